"""Networks that do not classify images: sounds, vectors, pictures of pictures, numbers.

The nets are random, but their batch norms know the data, as after training. What is asked is that the spiking network
comes close to its ANN, on inputs it was not calibrated with, and closer with more time steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikecal

STEPS = (4, 16, 64)


def settled(model: nn.Module, x: Tensor) -> nn.Module:
    """The model in eval mode, with the statistics of these inputs in its batch norms."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = None
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def errors(model: nn.Module, x: Tensor, held_out: Tensor) -> list[float]:
    """‖ANN − SNN‖² / ‖ANN − mean‖² over inputs that the calibration did not see, for each number of steps."""
    found = []
    with torch.no_grad():
        wanted = model(held_out)
    snn: nn.Module | spikecal.SpikingNetwork = model
    for T in STEPS:
        snn = spikecal.convert(snn, [x], T)  # from the second time on, calibrated anew
        torch.testing.assert_close(snn.ann(held_out), wanted, rtol=1e-4, atol=1e-4)
        got = snn(held_out)
        assert got.shape == wanted.shape
        found.append(float((got - wanted).square().mean() / (wanted - wanted.mean(0)).square().mean()))
    return found


def assert_falls(found: Sequence[float]) -> None:
    """It falls with every number of steps; and by a factor of four in all (so it did for every one of four seeds)."""
    assert all(after < before for before, after in pairwise(found)), found
    assert found[-1] < found[0] / 4, found


class KeywordNet(nn.Module):
    """The shape of DS-CNN (Zhang et al. 2017) over time: depthwise separable convolutions on 10 cepstral features."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(10, width, 10, stride=2, padding=5), nn.BatchNorm1d(width), nn.ReLU()]
        for _ in range(blocks):
            layers += [nn.Conv1d(width, width, 3, padding=1, groups=width), nn.BatchNorm1d(width), nn.ReLU()]
            layers += [nn.Conv1d(width, width, 1), nn.BatchNorm1d(width), nn.ReLU()]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.features(x).mean(-1), 0.2, self.training))


class UNet(nn.Module):
    """Down twice, up twice, with the picture of the same size beside it each time; gives a map."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = self.block(3, width), self.block(width, 2 * width), self.block(2 * width, 2 * width)
        self.d, self.e = self.block(4 * width, width), self.block(2 * width, width)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.a(x)
        middle = self.b(F.avg_pool2d(fine, 2))
        coarse = self.c(F.avg_pool2d(middle, 2))
        y = self.d(torch.cat([F.interpolate(coarse, scale_factor=2, mode="bilinear"), middle], 1))
        return self.head(self.e(torch.cat([self.up(y), fine], 1)))


def test_a_keyword_spotting_network() -> None:
    x = torch.randn(96, 10, 49).cumsum(-1) / 5  # features that change slowly
    assert_falls(errors(settled(KeywordNet(), x[:64]), x[:64], x[64:]))


def test_a_multilayer_perceptron() -> None:
    layers = [nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU6()]
    x = torch.randn(384, 20)
    assert_falls(errors(settled(nn.Sequential(*layers, nn.Linear(32, 5)), x[:256]), x[:256], x[256:]))


def test_a_u_net() -> None:
    x = F.avg_pool2d(torch.randn(40, 3, 18, 18), 3, stride=1)
    assert_falls(errors(settled(UNet(), x[:24]), x[:24], x[24:]))


def test_regression() -> None:
    """A net that learned sin(3a) + b²: the spiking net is about as far from the truth as the net it comes from."""
    x = torch.rand(768, 2) * 2 - 1
    y = (3 * x[:, 0]).sin() + x[:, 1].square()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        (model(x[:512]) - y[:512]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        own = float((model(x[512:]) - y[512:]).square().mean())
    assert own < 0.01
    assert_falls(errors(model, x[:512], x[512:]))
    snn = spikecal.convert(model, [x[:512]], T=128)
    assert float((snn(x[512:]) - y[512:]).square().mean()) < 2 * own + 0.01
