"""One ATen call on its way into a `Graph`, and the table of the rules that say what it means there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .graph import Node
from .ops import Constant, Op
from .refusals import Refuse, call_site


class Importer(Protocol):
    """What a rule needs of the graph in the making."""

    nodes: list[Node]
    tensors: dict[str, Tensor]
    batch: Any  # the size of dimension 0 of all inputs, a symbol

    def add(self, op: Op, inputs: tuple[str, ...], node: fx.Node, shape: Any = None) -> str:
        """Add a node and return its name."""

    def tensor(self, name: str, value: Tensor) -> str:
        """Keep a tensor and return its name."""


@dataclass
class Call:
    """One ATen call: its arguments by name, and how to add our nodes for it."""

    importer: Importer
    node: fx.Node
    args: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def out(self) -> Any:
        return self.node.meta["val"]

    def ndim(self, name: str) -> int:
        return len(self.shape(name)) + 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one sample of an input."""
        return next(n.shape for n in reversed(self.importer.nodes) if n.name == self[name])

    def fixed(self, name: str) -> Tensor | None:
        """An argument as a tensor, (1, ...) or without batch, if it does not depend on the images."""
        value = self[name]
        if isinstance(value, Tensor):
            return value
        if isinstance(value, int | float):
            return torch.tensor(value, dtype=torch.float64)
        op = next((n.op for n in self.importer.nodes if n.name == value), None)
        return self.importer.tensors[op.value].unsqueeze(0) if isinstance(op, Constant) else None

    def axis(self, dim: int, ndim: int) -> int:
        """A dimension as an axis of a sample; the batch dimension is refused."""
        dim = dim % ndim
        if dim == 0:
            raise Refuse("it works along the batch dimension; keep dimension 0 the batch")
        return dim - 1

    def data(self, name: str) -> str:
        """The name of the node behind an argument that must depend on the images."""
        value = self[name]
        if not isinstance(value, str):
            raise Refuse(f"its argument {name!r} does not depend on the images")
        return value

    def of_sample(self, value: Any) -> Tensor:
        """A constant as it broadcasts against one sample."""
        ndim = self.out.ndim - 1
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float)):
                raise Refuse("it computes with the batch size")
            return torch.full((1,) * ndim, float(value), dtype=self.out.dtype, device=self.out.device)
        constant: Tensor = value.to(self.out.dtype)
        if constant.ndim > ndim:
            if constant.shape[0] != 1:
                raise Refuse("it combines the images with a constant that has a batch of its own")
            constant = constant[0]
        return constant.reshape((1,) * (ndim - constant.ndim) + tuple(constant.shape))

    def add(self, op: Op, *inputs: str, shape: Any = None) -> str:
        return self.importer.add(op, inputs, self.node, shape)

    def keep(self, suffix: str, value: Tensor) -> str:
        """Store a tensor under the name that the next node of this call will have."""
        return self.importer.tensor(f"{call_site(self.node)}.{suffix}", value)

    def optional(self, suffix: str, value: Tensor | None) -> str | None:
        return None if value is None else self.keep(suffix, value)


Rule = Callable[[Call], Any]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(imported_by: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, imported_by))
        return imported_by

    return register


def as_tuple(value: Any, n: int) -> tuple[int, ...]:
    """ATen writes one number for all dimensions, or a list."""
    value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(value * n if len(value) == 1 else value)


def parameter(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refuse(f"its {what} depends on the images, so it is a product of two activations; keep it fixed")
    return value
