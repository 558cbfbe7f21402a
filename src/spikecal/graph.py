"""A network as data: nodes in the order they run, and their tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from .ops import (
    OPS,
    Activation,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    Concat,
    Conv,
    Expand,
    Input,
    Linear,
    Max,
    Mean,
    Op,
    Output,
    Pad,
    Peak,
    Permute,
    Reshape,
    Select,
    Slice,
    Upsample,
)

#: Operations whose result is never negative if no input is.
_KEEPS_SIGN = (Peak, AvgPool, AdaptiveAvgPool, Mean, Reshape, Permute, Expand, Slice, Select, Upsample, Concat)


@dataclass(frozen=True)
class Node:
    """One operation at one place of the network."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    shape: tuple[int, ...]  # of one sample, without the batch dimension
    where: str = ""  # the line of the user's code it comes from

    @property
    def is_site(self) -> bool:
        """Whether errors are measured and corrected here: at every activation and every output."""
        return isinstance(self.op, Activation | Output)


@dataclass(frozen=True)
class Graph:
    """A network of affine operations and activations.

    The nodes stand in an order in which they can run. `structure` is the nesting of the model's result as plain
    lists and dicts, with the number of an output at each leaf, or what the model always returns there.
    """

    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]
    structure: Any = 0

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """The nodes that read each node's value."""
        readers: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in node.inputs:
                readers[name].append(node)
        return readers

    @cached_property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes if isinstance(node.op, Input)]

    @cached_property
    def outputs(self) -> list[Node]:
        return [node for node in self.nodes if isinstance(node.op, Output)]

    @cached_property
    def neurons(self) -> list[Node]:
        """The activations: the places where integrate-and-fire neurons stand."""
        return [node for node in self.nodes if isinstance(node.op, Activation)]

    @cached_property
    def depths(self) -> dict[str, int]:
        """How many layers of neurons lie on the longest way to each node, with its own."""
        depths: dict[str, int] = {}
        for node in self.nodes:
            depths[node.name] = max((depths[i] for i in node.inputs), default=0) + isinstance(node.op, Activation)
        return depths

    def relative_depth(self, name: str) -> float:
        """How deep a node lies, by layers of neurons on the longest way: 1 for the last of them."""
        return self.depths[name] / max(1, *self.depths.values())

    @property
    def dtype(self) -> torch.dtype:
        return next((t.dtype for t in self.tensors.values() if t.is_floating_point()), torch.get_default_dtype())

    @property
    def precisions(self) -> set[torch.dtype]:
        """Of all tensors that nodes compute with: one, in a sound network."""
        used = (t for name, t in self.tensors.items() if name not in self.returned_tensors)
        return {t.dtype for t in used if t.is_floating_point()}

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.tensors.values()), torch.device("cpu"))

    def channel_axis(self, node: Node) -> int:
        """The axis of a sample along which a node has channels: that of the layers in front of it, else the first."""
        return self._channel_axes[node.name] or 0

    @cached_property
    def _channel_axes(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for node in self.nodes:
            known = [found[name] for name in node.inputs if found[name] is not None]
            before = self.by_name[node.inputs[0]].shape if node.inputs else ()
            found[node.name] = _channel_axis(node, before, known[0] if known else None)
        return found

    def is_nonnegative(self, name: str) -> bool:
        """Whether the value of this node can be shown never to be negative."""
        return name in self._nonnegative

    @cached_property
    def _nonnegative(self) -> set[str]:
        found: set[str] = set()
        for node in self.nodes:
            keeps_sign = (
                isinstance(node.op, _KEEPS_SIGN)
                or (isinstance(node.op, Add) and node.op.alpha >= 0)
                or (isinstance(node.op, Pad) and node.op.value >= 0)
            )
            if isinstance(node.op, Activation) or (keeps_sign and found.issuperset(node.inputs)):
                found.add(node.name)
        return found

    def fresh(self, name: str) -> str:
        """The name, or one like it, that no node and no tensor has."""
        while name in self.by_name or name in self.tensors:
            name += "'"
        return name

    def unflatten(self, leaves: list[Any]) -> Any:
        """Put one value for every output into the nesting of the model's result."""

        def build(part: Any) -> Any:
            if isinstance(part, int):
                return leaves[part]
            if "constant" in part:
                return part["constant"]
            if "tensor" in part:
                return self.tensors[part["tensor"]]
            if "dict" in part:
                return {key: build(value) for key, value in part["dict"]}
            built = [build(value) for value in part["items"]]
            return tuple(built) if part["tuple"] else built

        return build(self.structure)

    @property
    def returned_tensors(self) -> set[str]:
        """The tensors that are part of the model's result as they are."""

        def find(part: Any) -> set[str]:
            if isinstance(part, int) or "constant" in part:
                return set()
            if "tensor" in part:
                return {part["tensor"]}
            return set().union(*map(find, part["items"] if "items" in part else (v for _, v in part["dict"])))

        return find(self.structure)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Graph:
        """The same network with some tensors replaced or added."""
        return replace(self, tensors={**self.tensors, **tensors})

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Graph:
        """Apply `fn` to every tensor."""
        return replace(self, tensors={k: fn(t) for k, t in self.tensors.items()})

    def to_dict(self) -> dict[str, Any]:
        """Nodes and structure as plain data; the tensors travel apart."""
        nodes = [
            {
                "name": n.name,
                "op": type(n.op).__name__,
                **asdict(n.op),
                "inputs": n.inputs,
                "of": n.shape,
                "at": n.where,
            }
            for n in self.nodes
        ]
        return {"nodes": nodes, "structure": self.structure}

    @staticmethod
    def from_dict(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Graph:
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError for anything that is not a graph."""
        graph = Graph(tuple(_node_from_dict(d) for d in data["nodes"]), tensors, data["structure"])
        graph.check()
        return graph

    def check(self) -> None:
        """Raise ValueError unless every node can run and gives the shape it says, without computing anything."""
        seen: dict[str, Tensor] = {}
        meta = {k: t.to("meta") for k, t in self.tensors.items()}
        for node in self.nodes:
            if node.name in seen:
                raise ValueError(f"two nodes are called {node.name!r}")
            try:
                if isinstance(node.op, Input):
                    value = torch.empty((2, *node.shape), dtype=self.dtype, device="meta")
                else:
                    value = node.op.run(meta, *(seen[i] for i in node.inputs))
                if isinstance(node.op, Conv):
                    _check_lengths(node.op, meta[node.op.weight].ndim - 2)
            except (KeyError, RuntimeError, IndexError, TypeError, ValueError) as e:
                raise ValueError(f"node {node.name!r} cannot run: {e}") from e
            if tuple(value.shape) != (2, *node.shape):
                raise ValueError(f"node {node.name!r} gives shape {tuple(value.shape[1:])}, not {node.shape}")
            seen[node.name] = value
        if not self.outputs:
            raise ValueError("there is no output")
        self.unflatten(list(range(len(self.outputs))))


def _check_lengths(conv: Conv, axes: int) -> None:
    """Torch takes one number for all axes; here each has its own, so that nobody needs to ask."""
    if any(len(sizes) != axes for sizes in (conv.stride, conv.padding, conv.dilation, conv.output_padding)):
        raise ValueError(f"stride, padding and dilation must have {axes} number(s) each")


def _channel_axis(node: Node, before: tuple[int, ...], axis: int | None) -> int | None:
    """Where the channels of a node are that reads a sample of shape `before` with channels along `axis`, if known."""
    op = node.op
    if isinstance(op, Conv | Linear):
        return 0 if isinstance(op, Conv) else len(node.shape) - 1
    if axis is None:
        return None
    if isinstance(op, Permute):
        return op.axes.index(axis)
    if isinstance(op, Mean | Max) and not op.keepdim:
        return None if axis in op.axes else axis - sum(a < axis for a in op.axes)
    if isinstance(op, Reshape):  # an axis that is as long, and has as much in front of it, holds the same channels
        ahead = prod(before[:axis])
        same = (i for i, n in enumerate(op.shape) if n == before[axis] and prod(op.shape[:i]) == ahead)
        return next(same, None)
    return axis


def _node_from_dict(data: Mapping[str, Any]) -> Node:
    if data["op"] not in OPS:
        raise ValueError(f"there is no operation {data['op']!r}")
    cls = OPS[data["op"]]
    op = cls(**{f.name: _tuples(data[f.name]) for f in fields(cls)})
    return Node(str(data["name"]), op, tuple(map(str, data["inputs"])), tuple(map(int, data["of"])), str(data["at"]))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def rewired(nodes: Iterable[Node], renamed: Mapping[str, str]) -> list[Node]:
    """The nodes with every input called by its new name."""
    return [replace(n, inputs=tuple(renamed.get(i, i) for i in n.inputs)) for n in nodes]
