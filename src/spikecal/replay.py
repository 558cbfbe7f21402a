"""Layer-by-layer replay: each segment runs on the cached spike trains of the neurons in front of it.

Segments are visited once, in order, so a conversion simulates every layer a fixed number of times, however deep
the network is. Trains are kept as bits, and dropped when no later segment reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .engine import fused
from .errors import MemoryBudgetError
from .functional import count_spikes, delayed, mean_over_time, pack_bits, unpack_bits
from .graph import Graph, Node
from .memory import CACHE, CACHE_OF_BITS, chunk_of_images, peak_bytes
from .ops import Activation, Conv, Linear, Output, Peak
from .segments import Segment, last_readers, segments
from .simulation import Neurons, Readout, Site, fire, run_segment, site_current
from .values import PackedSpikes, Value


@dataclass
class _Store:
    """Values of all images at one node, over time."""

    data: Tensor  # constant: (N, ...); real train: (T, N, ...); spikes: bits, of steps (⌈T/8⌉, N, ...) or of channels
    constant: bool
    height: Tensor | None  # of spikes
    packed: PackedSpikes | None = None  # what the spikes are like, if the bits are those of channels

    def images(self, part: slice, T: int) -> Value:
        if self.constant:
            return Value(self.data[part])
        data = self.data[:, part]
        if self.packed is not None:
            return PackedSpikes(data.contiguous(), self.packed.channel_height, self.packed.shape, self.packed.rate)
        if self.height is not None:
            data = unpack_bits(data, T, self.height)
        return Value(data, constant=False, height=self.height)

    def mean(self, part: slice, steps: int) -> Tensor:
        """Mean over the first steps for each of these images, (B, ...)."""
        if self.packed is not None:
            bits = self.data[:steps, part].contiguous()
            return PackedSpikes(bits, self.packed.channel_height, self.packed.shape).mean()
        if self.height is not None:
            return count_spikes(self.data[:, part], steps) * (self.height / steps)
        return self.data[part] if self.constant else mean_over_time(self.data[:steps, part])


@dataclass(frozen=True)
class LayerStatistics:
    """What the calibration images showed at one site, with its final parameters."""

    firing_rate: float | None  # spikes per neuron and step; None at an output
    error: float  # ‖x − s̄‖² / ‖x‖²


class Layer:
    """One site during calibration: what arrives there in the spiking network, and what the ANN has there.

    Calibration steps read errors from it and change `site` (the neurons' parameters) and the weights.
    """

    def __init__(self, replay: Replay, segment: Segment, site: Site) -> None:
        self._replay, self.segment, self.site = replay, segment, site
        self._memo: list[tuple[slice, dict[str, Value]]] | None = None

    @property
    def T(self) -> int:
        return self._replay.T

    @property
    def memory(self) -> int:
        """The budget of the whole calibration, in bytes."""
        return self._replay.memory

    @property
    def graph(self) -> Graph:
        return self._replay.graph

    @property
    def name(self) -> str:
        return self.segment.site.name

    @property
    def channel_axis(self) -> int:
        return self.graph.channel_axis(self.segment.site)

    @property
    def depth(self) -> float:
        return self.graph.relative_depth(self.name)

    @property
    def weights(self) -> list[str]:
        """Names of the weight tensors of this segment: they act on nothing calibrated before."""
        return [n.op.weight for n in self.segment.nodes if isinstance(n.op, Conv | Linear)]

    def chunks(self) -> Iterator[tuple[slice, dict[str, Value]]]:
        """All values of this segment in the spiking network, some images at a time."""
        if self._memo is not None:
            yield from self._memo
            return
        needed = {self.segment.source, *self._replay.kept(self.segment)}
        memo: list[tuple[slice, dict[str, Value]]] = []
        holds = self._replay.holds(needed)
        for part in self._replay.parts(self.segment):
            values = run_segment(self.graph, self.segment, self._replay.values(self.segment, part), self.T)
            values = {name: value for name, value in values.items() if name in needed}
            if holds:
                memo.append((part, values))
            yield part, values
        self._memo = memo if holds else None

    def arriving(self, values: Mapping[str, Value]) -> Tensor:
        """The current the neurons see, (T, B, ...), without what is their own at every step."""
        current = site_current(values[self.segment.source], self.site.bias, self.T)
        return delayed(current, self.site.delay if isinstance(self.site, Neurons) else 0)

    def current_by_step(self) -> Tensor:
        """The current that comes in at every step, averaged over all images, (T, ...), without delay.

        The current of mean spikes is the mean current, unless a maximum is taken on the way.
        """
        if any(isinstance(node.op, Peak) for node in self.segment.nodes):
            currents = (values[self.segment.source] for _, values in self.chunks())
            total = sum(site_current(current, self.site.bias, self.T).sum(1) for current in currents)
            return total / self.images  # type: ignore[return-value]
        values = {name: Value(self._mean_image(name)) for name in self.segment.frontier}
        return run_segment(self.graph, self.segment, values, 1)[self.segment.source].data + self.site.bias

    def _mean_image(self, name: str) -> Tensor:
        """What the segment reads there at every step, averaged over all images, (T, ...)."""
        replay, store = self._replay, self._replay.store[name]
        if store.packed is not None:  # counted over the images of each step, as others are over steps
            like = store.packed.channel_height, store.packed.shape
            return torch.cat([PackedSpikes(step.unsqueeze(1), *like).mean() for step in store.data])
        total = torch.zeros((), dtype=self.graph.dtype, device=self.graph.device)
        for part in replay.parts(self.segment):
            total = total + store.images(part, self.T).data.sum(0 if store.constant else 1)
        return (total / self.images).expand(self.T, *self.graph.by_name[name].shape)

    def output(self, values: Mapping[str, Value]) -> Value:
        """What the site gives: spikes, or the current at an output."""
        arriving = values[self.segment.source]
        if isinstance(self.site, Readout):
            return Value(self.site.read(arriving, self.T), constant=False)
        return fire(site_current(arriving, self.site.bias, self.T), self.site, packed=True)[0]

    def target(self, part: slice = slice(None)) -> Tensor:
        """The ANN's activations at this site, (B, ...)."""
        return self._replay.ann[self.segment.site.name][part]

    def outputs(self) -> Iterator[tuple[slice, dict[str, Value], Value]]:
        """What the site gives for all images, some at a time, and the values of the segment that are kept beside it."""
        if self._memo is None and isinstance(self.site, Neurons) and self._replay.kept(self.segment) == [self.name]:
            some = self._replay.values(self.segment, slice(0, 1))
            layer = fused(self.graph, self.segment.site, self.site, some)
            if layer is not None:
                for part in self._replay.parts(self.segment, cache=CACHE_OF_BITS):
                    values = self._replay.values(self.segment, part)
                    yield part, {}, layer.run([values[name] for name in layer.reads], self.T, {})
                return
        for part, values in self.chunks():
            yield part, values, self.output(values)

    def mean_outputs(self) -> Tensor:
        """What the site gives on average over time, for every image, (N, ...)."""
        found = torch.empty(self.images, *self.segment.site.shape, dtype=self.graph.dtype, device=self.graph.device)
        for part, _, output in self.outputs():
            found[part] = output.mean()
        return found

    def mean_error(self, images: int = 0) -> Tensor:
        """x − s̄ averaged over all images, or the first of them, in the shape of a sample."""
        total = torch.zeros(self.segment.site.shape, dtype=torch.float64, device=self.graph.device)
        wanted = min(images or self.images, self.images)
        for part, _, output in self.outputs():
            error = (self.target(part) - output.mean())[: wanted - part.start]
            total += error.sum(0, dtype=torch.float64)
            if wanted <= part.stop < self.images:  # not after the last part: what is kept, is kept only then
                break
        return (total / wanted).to(self.graph.dtype)

    @property
    def images(self) -> int:
        return self._replay.images

    def means(self, images: int) -> Iterator[tuple[slice, dict[str, Tensor], dict[str, Tensor]]]:
        """All values of this segment, in the ANN and as means over time in the spiking network, some images at a time.

        images: how many, the first ones. Averaging commutes with what a segment does, so nothing is simulated.
        """
        replay = self._replay
        for part in replay.parts(self.segment, steps=2, images=images):
            ann = {name: Value(replay.ann[name][part]) for name in self.segment.frontier}
            found = run_segment(replay.ann_graph, self.segment, ann, 1)
            yield part, _data(found), self.means_until(self.T, part)

    def means_until(self, step: int, part: slice) -> dict[str, Tensor]:
        """All values of this segment in the spiking network, as means over its first steps."""
        replay = self._replay
        values = {name: Value(replay.store[name].mean(part, step)) for name in self.segment.frontier}
        return _data(run_segment(self.graph, self.segment, values, 1))

    def mean_inputs(self, batch: int) -> dict[str, Tensor]:
        """Mean over time of what the segment reads, for every image, (N, ...); to be trained on `batch` at a time.

        Channels first in memory: with them last, the weight gradient of a narrow strided 1×1 convolution makes torch
        2.13 (oneDNN) write outside of its memory.
        """
        parts = self._replay.parts(self.segment, beside=self._training_bytes(batch))
        means: dict[str, Tensor] = {}
        for name in self.segment.frontier:
            shape = (self._replay.images, *self.graph.by_name[name].shape)
            means[name] = torch.empty(shape, dtype=self.graph.dtype, device=self.graph.device)
            for part in parts:
                means[name][part] = self._replay.store[name].mean(part, self.T)
        return means

    def _training_bytes(self, batch: int) -> int:
        """Mean inputs of all images; of a batch, all values with their gradients; three more of each weight."""
        nodes, item = (*self.segment.nodes, self.segment.site), self.graph.dtype.itemsize
        inputs = sum(prod(self.graph.by_name[name].shape) for name in self.segment.frontier) * item
        values = sum(prod(node.shape) for node in nodes) * item
        weights = sum(self.graph.tensors[name].nbytes for name in self.weights)
        return inputs * (self._replay.images + batch) + 3 * values * batch + 3 * weights

    def current(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """The segment as a function of mean inputs and weights: averaging commutes with affine maps."""
        values = {name: Value(x) for name, x in inputs.items()}
        found = run_segment(self.graph.with_tensors(weights), self.segment, values, 1)
        return found[self.segment.source].data

    def outputs_behind(self) -> list[Segment]:
        """The outputs that read these neurons, if nothing else does, and they read nothing else."""
        readers = [s for s in self._replay.segments if self.name in s.frontier]
        handed_on = {name for s in self._replay.segments for name in s.frontier}
        alone = all(
            isinstance(s.site.op, Output)
            and s.frontier == (self.name,)
            and not any(node.name in handed_on for node in s.nodes)
            for s in readers
        )
        return readers if alone else []

    def parts_until(self, output: Segment) -> list[slice]:
        """All images, some at a time, to be carried from here to an output, in a few states at once."""
        return self._replay.parts(output, steps=3)

    def behind(self, output: Segment, x: Tensor) -> Tensor:
        """What an output behind these neurons has if they are worth x, (B, ...), with the ANN's weights."""
        return run_segment(self._replay.ann_graph, output, {self.name: Value(x)}, 1)[output.source].data

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._replay.graph = self.graph.with_tensors(weights)
        self._memo = None


class Replay:
    """Carries the calibration images through the network, one segment after the other."""

    def __init__(self, ann: Graph, inputs: Sequence[Tensor], T: int, memory: int, signed: bool = False) -> None:
        self.ann_graph, self.graph, self.T, self.memory = ann, ann, T, memory
        self.signed = signed  # spikes of two signs are kept as floats
        self.images = len(inputs[0])
        self.segments = segments(ann)
        self._last = last_readers(self.segments)
        pairs = list(zip(ann.inputs, inputs, strict=True))
        self.ann: dict[str, Tensor] = {node.name: x for node, x in pairs}
        self.store: dict[str, _Store] = {node.name: _Store(x, True, None) for node, x in pairs}

    def layer(self, segment: Segment, site: Site) -> Layer:
        """Bring the ANN to the next site and hand it out for calibration."""
        for part in self.parts(segment, steps=1):
            values = {name: Value(self.ann[name][part]) for name in segment.frontier}
            found = run_segment(self.ann_graph, segment, values, 1)
            found[segment.site.name] = Value(
                segment.site.op.run(self.ann_graph.tensors, found[segment.source].data)
            )  # the activation
            for name in self.kept(segment):
                self._write(self.ann, name, part, found[name].data)
        return Layer(self, segment, site)

    def finish(self, layer: Layer) -> LayerStatistics:
        """Fire with the final parameters, keep what later segments read, and drop what none does."""
        site, rates, wrong, power = layer.segment.site, 0.0, 0.0, 0.0
        stored: dict[str, Tensor] = {}
        like: dict[str, Value] = {}
        for part, values, output in layer.outputs():
            target, mean = layer.target(part), output.mean()
            wrong += float((target - mean).square().sum(dtype=torch.float64))
            power += float(target.square().sum(dtype=torch.float64))
            if isinstance(layer.site, Neurons):
                rates += float(layer.site.rate(output, mean).sum(dtype=torch.float64))
            values = {**values, site.name: output}
            for name in self.kept(layer.segment):
                value = values[name]
                like[name] = value
                self._write(stored, name, part, _as_bits(value), axis=0 if value.constant else 1)
        fires = isinstance(layer.site, Neurons)
        rate = rates / (self.images * prod(site.shape)) if fires else None
        for name, value in like.items():
            packed = value if isinstance(value, PackedSpikes) else None
            if packed is not None and rate is not None:
                packed = PackedSpikes(packed.bits[:0], packed.channel_height, packed.shape, rate)
            self.store[name] = _Store(stored[name], value.constant, value.height, packed)
        self._drop(layer.segment)
        return LayerStatistics(rate, wrong / power if power else float(wrong > 0))

    def values(self, segment: Segment, part: slice) -> dict[str, Value]:
        return {name: self.store[name].images(part, self.T) for name in segment.frontier}

    def parts(
        self,
        segment: Segment,
        steps: int | None = None,
        beside: int = 0,
        cache: int = CACHE,
        images: int | None = None,
    ) -> list[slice]:
        """The images, or the first of them, in chunks that fit into what is left of the budget.

        Cached trains take their part of it, and so do the bytes `beside`.
        """
        free = self.memory * 3 // 4 - self.cached_bytes(segment) - beside  # a quarter is for currents that are kept
        nodes = (*segment.nodes, segment.site)
        each = peak_bytes(self.graph, steps or self.T, nodes)
        if free < each:
            needed = max((self.memory * 3 // 4 - free + each) * 4 / 3, self.least_budget())
            raise MemoryBudgetError(
                f"the memory budget of {self.memory / 2**20:.0f} MiB is too small at {segment.site.name!r}: it needs "
                f"{needed / 2**20 + 1:.0f} MiB; raise it (memory=, --memory), or take fewer images "
                "(calibration_images= of the recipe, or --images)"
            )
        images = self.images if images is None else images
        size = chunk_of_images(self.graph, steps or self.T, free, images, nodes, cache=cache)
        return [slice(i, min(i + size, images)) for i in range(0, images, size)]

    def least_budget(self) -> float:
        """What replaying all segments takes, some image at a time: what is kept at each of them, and its own values."""
        item, most = self.graph.dtype.itemsize, 0
        kept = {node.name: 2 * prod(node.shape) * self.images * item for node in self.graph.inputs}
        for index, segment in enumerate(self.segments):
            nodes = [self.graph.by_name[name] for name in self.kept(segment)]
            kept |= {node.name: self._bytes(node) for node in nodes}
            held = sum(kept.values()) + sum(prod(node.shape) for node in nodes) * self.images * item
            most = max(most, held + peak_bytes(self.graph, self.T, (*segment.nodes, segment.site)))
            kept = {name: size for name, size in kept.items() if self._last.get(name, -1) > index}
        return most * 4 / 3

    def holds(self, names: set[str]) -> bool:
        """Whether the currents at these nodes are small enough to be kept while a site is calibrated."""
        each = sum(prod(self.graph.by_name[n].shape) for n in names) * self.T * self.graph.dtype.itemsize
        return each * self.images <= self.memory // 4

    def cached_bytes(self, segment: Segment) -> int:
        """What is kept now, and what this segment will add."""
        kept = sum(s.data.nbytes for s in self.store.values()) + sum(x.nbytes for x in self.ann.values())
        return kept + sum(self._bytes(self.graph.by_name[name]) for name in self.kept(segment))

    def _bytes(self, node: Node) -> int:
        item = self.graph.dtype.itemsize
        if not isinstance(node.op, Activation) or self.signed:
            return prod(node.shape) * self.images * (self.T + 1) * item
        channels = node.shape[0] if node.shape else 1
        rounded = 64 * -(-channels // 64) / channels  # bits of channels come in words
        return int(prod(node.shape) * self.images * (max(-(-self.T // 8), self.T * rounded / 8) + item))

    def kept(self, segment: Segment) -> list[str]:
        """What of this segment outlives it; the site itself stays until its errors are measured."""
        index = self.segments.index(segment)
        later = [n.name for n in segment.nodes if self._last.get(n.name, -1) > index]
        return [*later, segment.site.name]

    def _drop(self, segment: Segment) -> None:
        index = self.segments.index(segment)
        for cache in (self.ann, self.store):
            for name in [n for n in cache if self._last.get(n, -1) <= index]:
                del cache[name]

    def _write(self, into: dict[str, Tensor], name: str, part: slice, data: Tensor, axis: int = 0) -> None:
        if name not in into:
            into[name] = _resized(data, axis, self.images)
        into[name].narrow(axis, part.start, part.stop - part.start).copy_(data)


def _data(values: Mapping[str, Value]) -> dict[str, Tensor]:
    return {name: value.data for name, value in values.items()}


def _as_bits(value: Value) -> Tensor:
    """What is kept of a value: spikes take one bit each."""
    if isinstance(value, PackedSpikes):
        return value.bits
    return value.data if value.height is None else pack_bits(value.data, value.height)


def _resized(data: Tensor, axis: int, size: int) -> Tensor:
    """An empty tensor like `data`, laid out in memory alike, with another size along one axis."""
    shape = [size if d == axis else n for d, n in enumerate(data.shape)]
    outermost_first = sorted(range(data.ndim), key=lambda d: (-data.stride()[d], d))
    empty = torch.empty([shape[d] for d in outermost_first], dtype=data.dtype, device=data.device)
    return empty.permute([outermost_first.index(d) for d in range(data.ndim)])


def initial_site(node: Node, threshold: Tensor | None, graph: Graph, delay: int = 0, signed: bool = False) -> Site:
    """A site before calibration: no bias, no initial potential."""
    zero = torch.zeros((1,) * len(node.shape), dtype=graph.dtype, device=graph.device)
    return Readout(zero) if threshold is None else Neurons(threshold, zero, zero, delay=delay, signed=signed)
