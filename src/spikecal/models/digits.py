"""A residual network for 8×8 handwritten digits: small enough to ship, with the layers that matter."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("digits.safetensors")


class ResidualBlock(nn.Module):
    """conv BN ReLU conv BN, plus the input, ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


class DigitsNet(nn.Module):
    """Stem, average pool, residual block, wider convolution, global average pool, linear."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.AvgPool2d(2)
        self.block = ResidualBlock(width)
        self.widen = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))  # (B, 1, 8, 8) -> (B, 32, 4, 4)
        x = self.widen(self.block(x))  # (B, 64, 4, 4)
        logits: Tensor = self.head(x.mean((2, 3)))  # (B, 64) -> (B, 10)
        return logits


def digits_net(pretrained: bool = True) -> DigitsNet:
    """The network in eval mode, with the weights that `scripts/train_digits.py` made, or untrained."""
    model = DigitsNet()
    if pretrained:
        model.load_state_dict(load_file(WEIGHTS))
    return model.eval()
