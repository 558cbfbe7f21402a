"""A zoo of small awkward networks: every spelling and topology that the conversion must read correctly.

Each net is one decorated forward function with its parts. Calling a net builds it with seeded random weights
and non-trivial batch norm statistics; the caller's random state is left alone. Four dicts, name -> class:

    ZOO      must convert; the ANN twin equals the model
    MAXPOOL  those of them with max-pooling in it
    REFUSED  must be refused; OFFENDS[name]: the operations that the error has to name (none: see the net)
    EITHER   beyond the agreed operations: convert it right or refuse it, but never convert it wrong

`make(name)` gives the net in eval mode, `example(name)` its positional inputs; names are unique.
"""

import warnings
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ZOO: dict[str, Callable[[], nn.Module]] = {}
MAXPOOL: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, Callable[[], nn.Module]] = {}
EITHER: dict[str, Callable[[], nn.Module]] = {}
OFFENDS: dict[str, tuple[str, ...]] = {}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {}  # name -> the shapes of the inputs, without batch

IMAGE = (3, 8, 8)

with warnings.catch_warnings():  # torch remarks on an even kernel with "same" once per process: let it be now
    warnings.simplefilter("ignore")
    F.conv2d(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 2, 2), padding="same")


class Net(nn.Module):
    """Parts by name; tensors become parameters, or buffers if they need no gradient."""

    parts: Callable[[], dict]

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(type(self).__name__.encode()))
            for name, part in type(self).parts().items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)


def net(*shapes, into=ZOO, offends=(), **parts):
    """Turn `def name(self, x): ...` into the class of a net; each part is a function that builds it."""

    def decorate(forward):
        name = forward.__name__
        assert name not in SHAPES, f"two nets are called {name}"
        build = staticmethod(lambda: {key: part() for key, part in parts.items()})
        members = {"forward": forward, "parts": build, "__module__": __name__, "__doc__": forward.__doc__}
        into[name] = type(name, (Net,), members)
        SHAPES[name] = shapes or (IMAGE,)
        if into is REFUSED:
            OFFENDS[name] = tuple(offends)
        return into[name]

    return decorate


def make(name: str) -> nn.Module:
    """The net called `name`, in eval mode; the same weights every time."""
    return {**ZOO, **REFUSED, **EITHER}[name]().eval()


def example(name: str, batch: int = 2, seed: int = 0, dtype=torch.float32) -> tuple[Tensor, ...]:
    """The positional inputs of the net called `name`: standard normal, each (batch, ...)."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, *shape, generator=rng).to(dtype) for shape in SHAPES[name])


refused_example = example


# ---------------------------------------------------------------------- parts


def _strong(layer, gain=2.0):
    """Default initialisation lets the signal fade; this keeps a few layers alive, with biases that matter."""
    with torch.no_grad():
        layer.weight.mul_(gain)
        if layer.bias is not None:
            layer.bias.uniform_(-0.3, 0.3)
    return layer


def conv(i, o, k=3, d=2, **options):
    """A builder of a `d`-dimensional convolution; keeps the size of the image unless told otherwise."""
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
    options = {"padding": k // 2 if isinstance(k, int) else 0, **options}
    return lambda: _strong(cls(i, o, k, **options))


def linear(i, o, **options):
    return lambda: _strong(nn.Linear(i, o, **options))


def bn(c, d=2, dead=(), gain=1.0, **options):
    """A builder of batch norm with random statistics and affine parameters, one scale negative; the channels
    in `dead` lie so far below zero that a ReLU behind them never opens; a large gain makes a ReLU6 clip."""

    def build():
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d - 1](c, **options)
        with torch.no_grad():
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.3, 2.0)
            norm.num_batches_tracked.fill_(7)
            if norm.affine:
                norm.weight.uniform_(0.5 * gain, 1.5 * gain)[c // 2].neg_()
                norm.bias.normal_(0, 0.5)
                for channel in dead:
                    norm.bias[channel] = -50.0
        return norm

    return build


def seq(*builders):
    return lambda: nn.Sequential(*(build() for build in builders))


def param(*shape, low=0.5, high=1.5):
    return lambda: nn.Parameter(torch.empty(shape).uniform_(low, high))


def const(*shape):
    return lambda: torch.randn(shape)


def gap(x):
    return x.mean((2, 3))


# fmt: off
# From here on by hand: the parts of a net on as few lines as they need.


# ---------------------------------------------------------------------- activations and their spellings


@net(a=conv(3, 4), b=conv(4, 6, stride=2), fc=linear(6 * 16, 5))
def functional_relu(self, x):
    x = F.relu(self.a(x))
    x = torch.relu(self.b(x))
    return self.fc(x.flatten(1))


@net((6,), a=lambda: nn.ModuleList(linear(6, 6)() for _ in range(12)), relu=nn.ReLU,
     inplace=lambda: nn.ReLU(inplace=True), fc=linear(6, 4))
def relu_spellings(self, x):
    a = self.a
    x = self.relu(a[0](x))
    x = self.inplace(a[1](x))
    x = F.relu(a[2](x))
    x = a[3](x).relu()
    x = a[4](x).relu_()
    x = torch.relu(a[5](x))
    x = F.relu(a[6](x), inplace=True)
    x = F.relu_(a[7](x))
    x = a[8](x).clamp(min=0)
    x = torch.clamp_min(a[9](x), 0.0)
    x = a[10](x).clamp_min_(0)
    x = torch.clamp(a[11](x), 0)
    return self.fc(x)


@net((6,), a=lambda: nn.ModuleList(linear(6, 6)() for _ in range(10)), relu6=nn.ReLU6,
     relu6_inplace=lambda: nn.ReLU6(inplace=True), tanh=lambda: nn.Hardtanh(0.0, 2.0),
     tanh_inplace=lambda: nn.Hardtanh(0.0, 0.7, inplace=True), fc=linear(60, 4))
def clipped_spellings(self, x):
    """Side by side rather than in a chain, so that every upper bound really clips."""
    z = [5 * layer(x) for layer in self.a]
    return self.fc(torch.cat([
        self.relu6(z[0]),
        self.relu6_inplace(z[1]),
        F.relu6(z[2]),
        F.relu6(z[3], inplace=True),
        F.hardtanh(z[4], 0, 4),
        self.tanh(z[5]),
        self.tanh_inplace(z[6]),
        z[7].clamp(0, 1),
        z[8].clamp_(0, 1.5),
        torch.clamp(z[9], min=0.0, max=0.25),
    ], -1))


@net((6,), a=lambda: nn.ModuleList(linear(6, 6)() for _ in range(9)), zero=lambda: torch.zeros(()), fc=linear(6, 4))
def relu_as_a_choice(self, x):
    """The larger one of a value and zero, however the zero is written."""
    a = self.a
    x = torch.maximum(a[0](x), torch.zeros(()))
    x = torch.max(a[1](x), self.zero)
    y = a[2](x)
    x = torch.maximum(torch.zeros_like(y), y)
    x = a[3](x).clamp(min=self.zero)
    x = torch.clamp_min(a[4](x), torch.tensor(0.0))
    y = a[5](x)
    x = torch.where(y > 0, y, 0.0)
    y = a[6](x)
    x = torch.where(y >= 0, y, torch.zeros_like(y))
    y = a[7](x)
    x = torch.where(y < 0, 0, y)
    y = a[8](x)
    return self.fc(torch.where(y <= 0, self.zero, y))


@net((6,), a=lambda: nn.ModuleList(linear(6, 6)() for _ in range(6)), cap=param(6, low=0.2, high=1.0),
     low=param(6, low=-0.5, high=0.5), fc=linear(36, 4))
def bounds_by_other_means(self, x):
    """Upper bounds of what is never negative, and bounds of their own for every channel."""
    z = [3 * layer(x) for layer in self.a]
    return self.fc(torch.cat([
        z[0].relu().clamp(max=0.5),
        torch.clamp_max(F.relu(z[1]), self.cap),
        torch.minimum(z[2].relu(), torch.tensor(0.7)),
        torch.min(self.cap, z[3].relu()),
        torch.clamp(z[4], min=self.low, max=self.low + self.cap),
        torch.maximum(z[5], self.low),
    ], -1))


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def inplace_relu_reused(self, x):
    """Every later reader of y sees the ReLU."""
    y = self.a(x)
    z = y.relu_()
    return self.fc(gap(self.b(z) + y))


@net(a=conv(3, 4), fc=linear(256, 5), gc=linear(4, 5))
def inplace_relu_through_view(self, x):
    """The view was taken before the ReLU and still sees it; the copy does not."""
    y = self.a(x)
    view, copy = y.flatten(1), y * 1.0
    y.relu_()
    return self.fc(view) + self.gc(gap(copy))


@net(a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), fc=linear(4, 5))
def inplace_relu_input_read_before(self, x):
    """b reads the signed value, c the rectified one."""
    y = self.a(x)
    before = self.b(y)
    y.relu_()
    return self.fc(gap(F.relu(before + self.c(y))))


@net(a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), fc=linear(4, 5))
def inplace_add(self, x):
    x = self.a(x)
    x += self.b(x.relu())
    skip = x  # an alias: sees the next addition too
    x.add_(self.c(F.relu(x)))
    return self.fc(gap(x.relu() + skip))


@net(a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), d=conv(4, 4, stride=2), relu=lambda: nn.ReLU(inplace=True),
     fc=linear(4, 6), gc=linear(6, 5))
def one_relu_five_times(self, x):
    x = self.relu(self.a(x))
    y = self.relu(self.b(x))
    x = self.relu(self.c(y) + x)
    x = self.relu(self.d(x))
    return self.gc(self.relu(self.fc(gap(x))))


@net(pool=lambda: nn.AvgPool2d(2), a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def relu_at_input(self, x):
    x = F.relu(x)
    return self.fc(gap(F.relu(self.b(F.relu(self.a(self.pool(x)))))))


@net(a=conv(3, 4), b=conv(4, 6))
def relu_output(self, x):
    return F.relu(self.b(F.relu(self.a(x))))


@net((6,), a=linear(6, 8), b=linear(8, 4))
def clipped_output(self, x):
    return self.b(self.a(x).relu()).clamp(0, 0.5)


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def relu_of_nonnegative(self, x):
    x = F.relu(F.avg_pool2d(F.relu(self.a(x)), 2))
    x = F.relu(F.hardtanh(F.relu(self.b(x)), 0.0, 0.2))
    return self.fc(gap(x))


@net(a=conv(3, 4), b=conv(8, 6), fc=linear(6, 5))
def crelu(self, x):
    """Two activations read the same value, one of them negated."""
    x = self.a(x)
    x = torch.cat([F.relu(x), F.relu(-x)], 1)
    return self.fc(gap(F.relu(self.b(x))))


# ---------------------------------------------------------------------- batch norm


@net(a=conv(3, 4, bias=False), na=bn(4), b=conv(4, 4, stride=2), nb=bn(4), fc=linear(4, 5))
def conv_bn(self, x):
    x = F.relu(self.na(self.a(x)))
    return self.fc(gap(F.relu(self.nb(self.b(x)))))


@net(stem=conv(3, 4, bias=False), n1=bn(4), a=conv(4, 4, bias=False), n2=bn(4), b=conv(4, 4), n3=bn(4),
     fc=linear(4, 5))
def preactivation(self, x):
    x = self.stem(x)
    y = self.a(F.relu(self.n1(x)))
    x = x + self.b(F.relu(self.n2(y)))
    return self.fc(gap(F.relu(self.n3(x))))


@net(stem=conv(3, 4), n1=bn(4), a=conv(4, 3), n2=bn(7), b=conv(7, 3), n3=bn(10), fc=linear(10, 5))
def densenet(self, x):
    """Batch norm behind a concatenation whose parts have other readers."""
    x = self.stem(x)
    x = torch.cat([x, self.a(F.relu(self.n1(x)))], 1)
    x = torch.cat([x, self.b(F.relu(self.n2(x)))], 1)
    return self.fc(gap(F.relu(self.n3(x))))


@net(norm=bn(3, eps=1e-2), a=conv(3, 4), fc=linear(4, 5))
def bn_on_input(self, x):
    """Folding into the padded conv behind it would be wrong at the border."""
    return self.fc(gap(F.relu(self.a(self.norm(x)))))


@net(a=conv(3, 4), norm=bn(4), b=conv(4, 4, groups=2), c=conv(4, 4, padding=0), fc=linear(4, 5))
def bn_before_conv(self, x):
    x = self.norm(F.relu(self.a(x)))  # signed, no activation in between
    return self.fc(gap(F.relu(self.b(x))[..., 1:-1, 1:-1] + F.relu(self.c(x))))


@net(a=conv(3, 4), b=conv(3, 4), norm=bn(4), fc=linear(4, 5))
def bn_after_add(self, x):
    return self.fc(gap(F.relu(self.norm(self.a(x) + self.b(x)))))


@net(a=conv(3, 4), norm=bn(4), b=conv(4, 4), fc=linear(4, 5))
def bn_input_read_twice(self, x):
    """The conv has a reader beside its batch norm."""
    x = self.a(x)
    return self.fc(gap(F.relu(self.b(F.relu(self.norm(x))) + x)))


@net(a=conv(3, 4), n1=bn(4), n2=bn(4, affine=False), fc=linear(4, 5), n3=bn(5, d=1))
def bn_twice(self, x):
    """Two in a row, one without affine parameters, and one as the last layer."""
    return self.n3(self.fc(gap(F.relu(self.n2(self.n1(self.a(x)))))))


@net(a=conv(3, 4, bias=False), norm=bn(4, dead=(0, 2)), b=conv(4, 4), fc=linear(4, 5))
def dead_channels(self, x):
    x = F.relu(self.norm(self.a(x)))
    return self.fc(gap(F.relu(self.b(x))))


@net(a=conv(3, 4), norm=bn(4, dead=range(4)), b=conv(4, 4), c=conv(3, 4), fc=linear(4, 5))
def dead_layer(self, x):
    """No neuron of the first layer ever fires; what reads it sees a constant."""
    return self.fc(gap(F.relu(self.b(F.relu(self.norm(self.a(x)))) + self.c(x))))


# ---------------------------------------------------------------------- topology


@net(a=conv(3, 4, bias=False), na=bn(4), b=conv(4, 6, stride=2, bias=False), nb=bn(6), c=conv(6, 6), nc=bn(6),
     down=conv(4, 6, 1, stride=2, bias=False), nd=bn(6), relu=lambda: nn.ReLU(inplace=True),
     fc=linear(6, 5))
def resnet_block(self, x):
    x = self.relu(self.na(self.a(x)))
    y = self.nc(self.c(self.relu(self.nb(self.b(x)))))
    y += self.nd(self.down(x))
    return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.relu(y), 1), 1))


@net(stem=conv(3, 4, bias=False), n0=bn(4, gain=3), relu6=lambda: nn.ReLU6(inplace=True),
     up=conv(4, 8, 1, bias=False), n1=bn(8, gain=3), dw=conv(8, 8, groups=8, bias=False), n2=bn(8, gain=3),
     down=conv(8, 4, 1, bias=False), n3=bn(4), up2=conv(4, 8, 1, bias=False), n4=bn(8, gain=3),
     dw2=conv(8, 8, groups=8, stride=2, bias=False), n5=bn(8, gain=3), down2=conv(8, 6, 1, bias=False),
     n6=bn(6), drop=lambda: nn.Dropout(0.2), fc=linear(6, 5))
def linear_bottleneck(self, x):
    """MobileNetV2: the residual stream is signed, no activation behind the last conv of a block."""
    x = self.relu6(self.n0(self.stem(x)))
    x = x + self.n3(self.down(self.relu6(self.n2(self.dw(self.relu6(self.n1(self.up(x))))))))
    x = self.n6(self.down2(self.relu6(self.n5(self.dw2(self.relu6(self.n4(self.up2(x))))))))
    return self.fc(self.drop(gap(x)))


@net(a=conv(3, 4), b=conv(4, 8, groups=2), c=conv(8, 8, groups=8, stride=2), d=conv(8, 16, 5, groups=8),
     fc=linear(16, 5))
def grouped_and_depthwise(self, x):
    x = F.relu(self.b(F.relu(self.a(x))))
    return self.fc(gap(F.relu(self.d(F.relu(self.c(x))))))


@net(stem=conv(3, 8), a=conv(4, 4, 1, bias=False), na=bn(4), b=conv(4, 4, groups=4, bias=False), nb=bn(4),
     fc=linear(8, 5))
def shufflenet(self, x):
    x = F.relu(self.stem(x))
    left, right = x.chunk(2, dim=1)
    right = self.nb(self.b(F.relu(self.na(self.a(right)))))
    x = torch.cat((left, F.relu(right)), dim=1)
    batch, channels, height, width = x.size()
    x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
    x = x.view(batch, channels, height, width)
    return self.fc(gap(x))


@net(stem=conv(3, 4), shared=conv(4, 4), fc=linear(4, 5))
def shared_conv(self, x):
    """One conv, two call sites."""
    x = F.relu(self.stem(x))
    x = F.relu(self.shared(x))
    return self.fc(gap(F.relu(self.shared(x))))


@net(shared=conv(3, 4, bias=False), n1=bn(4), n2=bn(4), fc=linear(8, 5))
def shared_conv_two_norms(self, x):
    """One conv with a batch norm of its own at each call site: folding must not change the other one."""
    x, y = self.n1(self.shared(x)), self.n2(self.shared(0.5 * x))
    return self.fc(gap(torch.cat([F.relu(x), F.relu(y)], 1)))


@net(stem=conv(3, 4), a=conv(4, 4, 1), b=conv(4, 4), c=conv(4, 3, 5), fc=linear(11, 5))
def three_branches(self, x):
    """One activation, three readers."""
    x = F.relu(self.stem(x))
    return self.fc(gap(torch.cat([F.relu(self.a(x)), F.relu(self.b(x)), self.c(x)], 1)))


@net(a=conv(3, 4), b=conv(7, 4), fc=linear(7, 5))
def input_skip(self, x):
    """The image itself, constant in time, beside spikes."""
    y = F.relu(self.a(x))
    y = F.relu(self.b(torch.cat([x, y], 1)))
    return self.fc(gap(torch.cat([y, x], 1)))


@net(a=conv(3, 4), b=conv(4, 8, stride=2), c=conv(8, 8), fc=linear(8, 5))
def option_a_shortcut(self, x):
    """ResNet for CIFAR: strided slicing and zero channels instead of a conv."""
    x = F.relu(self.a(x))
    y = self.c(F.relu(self.b(x)))
    return self.fc(gap(F.relu(y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)))))


@net((3, 16, 16), a=conv(3, 4), b=conv(4, 6, stride=2), c=conv(6, 8, stride=2), d=conv(14, 6), e=conv(10, 4),
     head=conv(4, 2, 1))
def unet(self, x):
    x1 = F.relu(self.a(x))
    x2 = F.relu(self.b(x1))
    x3 = F.relu(self.c(x2))
    y = F.relu(self.d(torch.cat([F.interpolate(x3, scale_factor=2, mode="nearest"), x2], 1)))
    y = F.interpolate(y, size=(16, 16), mode="bilinear", align_corners=False)
    return self.head(F.relu(self.e(torch.cat([y, x1], 1))))


@net(a=conv(3, 4, stride=2), up=lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
     near=lambda: nn.Upsample(size=(7, 9)), b=conv(4, 4), head=conv(4, 2))
def upsampling(self, x):
    x = self.up(F.relu(self.a(x)))
    x = self.near(F.relu(self.b(x)))
    return F.interpolate(self.head(x), scale_factor=1.5, mode="bilinear")


@net(a=conv(3, 4), b=conv(4, 4), c=conv(3, 4), fc=linear(4, 5), head=conv(4, 2), gc=linear(4, 5, bias=False))
def affine_branch(self, x):
    """Two affine layers in a row, a branch with no activation at all, and a part that is never used."""
    x = F.relu(self.b(self.a(x))) - self.c(x)
    return self.fc(gap(x))


@net(a=conv(3, 4), alpha=param(low=-1, high=1), b=conv(4, 4), scale=param(4, 1, 1, low=-1, high=1),
     fc=linear(4, 5))
def learned_gate(self, x):
    """A learned scalar and a learned scale per channel (layer scale), both of either sign."""
    x = F.relu(self.a(x))
    return self.fc(gap(F.relu(x + self.alpha * self.b(x) * self.scale)))


@net(a=conv(3, 4), alpha=param(1, low=-1, high=1), beta=param(4, 1, 1, low=-1, high=1),
     b=conv(4, 4), fc=linear(4, 5))
def activated_gate(self, x):
    """Sigmoid, ReLU and softplus of *parameters* are constants, not operations of the network."""
    x = F.relu(self.a(x))
    x = x + self.alpha.sigmoid() * self.b(x)
    return self.fc(gap(F.relu(x * F.relu(self.beta) - 0.2 * F.softplus(self.alpha))))


@net(mean=const(3, 1, 1), std=param(3, 1, 1), a=conv(3, 4), position=const(1, 4, 8, 8),
     fc=linear(4, 5), out=const(5))
def constants(self, x):
    """Normalisation inside the model, a buffer added in the middle and one at the end."""
    x = (x - self.mean) / self.std
    x = F.relu(self.a(x) + self.position)
    return self.fc(gap(x)) * 3 + self.out


@net(a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), fc=linear(4, 5))
def add_alpha(self, x):
    x = F.relu(self.a(x))
    x = F.relu(torch.add(x, self.b(x), alpha=-0.5))
    x = torch.sub(self.c(x), x, alpha=2)
    return self.fc(gap(F.relu(1 + x)))


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def subtraction(self, x):
    y = F.relu(self.a(x))
    z = F.relu(self.b(y) - y)
    z -= 0.25
    return self.fc(gap(1.5 - z - y))


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def division(self, x):
    x = F.relu(self.a(x / 2)) / 0.75
    x = F.relu(self.b(x)).div_(3)
    return self.fc(gap(x)).mul(4) / 1.5


@net(a=conv(3, 4), b=conv(4, 4), drop=lambda: nn.Dropout2d(0.3), same=nn.Identity, fc=linear(4, 5),
     last=lambda: nn.Dropout(0.5, inplace=True))
def dropout_and_identity(self, x):
    x = self.same(F.relu(self.drop(self.a(x))))
    x = F.dropout(F.relu(self.b(x)), 0.5, self.training)
    return self.fc(self.last(gap(x)))


# ---------------------------------------------------------------------- inputs and outputs


@net(IMAGE, (5,), a=conv(3, 4), b=linear(5, 4), fc=linear(4, 5), head=conv(4, 2, 1))
def two_inputs_two_outputs(self, x, y):
    x = F.relu(self.a(x)) + F.relu(self.b(y)).unsqueeze(-1).unsqueeze(-1)
    return self.fc(gap(x)), self.head(x)


@net(IMAGE, IMAGE, shared=conv(3, 4), fc=linear(4, 5))
def siamese(self, left, right):
    return self.fc(gap(F.relu(self.shared(left)) - F.relu(self.shared(right))))


@net(a=conv(3, 4), b=conv(4, 4, stride=2), head=conv(4, 2, 1), fc=linear(4, 5))
def dict_output(self, x):
    x = F.relu(self.a(x))
    y = F.relu(self.b(x))
    return {"out": self.fc(gap(y)), "aux": self.head(x)}


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def output_used_inside(self, x):
    """The first output is a ReLU that the second one reads."""
    features = F.relu(self.a(x))
    return features, self.fc(gap(F.relu(self.b(features))))


@net(a=conv(3, 4), fc=linear(4, 5))
def repeated_output(self, x):
    """One output twice, and the signed value in front of the activation."""
    current = self.a(x)
    y = self.fc(gap(F.relu(current)))
    return y, current, y


@net(a=conv(3, 4), fc=linear(4, 1))
def scalar_output(self, x):
    return self.fc(gap(F.relu(self.a(x)))).squeeze(1)  # (B,)


# ---------------------------------------------------------------------- pooling, padding, shapes


@net((3, 11, 11), a=conv(3, 4), p=lambda: nn.AvgPool2d(3, stride=2, padding=1),
     q=lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), b=conv(4, 4),
     r=lambda: nn.AvgPool2d((3, 2), (2, 1), ceil_mode=True), fc=linear(4 * 3 * 5, 5))
def avg_pools(self, x):
    x = F.relu(self.a(x))
    x = F.relu(self.b(self.p(x) + self.q(x)))
    return self.fc(self.r(x).flatten(1))


@net((3, 9, 9), a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def avg_pool_corners(self, x):
    """Ceil mode with padding, both ways of counting, a divisor of its own, and a pool of a signed value."""
    x = F.avg_pool2d(self.a(x), 2, 2, padding=1, ceil_mode=True)
    x = F.avg_pool2d(F.relu(x), 2, 1, divisor_override=3)
    x = F.avg_pool2d(F.relu(self.b(x)), 3, 2, padding=1, ceil_mode=True, count_include_pad=False)
    return self.fc(gap(F.relu(x)))


@net((3, 10, 8), a=conv(3, 4), p=lambda: nn.AdaptiveAvgPool2d((5, 4)),
     q=lambda: nn.AdaptiveAvgPool2d((3, None)), b=conv(4, 4), one=lambda: nn.AdaptiveAvgPool2d(1),
     fc=linear(4, 5))
def adaptive_pools(self, x):
    """Even bins, uneven and overlapping bins, one bin."""
    x = self.p(F.relu(self.a(x)))
    x = F.relu(self.b(self.q(x)))
    return self.fc(self.one(x).view(x.size(0), -1))


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(8, 5))
def means(self, x):
    """Means over space in several spellings."""
    x = F.relu(self.a(x))
    x = F.relu(self.b(x - x.mean(dim=(2, 3), keepdim=True)))
    return self.fc(torch.cat([x.mean(3).mean(2), torch.mean(x, [-1, -2])], -1))


@net(zero=lambda: nn.ZeroPad2d((0, 1, 2, 0)), a=conv(3, 4, padding=0, stride=2), b=conv(4, 4, (2, 3)),
     fc=linear(4, 5))
def asymmetric_padding(self, x):
    x = F.relu(self.a(self.zero(x)))
    x = F.relu(self.b(F.pad(x, (1, 1, 1, 0))))
    return self.fc(gap(F.pad(x, (-1, 0, 0, -1))))  # a negative pad crops


@net(a=conv(3, 4, 4, padding="same"), b=conv(4, 4, (2, 3), padding="same", dilation=(1, 2)),
     c=conv(4, 4, padding="valid"), fc=linear(4, 5))
def same_padding_even_kernel(self, x):
    """An even kernel needs one more zero at the end than at the start."""
    x = F.relu(self.b(F.relu(self.a(x))))
    return self.fc(gap(F.relu(self.c(x))))


@net((3, 12, 9), a=conv(3, 4, (3, 1), stride=(2, 1), padding=(1, 0)), b=conv(4, 4, dilation=2, padding=2),
     c=conv(4, 6, (1, 3), stride=(1, 2), dilation=(1, 2), groups=2), fc=linear(6, 5))
def strides_and_dilations(self, x):
    x = F.relu(self.b(F.relu(self.a(x))))
    return self.fc(gap(F.relu(self.c(x))))


@net(v=param(4, 3, 3, 3, low=-1, high=1), g=param(4, 1, 1, 1), b=param(4), fc=linear(4, 5))
def weight_standardised_conv(self, x):
    """The weight of the conv is computed from parameters in forward."""
    v = self.v - self.v.mean((1, 2, 3), keepdim=True)
    w = self.g * v / (v.var((1, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    return self.fc(gap(F.relu(F.conv2d(x, w, self.b, padding=1))))


@net(a=conv(3, 8), b=conv(3, 4), c=conv(5, 4), fc=linear(6, 5))
def splits_and_slices(self, x):
    x = F.relu(self.a(x))
    p, q = x.split([3, 5], dim=1)
    x = torch.cat([F.relu(self.b(p)), F.relu(self.c(q))], 1)
    x = torch.cat([x[:, 1:4], x[:, ::3]], 1)[..., 1:, :-2]
    first, *_, last = x.split(2, 1)
    return self.fc(gap(torch.cat([first, last, x[:, 4:5], x.narrow(1, 0, 1)], 1))) + x[:, 0, 0, :5]


@net(a=conv(3, 4), b=conv(8, 6), fc=linear(6 * 16, 7), gc=linear(8, 3))
def reshapes(self, x):
    """Permute, transpose, view and reshape that mix channels with space."""
    x = F.relu(self.a(x)).permute(0, 3, 1, 2)  # width becomes the channel
    x = F.relu(self.b(x.transpose(2, 3).reshape(x.shape[0], 8, 8, 4)[:, :, ::2]))  # (B, 6, 4, 4)
    x = F.relu(self.fc(torch.flatten(x.transpose(-1, -2), start_dim=1)))
    return self.gc(F.pad(x, (0, 1)).view(-1, 2, 4).permute(0, 2, 1).reshape(-1, 8))


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def rolls_of_flips(self, x):
    x = F.relu(self.a(x))
    x = x.flip(3) + x.roll(1, 2) - x.flip((1, -2)).roll((-1, 11), (1, 3))
    return self.fc(gap(F.relu(self.b(x)).roll(0, 1)))


@net(a=conv(3, 8), b=conv(2, 4), c=conv(16, 4, 1), up=lambda: nn.PixelShuffle(2), down=lambda: nn.PixelUnshuffle(2),
     fc=linear(4, 5))
def pixel_shuffle_modules(self, x):
    """Channels become space, and space channels."""
    x = F.relu(self.b(self.up(F.relu(self.a(x)))))
    return self.fc(gap(F.relu(self.c(self.down(x)))))


@net(a=conv(3, 4), b=conv(4, 4), w=const(1, 4, 8, 8), fc=linear(4, 5))
def stacks(self, x):
    """Stacked with each other and with a constant, then added up."""
    x = F.relu(self.a(x))
    y = torch.stack([x, F.relu(self.b(x)), self.w.expand_as(x)], 1).sum(1)
    return self.fc(torch.stack([gap(y), gap(x)], -1).mean(-1))


@net(a=conv(3, 4), order=lambda: torch.tensor([3, 0, 2, 2, 1, 0]), b=conv(6, 4), c=conv(4, 4), fc=linear(4, 5))
def channels_by_index(self, x):
    """CondenseNet: a layer reads channels in an order that is kept in a buffer."""
    x = F.relu(self.b(torch.index_select(F.relu(self.a(x)), 1, self.order)))
    x = F.relu(self.c(x[:, [2, 0, -1, 3]]))
    return self.fc(gap(x[..., torch.arange(7, 0, -2)]))


@net(a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), fc=linear(4, 5))
def flips_and_rolls(self, x):
    x = F.relu(self.a(x))
    x = F.relu(self.b(x.flip(3) + x.flip((1, 2))))
    return self.fc(gap(F.relu(self.c(x.roll((1, -2), (1, 3)) - x.roll(3, -1)))))


@net(a=conv(3, 4), b=conv(8, 4), fc=linear(4, 5))
def stacked_and_repeated(self, x):
    """i-RevNet: values are laid side by side along a new axis, between others."""
    x = F.relu(self.a(x))
    x = torch.stack([x, 2 * x], 2).reshape(-1, 8, 8, 8)
    x = F.relu(self.b(x)).repeat(1, 1, 2, 1)
    return self.fc(gap(torch.stack([x, torch.ones_like(x)], -1).sum(-1)))


@net(a=conv(3, 8), b=conv(2, 4), c=conv(8, 4), fc=linear(4, 5))
def pixel_shuffles(self, x):
    x = F.relu(self.b(F.pixel_shuffle(F.relu(self.a(x)), 2)))  # (B, 4, 16, 16)
    x = F.pixel_unshuffle(x[:, :2], 2)  # (B, 8, 8, 8)
    return self.fc(gap(F.relu(self.c(F.channel_shuffle(x, 4)))))


class Detour(torch.autograd.Function):
    """A gradient of its own, as training tricks have, and memory freed by hand."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        half = y * 0.5
        result = y + half
        half.set_()
        return result


@net(a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def own_gradients_and_data(self, x):
    """RevNet: functions with their own gradients, and values that are read and freed behind autograd's back."""
    x = Detour.apply(self.a(x))
    y = F.conv2d(x, self.b.weight.data, self.b.bias, padding=1).relu()
    return self.fc(gap(y + x.data))


# ---------------------------------------------------------------------- other dimensions


@net((10,), a=linear(10, 8), b=linear(8, 8), c=linear(8, 4, bias=False))
def mlp(self, x):
    return self.c(F.relu(self.b(F.relu(self.a(x)))))


@net((10,), layers=seq(linear(10, 8), bn(8, d=1), nn.ReLU, linear(8, 8, bias=False), bn(8, d=1, gain=4),
                       nn.ReLU6, linear(8, 4)))
def mlp_bn(self, x):
    return self.layers(x)


@net((4, 4), layers=seq(nn.Flatten, linear(16, 8), nn.ReLU, lambda: nn.Unflatten(1, (2, 4)), linear(4, 3)))
def mlp_of_matrices(self, x):
    return self.layers(x)


@net((6, 5), up=linear(5, 8), down=linear(8, 5), mix=linear(6, 6), back=linear(6, 6), norm=bn(5, d=1),
     fc=linear(5, 4))
def tokens(self, x):
    """(B, L, C) tokens: linear on the last dimension, MLP-Mixer style mixing, batch norm on channels."""
    x = x + self.down(F.relu(self.up(x)))
    x = x + self.back(F.relu(self.mix(x.transpose(1, 2)))).transpose(1, 2)
    x = F.relu(self.norm(x.transpose(1, 2)).transpose(1, 2))
    return self.fc(x.mean(1))


@net((6, 5), token=const(1, 1, 5), place=const(1, 7, 5), a=linear(5, 8), b=linear(8, 5), fc=linear(5, 4))
def class_token(self, x):
    """A parameter in front of the tokens of every image, repeated in two ways."""
    x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
    x = x + self.b(F.relu(self.a(x))) + self.place.repeat(x.shape[0], 1, 1)
    return self.fc(F.relu(x)[:, 0])


@net((2, 16), a=conv(2, 4, d=1), na=bn(4, d=1), b=conv(4, 4, d=1, stride=2, groups=2),
     p=lambda: nn.AvgPool1d(2), c=conv(4, 6, 2, d=1, padding="same"), fc=linear(6 * 2, 5))
def conv1d_net(self, x):
    x = F.relu(self.na(self.a(x)))
    x = F.relu(self.c(self.p(F.relu(self.b(x)))))
    return self.fc(F.adaptive_avg_pool1d(x, 2).flatten(1))


@net((16,), a=conv(1, 4, d=1), b=conv(4, 1, d=1), fc=linear(16, 5))
def squeeze_around_conv1d(self, x):
    """A signal without channels: (B, 16) -> (B, 1, 16) -> (B, 16)."""
    x = F.relu(self.a(x.unsqueeze(1)))
    return self.fc(F.relu(self.b(x).squeeze(1)))


@net((2, 4, 8, 8), a=conv(2, 4, d=3), na=bn(4, d=3), b=conv(4, 6, (1, 3, 3), d=3, stride=(1, 2, 2)),
     p=lambda: nn.AvgPool3d(2, stride=1), fc=linear(6, 5))
def conv3d_net(self, x):
    x = F.relu(self.na(self.a(x)))
    x = self.p(F.relu(self.b(x)))
    return self.fc(F.adaptive_avg_pool3d(x, 1).flatten(1))


# ---------------------------------------------------------------------- with max-pooling


@net((3, 16, 16), into=MAXPOOL, a=conv(3, 4, stride=2, bias=False), na=bn(4), p=lambda: nn.MaxPool2d(3, 2, 1),
     b=conv(4, 4), fc=linear(4, 5))
def maxpool_stem(self, x):
    """The overlapping, padded pool of every torchvision ResNet."""
    x = self.p(F.relu(self.na(self.a(x))))
    return self.fc(gap(F.relu(self.b(x) + x)))


@net((3, 9, 9), into=MAXPOOL, a=conv(3, 4), p=lambda: nn.MaxPool2d(2, ceil_mode=True), b=conv(4, 4),
     fc=linear(16, 5))
def maxpool_of_currents(self, x):
    """The pool stands in front of the activation: its input is signed."""
    x = F.relu(self.p(self.a(x)))  # (B, 4, 5, 5)
    return self.fc(F.relu(F.max_pool2d(self.b(x), 2)).flatten(1))


@net(into=MAXPOOL, a=conv(3, 4), b=conv(4, 4, 1), c=conv(4, 4), fc=linear(8, 5))
def maxpool_branch(self, x):
    """Inception: the pooled activation has other readers, and the pool has no activation behind it."""
    x = F.relu(self.a(x))
    y = F.relu(self.b(F.max_pool2d(x, 3, 1, 1)))
    return self.fc(gap(torch.cat([y, F.max_pool2d(self.c(x), (3, 5), 1, (1, 2))], 1)))


@net(into=MAXPOOL, a=conv(3, 4), fc=linear(4, 5))
def maxpool_at_input(self, x):
    return self.fc(gap(F.relu(self.a(F.max_pool2d(x, 2, dilation=2)))))


@net((2, 16), into=MAXPOOL, a=conv(2, 4, d=1), b=conv(4, 4, d=1), fc=linear(4, 5))
def maxpool_1d(self, x):
    x = F.max_pool1d(F.relu(self.a(x)), 2)
    return self.fc(F.relu(self.b(x)).amax(-1))


@net((2, 4, 8, 8), into=MAXPOOL, a=conv(2, 4, d=3), fc=linear(4, 5))
def maxpool_3d(self, x):
    return self.fc(F.max_pool3d(F.relu(self.a(x)), (2, 3, 3), 2).mean((2, 3, 4)))


@net(into=MAXPOOL, a=conv(3, 4), fc=linear(16, 5))
def maxpool_adaptive(self, x):
    return self.fc(F.adaptive_max_pool2d(F.relu(self.a(x)), 2).flatten(1))


# ---------------------------------------------------------------------- to be refused

HEAD = {"a": conv(3, 4), "b": conv(4, 4), "fc": linear(4, 5)}  # most of them: a, ReLU, b, something, fc


@net(into=REFUSED, offends=["silu"], **HEAD)
def silu(self, x):
    return self.fc(gap(F.silu(self.b(F.relu(self.a(x))))))


@net(into=REFUSED, offends=["gelu"], **HEAD, act=nn.GELU)
def gelu(self, x):
    return self.fc(gap(self.act(self.b(F.relu(self.a(x))))))


@net(into=REFUSED, offends=["leaky_relu"], **HEAD, act=lambda: nn.LeakyReLU(0.1, inplace=True))
def leaky_relu(self, x):
    return self.fc(gap(self.act(self.b(F.relu(self.a(x))))))


@net(into=REFUSED, offends=["prelu"], **HEAD, act=nn.PReLU)
def prelu(self, x):
    """The learned slope is a parameter, so this looks like max(x, 0) + w min(x, 0): still not a ReLU."""
    return self.fc(gap(self.act(self.b(F.relu(self.a(x))))))


@net(into=REFUSED, offends=["elu"], **HEAD)
def elu(self, x):
    return self.fc(gap(F.elu(self.b(F.relu(self.a(x))))))


@net(into=REFUSED, offends=["abs"], **HEAD)
def absolute_value(self, x):
    return self.fc(gap(self.b(F.relu(self.a(x))).abs()))


@net(into=REFUSED, offends=["sigmoid", "mul"], **HEAD, down=linear(4, 2), up=linear(2, 4))
def squeeze_excitation(self, x):
    x = F.relu(self.a(x))
    gate = torch.sigmoid(self.up(F.relu(self.down(gap(x)))))
    return self.fc(gap(F.relu(self.b(x * gate[:, :, None, None]))))


@net(into=REFUSED, offends=["softmax"], **HEAD)
def softmax_inside(self, x):
    return self.fc(gap(F.softmax(self.b(F.relu(self.a(x))), dim=1)))


@net((6, 4), into=REFUSED, offends=["layer_norm"], norm=lambda: nn.LayerNorm(4), a=linear(4, 8),
     fc=linear(8, 5))
def layer_norm(self, x):
    return self.fc(F.relu(self.a(self.norm(x))).mean(1))


@net(into=REFUSED, offends=["group_norm"], **HEAD, norm=lambda: nn.GroupNorm(2, 4))
def group_norm(self, x):
    return self.fc(gap(F.relu(self.norm(self.a(x)))))


@net(into=REFUSED, offends=["instance_norm"], **HEAD, norm=lambda: nn.InstanceNorm2d(4, affine=True))
def instance_norm(self, x):
    return self.fc(gap(F.relu(self.norm(self.a(x)))))


@net(into=REFUSED, offends=["batch_norm"], **HEAD, norm=lambda: nn.BatchNorm2d(4, track_running_stats=False))
def batch_norm_without_statistics(self, x):
    """Normalises by the batch in eval mode too."""
    return self.fc(gap(F.relu(self.norm(self.a(x)))))


@net((6, 4), into=REFUSED, offends=["scaled_dot_product_attention"], fc=linear(4, 5),
     attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True))
def attention(self, x):
    x = F.relu(x)
    return self.fc(F.relu(self.attention(x, x, x, need_weights=False)[0]).mean(1))


@net((6, 4), into=REFUSED, offends=["matmul"], q=linear(4, 4), k=linear(4, 4), fc=linear(6, 5))
def matmul_of_activations(self, x):
    return self.fc((F.relu(self.q(x)) @ F.relu(self.k(x)).transpose(1, 2)).mean(1))


@net(into=REFUSED, offends=["mul"], **HEAD)
def product_of_activations(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(x * F.relu(self.b(x))))


@net(into=REFUSED, offends=["mul"], **HEAD)
def square(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(x * x))


@net(into=REFUSED, offends=["div"], **HEAD)
def division_by_activation(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(self.b(x) / (1 + x)))


@net(into=REFUSED, offends=["reciprocal"], **HEAD)
def reciprocal(self, x):
    return self.fc(gap(1 / (1 + F.relu(self.a(x)))))


@net(into=REFUSED, a=conv(3, 4), norm=bn(4), fc=linear(4, 5))
def no_activation(self, x):
    """Purely affine: nothing to convert."""
    return self.fc(gap(self.norm(self.a(x))))


@net(into=REFUSED, a=conv(3, 4), w=param(4, 1, 1, low=-1, high=1), fc=linear(4, 5))
def no_activation_but_of_a_constant(self, x):
    """The only ReLU is on a parameter: still nothing to convert."""
    return self.fc(gap(self.a(x) * F.relu(self.w)))


@net(into=REFUSED, **HEAD)
def data_dependent_control_flow(self, x):
    """Cannot be captured as one graph."""
    x = F.relu(self.a(x))
    if x.sum() > 0:
        x = F.relu(self.b(x))
    return self.fc(gap(x))


@net(into=REFUSED, offends=["mean"], **HEAD)
def mean_over_batch(self, x):
    x = self.a(x)
    return self.fc(gap(F.relu(self.b(F.relu(x - x.mean(0, keepdim=True))))))


@net(into=REFUSED, offends=["mean"], **HEAD)
def mean_over_everything(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(F.relu(self.b(x - x.mean()))))


@net(into=REFUSED, offends=["flip"], **HEAD)
def flipped_batch(self, x):
    """Each image reads another one."""
    x = F.relu(self.a(x))
    return self.fc(gap(F.relu(self.b(x + x.flip(0)))))


@net(into=REFUSED, offends=["roll"], **HEAD)
def rolled_batch(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(F.relu(self.b(x + x.roll(1)))))


@net(into=REFUSED, offends=["clamp"], **HEAD)
def upper_bound_of_a_signed_value(self, x):
    return self.fc(gap(self.b(F.relu(self.a(x))).clamp(max=0.5)))


@net(into=REFUSED, offends=["minimum"], **HEAD)
def minimum_of_activations(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(torch.minimum(x, self.b(x))))


@net(into=REFUSED, offends=["clamp"], **HEAD)
def bound_by_an_activation(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(self.b(x).clamp(min=x)))


@net(into=REFUSED, offends=["where"], **HEAD)
def choice_of_another_value(self, x):
    x = F.relu(self.a(x))
    y = self.b(x)
    return self.fc(gap(torch.where(y > 0, x, 0.0)))


@net(into=REFUSED, offends=["gt"], **HEAD)
def comparison(self, x):
    x = F.relu(self.a(x))
    return self.fc(gap(self.b(x) * (x > 0)))


@net(into=REFUSED, offends=["_to_copy"], **HEAD)
def half_precision_inside(self, x):
    return self.fc(gap(F.relu(self.b(F.relu(self.a(x)).half().to(x.dtype)))))


@net(into=REFUSED, offends=["_to_copy"], **HEAD)
def rounded(self, x):
    return self.fc(gap(F.relu(self.b(F.relu(self.a(x)).int().to(x.dtype)))))


@net(into=REFUSED, offends=["slice_scatter"], **HEAD)
def relu_of_a_slice(self, x):
    """Only half of the channels are rectified, in place."""
    x = self.a(x)
    x[:, :2].relu_()
    return self.fc(gap(F.relu(self.b(x))))


@net(into=REFUSED, offends=["gelu", "sigmoid"], **HEAD, c=conv(4, 4))
def two_offenders(self, x):
    """One error must name both."""
    x = F.gelu(self.b(F.relu(self.a(x))))
    return self.fc(gap(torch.sigmoid(self.c(x))))


# ---------------------------------------------------------------------- right or refused, never wrong


@net(into=EITHER, **HEAD)
def input_mutated(self, x):
    """Changes the caller's tensor: compare on copies."""
    return self.fc(gap(F.relu(self.b(F.relu(self.a(x.relu_()))))))


@net((6, 5), into=EITHER, a=linear(5, 8), norm=bn(8, d=1), fc=linear(8, 4))
def tokens_folded_into_batch(self, x):
    y = F.relu(self.norm(self.a(x.reshape(-1, 5))))  # (B * 6, 8)
    return self.fc(y.view(-1, 6, 8).mean(1))


@net((6, 5), into=EITHER, a=linear(5, 8), fc=linear(8, 4))
def sequence_first(self, x):
    """The batch is not the first dimension when the neuron sees it."""
    return self.fc(F.relu(self.a(x.transpose(0, 1))).mean(0))


@net(IMAGE, IMAGE, into=EITHER, a=conv(3, 4), b=conv(4, 4), fc=linear(4, 5))
def siamese_through_batch(self, left, right):
    """Both images ride in one batch: with time in the batch dimension too, their order is easily mixed up."""
    x = F.relu(self.b(F.relu(self.a(torch.cat([left, right], 0)))))
    return self.fc(gap(x[: left.size(0)] - x[left.size(0) :]))


@net((6,), into=EITHER, a=lambda: nn.ModuleList(linear(6, 6)() for _ in range(4)), fc=linear(6, 4))
def other_relus(self, x):
    """ReLU by other means, and an upper bound on its own."""
    x = F.threshold(self.a[0](x), 0.0, 0.0)
    x = torch.maximum(self.a[1](x), torch.zeros(()))
    x = self.a[2](x)
    x = torch.where(x > 0, x, 0.0)
    return self.fc(F.relu(self.a[3](x)).clamp(max=0.5))


@net((6,), into=EITHER, a=linear(6, 6), b=linear(6, 6), c=linear(6, 6), fc=linear(6, 4))
def signed_clamps(self, x):
    """Clamps whose lower bound is not zero: a shifted ReLU at best."""
    x = F.relu(self.a(x))
    x = F.hardtanh(self.b(x))
    return self.fc(self.c(x).clamp(min=0.2))


@net(into=EITHER, a=conv(3, 4, padding_mode="reflect"), b=conv(4, 4, padding_mode="circular"),
     fc=linear(4, 5))
def other_paddings(self, x):
    x = F.relu(self.b(F.relu(self.a(x))))
    return self.fc(gap(F.pad(x, (1, 1), value=0.5)))


@net(into=EITHER, a=conv(3, 4, stride=2), up=lambda: _strong(nn.ConvTranspose2d(4, 4, 2, 2)), b=conv(4, 4))
def other_upsamplings(self, x):
    x = F.relu(self.up(F.relu(self.a(x))))
    return F.interpolate(F.relu(self.b(x)), scale_factor=2, mode="bicubic")


@net(into=EITHER, **HEAD, w=const(4, 4))
def other_affine_operations(self, x):
    """Stack, sum, flip, roll, einsum and matmul with a constant, a list as index, expand."""
    x = F.relu(self.a(x))
    x = torch.stack([x, x.flip(3), x.roll(1, 2)], 1).sum(1)
    x = F.relu(self.b(torch.einsum("oi,bihw->bohw", self.w, x)))
    x = self.w[0] - gap(x[:, [2, 0, 3, 3]]) @ self.w
    return self.fc(F.relu(x).unsqueeze(1).expand(-1, 3, -1)).sum(1)


@net(into=EITHER, **HEAD)
def zeros_of_batch_size(self, x):
    """A constant whose shape depends on the batch."""
    x = F.relu(self.a(x))
    x = torch.cat([x[:, :2], x.new_zeros(x.size(0), 2, 8, 8)], 1)
    return self.fc(gap(F.relu(self.b(x + torch.ones_like(x)))))


@net(into=EITHER, **HEAD)
def nested_output(self, x):
    """The image itself and a constant among the outputs, in a tree."""
    y = F.relu(self.a(x))
    return {"maps": [y, (self.b(y), x)], "out": self.fc(gap(y)), "bias": self.fc.bias}


@net(into=EITHER, a=lambda: nn.utils.parametrizations.weight_norm(conv(3, 4)()), fc=linear(4, 5),
     b=lambda: nn.utils.parametrizations.spectral_norm(conv(4, 4)()))
def parametrised_weights(self, x):
    return self.fc(gap(F.relu(self.b(F.relu(self.a(x))))))


ZOO.update(MAXPOOL)
