"""Whatever a model returns, the spiking network returns it in the same structure: the mean over time at each leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import spikecal


class Heads(NamedTuple):
    classes: Tensor
    box: Tensor


class Structured(nn.Module):
    """Two layers, and a result that `arrange` puts together from their values and a tensor that is always the same."""

    anchors: Tensor

    def __init__(self, arrange: Any) -> None:
        super().__init__()
        self.first, self.second, self.arrange = nn.Linear(5, 6), nn.Linear(6, 3), arrange
        self.register_buffer("anchors", torch.arange(4.0))

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.arrange(hidden, self.second(hidden), self.anchors)


STRUCTURES: dict[str, Any] = {
    "dict": lambda h, y, c: {"out": y, "aux": h},
    "numbered": lambda h, y, c: {3: y, 8: h},
    "nested": lambda h, y, c: {"heads": [(y, y + 1), {"deep": (h,)}], "last": y},
    "constants": lambda h, y, c: {"out": y, "loss": None, "stride": 8, "scale": 0.5, "kind": "box", "done": True},
    "tensor": lambda h, y, c: (y, c, [c * 2, h]),
    "of one": lambda h, y, c: (y,),
    "empty": lambda h, y, c: {"out": y, "hidden": (), "more": {}},
}


def same(a: Any, b: Any) -> bool:
    return isinstance(a, type(b)) and (torch.allclose(a, b, atol=1e-6) if isinstance(b, Tensor) else a == b)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_is_kept(tmp_path: Path, name: str) -> None:
    model, x = Structured(STRUCTURES[name]), torch.randn(16, 5)
    with torch.no_grad():
        wanted, shape = pytree.tree_flatten(model(x))
    snn = spikecal.convert(model, [x], T=4)
    snn.save(tmp_path / "net.spk")
    again = spikecal.load(tmp_path / "net.spk")
    for result in (snn.ann(x), again.ann(x)):
        leaves, structure = pytree.tree_flatten(result)
        assert structure == shape
        assert all(map(same, leaves, wanted))
    mean, steps = snn(x), snn.over_time(x)
    assert pytree.tree_structure(mean) == pytree.tree_structure(steps) == shape
    for over_time, leaf, ann in zip(pytree.tree_leaves(steps), pytree.tree_leaves(mean), wanted, strict=True):
        if isinstance(ann, Tensor) and len(ann) == 16:
            assert over_time.shape == (4, *ann.shape)
            torch.testing.assert_close(over_time[-1], leaf)
        else:
            assert same(leaf, ann)
            assert same(over_time, ann)


def test_a_named_tuple_is_a_tuple() -> None:
    model, x = Structured(lambda h, y, c: Heads(y, h)), torch.randn(8, 5)
    result = spikecal.convert(model, [x], T=2)(x)
    assert type(result) is tuple
    assert [y.shape for y in result] == [(8, 3), (8, 6)]


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (lambda h, y, c: {"anchors": c, "none": None}, "does not depend on the images"),
        (lambda h, y, c: (y, y.shape[0]), "returns its batch size"),
        (lambda h, y, c: {("a", 1): y}, "returns a dict; return .* dicts with names or numbers as keys"),
    ],
)
def test_results_that_cannot_be_kept(arrange: Any, message: str) -> None:
    with pytest.raises(spikecal.UnsupportedModelError, match=message):
        spikecal.convert(Structured(arrange), [torch.randn(8, 5)], T=2)
