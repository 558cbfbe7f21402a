"""Plain PyTorch definitions of the trained networks that the benchmarks start from.

Each is written as its authors wrote it (functional ReLU here, modules there, signed residual paths, one-sided
padding), because the variety is the point: the library must convert them all without knowing any by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class SubsampledShortcut(nn.Module):
    """Option A of He et al.: every second pixel, and zeros for the new channels; no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        pad = x.shape[1] // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, pad, pad))  # (B, 2C, H/2, W/2)


class BasicBlock(nn.Module):
    """conv BN ReLU conv BN, plus the shortcut, ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else SubsampledShortcut()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """The thin ResNet of He et al. for 32×32 images: 6n + 2 layers of 16, 32 and 64 channels."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, 16), nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, n, stride=1)
        self.layer2 = stage(BasicBlock, 16, 32, n, stride=2)
        self.layer3 = stage(BasicBlock, 32, 64, n, stride=2)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))  # (B, 16, 32, 32)
        x = self.layer3(self.layer2(self.layer1(x)))  # (B, 64, 8, 8)
        return self.linear(F.avg_pool2d(x, 8).flatten(1))


class SignedBlock(nn.Module):
    """conv BN ReLU conv BN, plus the shortcut, and no ReLU behind the sum: signed values run on."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(y)) + self.shortcut(x)


class SignedResNet20(nn.Module):
    """ResNet-20 with a wide stem and one ReLU per stage, not per block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, 64), nn.BatchNorm2d(64)
        self.layer1 = stage(SignedBlock, 64, 16, 3, stride=1)
        self.layer2 = stage(SignedBlock, 16, 32, 3, stride=2)
        self.layer3 = stage(SignedBlock, 32, 64, 3, stride=2)
        self.linear = nn.Linear(256, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))  # (B, 64, 32, 32)
        for layer in (self.layer1, self.layer2, self.layer3):
            x = F.relu(layer(x))  # (B, 64, 8, 8) at last
        return self.linear(F.avg_pool2d(x, 4).flatten(1))  # (B, 64, 2, 2) -> (B, 256) -> (B, 100)


def stage(block: Callable[[int, int, int], nn.Module], inputs: int, outputs: int, n: int, stride: int) -> nn.Module:
    """`n` blocks, of which the first changes width and resolution."""
    rest = (block(outputs, outputs, 1) for _ in range(n - 1))
    return nn.Sequential(block(inputs, outputs, stride), *rest)


class KerasBlock(nn.Module):
    """A residual block with Keras habits: biased convolutions, ε = 0.001, "same" padding that is one-sided
    at stride 2, and a projection without BN."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1))
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs, eps=1e-3)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs, eps=1e-3)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(self.pad(x))))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class MlperfResNet8(nn.Module):
    """The image classifier of MLPerf Tiny; it takes raw RGB values 0..255."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, eps=1e-3)
        self.relu = nn.ReLU()
        self.block1 = KerasBlock(16, 16, stride=1)
        self.block2 = KerasBlock(16, 32, stride=2)
        self.block3 = KerasBlock(32, 64, stride=2)
        self.pool = nn.AvgPool2d(8)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 16, 32, 32)
        x = self.block3(self.block2(self.block1(x)))  # (B, 64, 8, 8)
        return self.fc(self.pool(x).flatten(1))


def unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Iterable[nn.Module]:
    """Convolution without bias, BN, ReLU; the resolution changes by the stride alone."""
    yield nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(outputs)
    yield nn.ReLU()


def vgg16_half() -> nn.Module:
    """VGG-16 at half width, with BN, average pooling and one linear layer."""
    stages = ((32, 32), (64, 64), (128, 128, 128), (256, 256, 256), (256, 256, 256))
    layers: list[nn.Module] = []
    width = 3
    for outputs in stages:
        for before, after in pairwise((width, *outputs)):
            layers += unit(before, after, 3)
        layers.append(nn.AvgPool2d(2))
        width = outputs[-1]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(256, 10))


def vgg6(pool: type[nn.MaxPool2d] | type[nn.AvgPool2d]) -> nn.Module:
    """Six convolutions, a pool of the given kind behind every second one: the same network with either pool."""
    layers: list[nn.Module] = []
    width = 3
    for outputs in (24, 48, 96):
        layers += [*unit(width, outputs, 3), *unit(outputs, outputs, 3), pool(2)]
        width = outputs
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def mobilenet_v1() -> nn.Module:
    """MobileNetV1 at width 1 for 32×32 images: its first stride is 1."""
    steps = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    layers = [*unit(3, 32, 3)]
    width = 32
    for outputs, stride in steps:
        layers += unit(width, width, 3, stride, groups=width)
        layers += unit(width, outputs, 1)
        width = outputs
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10))


@dataclass(frozen=True)
class Normalisation:
    """What is taken from, and then divides, each channel of RGB values in [0, 1]."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


PIXELS = Normalisation()
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = Normalisation((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
RAW_BYTES = Normalisation((0.0,), (1 / 255,))
EFFICIENTNET_LITE = Normalisation((127 / 255,), (128 / 255,))


@dataclass(frozen=True)
class Network:
    """A trained network: how to build it, what it was trained on, and the accuracy it is known to have.

    `accuracy` is that on the half of the test set in the shared data, in percent (SOURCES.md there, or the
    record beside our own weights).
    """

    build: Callable[[], nn.Module]
    dataset: str
    normalisation: Normalisation
    accuracy: float


NETWORKS = {
    "resnet20_cifar10": Network(lambda: CifarResNet(3), "cifar10", IMAGENET, 91.42),
    "resnet32_cifar10": Network(lambda: CifarResNet(5), "cifar10", IMAGENET, 92.26),
    "resnet20_cifar100": Network(SignedResNet20, "cifar100", CIFAR100, 70.42),
    "resnet8_mlperf_cifar10": Network(MlperfResNet8, "cifar10", RAW_BYTES, 86.94),
    "vgg16w50_cifar10": Network(vgg16_half, "cifar10", CIFAR10, 89.08),
    "mobilenet_cifar10": Network(mobilenet_v1, "cifar10", CIFAR10, 83.40),
    "vgg6max_cifar10": Network(lambda: vgg6(nn.MaxPool2d), "cifar10", CIFAR10, 84.00),
    "vgg6avg_cifar10": Network(lambda: vgg6(nn.AvgPool2d), "cifar10", CIFAR10, 83.06),
}


def load(name: str, weights: dict[str, Tensor]) -> nn.Module:
    """The network `name` in eval mode, with these weights as float32; every tensor must find its place.

    Some files leave out `num_batches_tracked`, which inference does not read.
    """
    model = NETWORKS[name].build()
    found = model.load_state_dict({key: to_float32(w) for key, w in weights.items()}, strict=False)
    missing = [key for key in found.missing_keys if not key.endswith("num_batches_tracked")]
    if missing or found.unexpected_keys:
        raise ValueError(f"the weights do not fit {name}: {missing + found.unexpected_keys}")
    return model.eval()


def to_float32(w: Tensor) -> Tensor:
    return w.to(torch.float32) if w.is_floating_point() else w
