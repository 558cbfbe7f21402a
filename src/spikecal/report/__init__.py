"""The HTML report: one file that holds everything and needs no network.

`collect` gathers plain numbers, the template and its script draw them; what comes from files, such as the names of
layers, reaches the page only as data.
"""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from .. import __version__
from ..calibration import BiasShift, InitialPotential
from ..checkpoint import load
from ..errors import DataError, UnsupportedModelError
from ..evaluation import Evaluation, evaluate, gives_class_scores
from ..files import replacing
from ..images import Inputs, as_batches, fit_inputs, split_batch
from ..judgement import advice, comparison_verdict, verdict
from ..network import SpikingNetwork
from ..ops import Activation
from ..simulation import Neurons, run_ann

SAMPLE = 64  # images for histograms and for the error before calibration
SHOWN = 4  # images of which spikes are shown
ROWS = 64  # neurons in a raster
BINS = 40
NOT_CLASSIFYING = "a report is of a network that classifies; what a metric= found is in the result of evaluate()"

Place = str | os.PathLike[str]


@overload
def write_report(
    result: Evaluation, path: Place, /, *, title: str = ..., command: str = ..., classes: Sequence[str] = ...
) -> Evaluation: ...
@overload
def write_report(
    snn: SpikingNetwork | Place,
    loader: Iterable[Any],
    path: Place,
    *,
    title: str = ...,
    command: str = ...,
    classes: Sequence[str] = ...,
    progress: bool = ...,
) -> Evaluation: ...
def write_report(
    snn: Evaluation | SpikingNetwork | Place,
    loader: Any,
    path: Place | None = None,
    *,
    title: str = "Spiking network",
    command: str = "",
    classes: Sequence[str] = (),
    progress: bool = False,
) -> Evaluation:
    """Write what was found about a network as one HTML file.

    write_report(result, path): what is in an Evaluation.
    write_report(snn, loader, path): evaluate a network, or the .spk file of one, on labelled batches (x, y), and show
    also what only images tell: errors before calibration, histograms and spikes.

    classes: their names by index, if they have any.
    """
    if isinstance(snn, Evaluation):
        if path is not None:
            raise DataError("an Evaluation has seen its images: write_report(result, path) takes no others")
        result, path = snn, _writable(loader)
        if not result.classes:
            raise DataError(NOT_CLASSIFYING)
        data = summary(result)
    else:
        if path is None:
            raise DataError("a report of a network needs images: write_report(snn, loader, path)")
        path = _writable(path)
        result, data = _evaluated(snn, loader, progress)
    data |= {"title": title, "command": command, "class_names": list(classes)}
    with replacing(path) as temporary:
        temporary.write_text(render("page.html", data), encoding="utf-8")
    return result


def _writable(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise DataError(f"a report is written to the path of a file, not to a {type(path).__name__}")
    if not Path(path).parent.is_dir():
        raise DataError(f"there is no folder {Path(path).parent} to write {Path(path).name} into")
    return Path(path)


def _evaluated(snn: SpikingNetwork | Place, loader: Iterable[Any], progress: bool) -> tuple[Evaluation, dict[str, Any]]:
    if isinstance(snn, str | os.PathLike):
        snn = load(snn)
    if not isinstance(snn, SpikingNetwork):
        raise UnsupportedModelError(
            f"a report is of an Evaluation, a SpikingNetwork or a .spk file, not of a {type(snn).__name__}"
        )
    if not gives_class_scores(snn.graph):
        raise DataError(NOT_CLASSIFYING)
    sample = _Sample(len(snn.graph.inputs))
    result = evaluate(snn, sample.of(loader), progress=progress)
    images = fit_inputs(snn.graph, tuple(torch.stack(part) for part in zip(*sample.images, strict=True)))
    return result, collect(snn, result, images)


class _Sample:
    """Some images, drawn from all that pass by."""

    def __init__(self, inputs: int) -> None:
        self.inputs, self.seen, self.images = inputs, 0, list[tuple[Tensor, ...]]()
        self.generator = random.Random(0)

    def of(self, loader: Iterable[Any]) -> Iterator[Any]:
        for batch in as_batches(loader):
            for image in zip(*split_batch(batch, self.inputs)[0], strict=True):
                place = self.generator.randint(0, self.seen)
                self.seen += 1
                if len(self.images) < SAMPLE:
                    self.images.append(image)
                elif place < SAMPLE:
                    self.images[place] = image
            yield batch


def write_comparison(
    results: Mapping[str, Evaluation],
    path: str | os.PathLike[str],
    *,
    title: str = "Spiking networks compared",
    command: str = "",
) -> None:
    """Write evaluations of several networks, by name, as one HTML file with their trade-offs."""
    networks = [{"name": name, **result.to_dict()} for name, result in results.items()]
    data = {"title": title, "command": command, "networks": networks, "verdict": comparison_verdict(results)}
    with replacing(Path(path)) as temporary:
        temporary.write_text(render("comparison.html", data), encoding="utf-8")


def render(template: str, data: dict[str, Any]) -> str:
    """A page for these data."""
    try:
        from jinja2 import Environment, PackageLoader
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as e:
        raise DataError(f"a report needs jinja2 and plotly: pip install 'spikecal[report]' ({e})") from e
    pages = Environment(loader=PackageLoader("spikecal.report", "."), autoescape=True)
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    harmless = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return pages.get_template(template).render(title=data["title"], data=harmless, plotly=get_plotlyjs())


def summary(result: Evaluation) -> dict[str, Any]:
    """What the page shows of an evaluation alone, as plain numbers and text."""
    numbers = result.to_dict()
    layers = [{**layer, "before": None, "after": layer["error"]} for layer in numbers["layers"]]
    return {
        **numbers,
        "layers": layers,
        "verdict": verdict(result),
        "advice": advice(result),
        "sample": 0,  # images of which more is shown
        "recipe_json": None,
        "environment": {
            "spikecal": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.machine(),
            "date": date.today().isoformat(),
        },
    }


def collect(snn: SpikingNetwork, result: Evaluation, images: Inputs) -> dict[str, Any]:
    """Everything that the page shows: the summary, and what the network does with some images."""
    before, after = (_errors(net, images) for net in (uncalibrated(snn), snn))
    if not snn.recipe.steps:
        before = dict.fromkeys(before)  # nothing was done
    pictures, data = _pictures(snn, images), summary(result)
    more = {name: {"before": before[name], "after": after[name], **pictures[name]} for name in pictures}
    return {
        **data,
        "layers": [{**layer, **more[layer["name"]]} for layer in data["layers"]],
        "sample": len(images[0]),
        "shift": sum(s.fraction for s in snn.recipe.steps if isinstance(s, BiasShift | InitialPotential)),
        "recipe_json": json.loads(snn.recipe.to_json()),
    }


def _errors(snn: SpikingNetwork, images: Inputs) -> dict[str, float | None]:
    return {layer.name: layer.error for layer in evaluate(snn, [_together(images)]).layers}


def uncalibrated(snn: SpikingNetwork) -> SpikingNetwork:
    """The same thresholds on the original weights, and nothing corrected."""
    sites = {
        name: replace(site, v0=torch.zeros_like(site.v0), bias=torch.zeros_like(site.bias), temporal=None)
        if isinstance(site, Neurons)
        else replace(site, bias=torch.zeros_like(site.bias), weights=None)
        for name, site in snn.sites.items()
    }
    return SpikingNetwork(snn.source, snn.source, sites, snn.T, snn.recipe, {}, snn.memory, snn.engine)


def _together(images: Inputs) -> Any:
    return images[0] if len(images) == 1 else (images,)


def _pictures(snn: SpikingNetwork, images: Inputs) -> dict[str, dict[str, Any]]:
    """By layer: histograms of the ANN's activations and of the mean spikes, and the spikes of a few images."""
    means, targets, trains = dict[str, Tensor](), dict[str, Tensor](), dict[str, list[Tensor]]()

    def add(node: Any, value: Any) -> None:
        if isinstance(node.op, Activation):
            share = value.mean() * (value.steps / snn.T)
            means[node.name] = means.get(node.name, 0) + share
            trains.setdefault(node.name, []).append(_rows(value.data[:, :SHOWN]))

    def keep(node: Any, value: Any) -> None:
        if isinstance(node.op, Activation):
            targets[node.name] = value.data

    snn.currents(images, add)
    with torch.no_grad():
        run_ann(snn.source, images, keep)
    return {
        node.name: {
            **_histograms(targets[node.name], means[node.name], snn.sites[node.name]),
            "most": 1 - snn.sites[node.name].start / snn.T,  # type: ignore[union-attr]  # of the threshold
            "raster": _raster(torch.cat(trains[node.name])),
        }
        for node in snn.graph.neurons
    }


def _rows(spikes: Tensor) -> Tensor:
    """Some neurons, evenly spaced, of a train (t, B, ...): (t, B, rows), whether they fire."""
    flat = spikes.flatten(2) if spikes.ndim > 2 else spikes.unsqueeze(2)
    chosen = torch.linspace(0, flat.shape[2] - 1, min(ROWS, flat.shape[2]), device=flat.device).round().long()
    return flat[:, :, chosen] != 0


def _raster(fired: Tensor) -> list[list[list[int]]]:
    """(T, B, rows) -> for every image the steps and the neurons of its spikes."""
    spikes = [fired[:, image].nonzero() for image in range(fired.shape[1])]
    return [[(found[:, 0] + 1).tolist(), found[:, 1].tolist()] for found in spikes]


def _histograms(x: Tensor, s: Tensor, site: Any) -> dict[str, Any]:
    """Of what is above zero; the rest is told as a share."""
    top = max(float(x.max()), float(site.threshold.max()), 1e-12)
    edges = torch.linspace(0, top, BINS + 1)
    values: Sequence[Tensor] = [t[t > 0].float().cpu() for t in (x, s)]
    return {
        "edges": edges.tolist(),
        "ann_histogram": torch.histogram(values[0], edges).hist.tolist(),
        "snn_histogram": torch.histogram(values[1], edges).hist.tolist(),
        "ann_positive": len(values[0]) / x.numel(),
        "snn_positive": len(values[1]) / s.numel(),
    }
