"""The networks of the paper have the layers, the size and the cost that others published for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import spikecal
from spikecal.models import cifar_mobilenet, cifar_resnet20, cifar_vgg16, mobilenet, regnetx_4gf, resnet34, vgg16
from spikecal.models.paper import initialise, regnetx, resnet

Build = Callable[..., nn.Sequential]

NETWORKS: dict[str, Build] = {
    "cifar_resnet20": cifar_resnet20,
    "cifar_resnet20 without BN": partial(cifar_resnet20, batch_norm=False),
    "cifar_resnet20 released": partial(cifar_resnet20, released=True),
    "cifar_vgg16": cifar_vgg16,
    "cifar_vgg16 without BN": partial(cifar_vgg16, batch_norm=False),
    "cifar_mobilenet": cifar_mobilenet,
    "resnet34": resnet34,
    "resnet34 without BN": partial(resnet34, batch_norm=False),
    "vgg16": vgg16,
    "vgg16 without BN": partial(vgg16, batch_norm=False),
    "mobilenet": mobilenet,
    "regnetx_4gf": regnetx_4gf,
}
CIFAR = [name for name in NETWORKS if "cifar" in name]

RESNET_WIDTHS = (64, 128, 256, 512)


def conv_bn(inputs: int, outputs: int, kernel: int = 3) -> int:
    """The parameters of a convolution without bias and of its BN."""
    return kernel * kernel * inputs * outputs + 2 * outputs


def released_resnet20() -> int:
    total, inputs = conv_bn(3, 64), 64
    for width in (64, 128, 256):
        projection = conv_bn(inputs, width, 1) if inputs != width else 0
        total += conv_bn(inputs, width) + projection + 5 * conv_bn(width, width)
        inputs = width
    return total + (256 + 1) * 10


def bn_channels(stem: tuple[int, ...], depths: tuple[int, ...]) -> int:
    """Two BN a block, and one in the projection of every stage but the first."""
    return sum(stem) + sum(w * (2 * d + (w > 64)) for w, d in zip(RESNET_WIDTHS, depths, strict=True))


PARAMETERS = {
    # kuangliu/pytorch-cifar: its ResNet-18 has the four stages of two blocks and one stem convolution (11,173,962);
    # here the stem has two more convolutions.
    "cifar_resnet20": 11_173_962 + 2 * conv_bn(64, 64),
    "cifar_resnet20 without BN": 11_173_962 + 2 * conv_bn(64, 64) - 2 * bn_channels((64, 64, 64), (2, 2, 2, 2)),
    "cifar_resnet20 released": released_resnet20(),  # not published
    "cifar_vgg16": 14_728_266,  # kuangliu/pytorch-cifar: VGG('VGG16')
    "cifar_vgg16 without BN": 14_714_688 + 513 * 10,  # Keras: VGG16(include_top=False), and a linear layer
    "cifar_mobilenet": 3_217_226,  # kuangliu/pytorch-cifar: MobileNet
    # Torchvision's resnet34 (21,797,672) with another stem. It equals xresnet34 of fastai, ResNetD-34 of jax-resnet
    # (21,816,904) and timm's resnet34d (21.82 M): the average pool in the shortcut of a "D" has no parameters.
    "resnet34": 21_797_672 - conv_bn(3, 64, 7) + conv_bn(3, 32) + conv_bn(32, 32) + conv_bn(32, 64),
    # Scale and shift of BN go, a bias comes.
    "resnet34 without BN": 21_816_904 - bn_channels((32, 32, 64), (3, 4, 6, 3)),
    "vgg16": 138_365_992,  # torchvision: vgg16_bn
    "vgg16 without BN": 138_357_544,  # torchvision: vgg16
    "mobilenet": 4_231_976,  # pytorchcv: mobilenet_w1, which the paper uses
    "regnetx_4gf": 22_118_248,  # pycls: dev/model_complexity.json
}

FINAL_RESOLUTION = {"cifar_resnet20 released": 8, "cifar_vgg16": 1, "cifar_vgg16 without BN": 1}  # others: 2 and 7


class Record:
    """What the layers of a network on the meta device see of one image."""

    def __init__(self, name: str) -> None:
        self.macs = self.activations = 0
        size = 32 if name in CIFAR else 224
        with torch.device("meta"):
            self.model = NETWORKS[name]().eval()
            for module in self.model.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.register_forward_hook(self._count)
                if isinstance(module, nn.Flatten | nn.AdaptiveAvgPool2d):
                    module.register_forward_pre_hook(self._resolution)
            self.features: torch.Size | None = None
            self.output = self.model(torch.empty(1, 3, size, size)).shape

    def _count(self, module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        """Multiply-accumulate operations as pycls counts them: a bias is one per output."""
        per_output = module.weight[0].numel() + (module.bias is not None)
        self.macs += y.numel() * per_output
        self.activations += y.numel()

    def _resolution(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.features = self.features or args[0].shape


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_and_shapes(name: str) -> None:
    record = Record(name)
    assert sum(p.numel() for p in record.model.parameters()) == PARAMETERS[name]
    assert record.output == (1, 10 if name in CIFAR else 1000)
    resolution = FINAL_RESOLUTION.get(name, 2 if name in CIFAR else 7)
    assert record.features is not None
    assert record.features[2:] == (resolution, resolution)


def test_resnet34_equals_other_deep_stems() -> None:
    assert PARAMETERS["resnet34"] == 21_816_904  # jax-resnet: tests/test_resnet.py, after fastai's xresnet34


def test_regnetx_costs_what_pycls_publishes() -> None:
    record = Record("regnetx_4gf")  # pycls: dev/model_complexity.json
    assert record.macs == 3_964_499_816
    assert record.activations == 12_201_608


@pytest.mark.parametrize(
    ("name", "macs"),
    [
        ("vgg16", 15.47e9),  # torchvision
        ("mobilenet", 569e6),  # Howard et al. (2017), Table 4
        ("resnet34", 3.664e9 + 112**2 * (27 * 32 + 288 * 32 + 288 * 64 - 147 * 64)),  # torchvision, with the deep stem
    ],
)
def test_cost_is_the_published_one(name: str, macs: float) -> None:
    assert Record(name).macs == pytest.approx(macs, rel=2e-3)


def test_regnetx_widths_follow_from_its_published_parameters() -> None:
    """Radosavovic et al. (2020), Eq. 2-4: quantised linear widths, then made multiples of the group width."""
    depth, w0, wa, wm, group = 23, 96, 38.65, 2.43, 40  # pycls: RegNetX-4.0GF
    powers = [round(math.log((w0 + wa * j) / w0) / math.log(wm)) for j in range(depth)]
    widths = Counter(round(8 * round(w0 * wm**p / 8) / group) * group for p in powers)
    with torch.device("meta"):
        model = regnetx_4gf()
    stages = [model.get_submodule(f"s{i}") for i in range(1, 5)]
    assert {stage.b1.f.c.out_channels: len(stage) for stage in stages} == dict(widths)
    assert {stage.b1.f.b.in_channels // stage.b1.f.b.groups for stage in stages} == {group}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_the_allowed_ones(name: str) -> None:
    with torch.device("meta"):
        layers = [m for m in NETWORKS[name]().modules() if not list(m.children()) and not isinstance(m, nn.Sequential)]
    allowed = {nn.Conv2d, nn.Linear, nn.ReLU, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity}
    if "without BN" in name:
        allowed |= {nn.Dropout} if "vgg" in name else set()
    else:
        allowed |= {nn.BatchNorm2d, nn.Dropout} if name == "vgg16" else {nn.BatchNorm2d}
    assert {type(layer) for layer in layers} <= allowed
    rates = [layer.p for layer in layers if isinstance(layer, nn.Dropout)]
    expected = {"cifar_vgg16 without BN": [0.25] * 13, "vgg16": [0.5] * 2, "vgg16 without BN": [0.5] * 2}
    assert rates == expected.get(name, [])


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("cifar_resnet20 released", {"conv1.weight": (64, 3, 3, 3), "layer3.2.conv2.weight": (256, 256, 3, 3)}),
        ("cifar_vgg16", {"features.40.weight": (512, 512, 3, 3), "classifier.weight": (10, 512)}),
        ("cifar_vgg16 without BN", {"features.40.weight": (512, 512, 3, 3), "classifier.weight": (10, 512)}),
        ("resnet34", {"conv1.6.weight": (64, 32, 3, 3), "bn1.weight": (64,), "layer4.2.bn2.weight": (512,)}),
        ("resnet34", {"layer2.0.downsample.1.weight": (128,), "fc.weight": (1000, 512)}),
        ("vgg16", {"features.40.weight": (512, 512, 3, 3), "classifier.6.weight": (1000, 4096)}),
        ("vgg16 without BN", {"features.28.weight": (512, 512, 3, 3), "classifier.3.weight": (4096, 4096)}),
        ("mobilenet", {"model.0.0.weight": (32, 3, 3, 3), "model.13.3.weight": (1024, 1024, 1, 1)}),
        ("mobilenet", {"model.13.0.weight": (1024, 1, 3, 3), "fc.weight": (1000, 1024)}),
        ("regnetx_4gf", {"stem.conv.weight": (32, 3, 3, 3), "s3.b14.f.b.weight": (560, 40, 3, 3)}),
        ("regnetx_4gf", {"s4.b1.proj.weight": (1360, 560, 1, 1), "s4.b1.bn.weight": (1360,)}),
    ],
)
def test_names_are_those_of_the_published_code(name: str, tensors: dict[str, tuple[int, ...]]) -> None:
    with torch.device("meta"):
        state = NETWORKS[name]().state_dict()
    assert {key: tuple(state[key].shape) for key in tensors} == tensors


@pytest.mark.parametrize("name", NETWORKS)
def test_number_of_classes_is_free(name: str) -> None:
    with torch.device("meta"):
        *_, last = NETWORKS[name](num_classes=7).modules()
    assert isinstance(last, nn.Linear)
    assert last.out_features == 7


@pytest.mark.parametrize("name", CIFAR)
def test_untrained_network_passes_its_input_on(name: str) -> None:
    model = NETWORKS[name]().eval()
    with torch.inference_mode():
        y = model(torch.randn(1, 3, 32, 32))
    assert y.shape == (1, 10)
    assert 1e-3 < y.std() < 1e3  # neither vanished nor exploded


def test_depthwise_convolutions_are_initialised_by_their_own_inputs() -> None:
    layer = nn.Conv2d(512, 512, 3, groups=512)
    initialise(nn.Sequential(layer))
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 9), rel=0.05)
    assert layer.bias is not None
    assert layer.bias.count_nonzero() == 0


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(cifar_resnet20, id="cifar_resnet20", marks=pytest.mark.slow),
        pytest.param(partial(cifar_vgg16, batch_norm=False), id="cifar_vgg16 without BN"),
        pytest.param(cifar_mobilenet, id="cifar_mobilenet", marks=pytest.mark.slow),
        pytest.param(
            lambda: resnet([4, 4, 8], 2, nn.AvgPool2d(3, 2, 1), [8, 16], [1, 1], 10, True, False), id="small resnet34"
        ),
        pytest.param(lambda: regnetx((16, 24), (1, 2), 8, 10), id="small regnetx"),
    ],
)
def test_network_converts_and_its_twin_equals_it(build: Build) -> None:
    model, images = build(), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        model.train()(images)  # BN gets statistics of its own
        expected = model.eval()(images)
    snn = spikecal.convert(model, [images], T=4)
    torch.testing.assert_close(snn.ann(images), expected, rtol=1e-3, atol=1e-3 * expected.std().item())
    result = snn(images)
    assert result.shape == (4, 10)
    assert (result - expected).norm() < expected.norm()  # better than no answer, after four steps
