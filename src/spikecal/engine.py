"""Which parts of a spiking network run on the native kernels.

A program is lowered by fusing each layer of neurons with the convolutions in front of it into one instruction:
spikes travel between such layers as bits, and become floats only where another operation reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

import torch
from torch import Tensor

from . import native
from .errors import CalibrationError
from .graph import Graph, Node
from .kernels import (
    choose,
    conv_form,
    moved_height,
    moved_rate,
    moves_bits,
    padded_bias,
    padded_threshold,
    pooled_rate,
    two,
)
from .memory import BLOCK, padded_size
from .ops import AdaptiveAvgPool, AdaptiveMaxPool, Add, AvgPool, Conv, Linear, MaxPool, Mean, Pad, Reshape, Tensors
from .simulation import Instruction, Neurons, Run, Site, State, needed, snn_program
from .values import USUAL_RATE, PackedSpikes, Value, bits_of, channels_last, image_shape, is_image
from .work import note_work

ENGINES = ("auto", "dense", "event")


def lowered(graph: Graph, sites: Mapping[str, Site], rates: Mapping[str, float], engine: str) -> list[Instruction]:
    """The program of a spiking network, with native layers where they are wanted and possible."""
    check_engine(engine)
    graph = with_channels_last(graph)
    program = snn_program(graph, sites)
    if not is_native(graph):
        return program
    planner = _Planner(graph, _heights(graph, sites), _with_moves(graph, rates), engine)
    return needed([_instruction(planner, step, sites) for step in program])


def with_channels_last(graph: Graph) -> Graph:
    """The same network with the weights of its 2-D convolutions laid out channels-last.

    Images are laid out so already (`fit_inputs`); without this torch lays out the weights at every call.
    """
    if graph.device.type != "cpu":
        return graph
    used = {node.op.weight for node in graph.nodes if isinstance(node.op, Conv) and len(node.op.stride) == 2}
    weights = {name: graph.tensors[name].contiguous(memory_format=torch.channels_last) for name in used}
    return graph.with_tensors(weights)


def fused(graph: Graph, node: Node, neurons: Neurons, given: Mapping[str, Value]) -> _Layer | None:
    """The neurons of a node, firing on what the given values bring them, as one native layer; None if it is not one."""
    spikes = {name: v for name, v in given.items() if isinstance(v, PackedSpikes)}
    if not is_native(graph) or _height(node, neurons) is None:
        return None
    planner = _Planner(graph, {n: v.channel_height for n, v in spikes.items()}, {n: v.rate for n, v in spikes.items()})
    layer = planner.layer(node, neurons)
    return layer if all(name in given for name in layer.reads) else None


def check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise CalibrationError(f"there is no engine {engine!r}; choose one of {', '.join(ENGINES)}")


def is_native(graph: Graph) -> bool:
    """Whether the native kernels may be used: single precision on a processor for which they are built."""
    return graph.dtype == torch.float32 and graph.device.type == "cpu" and native.library() is not None


@dataclass(frozen=True)
class _Events:
    """Where the spikes of a convolution come from: neurons, perhaps through average pooling."""

    source: str
    window: tuple[int, int] = (1, 1)
    hop: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class _ConvTerm:
    """A convolution that the kernels do."""

    source: str
    form: native.Conv
    weights: Tensor  # packed, with the height of the spikes
    bias: Tensor | None  # (C,)


@dataclass(frozen=True)
class _DenseTerm:
    """A convolution or linear layer that torch does, some images at a time: its floats should not leave the caches."""

    node: Node
    tensors: Tensors
    bytes_per_image: int  # of what it reads or gives, at one step

    @property
    def source(self) -> str:
        return self.node.inputs[0]

    def current(self, spikes: Value) -> Tensor:
        """(t, B, ...) -> (t·B, ...)."""
        note_work(nodes=spikes.images * spikes.steps)
        floats = spikes.unpacked() if isinstance(spikes, PackedSpikes) else spikes
        y = self.node.op.run(self.tensors, floats.dense(spikes.steps))
        note_work(bytes=y.nbytes)
        return y


@dataclass(frozen=True)
class _Layer:
    """Neurons and what is computed in front of them."""

    node: Node
    neurons: Neurons
    convs: tuple[_ConvTerm, ...]
    dense: tuple[_DenseTerm, ...]
    shortcut: str | None  # spikes that are added as they are
    shortcut_height: Tensor | None
    others: tuple[str, ...]  # currents that are added as they are

    @property
    def reads(self) -> tuple[str, ...]:
        shortcut = [self.shortcut] if self.shortcut else []
        return (*(c.source for c in self.convs), *(d.source for d in self.dense), *shortcut, *self.others)

    @cached_property
    def threshold(self) -> Tensor:
        return padded_threshold(self.neurons.threshold, image_shape(self.node.shape)[0])

    @cached_property
    def constant(self) -> Tensor:
        """The constant current of neurons and native convolutions, (1, H, W, padded C)."""
        biases = [c.bias for c in self.convs if c.bias is not None]
        total = self.neurons.bias.expand(self.node.shape)
        for b in biases:
            total = total + b.reshape(-1, *(1,) * (len(self.node.shape) - 1))
        return self._channels_last(total.unsqueeze(0))

    @cached_property
    def temporal(self) -> Tensor | None:
        temporal = self.neurons.temporal
        return None if temporal is None else padded_bias(temporal, image_shape(self.node.shape)[0])

    def run(self, inputs: Sequence[Value], steps: int, state: State) -> Value:
        values = dict(zip(self.reads, inputs, strict=True))
        channels, images = image_shape(self.node.shape)[0], inputs[0].images
        if self.node.name not in state:
            v0 = self.neurons.v0.expand(1, *self.node.shape)
            state[self.node.name] = channels_last(v0, self.node.shape, channels).repeat(images, 1, 1, 1)
        widest = max((term.bytes_per_image for term in self.dense), default=0)
        each = max(1, BLOCK // (steps * widest)) if widest else max(1, images)
        parts = [slice(i, min(i + each, images)) for i in range(0, max(1, images), each)]
        fired = [self._fire({k: v.part(p) for k, v in values.items()}, steps, state[self.node.name][p]) for p in parts]
        bits = fired[0] if len(fired) == 1 else torch.cat(fired, 1)
        return PackedSpikes(bits, self.threshold[:channels], self.node.shape)

    def _fire(self, values: Mapping[str, Value], steps: int, v: Tensor) -> Tensor:
        """The spikes of some images, as bits; v is updated."""
        images = len(v)
        others = [values[name] for name in self.others]
        trains = [value.dense(steps) for value in others if not value.constant]  # (t·B, C, ...)
        trains += [term.current(values[term.source]) for term in self.dense]
        constant = self.constant
        if fixed := [value.data for value in others if value.constant]:  # (B, C, ...)
            constant = constant + self._channels_last(sum(fixed[1:], fixed[0]))
        addend = None
        if trains:
            addend = self._channels_last(sum(trains[1:], trains[0])).unflatten(0, (steps, images))
        fired, events = native.run(
            image_shape(self.node.shape),
            [(conv.form, bits_of(values[conv.source]), conv.weights) for conv in self.convs],
            steps,
            images,
            constant=constant,
            addend=addend,
            shortcut=None if self.shortcut is None else bits_of(values[self.shortcut]),
            height=self.shortcut_height,
            bias=self.temporal,
            threshold=self.threshold,
            v=v,
            delay=self.neurons.delay,
            start=self.neurons.start,
        )
        note_work(neurons=steps * images, events=events)
        return fired

    def _channels_last(self, x: Tensor) -> Tensor:
        return channels_last(x, self.node.shape, image_shape(self.node.shape)[0])


def _heights(graph: Graph, sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """The height of spikes, (C,), by the node that gives them, where the kernels can take them."""
    heights: dict[str, Tensor] = {}
    for node in graph.nodes:
        before = node.inputs[0] if node.inputs else ""
        if isinstance(node.op, MaxPool | AdaptiveMaxPool):
            height = heights.get(before) if is_image(node.shape) else None
        elif before in heights and moves_bits(node.op, graph.by_name[before].shape, node.shape):
            height = moved_height(node.op, heights[before], graph.by_name[before].shape)  # type: ignore[arg-type]
        else:
            height = _height(node, sites.get(node.name))
        if height is not None:
            heights[node.name] = height
    return heights


def _with_moves(graph: Graph, rates: Mapping[str, float]) -> dict[str, float]:
    """Firing rates of neurons, and of the max-pools and moves behind them."""
    found = dict(rates)
    for node in graph.nodes:
        before = node.inputs[0] if node.inputs else ""
        if before not in found:
            continue
        shape = graph.by_name[before].shape
        if isinstance(node.op, MaxPool | AdaptiveMaxPool):
            found[node.name] = pooled_rate(found[before], shape, node.shape)
        elif moves_bits(node.op, shape, node.shape):
            found[node.name] = moved_rate(found[before], shape, node.shape)
    return found


def _height(node: Node, site: Site | None) -> Tensor | None:
    if not is_image(node.shape) or not isinstance(site, Neurons) or prod(site.threshold.shape[1:]) != 1:
        return None
    if site.signed or (site.temporal is not None and prod(site.temporal.shape[2:]) != 1):
        return None
    return site.threshold.reshape(-1).expand(node.shape[0]).contiguous()


def _instruction(planner: _Planner, step: Instruction, sites: Mapping[str, Site]) -> Instruction:
    """The native form of a layer of neurons; anything else stays as it is."""
    if planner.engine == "dense" and isinstance(step.node.op, Conv | Linear):  # in front of an output, or read twice
        return replace(step, run=partial(_on_floats, step.run))
    neurons = sites.get(step.node.name)
    if not isinstance(neurons, Neurons) or step.node.name not in planner.heights:
        return step
    layer = planner.layer(step.node, neurons)
    return replace(step, reads=layer.reads, run=layer.run)


def _on_floats(run: Run, inputs: Sequence[Value], steps: int, state: State) -> Value:
    """By torch, whatever the spikes are: bits become floats for as long as it takes."""
    return run([v.unpacked() if isinstance(v, PackedSpikes) else v for v in inputs], steps, state)


@dataclass(frozen=True)
class _Planner:
    """Finds what can be fused."""

    graph: Graph
    heights: Mapping[str, Tensor]  # of spikes, (C,), by the node that gives them
    rates: Mapping[str, float]
    engine: str = "auto"  # "event": by events, also where something else is faster; "dense": all convolutions by torch

    def layer(self, node: Node, neurons: Neurons) -> _Layer:
        """Neurons with all that can be fused in front of them."""
        convs: list[_ConvTerm] = []
        dense: list[_DenseTerm] = []
        shortcut, others = None, []
        for term in self._terms(node.inputs[0]):
            if conv := self._conv(term, convs):
                convs.append(conv)
            elif term in self.heights and shortcut is None:
                shortcut = term
            elif by_torch := self._by_torch(term):
                dense.append(by_torch)
            else:
                others.append(term)
        height = None
        if shortcut is not None:
            height = self.heights[shortcut]
            height = torch.nn.functional.pad(height, (0, native.padded(len(height)) - len(height)))
        return _Layer(node, neurons, tuple(convs), tuple(dense), shortcut, height, tuple(others))

    def _terms(self, name: str) -> Iterable[str]:
        """The summands of a current."""
        node = self.graph.by_name[name]
        shapes = {self.graph.by_name[i].shape for i in node.inputs}
        if isinstance(node.op, Add) and node.op.alpha == 1 and shapes == {node.shape} and self._alone(name):
            return [term for i in node.inputs for term in self._terms(i)]
        return [name]

    def _alone(self, name: str) -> bool:
        return len(self.graph.readers[name]) == 1

    def _conv(self, name: str, others: Sequence[_ConvTerm]) -> _ConvTerm | None:
        """The convolution or linear layer as the kernels do it, unless they cannot or torch is faster."""
        node = self.graph.by_name[name]
        if self.engine == "dense" or not isinstance(node.op, Conv | Linear) or not is_image(node.shape):
            return None
        if not self._alone(name):
            return None
        if isinstance(node.op, Linear) and len(node.shape) != 1:
            return None
        weight = self.graph.tensors[node.op.weight]
        source, zeros = self._unpadded(node.inputs[0])
        events = self._events(source)
        if isinstance(node.op, Linear):
            flat = self.graph.by_name[node.inputs[0]]
            if events is None and isinstance(flat.op, Reshape) and flat.inputs[0] in self.heights:
                events = _Events(flat.inputs[0])  # a flattened image: the kernel covers all of it
                weight = weight.reshape(len(weight), *image_shape(self.graph.by_name[events.source].shape))
            weight = weight.reshape(*weight.shape, *(1,) * (4 - weight.ndim))
        elif weight.ndim == 3:
            weight = weight.unsqueeze(2)
        if events is None:
            return None
        shape = self.graph.by_name[events.source].shape
        form = conv_form(node.op, weight.shape[2:], shape, node.shape[0], events.window, events.hop, zeros)
        if form is None or any(c.form.groups != form.groups for c in others):
            return None
        best = choose(form, node.shape[0], self.rates.get(events.source, USUAL_RATE))
        if best == "dense" and self.engine != "event":
            return None
        if self.engine == "event" and best != "depthwise":
            best = "events"
        form.tables = int(best == "tables")
        height = self.heights[events.source] / prod(events.window)
        packed = native.pack_weights(form, node.shape[0], weight, height)
        bias = None if node.op.bias is None else self.graph.tensors[node.op.bias]
        return _ConvTerm(events.source, form, packed, bias)

    def _by_torch(self, name: str) -> _DenseTerm | None:
        """The convolution or linear layer that torch does, if it reads spikes, and only these neurons read it."""
        node = self.graph.by_name[name]
        if not isinstance(node.op, Conv | Linear) or node.inputs[0] not in self.heights or not self._alone(name):
            return None
        widest = max(padded_size(self.graph.by_name[i].shape) for i in (name, node.inputs[0]))
        return _DenseTerm(node, self.graph.tensors, widest * self.graph.dtype.itemsize)

    def _unpadded(self, name: str) -> tuple[str, tuple[int, int]]:
        """What stands in front of a padding with zeros, and how many of them are above and on the left."""
        node = self.graph.by_name[name]
        if not isinstance(node.op, Pad) or node.op.mode != "constant" or node.op.value or len(node.shape) not in (2, 3):
            return name, (0, 0)
        space = 2 * (len(node.shape) - 1)
        if any(node.op.widths[space:]) or min(node.op.widths, default=0) < 0:
            return name, (0, 0)
        left, _, above, *_ = (*node.op.widths, 0, 0, 0)
        return node.inputs[0], (above, left)

    def _events(self, name: str) -> _Events | None:
        """The spikes behind a value, if it is spikes or an average over windows of them."""
        node = self.graph.by_name[name]
        if name in self.heights:
            return _Events(name)
        if not node.inputs or node.inputs[0] not in self.heights:
            if isinstance(node.op, Reshape) and prod(node.shape) == node.shape[0] == self._channels(node.inputs[0]):
                return self._events(node.inputs[0])
            return None
        _, *space = image_shape(self.graph.by_name[node.inputs[0]].shape)
        whole = (space[0], space[1])
        if isinstance(node.op, Mean) and {*node.op.axes} == {*range(1, len(self.graph.by_name[node.inputs[0]].shape))}:
            return _Events(node.inputs[0], whole, whole)
        if isinstance(node.op, AdaptiveAvgPool) and prod(node.op.size) == 1:
            return _Events(node.inputs[0], whole, whole)
        if isinstance(node.op, AvgPool) and not any(node.op.padding) and not node.op.ceil_mode and not node.op.divisor:
            return _Events(node.inputs[0], two(node.op.kernel, 1), two(node.op.stride, 1))
        return None

    def _channels(self, name: str) -> int:
        shape = self.graph.by_name[name].shape
        return shape[0] if shape else 0
