"""Passes that rewrite a graph without changing the function it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .graph import Graph, Node, rewired
from .ops import Activation, AdaptiveAvgPool, AvgPool, Conv, Input, Linear, Mean, Output, Reshape, Scale


def prepare(graph: Graph, *, pool_to_conv: bool = False) -> Graph:
    """The graph that is converted: only affine operations and activations, as few of them as possible."""
    for run in (*PASSES, *((spiking_pools,) if pool_to_conv else ())):
        graph = run(graph)
    return graph


def drop_unused(graph: Graph) -> Graph:
    """Drop nodes that no output depends on, and tensors that are neither named by a node nor returned."""
    needed: set[str] = set()
    for node in reversed(graph.nodes):
        if isinstance(node.op, Input | Output) or node.name in needed:
            needed.update((node.name, *node.inputs))
    nodes = tuple(n for n in graph.nodes if n.name in needed)
    named = {v for n in nodes for v in vars(n.op).values() if isinstance(v, str)} | graph.returned_tensors
    return replace(graph, nodes=nodes, tensors={k: t for k, t in graph.tensors.items() if k in named})


def fold_batchnorm(graph: Graph) -> Graph:
    """Fold a per-channel scale and shift into the conv or linear layer in front of it (Eq. 19).

    W ← W·γ/σ, b ← β + (b − μ)·γ/σ. A batch norm with no such layer in front stays a per-channel affine map.
    """
    tensors, nodes, renamed = dict(graph.tensors), dict(graph.by_name), dict[str, str]()
    for node in graph.nodes:
        before = nodes[renamed.get(node.inputs[0], node.inputs[0])] if isinstance(node.op, Scale) else None
        if before is None or len(graph.readers[node.inputs[0]]) > 1 or not isinstance(before.op, Conv | Linear):
            continue
        factors = _per_channel(node, before, tensors)
        if factors is None:
            continue
        nodes[before.name] = replace(before, op=_folded(before.op, *factors, tensors))
        renamed[node.name] = before.name
        del nodes[node.name]
    return drop_unused(replace(graph, nodes=tuple(rewired(nodes.values(), renamed)), tensors=tensors))


def _per_channel(node: Node, before: Node, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Scale and shift as vectors over the output channels of the layer in front; None if they vary within one."""
    assert isinstance(node.op, Scale)
    axis = len(before.shape) - 1 if isinstance(before.op, Linear) else 0
    channels, vectors = before.shape[axis], []
    if node.shape != before.shape:
        return None
    for name, default in ((node.op.scale, 1.0), (node.op.shift, 0.0)):
        t = torch.tensor(default).view((1,) * len(before.shape)) if name is None else tensors[name]
        t = t.reshape((1,) * (len(before.shape) - t.ndim) + tuple(t.shape))
        if any(size != 1 for i, size in enumerate(t.shape) if i != axis):
            return None
        vectors.append(t.flatten().expand(channels).double())
    return vectors[0], vectors[1]


def _folded(op: Conv | Linear, scale: Tensor, shift: Tensor, tensors: dict[str, Tensor]) -> Conv | Linear:
    weight = tensors[op.weight]
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    if isinstance(op, Conv) and op.transposed:  # (in, out/groups, ...), output channels vary group by group
        by_group = weight.double().unflatten(0, (op.groups, -1))  # (groups, in/groups, out/groups, ...)
        factor = scale.view(op.groups, 1, -1, *(1,) * (weight.ndim - 2))
        folded = (by_group * factor).flatten(0, 1)
    else:
        folded = weight.double() * scale.view(-1, *(1,) * (weight.ndim - 1))
    bias = shift if op.bias is None else tensors[op.bias].double() * scale + shift
    name = op.weight + "*"  # a new name: the original may be shared with another call
    while name in tensors:
        name += "*"
    tensors[name], tensors[name + ".bias"] = folded.to(weight.dtype), bias.to(weight.dtype)
    return replace(op, weight=name, bias=name + ".bias")


def drop_redundant_activations(graph: Graph) -> Graph:
    """Drop a ReLU of something that is never negative, or that only clipped ReLUs read: such neurons add error."""
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if not isinstance(node.op, Activation) or node.op.cap is not None:
            continue
        readers = [reader.op for reader in graph.readers[node.name]]
        hidden = all(isinstance(op, Activation) and op.cap is not None for op in readers)
        if hidden or graph.is_nonnegative(node.inputs[0]):
            renamed[node.name] = renamed.get(node.inputs[0], node.inputs[0])
    nodes = rewired((n for n in graph.nodes if n.name not in renamed), renamed)
    return replace(graph, nodes=tuple(nodes))


def spiking_pools(graph: Graph) -> Graph:
    """Average pooling as a depthwise convolution with neurons of its own (paper, section 4.4 and appendix B).

    The new neuron computes ReLU, so it is placed only where the pooled values cannot be negative. A pool whose
    windows differ in size (padding that is not counted, ceil mode, adaptive sizes that do not divide) is no
    convolution and stays as it is.
    """
    tensors, nodes, renamed = dict(graph.tensors), list[Node](), dict[str, str]()
    for original in graph.nodes:
        (node,) = rewired([original], renamed)
        shape = graph.by_name[original.inputs[0]].shape if node.inputs else ()
        pool = _uniform_pool(node, shape)
        if pool is None or not graph.is_nonnegative(original.inputs[0]):
            nodes.append(node)
            continue
        weight, before, neuron = (graph.fresh(f"{node.name}.{part}") for part in ("weight", "conv", "neuron"))
        channels = shape[0]
        size = pool.divisor or int(torch.tensor(pool.kernel).prod())
        tensors[weight] = torch.full(
            (channels, 1, *pool.kernel), 1 / size, dtype=graph.dtype, device=graph.device
        )  # depthwise, constant weights
        n = len(pool.kernel)
        conv = Conv(weight, None, pool.stride, pool.padding, (1,) * n, channels, False, (0,) * n)
        spatial = _pooled(shape, pool)
        nodes.append(Node(before, conv, node.inputs, spatial, node.where))
        nodes.append(Node(neuron, Activation(), (before,), spatial, node.where))
        if spatial == node.shape:
            renamed[node.name] = neuron
        else:  # a mean that dropped its axes
            nodes.append(replace(node, op=Reshape(node.shape), inputs=(neuron,)))
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _pooled(shape: tuple[int, ...], pool: AvgPool) -> tuple[int, ...]:
    windows = zip(shape[1:], pool.kernel, pool.stride, pool.padding, strict=True)
    return (shape[0], *((s + 2 * p - k) // stride + 1 for s, k, stride, p in windows))


def _uniform_pool(node: Node, shape: tuple[int, ...]) -> AvgPool | None:
    """The node as an average pool with equal windows over all spatial axes of its input, if it is one."""
    op, space = node.op, shape[1:]
    if isinstance(op, AvgPool) and (op.count_include_pad or not any(op.padding) or op.divisor):
        exact = all(
            (s + 2 * p - k) % st == 0 for s, p, k, st in zip(space, op.padding, op.kernel, op.stride, strict=True)
        )
        return replace(op, ceil_mode=False) if exact or not op.ceil_mode else None
    if isinstance(op, Mean) and op.axes == tuple(range(1, len(shape))) and 2 <= len(shape) <= 4:
        return AvgPool(space, space, (0,) * len(space))
    if isinstance(op, AdaptiveAvgPool) and all(s % o == 0 for s, o in zip(space, op.size, strict=True)):
        kernel = tuple(s // o for s, o in zip(space, op.size, strict=True))
        return AvgPool(kernel, kernel, (0,) * len(space))
    return None


#: Every network goes through these; each is proven on real nets to preserve the function.
PASSES: tuple[Callable[[Graph], Graph], ...] = (drop_unused, fold_batchnorm, drop_redundant_activations)
