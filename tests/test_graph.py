"""The graph itself: where a node's channels are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spikecal as sc
from helpers import captured, inputs, prepared, shell
from spikecal.capture import capture


class Behind(nn.Module):
    """Something between layers and a ReLU; tokens are (6, 5), images (5, 4, 4)."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.conv, self.between = nn.Linear(5, 7), nn.Conv2d(5, 7, 1), between

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) if x.ndim == 3 else self.conv(x)
        return self.between(x, y).relu()


TOKENS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer": (lambda x, y: y, 1),
    "scale": (lambda x, y: 2 * y + 1, 1),
    "sum": (lambda x, y: y[..., :5] + x, 1),
    "sum, input first": (lambda x, y: x - y[..., :5], 1),
    "concat": (lambda x, y: torch.cat([x, y], 2), 1),
    "concat of tokens": (lambda x, y: torch.cat([y, y], 1), 1),
    "transposed": (lambda x, y: y.transpose(1, 2), 0),
    "mean over tokens": (lambda x, y: y.mean(1), 0),
    "maximum over tokens": (lambda x, y: y.amax(1), 0),
    "mean over channels": (lambda x, y: y.mean(2), 0),
    "picked token": (lambda x, y: y[:, 0], 0),
    "one more axis": (lambda x, y: y.unsqueeze(1), 2),
    "tokens as a map": (lambda x, y: y.reshape(-1, 2, 3, 7), 2),
    "channels in groups": (lambda x, y: y[..., :6].reshape(-1, 6, 2, 3), 0),
}
IMAGES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer": (lambda x, y: y, 0),
    "channels last": (lambda x, y: y.permute(0, 2, 3, 1), 2),
    "channels last and back": (lambda x, y: (y.permute(0, 2, 3, 1) + 1).permute(0, 3, 1, 2), 0),
    "sum of tokens": (lambda x, y: y.flatten(2).transpose(1, 2) + 1, 1),
    "pooled": (lambda x, y: nn.functional.avg_pool2d(y, 2), 0),
    "kept mean": (lambda x, y: y.mean((2, 3), keepdim=True), 0),
    "flattened": (lambda x, y: y.flatten(1), 0),
}


@pytest.mark.parametrize(
    ("shape", "between", "axis"),
    [((6, 5), *case) for case in TOKENS.values()] + [((5, 4, 4), *case) for case in IMAGES.values()],
    ids=[f"tokens, {name}" for name in TOKENS] + [f"images, {name}" for name in IMAGES],
)
def test_channels_are_followed(shape: tuple[int, ...], between: Callable[..., Tensor], axis: int) -> None:
    graph = capture(Behind(between), [torch.randn(2, *shape)])
    assert graph.channel_axis(graph.neurons[0]) == graph.channel_axis(graph.outputs[0]) == axis


def test_thresholds_and_biases_of_tokens_are_those_of_their_channels() -> None:
    """Behind a residual sum and behind two transpositions around a batch norm, too."""
    snn = sc.convert(shell(captured("tokens")), [inputs("tokens", 16)], 4, "light")
    neurons = [snn.sites[node.name] for node in prepared("tokens").neurons]
    assert [tuple(site.threshold.shape) for site in neurons] == [(1, 8), (1, 6), (1, 5)]
    assert [tuple(site.bias.shape) for site in neurons] == [(1, 8), (1, 6), (1, 5)]
