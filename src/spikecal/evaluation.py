"""How well a spiking network does, and what every layer of it does meanwhile: numbers as plain data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sized
from dataclasses import asdict, dataclass, field
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from .checkpoint import load
from .errors import DataError, UnsupportedModelError
from .graph import Graph, Node
from .images import as_batches, fit_inputs, split_batch
from .network import SpikingNetwork
from .ops import Activation
from .progress import track
from .simulation import Neurons, run_ann
from .values import Value


@dataclass(frozen=True)
class LayerResult:
    """One layer of neurons over all images."""

    name: str
    neurons: int
    threshold: float  # mean over the channels
    threshold_min: float
    threshold_max: float
    firing_rate: float  # spikes per neuron and step
    error: float  # ‖x − s̄‖² / ‖x‖² against the ANN's activation x
    dead_share: float  # neurons that never fired


@dataclass(frozen=True)
class Evaluation:
    """Accuracies are shares of images, None where there were no labels."""

    images: int
    T: int  # steps in which a layer fires
    latency: int  # steps until the last layer has done so: T, and more with firing delay
    recipe: str
    accuracy: float | None
    ann_accuracy: float | None
    accuracy_over_time: list[float]  # after 1, 2, ... steps, up to the latency
    agreement: float  # share of images on which SNN and ANN give the same answer
    agreement_over_time: list[float]
    layers: list[LayerResult]

    @property
    def standard_error(self) -> float | None:
        """Of the accuracy, from the number of images."""
        return None if self.accuracy is None else sqrt(self.accuracy * (1 - self.accuracy) / self.images)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        return {**asdict(self), "standard_error": self.standard_error}


@dataclass
class _LayerSums:
    rates: float = 0.0  # summed over images and neurons
    wrong: float = 0.0
    power: float = 0.0
    mean: Tensor | None = None  # s̄ of the images in hand, (B, C, ...)
    fired: Tensor | None = None  # ever, (C, ...)


@dataclass
class _Sums:
    images: int = 0
    labelled: bool | None = None
    right: float = 0.0
    right_ann: float = 0.0
    right_over_time: Tensor | None = None
    same_over_time: Tensor | None = None
    layers: dict[str, _LayerSums] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    snn: SpikingNetwork | str | os.PathLike[str], loader: Iterable[Any], *, progress: bool = False
) -> Evaluation:
    """Accuracy after every time step, and the state of every layer, in one pass over labelled batches (x, y).

    snn: a spiking network, or the .spk file of one.
    Batches without labels give agreement with the ANN, and no accuracy.
    """
    if isinstance(snn, str | os.PathLike):
        snn = load(snn)
    if not isinstance(snn, SpikingNetwork):
        raise UnsupportedModelError(
            f"evaluate() takes a SpikingNetwork or a .spk file, not {type(snn).__name__}; convert() makes one"
        )
    if not gives_class_scores(snn.graph):
        raise DataError(
            "only a network whose one output is the scores of two or more classes can be evaluated; compare "
            "snn(x) with snn.ann(x) for another"
        )
    sums = _Sums(layers={node.name: _LayerSums() for node in snn.graph.neurons})
    total = len(loader) if isinstance(loader, Sized) else None
    for item in track(as_batches(loader), "evaluating", total, progress):
        inputs, rest = split_batch(item, len(snn.graph.inputs))
        labels = _labels(rest, len(inputs[0]), snn.graph.outputs[0].shape[0])
        if sums.labelled not in (None, labels is not None):
            raise DataError("some batches have labels and some have none")
        sums.labelled = labels is not None
        images = fit_inputs(snn.graph, inputs)
        size = snn.chunk_size(len(images[0]))
        for start in range(0, len(images[0]), size):
            part = slice(start, start + size)
            _add_chunk(snn, sums, tuple(x[part] for x in images), None if labels is None else labels[part])
    if not sums.images:
        raise DataError("there are no images to evaluate: the iterable of batches is empty")
    return _result(snn, sums)


def gives_class_scores(graph: Graph) -> bool:
    """Whether the network has one output, (batch, classes), of which the largest is the answer."""
    return len(graph.outputs) == 1 and len(graph.outputs[0].shape) == 1 and graph.outputs[0].shape[0] > 1


def _labels(rest: Any, images: int, classes: int) -> Tensor | None:
    if not rest:
        return None
    y = torch.as_tensor(rest[0]).cpu()
    if y.shape != (images,) or y.is_floating_point():
        raise DataError(f"labels must be {images} whole numbers, one an image, not {y.dtype} of shape {tuple(y.shape)}")
    if images and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(f"labels must lie in 0..{classes - 1}, but go from {int(y.min())} to {int(y.max())}")
    return y


def _add_chunk(snn: SpikingNetwork, sums: _Sums, images: tuple[Tensor, ...], labels: Tensor | None) -> None:
    (ys,) = snn.currents(images, lambda node, value: _add_spikes(snn, sums, node, value))  # (T, B, classes)
    (z,) = run_ann(snn.source, images, lambda node, value: _compare(snn, sums, node, value))  # (B, classes)
    answers, ann = snn.running(0, ys).argmax(-1).cpu(), z.argmax(-1).cpu()  # (latency, B), (B,)
    sums.images += len(ann)
    same = (answers == ann).sum(1)
    sums.same_over_time = same if sums.same_over_time is None else sums.same_over_time + same
    if labels is not None:
        right = (answers == labels).sum(1)
        sums.right_over_time = right if sums.right_over_time is None else sums.right_over_time + right
        sums.right_ann += int((ann == labels).sum())


def _add_spikes(snn: SpikingNetwork, sums: _Sums, node: Node, value: Value) -> None:
    if not isinstance(node.op, Activation):
        return
    layer = sums.layers[node.name]
    site = snn.sites[node.name]
    assert isinstance(site, Neurons)
    mean, share = value.mean(), value.steps / snn.T  # (B, C, ...)
    layer.rates += float(site.rate(value, mean).sum(dtype=torch.float64)) * share
    layer.mean = mean * share if layer.mean is None else layer.mean + mean * share


def _compare(snn: SpikingNetwork, sums: _Sums, node: Node, value: Value) -> None:
    if not isinstance(node.op, Activation):
        return
    layer, site = sums.layers[node.name], snn.sites[node.name]
    assert layer.mean is not None and isinstance(site, Neurons)
    layer.wrong += float((value.data - layer.mean).square().sum(dtype=torch.float64))
    layer.power += float(value.data.square().sum(dtype=torch.float64))
    fired = (layer.mean > 0).any(0)
    layer.fired = fired if layer.fired is None else layer.fired | fired
    layer.mean = None


def _result(snn: SpikingNetwork, sums: _Sums) -> Evaluation:
    same = (sums.same_over_time.double() / sums.images).tolist() if sums.same_over_time is not None else []
    right = (sums.right_over_time.double() / sums.images).tolist() if sums.right_over_time is not None else []
    return Evaluation(
        images=sums.images,
        T=snn.T,
        latency=snn.latency,
        recipe=snn.recipe.name,
        accuracy=right[-1] if right else None,
        ann_accuracy=sums.right_ann / sums.images if right else None,
        accuracy_over_time=right,
        agreement=same[-1],
        agreement_over_time=same,
        layers=[_layer_result(snn, node, sums.layers[node.name], sums.images) for node in snn.graph.neurons],
    )


def _layer_result(snn: SpikingNetwork, node: Node, layer: _LayerSums, images: int) -> LayerResult:
    site, neurons = snn.sites[node.name], prod(node.shape)
    assert isinstance(site, Neurons) and layer.fired is not None
    return LayerResult(
        name=node.name,
        neurons=neurons,
        threshold=float(site.threshold.mean()),
        threshold_min=float(site.threshold.min()),
        threshold_max=float(site.threshold.max()),
        firing_rate=layer.rates / (images * neurons),
        error=layer.wrong / layer.power if layer.power else float(layer.wrong > 0),
        dead_share=1 - float(layer.fired.float().mean()),
    )
