"""Run a graph as the ANN or as the spiking network; the loop is the same, only the activations differ.

A value is either the same at every step, (B, ...), and computed once, or a train over time, (t, B, ...), whose
steps ride in the batch dimension while affine operations work on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from .functional import delayed, increments, integrate_and_fire, mean_over_time, signed_integrate_and_fire
from .graph import Graph, Node
from .kernels import can_scan, convolve, move_spikes, moves_bits, pool_spikes, scan
from .ops import (
    Activation,
    AdaptiveMaxPool,
    Concat,
    Conv,
    Input,
    Linear,
    Max,
    MaxPool,
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
from .segments import Segment
from .values import PackedSpikes, Value, is_image
from .work import note_work


@dataclass(frozen=True)
class Neurons:
    """The integrate-and-fire neurons of one site. Parameters broadcast against a sample, as (C, 1, 1) does."""

    threshold: Tensor
    v0: Tensor  # membrane potential before the first step
    bias: Tensor  # a constant current on top of what arrives
    temporal: Tensor | None = None  # (T, ...), a current of its own at every step
    delay: int = 0  # firing begins this many steps after input does, and lasts as long
    signed: bool = False  # a spike may be taken back by a negative one
    start: int = 0  # the first of its steps at which a neuron may fire; what arrives before is kept

    def map(self, fn: Callable[[Tensor], Tensor]) -> Neurons:
        temporal = None if self.temporal is None else fn(self.temporal)
        return replace(self, threshold=fn(self.threshold), v0=fn(self.v0), bias=fn(self.bias), temporal=temporal)

    def tensors(self) -> dict[str, Tensor]:
        return _tensors(self)

    @property
    def needs_all_steps(self) -> bool:
        """Whether the steps cannot be taken some at a time."""
        return self.delay > 0 or self.temporal is not None or self.signed or self.start > 0

    def rate(self, spikes: Value, mean: Tensor) -> Tensor:
        """Spikes per step, of either sign, (B, ...), whose mean over time is known."""
        return (mean_over_time(spikes.data.abs()) if self.signed else mean) / self.threshold


@dataclass(frozen=True)
class Readout:
    """An output: it does not fire, its value is the mean current, perhaps with more weight on some steps."""

    bias: Tensor
    weights: Tensor | None = None  # (T, ...), 1 on average

    def map(self, fn: Callable[[Tensor], Tensor]) -> Readout:
        return Readout(fn(self.bias), None if self.weights is None else fn(self.weights))

    def read(self, value: Value, steps: int, start: int = 0) -> Tensor:
        """What counts of the current that arrives, (t, B, ...), from step `start` on."""
        current = site_current(value, self.bias, steps)
        return current if self.weights is None else current * self.weights[start : start + steps].unsqueeze(1)

    def tensors(self) -> dict[str, Tensor]:
        return _tensors(self)


Site = Neurons | Readout


def _tensors(site: Site) -> dict[str, Tensor]:
    return {key: t for key, t in vars(site).items() if isinstance(t, Tensor)}


State = dict[str, Any]  # what a run carries from step to step, by node


def run_node(graph: Graph, node: Node, inputs: Sequence[Value], steps: int, state: State) -> Value:
    """One node other than a neuron, on values that may or may not change over time."""
    constant = all(v.constant for v in inputs)
    note_work(nodes=inputs[0].images * (1 if constant else steps))
    if constant:
        return Value(node.op.run(graph.tensors, *(v.data for v in inputs)))
    if isinstance(node.op, Peak):
        return _peak(node, inputs[0], state)
    if isinstance(node.op, Conv | Linear) and isinstance(inputs[0], PackedSpikes):
        current = convolve(node.op, graph.tensors, inputs[0], node.shape)
        if current is not None:
            return Value(current, constant=False)
    if isinstance(inputs[0], PackedSpikes) and moves_bits(node.op, inputs[0].shape, node.shape):
        return move_spikes(node.op, inputs[0], node.shape)  # type: ignore[arg-type]
    y = node.op.run(graph.tensors, *(v.dense(steps) for v in inputs))
    return Value(y.unflatten(0, (steps, -1)), constant=False, height=_moved_height(node.op, inputs))


def only_moves(op: Op) -> bool:
    """Whether an operation only puts values elsewhere, with zeros beside them at most: spikes stay spikes."""
    return (
        isinstance(op, Concat | Permute | Reshape | Select | Slice)
        or (isinstance(op, Pad) and op.value == 0)
        or (isinstance(op, Upsample) and op.mode == "nearest")
    )


def _moved_height(op: Op, inputs: Sequence[Value]) -> Tensor | None:
    heights = [v.height.expand(v.data.shape[2:]) for v in inputs if v.height is not None]
    return height_behind(op, heights) if only_moves(op) and len(heights) == len(inputs) else None


def height_behind(op: Op, heights: Sequence[Tensor]) -> Tensor:
    """The height of spikes behind an operation that only puts them elsewhere; all in the shape of a sample."""
    return op.run({}, *(h.unsqueeze(0) for h in heights))[0]


def _peak(node: Node, x: Value, state: State) -> Value:
    """A maximum over time; of spikes it is counted in spikes, so that it is exactly one or none."""
    if isinstance(x, PackedSpikes) and isinstance(node.op, MaxPool | AdaptiveMaxPool) and is_image(node.shape):
        spikes, state[node.name] = pool_spikes(node.op, x, node.shape, state.get(node.name))
        return spikes
    height = None if x.height is None else height_of_channels(node.op, x.height.expand(x.data.shape[2:]))
    if height is None:
        y, state[node.name] = increments(lambda total: node.op.run({}, total), x.data, state.get(node.name))
        return Value(y, constant=False)
    ones = (x.data != 0).to(x.data.dtype)
    y, state[node.name] = increments(lambda total: node.op.run({}, total), ones, state.get(node.name))
    height = height.reshape(-1, *(1,) * (len(node.shape) - 1))
    return Value(y * height, constant=False, height=height)


def height_of_channels(op: Op, height: Tensor) -> Tensor | None:
    """The height of the spikes of each channel, (C,), if it has one; padding, which never fires, may have none."""
    if isinstance(op, Max) and 0 in op.axes:
        return None
    heights = height.flatten(1)  # (C, values)
    top = heights.amax(1)
    return top if bool(((heights == top[:, None]) | (heights == 0)).all()) else None


def site_current(value: Value, bias: Tensor, steps: int) -> Tensor:
    """The current a site gets at every step, (t, B, ...), with its own bias."""
    if value.constant:
        current = value.data + bias
        return current.expand(steps, *current.shape)
    return value.data + bias


def fire(current: Tensor, neurons: Neurons, v: Tensor | None = None, packed: bool = False) -> tuple[Value, Tensor]:
    """Spikes for a current (t, B, ...) that already holds the constant bias; and the potential afterwards.

    `packed`: as bits, where the native kernels can.
    """
    note_work(neurons=current.shape[0] * current.shape[1])
    if packed and v is None and not neurons.signed and can_scan(current, neurons.threshold, neurons.temporal):
        parameters = (neurons.threshold, neurons.v0, neurons.temporal)
        return scan(current, *parameters, delay=neurons.delay, start=neurons.start)
    current = delayed(current, neurons.delay)
    if neurons.temporal is not None:
        current = current + neurons.temporal.unsqueeze(1)
    v = neurons.v0 if v is None else v
    if neurons.signed:
        spikes, v = signed_integrate_and_fire(current, neurons.threshold, v, neurons.start)
        return Value(spikes, constant=False), v
    spikes, v = integrate_and_fire(current, neurons.threshold, v, neurons.start)
    return Value(spikes, constant=False, height=neurons.threshold), v


def run_segment(graph: Graph, segment: Segment, values: Mapping[str, Value], steps: int) -> dict[str, Value]:
    """All values of one segment, given those at its frontier."""
    found = dict(values)
    for node in segment.nodes:
        found[node.name] = run_node(graph, node, [found[i] for i in node.inputs], steps, {})
        note_work(bytes=found[node.name].nbytes)
    return found


Tap = Callable[[Node, Value], None]
Run = Callable[[Sequence[Value], int, State], Value]  # (what it reads, steps, state) -> its value


@dataclass(frozen=True)
class Instruction:
    """One entry of a program: how the value of a node comes from those it reads."""

    node: Node
    reads: tuple[str, ...]
    run: Run


def ann_program(graph: Graph) -> list[Instruction]:
    """Every node as it stands: activations are ReLUs."""
    return [Instruction(node, node.inputs, partial(run_node, graph, node)) for node in graph.nodes]


def snn_program(graph: Graph, sites: Mapping[str, Site]) -> list[Instruction]:
    """The same with neurons in place of activations."""
    return [
        replace(step, run=partial(_fire_at, step.node, sites[step.node.name]))
        if isinstance(step.node.op, Activation)
        else step
        for step in ann_program(graph)
    ]


def needed(program: list[Instruction]) -> list[Instruction]:
    """Without what nobody reads any more."""
    read: set[str] = set()
    kept = []
    for step in reversed(program):
        if step.node.is_site or isinstance(step.node.op, Input) or step.node.name in read:
            kept.append(step)
            read.update(step.reads)
    return kept[::-1]


def _fire_at(node: Node, neurons: Site, inputs: Sequence[Value], steps: int, state: State) -> Value:
    assert isinstance(neurons, Neurons)
    current = site_current(inputs[0], neurons.bias, steps)
    value, state[node.name] = fire(current, neurons, state.get(node.name))
    return value


def run_ann(graph: Graph, inputs: Sequence[Tensor], tap: Tap | None = None) -> list[Tensor]:
    """The outputs of the ANN; `tap` is shown the value at every activation and output."""
    found = run_steps(ann_program(graph), inputs, 1, {}, None, tap)
    return [found[node.name].data for node in graph.outputs]


def run_snn(
    program: Sequence[Instruction],
    sites: Mapping[str, Site],
    inputs: Sequence[Tensor],
    T: int,
    tap: Tap | None = None,
    block: int | None = None,
) -> Iterator[list[Tensor]]:
    """The current at every output, [(t, B, ...)] for the next t steps; `tap` is shown every site's spikes or current.

    Steps are taken `block` at a time, all of them at once by default.
    """
    state: State = {}
    constants: dict[str, Value] = {}
    outputs = [(step.node.name, sites[step.node.name]) for step in program if isinstance(step.node.op, Output)]
    for start in range(0, T, block or T):
        steps = min(block or T, T - start)
        found = run_steps(program, inputs, steps, state, constants, tap)
        yield [site.read(found[name], steps, start) for name, site in outputs if isinstance(site, Readout)]


def run_steps(
    program: Sequence[Instruction],
    inputs: Sequence[Tensor],
    steps: int,
    state: State,
    constants: dict[str, Value] | None,
    tap: Tap | None,
) -> dict[str, Value]:
    """The outputs after one pass over the program; `state` and `constants` carry over to the next steps."""
    images = iter(inputs)
    values: dict[str, Value] = dict(constants or {})
    waiting = Counter(name for step in program for name in step.reads)
    for step in program:
        name = step.node.name
        if isinstance(step.node.op, Input):
            values[name] = Value(next(images))
        elif name not in values:
            values[name] = step.run([values[i] for i in step.reads], steps, state)
            note_work(bytes=values[name].nbytes)
        value = values[name]
        if tap is not None and step.node.is_site:
            tap(step.node, value)
        if constants is not None and value.constant and not isinstance(step.node.op, Input):
            constants[name] = value
        for i in step.reads:
            waiting[i] -= 1
            if not waiting[i]:
                del values[i]
    return values


def with_bias(site: Site, delta: Tensor) -> Site:
    """The site with `delta` added to its bias."""
    return replace(site, bias=site.bias + delta)
