"""How well a spiking network does, and what every layer of it does meanwhile: numbers as plain data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from functools import partial
from html import escape
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .checkpoint import load
from .energy import Energy, Operations, estimate
from .errors import DataError, UnsupportedModelError
from .graph import Graph
from .images import as_batches, fit_inputs, split_batch
from .layer_results import LayerResult, LayerWatch, plus
from .network import SpikingNetwork, html_table
from .ops import Activation
from .progress import track
from .recipes import titled


@dataclass(frozen=True)
class Evaluation:
    """Accuracies are shares of images, None where there were no labels; with a metric, nothing is said of classes."""

    images: int
    profiled: int  # of them, the first, whose errors are followed over time
    T: int  # steps in which a layer fires
    latency: int  # steps until the last layer has done so: T, and more with firing delay
    recipe: str
    signed: bool  # whether spikes have two signs
    classes: int  # 0 for a network that does not classify
    accuracy: float | None
    ann_accuracy: float | None
    accuracy_over_time: list[float]  # after 1, 2, ... steps, up to the latency
    agreement: float | None  # share of images on which SNN and ANN give the same answer
    agreement_over_time: list[float]
    hits: list[bool]  # of every image, whether the answer is right; without labels, whether it is the ANN's
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
    def recipe_title(self) -> str:
        return titled(self.recipe, self.signed)

    @property
    def energy(self) -> list[Energy]:
        """Estimates for one image, by several sets of constants."""
        return estimate(self.operations, self.T)

    @property
    def standard_error(self) -> float | None:
        """Of the accuracy, from the number of images."""
        return None if self.accuracy is None else standard_error(self.accuracy, self.images)

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
        more = {"recipe_title": self.recipe_title, "standard_error": self.standard_error, "energy": energy}
        return {**asdict(self), "totals": totals, **more}


def standard_error(share: float, images: int) -> float:
    """Of a share of images, which is taken as if there were a hit and a miss more: it is not 0 where all were hits."""
    likely = (share * images + 1) / (images + 2)
    return sqrt(likely * (1 - likely) / images)


@dataclass
class _Sums:
    """Of answers, over the images."""

    labelled: bool | None = None
    right_ann: int = 0
    metric: Tensor | None = None  # of the ANN, and of the SNN after every step
    right_over_time: Tensor | None = None
    same_over_time: Tensor | None = None
    final_over_time: Tensor | None = None
    hits: list[bool] = field(default_factory=list)
    final_steps: list[int] = field(default_factory=list)
    confidence: Tensor | None = None  # of SNN and ANN
    confusion: Counter[tuple[int, int]] = field(default_factory=Counter)


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
    sums, watch = _Sums(), LayerWatch(snn)
    total = len(loader) if isinstance(loader, Sized) else None
    for item in track(as_batches(loader), "evaluating", total, progress):
        inputs, rest = split_batch(item, len(snn.graph.inputs))
        labels = _labels(rest, len(inputs[0]), snn.graph) if metric is None else rest[0] if rest else None
        if sums.labelled not in (None, labels is not None):
            raise DataError("some batches have labels and some have none")
        sums.labelled = labels is not None
        images = fit_inputs(snn.graph, inputs)
        size = snn.chunk_size(len(images[0]), beside=watch.bytes_kept)
        for start in range(0, len(images[0]), size):
            part = slice(start, start + size)
            chunk, wanted = tuple(x[part] for x in images), tree_map(partial(_some, part), labels)
            ys, z = watch.run(chunk)
            if metric is None:
                _add_answers(sums, snn.running(0, ys[0]), z[0], wanted)
            else:
                _add_metric(snn, sums, metric, ys, z, wanted)
    if not watch.images:
        raise DataError("there are no images to evaluate: the iterable of batches is empty")
    return _result(snn, sums, watch)


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
        name = _name(net) if isinstance(net, SpikingNetwork) else os.fspath(net)
        while name in names:
            name += "'"
        names[name] = net
    return names


def _name(snn: SpikingNetwork) -> str:
    return f"{snn.recipe.title}, T={snn.T}" + (f", latency {snn.latency}" if snn.latency > snn.T else "")


def gives_class_scores(graph: Graph) -> bool:
    """Whether the network has one output, (batch, classes), of which the largest is the answer."""
    return len(graph.outputs) == 1 and len(graph.outputs[0].shape) == 1 and graph.outputs[0].shape[0] > 1


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


def _add_answers(sums: _Sums, running: Tensor, z: Tensor, labels: Tensor | None) -> None:
    """running: the mean so far of the class scores, (latency, B, classes); z: those of the ANN."""
    answers, ann = running.argmax(-1).cpu(), z.argmax(-1).cpu()  # (latency, B), (B,)
    sums.same_over_time = plus(sums.same_over_time, (answers == ann).sum(1))
    begun = running.ne(0).any(-1).cpu()  # zeros are no answer; what the network gives at its end is
    begun[-1] = True
    final = ((answers == answers[-1]) & begun).flip(0).cumprod(0).flip(0)  # (latency, B)
    sums.final_over_time = plus(sums.final_over_time, final.sum(1))
    sums.final_steps += (len(final) + 1 - final.sum(0)).tolist()
    confidence = torch.stack([y.double().softmax(1).amax(1).sum().cpu() for y in (running[-1], z)])
    sums.confidence = plus(sums.confidence, confidence)
    sums.hits += (answers[-1] == (ann if labels is None else labels)).tolist()
    if labels is not None:
        sums.right_over_time = plus(sums.right_over_time, (answers == labels).sum(1))
        sums.right_ann += int((ann == labels).sum())
        sums.confusion.update(zip(labels.tolist(), answers[-1].tolist(), strict=True))


def _add_metric(
    snn: SpikingNetwork, sums: _Sums, metric: Metric, ys: list[Tensor], z: list[Tensor], wanted: Any
) -> None:
    running = [snn.running(i, y) for i, y in enumerate(ys)]  # [(latency, B, ...)]
    ann = snn.graph.unflatten(z)
    results = [ann, *(snn.graph.unflatten([y[t] for y in running]) for t in range(snn.latency))]
    found = [float(metric(result, ann if wanted is None else wanted)) for result in results]
    sums.metric = plus(sums.metric, torch.tensor(found, dtype=torch.float64) * len(z[0]))


def _result(snn: SpikingNetwork, sums: _Sums, watch: LayerWatch) -> Evaluation:
    def shares(total: Tensor | None) -> list[float]:
        return [] if total is None else [float(share) for share in total.double() / watch.images]

    same, right = shares(sums.same_over_time), shares(sums.right_over_time)
    (own, ann), metric = shares(sums.confidence) or (None, None), shares(sums.metric)
    layers, operations = watch.results(), watch.operations()
    return Evaluation(
        images=watch.images,
        profiled=watch.profiled,
        T=snn.T,
        latency=snn.latency,
        recipe=snn.recipe.name,
        signed=snn.recipe.signed,
        classes=snn.graph.outputs[0].shape[0] if gives_class_scores(snn.graph) else 0,
        accuracy=right[-1] if right else None,
        ann_accuracy=sums.right_ann / watch.images if right else None,
        accuracy_over_time=right,
        agreement=same[-1] if same else None,
        agreement_over_time=same,
        hits=sums.hits,
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
