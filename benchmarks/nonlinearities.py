"""Which calls of a model are neither affine nor rectifiers, found by running it.

The answer owes nothing to the library that it checks: no torch.export, no table of operations with a meaning. Every
operation that the forward pass sends to torch, and that depends on the images, is tried on random numbers a and b:
if it is affine, then f((a + b) / 2) = (f(a) + f(b)) / 2. What fails is a non-linearity. ReLU, clamps with a lower
bound and maxima over a window are known by name and let pass: they are what spiking neurons can stand in for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WINDOWS = {
    "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d", "max_pool3d", "mkldnn_max_pool2d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "max.dim",
}  # fmt: skip
TOLERANCE = 1e-3  # of the largest value; what float32 loses in a sum is a thousandth of this
SPREAD = 2.0  # of the random numbers, so that saturation shows


@dataclass(frozen=True)
class NonLinear:
    """One call that is neither affine nor a rectifier."""

    operation: str
    module: str  # the path of the innermost module that made it


def nonlinear_calls(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[NonLinear], int]:
    """Such calls in the order of the forward pass; and how many rectifiers and window maxima there are beside them."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        watch = stack.enter_context(_Watch(inputs, stack.enter_context(_paths(model))))
        stack.enter_context(_noticed(watch))
        model(*inputs)
    return watch.found, watch.rectifiers


@contextmanager
def _noticed(watch: _Watch) -> Any:
    """What leaves torch for numpy is out of sight, and counts as a non-linearity."""
    numpy = Tensor.numpy

    def notice(x: Tensor, **options: Any) -> Any:
        if watch._depends(x):
            watch.found.append(NonLinear("numpy", watch.path[-1] if watch.path else ""))
        return numpy(x, **options)

    Tensor.numpy = notice  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.numpy = numpy  # type: ignore[method-assign]


@contextmanager
def _paths(model: nn.Module) -> Any:
    """The path of the module whose forward pass is running, as the last entry of a list."""
    running: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


class _Watch(TorchDispatchMode):
    """Follows what depends on the inputs, by the memory it lies in, and tries every operation on it."""

    def __init__(self, inputs: Sequence[Tensor], path: list[str]) -> None:
        super().__init__()
        self.path, self.found, self.rectifiers = path, list[NonLinear](), 0
        self.alive: dict[int, Any] = {}  # kept, so that no other value comes to lie in the same memory
        for x in inputs:
            self._follow(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dependent = [t for t in tree_leaves((args, kwargs)) if self._depends(t)]
        follows = bool(dependent) and self._judge(func, args, kwargs, dependent)
        result = func(*args, **kwargs)
        if follows:
            tree_map(self._follow, (result, args[0] if func._schema.is_mutable else None))
        return result

    def _judge(self, func: Any, args: Any, kwargs: Any, dependent: list[Tensor]) -> bool:
        """Whether the result depends on the images; a call that is not affine is noted."""
        name = operation_of(func)
        if func.is_view:
            return True
        if name.startswith("new_") or name.endswith("_like"):
            return False  # they read only the shape
        if _is_rectifier(func, args):
            self.rectifiers += 1
            return True
        if not all(t.is_floating_point() for t in dependent) or not self._is_affine(func, args, kwargs):
            self.found.append(NonLinear(name, self.path[-1] if self.path else ""))
        return True

    def _is_affine(self, func: Any, args: Any, kwargs: Any) -> bool:
        return all(_halfway(*values) for values in zip(*self._try(func, args, kwargs), strict=True))

    def _try(self, func: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        """What an operation makes of random numbers, of others, and of those halfway between."""
        mutable = func._schema.is_mutable

        def draw(value: Any) -> Any:
            return torch.empty_like(value).normal_(0, SPREAD) if self._depends(value) else value

        def halfway(a: Any, b: Any) -> Any:
            return (a + b) / 2 if isinstance(a, Tensor) and a is not b else a

        def run(arguments: Any) -> list[Any]:
            copies = tree_map(lambda v: v.clone() if mutable and isinstance(v, Tensor) else v, arguments)
            return [y for y in tree_leaves(func(*copies[0], **copies[1])) if y is not None]

        a, b = (tree_map(draw, (args, kwargs)) for _ in range(2))
        return [run(a), run(b), run(tree_map(halfway, a, b))]

    def _depends(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.alive

    def _follow(self, value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            self.alive[storage._cdata] = storage


def _halfway(a: Any, b: Any, m: Any) -> bool:
    """Whether m = (a + b) / 2; what is no number of floating point, such as positions of maxima, never is."""
    if not isinstance(m, Tensor) or not m.is_floating_point():
        return False
    if not m.numel():
        return True
    padding = a.isneginf() & b.isneginf() & m.isneginf()  # for a maximum
    a, b, m = (t.masked_fill(padding, 0) for t in (a, b, m))
    error = (m - (a + b) / 2).abs().max()
    return bool(error <= TOLERANCE * torch.stack([a.abs().max(), b.abs().max()]).max())


def _is_rectifier(func: Any, args: Any) -> bool:
    name, bounds = operation_of(func), [*args[1:3], None, None][:2]
    if name == "relu" or name in WINDOWS or str(func).removeprefix("aten.") in WINDOWS:
        return True
    if name == "threshold":
        return bounds == [0, 0]
    if name in ("clamp", "hardtanh", "clamp_min"):
        return isinstance(bounds[0], int | float) or name == "hardtanh"
    return False


def operation_of(func: Any) -> str:
    """The name of an operation, in place or not, native or not: `silu`, `layer_norm`, `softmax`."""
    name = func._schema.name.split("::")[1].rstrip("_")
    return name.removeprefix("_").removeprefix("native_")
