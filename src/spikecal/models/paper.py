"""The networks of the paper in plain PyTorch, untrained: ReLU, average pooling, convolution, BN, dropout, linear.

Modules are named as in the authors' code (github.com/yhhhli/SNN_Calibration), RegNet's as in pycls, so that a state
dict of theirs for the same network fits. Where the paper is silent, the authors' code decides. The accuracies are
the paper's for the ANN, in per cent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
MOBILENET = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


def cifar_resnet20(num_classes: int = 10, *, batch_norm: bool = True, released: bool = False) -> nn.Sequential:
    """The widened ResNet-20 for 32×32 images: a stem of three convolutions, then four stages of two blocks.

    With BN 95.46 on CIFAR-10 and 77.16 on CIFAR-100, without 93.94 and 68.40. The paper gives only the stem and the
    number of stages; widths, depths and the pool behind the stem are those of Rathi et al. (2020, Hybrid Train), no
    biases in convolutions and the mean before the linear layer are those of the authors' code.
    released: the other ResNet-20, which the authors' code contains: one stem convolution and three stages of three
    blocks (its README: 95.68 and 76.52).
    """
    if released:
        return resnet([64], 1, nn.Identity(), [64, 128, 256], [3, 3, 3], num_classes, batch_norm, bias=False)
    widths, depths = [64, 128, 256, 512], [2, 2, 2, 2]
    return resnet([64, 64, 64], 1, nn.AvgPool2d(2), widths, depths, num_classes, batch_norm, bias=False)


def resnet34(num_classes: int = 1000, *, batch_norm: bool = True) -> nn.Sequential:
    """ResNet-34 for 224×224 images, with a stem of three convolutions and average pooling (75.66; 70.95 without BN).

    As in the authors' code: stem widths 32, 32 and 64, plain strided projections, biases where there is no BN.
    """
    pool, widths, depths = nn.AvgPool2d(3, stride=2, padding=1), [64, 128, 256, 512], [3, 4, 6, 3]
    return resnet([32, 32, 64], 2, pool, widths, depths, num_classes, batch_norm, bias=not batch_norm)


def cifar_vgg16(num_classes: int = 10, *, batch_norm: bool = True) -> nn.Sequential:
    """VGG-16 for 32×32 images: 95.72 on CIFAR-10 and 77.89 on CIFAR-100 with BN; without, 93.51 and 70.21.

    Without BN, dropout at 0.25 takes its place. As in the authors' code: one linear layer, and biases beside BN too.
    """
    return initialise(
        named(features=vgg16_features(batch_norm, 0.25), flatten=nn.Flatten(), classifier=nn.Linear(512, num_classes))
    )


def vgg16(num_classes: int = 1000, *, batch_norm: bool = True) -> nn.Sequential:
    """VGG-16 for 224×224 images, with average pooling (75.36; 72.40 without BN).

    As in the authors' code: the original classifier of three linear layers, with dropout at 0.5.
    """
    classifier = nn.Sequential(
        *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(4096, num_classes),
    )
    return initialise(named(features=vgg16_features(batch_norm), flatten=nn.Flatten(), classifier=classifier))


def cifar_mobilenet(num_classes: int = 10) -> nn.Sequential:
    """MobileNet V1 for 32×32 images: the first convolution has stride 1 (92.48 on CIFAR-10, 73.23 on CIFAR-100)."""
    return mobilenet_v1(num_classes, first_stride=1)


def mobilenet(num_classes: int = 1000) -> nn.Sequential:
    """MobileNet V1 at full width for 224×224 images (73.40)."""
    return mobilenet_v1(num_classes, first_stride=2)


def regnetx_4gf(num_classes: int = 1000) -> nn.Sequential:
    """RegNetX-4.0GF for 224×224 images (80.02), as RegNet's authors define it; the paper's code lacks it."""
    return regnetx((80, 240, 560, 1360), (2, 5, 14, 2), 40, num_classes)


def resnet(
    stem: Sequence[int],
    stem_stride: int,
    pool: nn.Module,
    widths: Sequence[int],
    depths: Sequence[int],
    num_classes: int,
    batch_norm: bool,
    bias: bool,
) -> nn.Sequential:
    """Stem convolutions, a pool, stages of basic blocks (the first at full resolution), mean, linear."""
    convs: list[nn.Module] = []
    inputs, stride = 3, stem_stride
    for outputs in stem:
        convs += [conv(inputs, outputs, 3, stride, bias=bias), norm(outputs, batch_norm), nn.ReLU()]
        inputs, stride = outputs, 1
    *convs, bn, relu = convs
    stages: dict[str, nn.Module] = {}
    for i, (outputs, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        first = BasicBlock(inputs, outputs, 1 if i == 1 else 2, batch_norm, bias)
        rest = (BasicBlock(outputs, outputs, 1, batch_norm, bias) for _ in range(depth - 1))
        stages[f"layer{i}"] = nn.Sequential(first, *rest)
        inputs = outputs
    return initialise(
        named(
            conv1=nn.Sequential(*convs) if len(convs) > 1 else convs[0],
            bn1=bn,
            relu=relu,
            avgpool=pool,
            **stages,
            avgpool2=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(inputs, num_classes),
        )
    )


class BasicBlock(nn.Module):
    """conv BN ReLU conv BN, plus the input (projected if its shape changes), ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool, bias: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, bias=bias), norm(outputs, batch_norm)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, bias=bias), norm(outputs, batch_norm)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride, bias=bias), norm(outputs, batch_norm))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def vgg16_features(batch_norm: bool, dropout: float | None = None) -> nn.Sequential:
    """The convolutions of VGG-16, each with BN, or with dropout in its place; an average pool behind each stage."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage in VGG16:
        for outputs in stage:
            layers.append(conv(inputs, outputs, 3, bias=True))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            elif dropout is not None:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.ReLU())
            inputs = outputs
        layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers)


def mobilenet_v1(num_classes: int, first_stride: int) -> nn.Sequential:
    """A convolution, thirteen depthwise separable ones, mean, linear."""
    width = 32
    blocks = [nn.Sequential(*conv_bn_relu(3, width, 3, first_stride))]
    for outputs, stride in MOBILENET:
        depthwise = conv_bn_relu(width, width, 3, stride, groups=width)
        blocks.append(nn.Sequential(*depthwise, *conv_bn_relu(width, outputs, 1)))
        width = outputs
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1))
    return initialise(named(model=model, flatten=nn.Flatten(), fc=nn.Linear(width, num_classes)))


def regnetx(widths: Sequence[int], depths: Sequence[int], group_width: int, num_classes: int) -> nn.Sequential:
    """A stem convolution and four stages, each of which halves the resolution, mean, linear."""
    inputs = 32
    stem = named(conv=conv(3, inputs, 3, stride=2), bn=nn.BatchNorm2d(inputs), relu=nn.ReLU())
    stages: dict[str, nn.Module] = {}
    for i, (outputs, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        blocks = {"b1": XBlock(inputs, outputs, 2, group_width)}
        blocks |= {f"b{j}": XBlock(outputs, outputs, 1, group_width) for j in range(2, depth + 1)}
        stages[f"s{i}"] = named(**blocks)
        inputs = outputs
    head = named(avg_pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(inputs, num_classes))
    return initialise(named(stem=stem, **stages, head=head))


class XBlock(nn.Module):
    """1×1, grouped 3×3 and 1×1 convolution of one width, plus the input (projected if its shape changes), ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, group_width: int) -> None:
        super().__init__()
        changes = stride != 1 or inputs != outputs
        self.proj = conv(inputs, outputs, 1, stride) if changes else nn.Identity()
        self.bn = norm(outputs, changes)
        self.f = named(
            a=conv(inputs, outputs, 1),
            a_bn=nn.BatchNorm2d(outputs),
            a_relu=nn.ReLU(),
            b=conv(outputs, outputs, 3, stride, groups=outputs // group_width),
            b_bn=nn.BatchNorm2d(outputs),
            b_relu=nn.ReLU(),
            c=conv(outputs, outputs, 1),
            c_bn=nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.proj(x)) + self.f(x))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """A convolution that changes the resolution by its stride alone."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)


def norm(width: int, batch_norm: bool) -> nn.Module:
    return nn.BatchNorm2d(width) if batch_norm else nn.Identity()


def conv_bn_relu(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [conv(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU()]


def named(**layers: nn.Module) -> nn.Sequential:
    """One layer after the other, under these names."""
    return nn.Sequential(OrderedDict(layers))


def initialise(model: nn.Sequential) -> nn.Sequential:
    """Weights as He et al. (2015) draw them, by the number of inputs to a unit; biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
