"""What a model does on real images, seen from outside: for what torch.export cannot follow, or does not tell.

Every call of torch passes by here, and what comes from the images is followed from call to call. So it is seen where
Python reads values of the images and decides by them, and which well-known non-linearities stand on the way.
"""

from __future__ import annotations

import copy
import itertools
import sys
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .errors import Refusal
from .refusals import LEAVES, PRODUCTS, REMEDIES, is_users_code

DECISION = "an if, int() or item() on values that depend on the images has no graph; write it without"
OTHER_WAYS = 32  # runs with other answers, at most
TIMES = 4  # that a decision at the same place is taken otherwise, at most
CALLS = 10  # a way that makes so many times the calls of the one that the images take does not end

Read = tuple[str, str]  # the place where Python reads a tensor, and how
Decision = tuple[Read, int]  # and how often it has been read before

#: How Python reads the values of a tensor.
_READS = {
    *(getattr(Tensor, f"__{name}__") for name in ("bool", "int", "float", "index", "complex", "contains")),
    *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, Tensor.equal, Tensor.allclose),
    *(torch.is_nonzero, torch.equal, torch.allclose),
}
_RETURNED = (Tensor, int, float, str, type(None))
_SYNONYMS = (
    {"multiply": "mul", "divide": "div", "expit": "sigmoid"}
    | {"rmul": "mul", "imul": "mul", "truediv": "div", "rtruediv": "div", "itruediv": "div"}
    | {
        "rmatmul": "matmul",
        "logsigmoid": "log_sigmoid",
        "multi_head_attention_forward": "scaled_dot_product_attention",
    }
)
_NOT_ALWAYS = {
    "batch_norm",
    "copy",
    "fill",
    "cond",
    "native_dropout",
}  # whether they offend, a name cannot tell


@dataclass
class Observation:
    """One run of a model."""

    answers: dict[Read, list[Any]] = field(default_factory=lambda: defaultdict(list))  # what Python read, in order
    decisions: dict[Decision, Any] = field(default_factory=dict)  # what was read of the images
    made: list[Refusal] = field(default_factory=list)  # calls on what comes from the images; `why` if one offends
    calls: int = 0
    returned: list[str] = field(default_factory=list)  # types that no result may hold

    @property
    def refusals(self) -> list[Refusal]:
        places = dict.fromkeys(place for (place, _), _ in self.decisions)
        return [Refusal("control flow", place, DECISION) for place in places]

    @property
    def offenders(self) -> list[Refusal]:
        return [call for call in self.made if call.why]


def observe(model: nn.Module, images: Sequence[Tensor]) -> Observation:
    """A run of the model; it gets copies of images and buffers, because it may write to them."""
    return _run(model, images, {}, sys.maxsize)


def other_ways(model: nn.Module, images: Sequence[Tensor], taken: Observation) -> list[Observation]:
    """Runs that leave the way of the images: every decision, also one on such a way, is taken otherwise once."""
    ways, tried = list[Observation](), set[Decision]()
    waiting = [(taken, dict[Read, list[Any]]())]  # runs, and the answers that led there
    for seen, answers in waiting:
        for decision in (d for d in seen.decisions if d not in tried and d[1] < TIMES):
            tried.add(decision)
            read, before = decision
            for answer in _others(seen.decisions[decision])[: OTHER_WAYS - len(ways)]:
                forced = {**answers, read: [*seen.answers[read][:before], answer]}
                ways.append(_run(copy.deepcopy(model), images, forced, CALLS * taken.calls + 1000))
                waiting.append((ways[-1], forced))
    return ways


def _others(value: Any) -> list[Any]:
    """What could have been read instead: the other truth, or numbers that are harmless as sizes."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [n for n in (0, 1, 2, value + 1) if n != value]
    if isinstance(value, float):
        far = 100 * (abs(value) + 1)
        return [value - far, value + far]
    if isinstance(value, list):
        return [list(others) for others in zip(*map(_others, value), strict=False)]
    return []


def _run(model: nn.Module, images: Sequence[Tensor], forced: Mapping[Read, list[Any]], calls: int) -> Observation:
    copies = tuple(x.clone() for x in images)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    watch = Watch(model, forced, copies, calls)
    with suppress(Exception), torch.no_grad(), watch:
        result = torch.func.functional_call(model, buffers, copies)
        kinds = (type(leaf) for leaf in tree_leaves(result) if not isinstance(leaf, _RETURNED))
        watch.seen.returned = sorted({kind.__name__ for kind in kinds})
    return watch.seen


class Watch(TorchFunctionMode):
    """Notes what calls do with what comes from the images. Whoever reads a tensor gets the answers that are given."""

    def __init__(
        self,
        model: nn.Module,
        answers: Mapping[Read, list[Any]],
        images: Sequence[Tensor] = (),
        calls: int = sys.maxsize,
    ) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.answers, self.calls = {read: list(values) for read, values in answers.items()}, calls
        self.followed: dict[int, weakref.ref[Tensor]] = {}
        self.seen = Observation()
        self._follow(images)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.calls += 1
        if self.seen.calls > self.calls:
            raise RecursionError("this way does not end")
        sources = [x for x in tree_leaves((args, kwargs)) if self._comes_from_images(x)]
        if func in _READS:
            return self._read(func, args, kwargs or {}, bool(sources))
        if sources:
            self._note(func.__name__.strip("_"), len(sources))
        result = func(*args, **(kwargs or {}))
        if sources:
            self._follow(args[:1] if result is None else result)  # x[0] = y gives nothing
        return result

    def _read(self, func: Any, args: Any, kwargs: Any, of_images: bool) -> Any:
        where = place_of(self._frames(), self.paths)
        pending = self.answers.get((where, func.__name__))
        value = pending.pop(0) if pending else func(*args, **kwargs)
        read = where, func.__name__
        if of_images:
            self.seen.decisions[read, len(self.seen.answers[read])] = value
        self.seen.answers[read].append(value)
        return value

    def _note(self, name: str, sources: int) -> None:
        """Note a call, and whether it offends as far as its name tells."""
        name = _SYNONYMS.get(name, name)
        why = PRODUCTS.get(name, "") if sources > 1 else ""
        if not why and name not in PRODUCTS and name not in _NOT_ALWAYS:
            why = REMEDIES.get(name, "")
        self.seen.made.append(Refusal(name, place_of(self._frames(), self.paths, name), why))

    def _comes_from_images(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.followed and self.followed[id(value)]() is value

    def _follow(self, values: Any) -> None:
        self.followed |= {id(x): weakref.ref(x) for x in tree_leaves(values) if isinstance(x, Tensor)}

    def _frames(self) -> list[tuple[FrameType, int]]:
        callers = traceback.walk_stack(sys._getframe(3))
        return [*itertools.takewhile(lambda frame: frame[0].f_code.co_filename != __file__, callers)][::-1]


def place_of(frames: Iterable[tuple[FrameType, int]], paths: Mapping[int, str], operation: str = "") -> str:
    """The module that was running, and the line of the user's code; frames from the outermost on.

    An operation is named behind a module which is more than that operation.
    """
    path, line, leaf = "", "", False
    for frame, number in frames:
        module = frame.f_locals.get("self")
        if id(module) in paths:
            path, leaf = paths[id(module)], type(module).__module__.startswith(LEAVES)
        if is_users_code(frame.f_code.co_filename):
            line = f" ({Path(frame.f_code.co_filename).name}:{number})"
    if operation and not (path and leaf):
        path = f"{path}.{operation}" if path else operation
    return f"{path or 'forward'}{line}"
