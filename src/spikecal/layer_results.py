"""What every layer of a spiking network does while images pass: its rates, and its error in parts, as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor

from .energy import Ledger, Operations
from .functional import clip_floor, mean_over_time
from .graph import Graph, Node
from .network import SpikingNetwork
from .ops import Activation
from .simulation import Instruction, Neurons, State, ann_program, run_ann, run_steps
from .values import PackedSpikes, Value, spikes_by_step

PROFILED = 256  # images of which errors are followed over time: each of those times costs as much as an ANN pass


@dataclass(frozen=True)
class ErrorParts:
    """The steps from x to s̄ of one layer: x − s̄ is their sum; of each the squared norm, as a share of ‖x‖².

    They need not add up to the error, because steps can make good for each other.
    """

    inherited: float  # x − x', where x' is what the ANN's activation would make of what arrives here
    clipping: float  # x' above the threshold
    flooring: float  # what is left, in whole spikes
    unevenness: float  # what the neurons fire instead, because the current is not the same at every step

    @property
    def largest(self) -> str:
        """The name of the largest part; nothing where there is no error."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name]) if any(parts.values()) else ""


@dataclass(frozen=True)
class LayerError:
    """Of a layer after some of its steps: how its mean spikes s̄ are spread, and how far from the ANN's activation x."""

    steps: int
    firing_rate: float  # spikes per neuron and step; of signed neurons those up less those down
    channel_rates: list[float]  # the least, the quartiles, the highest
    dead_share: float  # neurons that have not fired yet
    saturated_share: float  # of neurons and images: fired at every step so far
    error: float  # ‖x − s̄‖² / ‖x‖²
    parts: ErrorParts  # with what has arrived by then, which is more steps of input where neurons fire with a delay
    correlation: float  # of s̄ with x


@dataclass(frozen=True)
class LayerResult:
    """One layer of neurons over all images."""

    name: str
    neurons: int
    threshold: float  # mean over the channels
    threshold_min: float
    threshold_max: float
    firing_rate: float  # spikes per neuron and step
    rates_over_time: list[float]  # the same at each of its T steps
    calibration_rate: float | None  # the firing rate on the calibration images
    channel_rates: list[float]  # of the channels: the least, the quartiles, the highest
    error: float  # ‖x − s̄‖² / ‖x‖² against the ANN's activation x
    calibration_error: float | None  # the same on the calibration images
    parts: ErrorParts
    correlation: float  # of s̄ with x
    error_over_time: list[LayerError]  # after 1, 2, 4, ... and T of its steps, on the profiled images
    dead_share: float  # neurons that never fired
    saturated_share: float  # of neurons and images: fired at every step at which they may


@dataclass
class _ErrorSums:
    """What the error of a layer is made of, summed over images and neurons."""

    norms: Tensor | None = None  # of x − s̄ and its parts, squared
    moments: Tensor | None = None  # x, s̄, x², s̄², x·s̄
    rates: Tensor | None = None  # of the channels, (C,)
    fired: Tensor | None = None  # ever, (C, ...)
    saturated: float = 0.0
    values: int = 0
    images: int = 0

    def add(self, x: Tensor, s: Tensor, reached: Sequence[Tensor], rates: Tensor, full: Tensor) -> None:
        """reached: the way from x to s̄; rates: (C,), summed over the images; full: what s̄ is at least if saturated."""
        self.rates = plus(self.rates, rates)
        self.fired = (s > 0).any(0) | (False if self.fired is None else self.fired)
        self.saturated += float((s >= full).sum())
        self.images += len(x)
        differences = [x - s, *(a - b for a, b in itertools.pairwise(reached))]
        self.norms = plus(self.norms, torch.stack([d.square().sum(dtype=torch.float64) for d in differences]))
        moments = (x, s, x * x, s * s, x * s)
        self.moments = plus(self.moments, torch.stack([m.sum(dtype=torch.float64) for m in moments]))
        self.values += x.numel()

    def result(self, steps: int) -> LayerError:
        assert self.norms is not None and self.moments is not None
        assert self.rates is not None and self.fired is not None
        power, rates = float(self.moments[2]), self.rates / self.images
        error, *parts = [float(n) / power if power else float(n > 0) for n in self.norms]
        return LayerError(
            steps=steps,
            firing_rate=float(rates.mean()),
            channel_rates=rates.quantile(torch.linspace(0, 1, 5, dtype=rates.dtype, device=rates.device)).tolist(),
            dead_share=1 - float(self.fired.float().mean()),
            saturated_share=self.saturated / self.values,
            error=error,
            parts=ErrorParts(*parts),
            correlation=_correlation(self.moments / self.values),
        )


@dataclass
class _LayerSums:
    """Sums over images; of single neurons, (C, ...), or of all."""

    rates: Tensor | None = None  # (C,)
    by_step: list[Tensor] = field(default_factory=list)  # spikes, (t,), t steps after t steps
    errors: _ErrorSums = field(default_factory=_ErrorSums)
    profile: dict[int, _ErrorSums] = field(default_factory=dict)  # by steps, of some images
    steps: int = 0  # of the images in hand that have been seen
    total: Tensor | None = None  # of their spikes so far, (B, C, ...)
    means: dict[int, Tensor] = field(default_factory=dict)  # their s̄ after so many steps, (B, C, ...)
    target: Tensor | None = None  # their x


class LayerWatch:
    """Runs a network on some images after the other, and takes stock of its layers."""

    def __init__(self, snn: SpikingNetwork) -> None:
        self.snn, self.images = snn, 0
        self._ledger = Ledger(snn.graph, snn.sites, snn.T)
        self._layers = {node.name: _LayerSums() for node in snn.graph.neurons}

    @property
    def profiled(self) -> int:
        """The images, the first, whose errors are followed over time."""
        return min(self.images, PROFILED)

    @property
    def bytes_kept(self) -> int:
        """Of one image: activations of all layers, and their mean spikes after several steps."""
        graph, times = self.snn.graph, len(checkpoints(self.snn.T)) + 2
        return sum(prod(n.shape) for n in graph.neurons) * times * graph.dtype.itemsize

    def run(self, images: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """The currents at the outputs, [(T, B, ...)], and what the ANN gives, [(B, ...)]."""
        z = run_ann(self.snn.source, images, self._keep_target)
        ys = self.snn.currents(images, self._add_spikes)
        self._ledger.begin(len(images[0]))
        for steps in sorted({integrated for _, integrated in self._followed()}):
            run_steps(self._mean_program(steps), images, 1, {}, None, None)
        for layer in self._layers.values():
            layer.steps, layer.total, layer.target = 0, None, None
            layer.means.clear()
        self.images += len(images[0])
        return ys, z

    def results(self) -> list[LayerResult]:
        return [_layer_result(self.snn, node, self._layers[node.name], self.images) for node in self.snn.graph.neurons]

    def operations(self) -> Operations:
        return self._ledger.result()

    def _keep_target(self, node: Node, value: Value) -> None:
        if isinstance(node.op, Activation):
            self._layers[node.name].target = value.data

    def _add_spikes(self, node: Node, value: Value) -> None:
        if not isinstance(node.op, Activation):
            return
        layer, site = self._layers[node.name], self.snn.sites[node.name]
        assert isinstance(site, Neurons)
        mean, share = value.mean(), value.steps / self.snn.T  # (B, C, ...)
        layer.rates = plus(layer.rates, _by_channel(self.snn.graph, node, site.rate(value, mean)) * share)
        layer.by_step.append(spikes_by_step(value))
        for steps in {steps for pair in self._followed() for steps in pair}:
            if layer.steps < steps <= layer.steps + value.steps:
                layer.means[steps] = plus(layer.total, _first_steps(value, steps - layer.steps)) / steps
        layer.total = plus(layer.total, mean * value.steps)
        layer.steps += value.steps

    def _followed(self) -> set[tuple[int, int]]:
        """After how many steps layers are looked at, and how many steps of their input they have integrated by then."""
        T = self.snn.T
        delays = {site.delay for site in self.snn.sites.values() if isinstance(site, Neurons)}
        times = checkpoints(T) if self.images < PROFILED else [T]
        return {(steps, min(steps + delay, T)) for steps in times for delay in delays}

    def _mean_program(self, steps: int) -> list[Instruction]:
        """The network on means over its first steps, with what neurons fired: averaging commutes with the rest."""
        return [replace(step, run=partial(self._run_on_means, steps, step)) for step in ann_program(self.snn.graph)]

    def _run_on_means(self, until: int, step: Instruction, inputs: Sequence[Value], steps: int, state: State) -> Value:
        if isinstance(step.node.op, Activation):
            return self._account(step.node, until, inputs[0].data)
        if until == self.snn.T:
            self._ledger.note(step.node, [value.data for value in inputs])
        return step.run(inputs, steps, state)

    def _account(self, node: Node, integrated: int, arriving: Tensor) -> Value:
        """Take stock of a layer, given the mean current of so many steps; and go on with its mean spikes of as many."""
        snn, site, layer = self.snn, self.snn.sites[node.name], self._layers[node.name]
        x, fresh = layer.target, max(0, PROFILED - self.images)
        assert isinstance(site, Neurons) and x is not None
        for steps in (k for k, until in self._followed() if until == min(k + site.delay, snn.T) == integrated):
            s, full = layer.means[steps], site.threshold * ((steps - site.start - 0.5) / steps)
            full = full if steps > site.start else torch.full_like(full, torch.inf)  # as many spikes as there can be
            rates = partial(_by_channel, snn.graph, node)
            reached = error_steps(arriving, x, s, steps, site, partial(node.op.run, snn.graph.tensors), integrated)
            if fresh:
                some = layer.profile.setdefault(steps, _ErrorSums())
                way = [value.expand_as(x)[:fresh] for value in reached]
                some.add(x[:fresh], s[:fresh], way, rates(s[:fresh] / site.threshold), full)
            if steps == snn.T:
                layer.errors.add(x, s, reached, rates(s / site.threshold), full)
        return Value(layer.means[integrated])


def plus(total: Tensor | None, more: Tensor) -> Tensor:
    """The sum of what has come so far, if anything has."""
    return more if total is None else total + more


def checkpoints(T: int) -> list[int]:
    """1, 2, 4, ... and T."""
    return [*(2**i for i in range(T.bit_length()) if 2**i < T), T]


def _by_channel(graph: Graph, node: Node, rates: Tensor) -> Tensor:
    """Of single neurons, (B, C, ...) -> (C,): means over each channel, summed over the images."""
    total = rates.sum(0, dtype=torch.float64).expand(node.shape)  # (C, ...)
    axis = graph.channel_axis(node) % max(1, len(node.shape))
    return total.movedim(axis, 0).reshape(node.shape[axis], -1).mean(1) if node.shape else total.reshape(1)


def _first_steps(value: Value, steps: int) -> Tensor:
    """The sum over the first steps, (B, ...)."""
    if isinstance(value, PackedSpikes):
        return PackedSpikes(value.bits[:steps], value.channel_height, value.shape).mean() * steps
    return mean_over_time(value.data[:steps]) * steps


def error_steps(
    arriving: Tensor,
    x: Tensor,
    s: Tensor,
    T: int,
    site: Neurons,
    activation: Callable[[Tensor], Tensor],
    integrated: int | None = None,
) -> list[Tensor]:
    """From the ANN's x to the mean spikes s̄ of a layer, each (B, C, ...): x, x', x' clipped, in whole spikes, s̄.

    Spikes are means over the first T steps, `arriving` is that over the steps that have been integrated by then. Of the
    constant current that neurons have of their own, up to θ/2T makes good for the floor, and the rest belongs to what
    arrives.
    """
    share = (integrated or T) / T
    arriving, own = arriving * share, site.bias * share + site.v0 / T
    if site.temporal is not None:
        own = own + mean_over_time(site.temporal[:T])
    floor = torch.minimum(own.clamp(min=0), site.threshold / (2 * T))
    seen = activation(arriving + own - floor)
    whole = clip_floor(arriving + own, T, site.threshold, start=site.start)
    most = site.threshold * (max(0, T - site.start) / T)
    return [x, seen, torch.minimum(seen, most), whole, s]


def _layer_result(snn: SpikingNetwork, node: Node, layer: _LayerSums, images: int) -> LayerResult:
    site, neurons = snn.sites[node.name], prod(node.shape)
    assert isinstance(site, Neurons) and layer.rates is not None
    rates, known, errors = layer.rates / images, snn.statistics.get(node.name), layer.errors.result(snn.T)
    by_step = torch.cat(layer.by_step).reshape(-1, snn.T).sum(0) / (images * max(1, neurons))
    return LayerResult(
        name=node.name,
        neurons=neurons,
        threshold=float(site.threshold.mean()),
        threshold_min=float(site.threshold.min()),
        threshold_max=float(site.threshold.max()),
        firing_rate=float(rates.mean()),
        rates_over_time=by_step.tolist(),
        calibration_rate=known.firing_rate if known else None,
        channel_rates=rates.quantile(torch.linspace(0, 1, 5, dtype=rates.dtype, device=rates.device)).tolist(),
        error=errors.error,
        calibration_error=known.error if known else None,
        parts=errors.parts,
        correlation=errors.correlation,
        error_over_time=[found.result(steps) for steps, found in sorted(layer.profile.items())],
        dead_share=errors.dead_share,
        saturated_share=errors.saturated_share,
    )


def _correlation(moments: Tensor) -> float:
    """From the means of x, s, x², s², x·s; 0 where one of them never changes."""
    x, s, xx, ss, xs = moments.tolist()
    spread = max(xx - x * x, 0.0) * max(ss - s * s, 0.0)
    return (xs - x * s) / sqrt(spread) if spread > 0 else 0.0
