"""What a spiking network computes for an image, and what that may cost: counts are exact, energies are estimates.

A spike costs one synaptic operation for every synapse that it reaches: fewer at borders and behind strides. A layer
whose input is no train of binary spikes (the image; pooled or added spikes) costs multiply-accumulates instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, prod

import torch
from torch import Tensor

from .graph import Graph, Node
from .ops import Activation, AdaptiveAvgPool, Add, AvgPool, Conv, Linear, Mean, Peak
from .simulation import Neurons, Site, height_behind, height_of_channels, only_moves

BYTES = 4  # of a weight or a potential, in single precision


@dataclass(frozen=True)
class LayerOperations:
    """Connections from one node to another, per image."""

    name: str
    source: str
    input: str  # "spikes", "analog" values that change over time, or "constant" ones
    synapses: int
    spikes: float  # that arrive
    synaptic_operations: float
    multiply_accumulates: float  # instead, where the input is not binary
    ann_multiply_accumulates: int  # 0 for connections without weights: pools and shortcuts only add


@dataclass(frozen=True)
class Operations:
    """Everything that is computed for an image, on average."""

    layers: list[LayerOperations]
    neuron_updates: int  # neurons × (T + their firing delay)
    weight_bytes: int
    state_bytes: int  # membrane potentials
    synaptic_operations_std: float  # of the total, over the images

    @property
    def ann_multiply_accumulates(self) -> int:
        return sum(layer.ann_multiply_accumulates for layer in self.layers)

    @property
    def synaptic_operations(self) -> float:
        return sum(layer.synaptic_operations for layer in self.layers)

    @property
    def multiply_accumulates(self) -> float:
        return sum(layer.multiply_accumulates for layer in self.layers)

    @property
    def spikes_per_synapse(self) -> float:
        """Over the whole inference, at synapses that carry spikes: published break-even points lie at 0.15 to 1.38."""
        synapses = sum(layer.synapses for layer in self.layers if layer.input == "spikes")
        return self.synaptic_operations / synapses if synapses else 0.0


@dataclass(frozen=True)
class Constants:
    """Energy of single operations, in picojoule."""

    name: str
    multiply_accumulate: float
    accumulate: float  # of a synaptic operation
    neuron_update: float
    source: str


CONSTANTS = (
    Constants("paper", 4.6, 0.9, 0.0, "Li et al. 2021, after Rathi & Roy 2020: additions and multiplications alone"),
    Constants("45 nm, FP32", 4.6, 0.9, 0.9, "Horowitz 2014; a neuron update is an addition"),
    Constants("45 nm, INT8", 0.23, 0.03, 0.03, "Horowitz 2014; a neuron update is an addition"),
    Constants("neuromorphic chip", 0.23, 0.077, 0.077, "77 fJ per synaptic operation; multiplications as INT8"),
)


@dataclass(frozen=True)
class Energy:
    """Estimates of picojoules per image, by one set of constants; memory traffic is not in them."""

    constants: Constants
    spiking: float
    fixed: float  # the part of it that does not depend on spikes
    ann: dict[str, float]  # the same network as an ANN in FP32, in INT8, and with as many levels as T steps give

    @property
    def ratios(self) -> dict[str, float]:
        """Spiking network to ANN: below 1 it saves energy."""
        return {name: self.spiking / pj if pj else float("inf") for name, pj in self.ann.items()}

    @property
    def break_even(self) -> dict[str, float]:
        """With how many synaptic operations an image would cost as much as by each ANN; below 0, whatever it fires."""
        return {name: (pj - self.fixed) / self.constants.accumulate for name, pj in self.ann.items()}


def estimate(operations: Operations, T: int, constants: Sequence[Constants] = CONSTANTS) -> list[Energy]:
    """The energy of an inference, by every set of constants."""
    macs, bits = operations.ann_multiply_accumulates, ceil(log2(T + 1))  # bits that tell 0 ... T spikes apart
    share = (bits / 8) ** 2  # multipliers grow with the square of the bits
    ann = {"FP32": 4.6 * macs, "INT8": 0.23 * macs, f"{bits}-bit": 0.23 * share * macs}
    found = []
    for c in constants:
        fixed = c.multiply_accumulate * operations.multiply_accumulates + c.neuron_update * operations.neuron_updates
        found.append(Energy(c, fixed + c.accumulate * operations.synaptic_operations, fixed, ann))
    return found


# -- counting ---------------------------------------------------------------------------------------------------------


class Ledger:
    """Counts operations from the mean over time of what arrives at each layer, some images at a time."""

    def __init__(self, graph: Graph, sites: Mapping[str, Site], T: int) -> None:
        self.graph, self.T = graph, T
        self.heights, self.constant = spike_heights(graph, sites), _constant(graph)
        self.delays = {name: site.delay for name, site in sites.items() if isinstance(site, Neurons)}
        self.fan_out = {
            (node.name, name): fan_out(graph, node, graph.by_name[name].shape)
            for node in graph.nodes
            for name in node.inputs
            if isinstance(node.op, Conv | Linear) or (isinstance(node.op, _ADDING) and self.heights[name] is not None)
        }
        self.spikes, self.operations = dict.fromkeys(self.fan_out, 0.0), dict.fromkeys(self.fan_out, 0.0)
        self.totals: list[Tensor] = []  # synaptic operations of every image

    def begin(self, images: int) -> None:
        """Some more images follow."""
        self.totals.append(torch.zeros(images, dtype=torch.float64))

    def note(self, node: Node, means: Sequence[Tensor]) -> None:
        """Count what arrives at one node; means: of its inputs, (B, ...)."""
        for name, mean in zip(node.inputs, means, strict=True):
            height, edge = self.heights[name], (node.name, name)
            if edge in self.fan_out and height is not None:
                events = torch.where(height > 0, mean * (self.T / height), 0).double()  # (B, ...)
                reached = (events * self.fan_out[edge]).flatten(1).sum(1).cpu()  # (B,)
                self.spikes[edge] += float(events.sum())
                self.operations[edge] += float(reached.sum())
                self.totals[-1] += reached

    def result(self) -> Operations:
        totals = torch.cat(self.totals)
        neurons = sum(prod(node.shape) for node in self.graph.neurons)
        waits = sum(prod(node.shape) * self.delays[node.name] for node in self.graph.neurons)
        weights = {node.op.weight for node in self.graph.nodes if isinstance(node.op, Conv | Linear)}
        return Operations(
            layers=[self._layer(*edge, len(totals)) for edge in self.fan_out],
            neuron_updates=neurons * self.T + waits,
            weight_bytes=BYTES * sum(self.graph.tensors[name].numel() for name in weights),
            state_bytes=BYTES * neurons,
            synaptic_operations_std=float(totals.std()) if len(totals) > 1 else 0.0,
        )

    def _layer(self, name: str, source: str, images: int) -> LayerOperations:
        edge, synapses = (name, source), int(self.fan_out[name, source].sum())
        kind = "constant" if source in self.constant else "analog" if self.heights[source] is None else "spikes"
        weighted = isinstance(self.graph.by_name[name].op, Conv | Linear)
        return LayerOperations(
            name=name,
            source=source,
            input=kind,
            synapses=synapses,
            spikes=self.spikes[edge] / images,
            synaptic_operations=self.operations[edge] / images,
            multiply_accumulates=float(synapses * {"spikes": 0, "analog": self.T, "constant": 1}[kind]),
            ann_multiply_accumulates=synapses if weighted else 0,
        )


_ADDING = (Add, AvgPool, AdaptiveAvgPool, Mean)


def spike_heights(graph: Graph, sites: Mapping[str, Site]) -> dict[str, Tensor | None]:
    """Of every node whose values over time are spikes: their height, in the shape of a sample. None of others."""
    heights: dict[str, Tensor | None] = {}
    for node in graph.nodes:
        site, given = sites.get(node.name), [h for i in node.inputs if (h := heights[i]) is not None]
        binary, height = bool(given) and len(given) == len(node.inputs), None
        if isinstance(node.op, Activation) and isinstance(site, Neurons) and not site.signed:
            height = site.threshold.expand(node.shape)
        elif binary and only_moves(node.op):
            height = height_behind(node.op, given)
        elif binary and isinstance(node.op, Peak):
            top = height_of_channels(node.op, given[0])
            height = None if top is None else top.reshape(-1, *(1,) * (len(node.shape) - 1)).expand(node.shape)
        heights[node.name] = height
    return heights


def _constant(graph: Graph) -> set[str]:
    """Nodes with the same value at every step."""
    found: set[str] = set()
    for node in graph.nodes:
        if not isinstance(node.op, Activation) and found.issuperset(node.inputs):
            found.add(node.name)
    return found


def fan_out(graph: Graph, node: Node, shape: tuple[int, ...]) -> Tensor:
    """How many values of a node each value of an input of this shape reaches, in that shape."""
    op, ones = node.op, dict[str, Tensor]()
    if isinstance(op, Add):
        return torch.full(shape, prod(node.shape) // prod(shape), dtype=torch.float64)
    if isinstance(op, Mean):
        return torch.ones(shape, dtype=torch.float64)
    if isinstance(op, AdaptiveAvgPool):
        return _windows_over(shape, op.size)
    if isinstance(op, Conv | Linear):
        ones = {op.weight: torch.ones_like(graph.tensors[op.weight], device="cpu", dtype=torch.float64)}
        op = replace(op, bias=None)
    x = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():  # the derivative of a sum with weights of one counts its terms
        y = _sums(op, x) if isinstance(op, AvgPool) else op.run(ones, x)
        (reached,) = torch.autograd.grad(y.sum(), x)
    return reached[0]


def _sums(op: AvgPool, x: Tensor) -> Tensor:
    """Sums over the windows of a pool."""
    if len(op.kernel) == 1:  # only pools of more dimensions let one choose the divisor
        op = replace(op, kernel=(*op.kernel, 1), stride=(*op.stride, 1), padding=(*op.padding, 0))
        x = x.unsqueeze(-1)
    return replace(op, divisor=1).run({}, x)


def _windows_over(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """In how many windows of an adaptive pool each value lies."""
    count = torch.ones(shape, dtype=torch.float64)
    for axis, windows in enumerate(sizes, len(shape) - len(sizes)):
        length, along = shape[axis], torch.zeros(shape[axis], dtype=torch.float64)
        for i in range(windows):
            along[i * length // windows : -(-(i + 1) * length // windows)] += 1
        count *= along.reshape(-1, *(1,) * (len(shape) - axis - 1))
    return count
