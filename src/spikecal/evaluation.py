"""How well a spiking network does, and what every layer of it does meanwhile: numbers as plain data."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from html import escape
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .checkpoint import load
from .energy import Energy, Ledger, Operations, estimate
from .errors import DataError, UnsupportedModelError
from .functional import clip_floor, mean_over_time
from .graph import Graph, Node
from .images import as_batches, fit_inputs, split_batch
from .network import SpikingNetwork, html_table
from .ops import Activation
from .progress import track
from .simulation import Instruction, Neurons, State, ann_program, run_ann, run_steps
from .values import PackedSpikes, Value, spikes_by_step


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


@dataclass(frozen=True)
class Evaluation:
    """Accuracies are shares of images, None where there were no labels; with a metric, nothing is said of classes."""

    images: int
    profiled: int  # of them, the first, whose errors are followed over time
    T: int  # steps in which a layer fires
    latency: int  # steps until the last layer has done so: T, and more with firing delay
    recipe: str
    classes: int  # 0 for a network that does not classify
    accuracy: float | None
    ann_accuracy: float | None
    accuracy_over_time: list[float]  # after 1, 2, ... steps, up to the latency
    agreement: float | None  # share of images on which SNN and ANN give the same answer
    agreement_over_time: list[float]
    final_steps: list[int]  # of every image, the first step after which its answer does not change any more
    final_over_time: list[float]  # share of images for which that is so after 1, 2, ... steps
    confidence: float | None  # mean probability (softmax) of the answer
    ann_confidence: float | None
    confusion: list[list[int]]  # label, answer, and how many images, where there are any
    metric: float | None  # what the metric says of the network's results, averaged over the images
    ann_metric: float | None
    metric_over_time: list[float]
    layers: list[LayerResult]
    operations: Operations
    operations_over_time: list[float]  # synaptic operations in the steps so far, by the spikes of each layer

    @property
    def energy(self) -> list[Energy]:
        """Estimates for one image, by several sets of constants."""
        return estimate(self.operations, self.T)

    @property
    def standard_error(self) -> float | None:
        """Of the accuracy, from the number of images."""
        return None if self.accuracy is None else sqrt(self.accuracy * (1 - self.accuracy) / self.images)

    def _repr_html_(self) -> str:
        """For notebooks."""
        from .judgement import advice, verdict

        lines = "".join(f"<li>{escape(line)}</li>" for line in advice(self))
        rows = [
            (n.name, f"{n.neurons:,}", f"{n.firing_rate:.3f}", f"{n.error:.4f}", n.parts.largest, f"{n.dead_share:.1%}")
            for n in self.layers
        ]
        table = html_table(("layer", "neurons", "firing rate", "error", "mostly", "silent"), rows)
        return f"<p><b>{escape(verdict(self))}</b></p><ul>{lines}</ul>{table}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        energy = [{**asdict(e), "ratios": e.ratios, "break_even": e.break_even} for e in self.energy]
        work = self.operations
        totals = {
            "synaptic_operations": work.synaptic_operations,
            "multiply_accumulates": work.multiply_accumulates,
            "ann_multiply_accumulates": work.ann_multiply_accumulates,
            "spikes_per_synapse": work.spikes_per_synapse,
        }
        return {**asdict(self), "totals": totals, "standard_error": self.standard_error, "energy": energy}


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
        self.rates = _plus(self.rates, rates)
        self.fired = (s > 0).any(0) | (False if self.fired is None else self.fired)
        self.saturated += float((s >= full).sum())
        self.images += len(x)
        differences = [x - s, *(a - b for a, b in itertools.pairwise(reached))]
        self.norms = _plus(self.norms, torch.stack([d.square().sum(dtype=torch.float64) for d in differences]))
        moments = (x, s, x * x, s * s, x * s)
        self.moments = _plus(self.moments, torch.stack([m.sum(dtype=torch.float64) for m in moments]))
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


@dataclass
class _Sums:
    ledger: Ledger
    images: int = 0
    labelled: bool | None = None
    right_ann: int = 0
    metric: Tensor | None = None  # of the ANN, and of the SNN after every step
    right_over_time: Tensor | None = None
    same_over_time: Tensor | None = None
    final_over_time: Tensor | None = None
    final_steps: list[int] = field(default_factory=list)
    confidence: Tensor | None = None  # of SNN and ANN
    confusion: Counter[tuple[int, int]] = field(default_factory=Counter)
    layers: dict[str, _LayerSums] = field(default_factory=dict)


PROFILED = 256  # images of which errors are followed over time: each of those times costs as much as an ANN pass


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


Net = SpikingNetwork | str | os.PathLike[str]
Metric = Callable[[Any, Any], Any]


@torch.no_grad()
def evaluate(snn: Net, loader: Iterable[Any], *, metric: Metric | None = None, progress: bool = False) -> Evaluation:
    """Accuracy after every time step, and the state of every layer, in one pass over labelled batches (x, y).

    snn: a spiking network, or the .spk file of one.
    Batches without labels give agreement with the ANN, and no accuracy.
    metric: for networks that do not classify: metric(result, y) of some images gives a number, their average. Without
    y, it is given what the ANN gives.
    """
    if isinstance(snn, str | os.PathLike):
        snn = load(snn)
    if not isinstance(snn, SpikingNetwork):
        raise UnsupportedModelError(
            f"evaluate() takes a SpikingNetwork or a .spk file, not {type(snn).__name__}; convert() makes one"
        )
    if metric is None and not gives_class_scores(snn.graph):
        raise DataError(
            "this network does not give the scores of two or more classes as its one output, so it has no accuracy; "
            "give evaluate() a metric=, such as torch.nn.functional.mse_loss"
        )
    sums = _Sums(Ledger(snn.graph, snn.sites, snn.T), layers={node.name: _LayerSums() for node in snn.graph.neurons})
    total = len(loader) if isinstance(loader, Sized) else None
    for item in track(as_batches(loader), "evaluating", total, progress):
        inputs, rest = split_batch(item, len(snn.graph.inputs))
        labels = _labels(rest, len(inputs[0]), snn.graph) if metric is None else rest[0] if rest else None
        if sums.labelled not in (None, labels is not None):
            raise DataError("some batches have labels and some have none")
        sums.labelled = labels is not None
        images = fit_inputs(snn.graph, inputs)
        size = snn.chunk_size(len(images[0]), beside=_bytes_kept(snn))
        for start in range(0, len(images[0]), size):
            part = slice(start, start + size)
            chunk, wanted = tuple(x[part] for x in images), tree_map(partial(_some, part), labels)
            ys, z = _run(snn, sums, chunk)
            if metric is None:
                _add_answers(sums, snn.running(0, ys[0]), z[0], wanted)
            else:
                _add_metric(snn, sums, metric, ys, z, wanted)
    if not sums.images:
        raise DataError("there are no images to evaluate: the iterable of batches is empty")
    return _result(snn, sums)


def compare(
    networks: Mapping[str, Net] | Sequence[Net],
    loader: Iterable[Any],
    *,
    metric: Metric | None = None,
    progress: bool = False,
) -> dict[str, Evaluation]:
    """Evaluate several networks, or their files, on the same batches; by name, or by recipe and T."""
    if isinstance(networks, str | os.PathLike | SpikingNetwork):
        raise DataError("compare() takes several networks, as a list or by name in a dict; evaluate() takes one")
    named = networks if isinstance(networks, Mapping) else _named(networks)
    if not named:
        raise DataError("there are no networks to compare")
    batches = list(loader) if isinstance(loader, Iterator) else loader  # which can be read only once
    return {name: evaluate(net, batches, metric=metric, progress=progress) for name, net in named.items()}


def _named(networks: Sequence[Net]) -> dict[str, Net]:
    names: dict[str, Net] = {}
    for net in networks:
        name = f"{net.recipe.name}, T={net.T}" if isinstance(net, SpikingNetwork) else os.fspath(net)
        while name in names:
            name += "'"
        names[name] = net
    return names


def gives_class_scores(graph: Graph) -> bool:
    """Whether the network has one output, (batch, classes), of which the largest is the answer."""
    return len(graph.outputs) == 1 and len(graph.outputs[0].shape) == 1 and graph.outputs[0].shape[0] > 1


def _bytes_kept(snn: SpikingNetwork) -> int:
    """Of one image: activations of all layers, and their mean spikes after several steps."""
    return sum(prod(n.shape) for n in snn.graph.neurons) * (len(checkpoints(snn.T)) + 2) * snn.graph.dtype.itemsize


def _some(part: slice, value: Any) -> Any:
    return value[part] if isinstance(value, Tensor) else value


def _labels(rest: Any, images: int, graph: Graph) -> Tensor | None:
    if not rest:
        return None
    classes = graph.outputs[0].shape[0]
    y = torch.as_tensor(rest[0]).cpu()
    if y.shape != (images,) or y.is_floating_point():
        raise DataError(f"labels must be {images} whole numbers, one an image, not {y.dtype} of shape {tuple(y.shape)}")
    if images and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(f"labels must lie in 0..{classes - 1}, but go from {int(y.min())} to {int(y.max())}")
    return y


def _run(snn: SpikingNetwork, sums: _Sums, images: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The currents at the outputs, [(T, B, ...)], and what the ANN gives, [(B, ...)]; all layers are accounted for."""
    z = run_ann(snn.source, images, lambda node, value: _keep_target(sums, node, value))
    ys = snn.currents(images, lambda node, value: _add_spikes(snn, sums, node, value))
    sums.ledger.begin(len(images[0]))
    for steps in sorted({integrated for _, integrated in _followed(snn, sums)}):
        run_steps(_mean_program(snn, sums, steps), images, 1, {}, None, None)
    for layer in sums.layers.values():
        layer.steps, layer.total, layer.target = 0, None, None
        layer.means.clear()
    sums.images += len(images[0])
    return ys, z


def _add_answers(sums: _Sums, running: Tensor, z: Tensor, labels: Tensor | None) -> None:
    """running: the mean so far of the class scores, (latency, B, classes); z: those of the ANN."""
    answers, ann = running.argmax(-1).cpu(), z.argmax(-1).cpu()  # (latency, B), (B,)
    sums.same_over_time = _plus(sums.same_over_time, (answers == ann).sum(1))
    begun = running.ne(0).any(-1).cpu()  # zeros are no answer; what the network gives at its end is
    begun[-1] = True
    final = ((answers == answers[-1]) & begun).flip(0).cumprod(0).flip(0)  # (latency, B)
    sums.final_over_time = _plus(sums.final_over_time, final.sum(1))
    sums.final_steps += (len(final) + 1 - final.sum(0)).tolist()
    confidence = torch.stack([y.double().softmax(1).amax(1).sum().cpu() for y in (running[-1], z)])
    sums.confidence = _plus(sums.confidence, confidence)
    if labels is not None:
        sums.right_over_time = _plus(sums.right_over_time, (answers == labels).sum(1))
        sums.right_ann += int((ann == labels).sum())
        sums.confusion.update(zip(labels.tolist(), answers[-1].tolist(), strict=True))


def _add_metric(
    snn: SpikingNetwork, sums: _Sums, metric: Metric, ys: list[Tensor], z: list[Tensor], wanted: Any
) -> None:
    running = [snn.running(i, y) for i, y in enumerate(ys)]  # [(latency, B, ...)]
    ann = snn.graph.unflatten(z)
    results = [ann, *(snn.graph.unflatten([y[t] for y in running]) for t in range(snn.latency))]
    found = [float(metric(result, ann if wanted is None else wanted)) for result in results]
    sums.metric = _plus(sums.metric, torch.tensor(found, dtype=torch.float64) * len(z[0]))


def _add_spikes(snn: SpikingNetwork, sums: _Sums, node: Node, value: Value) -> None:
    if not isinstance(node.op, Activation):
        return
    layer, site = sums.layers[node.name], snn.sites[node.name]
    assert isinstance(site, Neurons)
    mean, share = value.mean(), value.steps / snn.T  # (B, C, ...)
    layer.rates = _plus(layer.rates, _by_channel(snn.graph, node, site.rate(value, mean)) * share)
    layer.by_step.append(spikes_by_step(value))
    for steps in {steps for pair in _followed(snn, sums) for steps in pair}:
        if layer.steps < steps <= layer.steps + value.steps:
            layer.means[steps] = _plus(layer.total, _first_steps(value, steps - layer.steps)) / steps
    layer.total = _plus(layer.total, mean * value.steps)
    layer.steps += value.steps


def _by_channel(graph: Graph, node: Node, rates: Tensor) -> Tensor:
    """Of single neurons, (B, C, ...) -> (C,): means over each channel, summed over the images."""
    total = rates.sum(0, dtype=torch.float64).expand(node.shape)  # (C, ...)
    axis = graph.channel_axis(node) % max(1, len(node.shape))
    return total.movedim(axis, 0).reshape(node.shape[axis], -1).mean(1) if node.shape else total.reshape(1)


def _followed(snn: SpikingNetwork, sums: _Sums) -> set[tuple[int, int]]:
    """After how many steps the layers are looked at, and how many steps of their input they have integrated by then."""
    delays = {site.delay for site in snn.sites.values() if isinstance(site, Neurons)}
    times = checkpoints(snn.T) if sums.images < PROFILED else [snn.T]
    return {(steps, min(steps + delay, snn.T)) for steps in times for delay in delays}


def checkpoints(T: int) -> list[int]:
    """1, 2, 4, ... and T."""
    return [*(2**i for i in range(T.bit_length()) if 2**i < T), T]


def _first_steps(value: Value, steps: int) -> Tensor:
    """The sum over the first steps, (B, ...)."""
    if isinstance(value, PackedSpikes):
        return PackedSpikes(value.bits[:steps], value.channel_height, value.shape).mean() * steps
    return mean_over_time(value.data[:steps]) * steps


def _keep_target(sums: _Sums, node: Node, value: Value) -> None:
    if isinstance(node.op, Activation):
        sums.layers[node.name].target = value.data


def _mean_program(snn: SpikingNetwork, sums: _Sums, steps: int) -> list[Instruction]:
    """The network on means over its first steps, with what neurons really fired: averaging commutes with the rest."""
    return [replace(step, run=partial(_run_on_means, snn, sums, steps, step)) for step in ann_program(snn.graph)]


def _run_on_means(
    snn: SpikingNetwork, sums: _Sums, until: int, step: Instruction, inputs: Sequence[Value], steps: int, state: State
) -> Value:
    if isinstance(step.node.op, Activation):
        return _account(snn, step.node, sums, until, inputs[0].data)
    if until == snn.T:
        sums.ledger.note(step.node, [value.data for value in inputs])
    return step.run(inputs, steps, state)


def _account(snn: SpikingNetwork, node: Node, sums: _Sums, integrated: int, arriving: Tensor) -> Value:
    """Take stock of one layer, given the mean current of so many steps; and go on with its mean spikes of as many."""
    site, layer = snn.sites[node.name], sums.layers[node.name]
    x, fresh = layer.target, max(0, PROFILED - sums.images)
    assert isinstance(site, Neurons) and x is not None
    for steps in (k for k, until in _followed(snn, sums) if until == min(k + site.delay, snn.T) == integrated):
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


def _result(snn: SpikingNetwork, sums: _Sums) -> Evaluation:
    def shares(total: Tensor | None) -> list[float]:
        return [] if total is None else [float(share) for share in total.double() / sums.images]

    same, right = shares(sums.same_over_time), shares(sums.right_over_time)
    (own, ann), metric = shares(sums.confidence) or (None, None), shares(sums.metric)
    layers = [_layer_result(snn, node, sums.layers[node.name], sums.images) for node in snn.graph.neurons]
    operations = sums.ledger.result()
    return Evaluation(
        images=sums.images,
        profiled=min(sums.images, PROFILED),
        T=snn.T,
        latency=snn.latency,
        recipe=snn.recipe.name,
        classes=snn.graph.outputs[0].shape[0] if gives_class_scores(snn.graph) else 0,
        accuracy=right[-1] if right else None,
        ann_accuracy=sums.right_ann / sums.images if right else None,
        accuracy_over_time=right,
        agreement=same[-1] if same else None,
        agreement_over_time=same,
        final_steps=sums.final_steps,
        final_over_time=shares(sums.final_over_time),
        confidence=own,
        ann_confidence=ann,
        confusion=[[label, answer, n] for (label, answer), n in sorted(sums.confusion.items())],
        metric=metric[-1] if metric else None,
        ann_metric=metric[0] if metric else None,
        metric_over_time=metric[1:],
        layers=layers,
        operations=operations,
        operations_over_time=_operations_over_time(snn, layers, operations),
    )


def _operations_over_time(snn: SpikingNetwork, layers: list[LayerResult], operations: Operations) -> list[float]:
    """Those of each connection, spread over the steps as the spikes of the neurons in front of it are."""
    rates = {layer.name: torch.tensor(layer.rates_over_time, dtype=torch.float64) for layer in layers}
    by_step, begins = torch.zeros(snn.latency, dtype=torch.float64), snn.begins
    for edge in (edge for edge in operations.layers if edge.synaptic_operations):
        origins = _neurons_behind(snn.graph, edge.source)
        spikes = torch.stack([rates[name] for name in origins]).sum(0)  # (T,)
        begin = max(begins[name] for name in origins)
        by_step[begin : begin + snn.T] += edge.synaptic_operations * spikes / spikes.sum()
    return [float(n) for n in by_step.cumsum(0)]


def _neurons_behind(graph: Graph, name: str) -> set[str]:
    """The neurons whose spikes a value is made of."""
    node = graph.by_name[name]
    if isinstance(node.op, Activation):
        return {name}
    return {found for i in node.inputs for found in _neurons_behind(graph, i)}


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
