"""A graph and a conversion in words and plain numbers, ready for a table or for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from ..capture import Refused
from ..conversion import check_tensors
from ..errors import Refusal, UnsupportedModelError
from ..graph import Graph, Node
from ..network import SpikingNetwork
from ..ops import (
    Activation,
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    Add,
    AvgPool,
    Concat,
    Constant,
    Conv,
    Input,
    Linear,
    Max,
    MaxPool,
    Mean,
    Output,
    Pad,
    Peak,
    Reshape,
    Scale,
    Select,
    Slice,
    Upsample,
)
from ..preparation import prepare
from ..segments import Segment, segments
from ..simulation import Neurons, only_moves
from ..time_steps import Search

POOLS = (AvgPool, AdaptiveAvgPool, Mean)


@dataclass(frozen=True)
class NodeRow:
    """One node, as a person wants to read it."""

    name: str
    operation: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int | None  # None where an earlier node has counted the same tensors
    rule: str
    segment: int | None  # counted from 1; an input belongs to none
    site: str | None  # the neurons or output that the segment ends in


@dataclass(frozen=True)
class NetworkDescription:
    """A network as it would be converted."""

    nodes: tuple[NodeRow, ...]
    neurons: int
    neuron_layers: int
    segments: int
    parameters: int
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    dropped: tuple[str, ...]  # activations that change nothing
    pooled_spikes: bool  # whether there are pools that --pool-to-conv is for
    refused: tuple[Refusal, ...] = ()  # places because of which it would not be converted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(captured: Graph, refusals: Sequence[Refusal] = (), *, pool_to_conv: bool = False) -> NetworkDescription:
    """The graph after preparation; of a refused network as it is, because preparation needs operations with a meaning.

    A network that `convert` would refuse for its weights is refused here too.
    """
    if not refusals:
        check_tensors(captured)
    graph = captured if refusals else prepare(captured, pool_to_conv=pool_to_conv)
    parts = segments(graph)
    rows = _rows(graph, parts, {} if refusals else _folded_into(captured, graph))
    return NetworkDescription(
        nodes=tuple(rows),
        neurons=sum(prod(n.shape) for n in graph.neurons),
        neuron_layers=len(graph.neurons),
        segments=len(parts),
        parameters=sum(row.parameters or 0 for row in rows),
        inputs={n.name: n.shape for n in graph.inputs},
        outputs={n.name: n.shape for n in graph.outputs},
        dropped=tuple(n.name for n in captured.neurons if n.name not in graph.by_name),
        pooled_spikes=not refusals and not pool_to_conv and any(_pools_spikes(graph, node) for node in graph.nodes),
        refused=tuple(refusals),
    )


def refused_unseen(error: UnsupportedModelError) -> dict[str, Any]:
    """What there is to say of a model that could not even be read."""
    return {"nodes": [], "refused": [asdict(refusal) for refusal in error.refusals], "message": str(error)}


def _rows(graph: Graph, parts: Sequence[Segment], folded: Mapping[str, Sequence[str]]) -> list[NodeRow]:
    number = {n.name: i for i, part in enumerate(parts, 1) for n in (*part.nodes, part.site)}
    counts = _parameters(graph)
    rows = []
    for node in graph.nodes:
        segment = number.get(node.name)
        site = None if segment is None else parts[segment - 1].site.name
        rule = _rule(graph, node, folded.get(node.name, ()))
        row = (node.name, operation(graph, node), node.inputs, node.shape, counts[node.name], rule, segment, site)
        rows.append(NodeRow(*row))
    return rows


def calibration_of(model: object, pool_to_conv: bool) -> dict[str, Any]:
    """For a network that is already converted: for how many steps, and how; nothing if it would get other neurons."""
    if not isinstance(model, SpikingNetwork) or (pool_to_conv and not model.recipe.pool_to_conv):
        return {}
    return {"T": model.T, "latency": model.latency, "recipe": model.recipe.title}


def _folded_into(captured: Graph, graph: Graph) -> dict[str, list[str]]:
    """For each node, the scales that preparation folded into it, in words."""
    folded: dict[str, list[str]] = {}
    for node in captured.nodes:
        if not isinstance(node.op, Scale) or node.name in graph.by_name:
            continue
        into = node
        while into.inputs and into.name not in graph.by_name:
            into = captured.by_name[into.inputs[0]]
        folded.setdefault(into.name, []).append(f"{_kind_of_scale(captured, node)} {node.name}")
    return folded


def _kind_of_scale(graph: Graph, node: Node) -> str:
    """A batch norm is what has one scale and one shift for each channel."""
    op = node.op
    assert isinstance(op, Scale)
    if op.scale is None or op.shift is None:
        return "scale" if op.shift is None else "shift"
    return "batch norm" if graph.tensors[op.scale].numel() == node.shape[0] else "scale and shift"


def _parameters(graph: Graph) -> dict[str, int | None]:
    """Numbers in the tensors of each node. What several nodes share counts once, so that the sum is the total."""
    seen: set[int] = set()
    counts: dict[str, int | None] = {}
    for node in graph.nodes:
        values = () if isinstance(node.op, Activation | Constant) else vars(node.op).values()
        tensors = [graph.tensors[v] for v in values if isinstance(v, str) and v in graph.tensors]
        new = [t for t in tensors if t.data_ptr() not in seen]
        counts[node.name] = None if tensors and not new else sum(t.numel() for t in new)
        seen.update(t.data_ptr() for t in new)
    return counts


def _rule(graph: Graph, node: Node, folded: Sequence[str]) -> str:
    if isinstance(node.op, Input):
        return "the same at every step"
    if isinstance(node.op, Activation):
        return "neuron (IF, soft reset)"
    if isinstance(node.op, Output):
        return "readout (averaged over time)"
    if isinstance(node.op, Refused):
        return f"refused: {node.op.why}" if node.op.why else "unknown, behind something refused"
    if isinstance(node.op, Peak):
        return "maximum over time, spikes stay binary" if _is_of_spikes(graph, node) else "maximum over time"
    if folded:
        return f"affine, {' and '.join(folded)} folded in"
    return "affine, spikes become fractions" if _pools_spikes(graph, node) else "affine"


def _is_of_spikes(graph: Graph, node: Node) -> bool:
    """Whether a maximum reads spikes, perhaps moved, of one height in each channel."""
    if isinstance(node.op, Max) and 0 in node.op.axes:
        return False
    before = [graph.by_name[name] for name in node.inputs]
    return all(
        isinstance(n.op, Activation) or ((isinstance(n.op, Peak) or only_moves(n.op)) and _is_of_spikes(graph, n))
        for n in before
    )


def _pools_spikes(graph: Graph, node: Node) -> bool:
    return isinstance(node.op, POOLS) and graph.is_nonnegative(node.inputs[0])


# --- operations ----------------------------------------------------------------------------------------------


def operation(graph: Graph, node: Node) -> str:
    """An operation and its main parameters, such as `conv 3×3, 64→128, stride 2`."""
    say = _SAY.get(type(node.op))
    return say(graph, node.op) if say else _generic(node.op)


def _by(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _unless(default: int, **settings: Sequence[int]) -> list[str]:
    """Settings that are not the default, as text; one number where all axes agree."""
    texts = {name: _by(values if len(set(values)) > 1 else values[:1]) for name, values in settings.items()}
    return [f"{name} {text}" for name, text in texts.items() if text != str(default)]


def _conv(graph: Graph, op: Conv) -> str:
    weight = graph.tensors[op.weight]
    outer, inner = weight.shape[0], weight.shape[1] * op.groups
    if op.transposed:
        outer, inner = weight.shape[1] * op.groups, weight.shape[0]
    depthwise = 1 < op.groups == inner
    kind = ("transposed " if op.transposed else "") + ("depthwise " if depthwise else "") + "conv"
    groups = [] if depthwise else _unless(1, groups=(op.groups,))
    settings = [*_unless(1, stride=op.stride), *_unless(0, padding=op.padding), *_unless(1, dilation=op.dilation)]
    return ", ".join([f"{kind} {_by(weight.shape[2:])}", f"{inner}→{outer}", *settings, *groups])


def _linear(graph: Graph, op: Linear) -> str:
    outer, inner = graph.tensors[op.weight].shape
    return f"linear {inner}→{outer}"


def _activation(graph: Graph, op: Activation) -> str:
    if op.cap is None:
        return "ReLU"
    cap = graph.tensors[op.cap]
    return f"ReLU, clipped at {float(cap.max()):g}" + (" and below" if cap.min() < cap.max() else "")


def _pool(graph: Graph, op: AvgPool | MaxPool) -> str:
    kind, settings = "average", _unless(0, stride=op.stride, padding=op.padding)
    if isinstance(op, MaxPool):
        kind, settings = "max", [*settings, *_unless(1, dilation=op.dilation)]
    return ", ".join([f"{kind} pool {_by(op.kernel)}", *settings])


def _scale(graph: Graph, op: Scale) -> str:
    return " and ".join(name for name, tensor in vars(op).items() if tensor is not None)


_SAY: dict[type, Callable[[Graph, Any], str]] = {
    Conv: _conv,
    Linear: _linear,
    Activation: _activation,
    AvgPool: _pool,
    MaxPool: _pool,
    Scale: _scale,
    AdaptiveAvgPool: lambda _, op: f"average pool to {_by(op.size)}",
    AdaptiveMaxPool: lambda _, op: f"max pool to {_by(op.size)}",
    Mean: lambda _, op: f"mean over axes {', '.join(map(str, op.axes))}",
    Add: lambda _, op: {1.0: "add", -1.0: "subtract"}.get(op.alpha, f"add, times {op.alpha:g}"),
    Concat: lambda _, op: f"concat along axis {op.axis}",
    Reshape: lambda _, op: f"reshape to {_by(op.shape)}",
    Select: lambda _, op: f"select {len(op.places)}, axis {op.axis}",
    Slice: lambda _, op: f"slice {op.start}:{op.stop}" + (f":{op.step}" if op.step != 1 else "") + f", axis {op.axis}",
    Pad: lambda _, op: f"pad {', '.join(map(str, op.widths))}" + (f", {op.mode}" if op.mode != "constant" else ""),
    Upsample: lambda _, op: f"upsample to {_by(op.size)}, {op.mode}",
    Constant: lambda _, op: "constant",
    Refused: lambda _, op: op.what,
}  # fmt: skip


def _generic(op: Any) -> str:
    settings = [f"{f.name} {getattr(op, f.name)}" for f in fields(op) if not isinstance(getattr(op, f.name), str)]
    return ", ".join([type(op).__name__.lower(), *settings])


# --- conversions ---------------------------------------------------------------------------------------------


def conversion_summary(
    snn: SpikingNetwork, file: str, images: int, seconds: float, search: Search | None = None
) -> dict[str, Any]:
    """What a conversion found at every site, and where the network is. `images` were given; some may be held out."""
    tried: dict[str, Any] = {}
    if search is not None:
        tried = {"tried": search.agreement, "latencies": search.latencies}
        tried |= {"held_out": search.held_out, "points": search.points}
    seen = images - (0 if search is None else search.held_out)
    return {
        **tried,
        "file": file,
        "T": snn.T,
        "latency": snn.latency,
        "recipe": snn.recipe.to_dict(),
        "images": seen,
        "calibration_images": min(seen, snn.recipe.images_for(snn.T)),
        "seconds": round(seconds, 3),
        "sites": [_site(snn, node) for node in snn.graph.nodes if node.is_site],
    }


def _site(snn: SpikingNetwork, node: Node) -> dict[str, Any]:
    site, statistics = snn.sites[node.name], snn.statistics[node.name]
    threshold = site.threshold if isinstance(site, Neurons) else None
    return {
        "name": node.name,
        "kind": "readout" if threshold is None else "neurons",
        "neurons": 0 if threshold is None else prod(node.shape),
        "threshold_min": None if threshold is None else float(threshold.min()),
        "threshold_max": None if threshold is None else float(threshold.max()),
        "firing_rate": statistics.firing_rate,
        "error": statistics.error,
    }
