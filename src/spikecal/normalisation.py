"""Spikes of height one: thresholds move into the weights around them (Eq. 5)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .graph import Graph, Node, rewired
from .network import SpikingNetwork
from .ops import (
    Activation,
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    AvgPool,
    Conv,
    Linear,
    MaxPool,
    Mean,
    Op,
    Pad,
    Permute,
    Reshape,
    Scale,
    Select,
    Slice,
    Upsample,
)
from .preparation import drop_unused, fold_batchnorm
from .simulation import Neurons, Site


def with_binary_spikes(snn: SpikingNetwork) -> SpikingNetwork:
    """The same network with thresholds of 1. W ← W·θ_before/θ_behind, b ← b/θ, v(0) ← v(0)/θ.

    A threshold that meets no weights (an identity shortcut, say) stays as a factor of its own on that connection.
    """
    thresholds = {name: site.threshold for name, site in snn.sites.items() if isinstance(site, Neurons)}
    graph, source = (normalise(g, thresholds) for g in (snn.graph, snn.source))
    sites = {name: _normalised(site) for name, site in snn.sites.items()}
    others = (snn.T, snn.recipe, snn.statistics, snn.memory, snn.engine, snn.preprocessing)
    return SpikingNetwork(graph, source, sites, *others)


def _normalised(site: Site) -> Site:
    return site.map(lambda t: t / site.threshold) if isinstance(site, Neurons) else site


def normalise(graph: Graph, thresholds: dict[str, Tensor]) -> Graph:
    """Divide what enters each activation by its threshold, multiply what leaves it, and fold both into weights."""
    tensors, nodes, renamed = dict(graph.tensors), list[Node](), dict[str, str]()
    for node in graph.nodes:
        (node,) = rewired([node], renamed)
        if not isinstance(node.op, Activation):
            nodes.append(node)
            continue
        theta = thresholds[node.name]
        before, behind = graph.fresh(f"{node.name}.divide"), graph.fresh(f"{node.name}.multiply")
        tensors |= {before: 1 / theta, behind: theta}
        if node.op.cap is not None:
            cap = graph.fresh(f"{node.name}.cap")
            tensors[cap] = tensors[node.op.cap] / theta
            node = replace(node, op=Activation(cap))
        nodes.append(Node(before, Scale(before), node.inputs, node.shape, node.where))
        nodes.append(replace(node, inputs=(before,)))
        nodes.append(Node(behind, Scale(behind), (node.name,), node.shape, node.where))
        renamed[node.name] = behind
    divided = replace(graph, nodes=tuple(nodes), tensors=tensors)
    return push_scales(fold_batchnorm(divided), set(renamed.values()))


def push_scales(graph: Graph, names: set[str]) -> Graph:
    """Move the named scale nodes forward, through poolings and reshapes, into the weights of the layers they reach."""
    tensors = dict(graph.tensors)
    nodes = {node.name: node for node in graph.nodes}
    queue = [node.name for node in graph.nodes if node.name in names]
    while queue:
        node = nodes[queue.pop(0)]
        assert isinstance(node.op, Scale) and node.op.scale is not None
        scale, shape = tensors[node.op.scale], nodes[node.inputs[0]].shape
        for reader in [n for n in nodes.values() if n.inputs == (node.name,)]:
            if isinstance(reader.op, Conv | Linear):
                absorbed = _absorbed(reader.op, scale.expand(shape), tensors)
                if absorbed is not None:
                    weight = graph.fresh(f"{reader.name}.weight.binary")
                    tensors[weight] = absorbed
                    nodes[reader.name] = replace(reader, op=replace(reader.op, weight=weight), inputs=node.inputs)
                continue
            passed = _passed(reader.op, scale, shape)
            if passed is not None:
                behind = graph.fresh(f"{reader.name}.multiply")
                tensors[behind] = passed
                nodes = {n.name: n for n in rewired(nodes.values(), {reader.name: behind})}
                nodes[reader.name] = replace(reader, inputs=node.inputs)
                nodes = _inserted(nodes, reader.name, Node(behind, Scale(behind), (reader.name,), reader.shape))
                queue.append(behind)
    return drop_unused(replace(graph, nodes=tuple(nodes.values()), tensors=tensors))


def _inserted(nodes: dict[str, Node], after: str, node: Node) -> dict[str, Node]:
    result = {}
    for name, old in nodes.items():
        result[name] = old
        if name == after:
            result[node.name] = node
    return result


def _absorbed(op: Conv | Linear, scale: Tensor, tensors: dict[str, Tensor]) -> Tensor | None:
    """The layer's weight times a scale of its input's shape; None if that varies within a channel."""
    weight = tensors[op.weight]
    if isinstance(op, Linear):
        rows = scale.reshape(-1, scale.shape[-1])
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            return None
        return weight * rows[0]
    columns = scale.flatten(1)
    if not torch.equal(columns, columns[:, :1].expand_as(columns)):
        return None
    factor, ones = columns[:, 0], (1,) * (weight.ndim - 2)
    if op.transposed:
        return weight * factor.view(-1, 1, *ones)
    by_group: Tensor = weight.unflatten(0, (op.groups, -1))  # (groups, out/groups, in/groups, ...)
    return (by_group * factor.view(op.groups, 1, -1, *ones)).flatten(0, 1)


def _passed(op: Op, scale: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The scale that gives the same result behind `op` instead of in front of it, if there is one."""
    if isinstance(op, Reshape | Permute | Slice | Select):
        return op.run({}, scale.expand(shape).unsqueeze(0))[0]
    per_channel = scale.numel() == scale.shape[0] and len(shape) >= 2
    spatial = (
        isinstance(op, AvgPool | AdaptiveAvgPool | MaxPool | AdaptiveMaxPool | Upsample)
        or (isinstance(op, Mean) and 0 not in op.axes)
        or (isinstance(op, Pad) and op.value == 0 and len(op.widths) <= 2 * (len(shape) - 1))
    )
    if not (per_channel and spatial):
        return None
    kept = len(shape) - (len(op.axes) if isinstance(op, Mean) and not op.keepdim else 0)
    return scale.reshape(-1, *(1,) * (kept - 1))
