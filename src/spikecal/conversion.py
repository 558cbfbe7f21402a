"""From a trained network to a calibrated spiking network: Algorithm 1 of the paper."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from .calibration import NoEffectWarning
from .capture import capture
from .checkpoint import load
from .errors import CalibrationError, DataError, MemoryBudgetError, UnsupportedModelError
from .graph import Graph, Node
from .images import Inputs, collect, count_inputs, fit_inputs
from .memory import budget, chunk_of_images
from .network import SpikingNetwork
from .onnx import OnnxNetwork, read_onnx
from .preparation import prepare
from .progress import track
from .recipes import DEFAULT, Recipe, find_recipe
from .replay import LayerStatistics, Replay, initial_site
from .simulation import Site, run_ann
from .thresholds import SCRATCH, ThresholdRule
from .tracing import eval_mode
from .values import Value

Model = nn.Module | ExportedProgram | SpikingNetwork | str | os.PathLike[str]
WEIGHT_FILES = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")
MODEL_FILES = (".pt2", ".onnx", ".spk")
MOST_STEPS = 2**16  # far more than spikes need to be as good as activations


@torch.inference_mode(False)  # weights calibration takes gradients, whatever mode the caller is in
@torch.no_grad()
def convert(
    model: Model,
    batches: Iterable[Any],
    T: int = 32,
    recipe: Recipe | str | None = None,
    *,
    memory: str | float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SpikingNetwork:
    """Turn a trained network into a spiking one, calibrated for T time steps.

    model: an nn.Module, an ExportedProgram, a .pt2 or .onnx file; or a SpikingNetwork or .spk file to calibrate anew.
    batches: calibration images, as an iterable of tensors or of (tensor, label, ...) tuples; labels are ignored.
    recipe: a name ("light", "advanced", "best", ...) or a Recipe; default "best", or a spiking network's own.
    memory: the most memory for images and spikes, beside the weights, such as "2GiB"; default: half of what is free.
    seed: picks the images for the calibration steps out of those for the thresholds.

    >>> snn = convert(model, train_loader, T=8)
    """
    if isinstance(model, str | os.PathLike):
        model = open_model(Path(model))
    if recipe is None:
        recipe = model.recipe if isinstance(model, SpikingNetwork) else DEFAULT
    recipe, limit = find_recipe(recipe), budget(memory)
    if not isinstance(T, int) or isinstance(T, bool) or not 1 <= T <= MOST_STEPS:
        raise CalibrationError(f"the number of time steps T must be a whole number from 1 to {MOST_STEPS}, not {T!r}")
    graph, images = _graph_and_images(model, batches, max(recipe.threshold_images, recipe.calibration_images))
    check_tensors(graph)
    ann = prepare(graph, pool_to_conv=recipe.pool_to_conv)
    _check_pools(model, graph, ann, recipe)
    ann.check()
    images = fit_inputs(ann, images)
    if len(images[0]) > 1 and all(torch.equal(x[0], x[-1]) and torch.equal(x[1:], x[:-1]) for x in images):
        warnings.warn(
            f"all {len(images[0])} calibration images are the same, and calibration fits these alone; check the loader",
            stacklevel=4,  # behind two decorators
        )
    left = limit - _bytes_of(images, limit)
    thresholds = find_thresholds(
        ann, [x[: recipe.threshold_images] for x in images], recipe.threshold, T, left, progress
    )
    images = _pick(images, recipe.images_for(T), seed)  # and the others make room
    snn = None
    try:
        snn = calibrate(ann, thresholds, images, T, recipe, limit, progress)
    except MemoryBudgetError:  # images that only small T makes cheap are welcome, not needed
        if len(images[0]) <= recipe.calibration_images:
            raise
    if snn is None:  # the error holds on to all spike trains, until it has been handled
        images = tuple(x[: recipe.calibration_images] for x in images)
        snn = calibrate(ann, thresholds, images, T, replace(recipe, image_steps=0), limit, progress)
    if isinstance(model, SpikingNetwork):
        snn.preprocessing = model.preprocessing
    return snn


def _check_pools(model: Any, graph: Graph, ann: Graph, recipe: Recipe) -> None:
    """Neurons of pools stay in a network once they are there, and are not there without pools."""
    has_them = isinstance(model, SpikingNetwork) and model.recipe.pool_to_conv
    if has_them and not recipe.pool_to_conv:
        raise CalibrationError(
            "this network was converted with pool_to_conv, so its pools have neurons; start from the model, or give a "
            "recipe with pool_to_conv=True"
        )
    if recipe.pool_to_conv and not has_them and len(ann.neurons) == len(prepare(graph).neurons):
        warnings.warn(
            "pool_to_conv changes nothing here: the network has no average pool of values that are never negative",
            NoEffectWarning,
            stacklevel=5,
        )


def _bytes_of(images: Inputs, limit: int) -> int:
    """Memory that the images take up, or an error if there is none for a second copy of them, in another order."""
    held = sum(x.nbytes for x in images)
    if 2 * held > limit:
        raise CalibrationError(
            f"{len(images[0])} images need a memory budget of {2 * held / 2**20 + 1:.0f} MiB; raise it (memory=, "
            "--memory), or take fewer with threshold_images= and calibration_images= of the recipe, or --images"
        )
    return held


@torch.no_grad()
def calibrate(
    ann: Graph,
    thresholds: Mapping[str, Tensor],
    images: Sequence[Tensor],
    T: int,
    recipe: Recipe,
    memory: int,
    progress: bool = False,
) -> SpikingNetwork:
    """Layer by layer: replay the segment on the spikes of the layers before it, correct it, fire (Algorithm 1)."""
    replay = Replay(ann, images, T, memory, recipe.signed)
    sites, statistics = dict[str, Site](), dict[str, LayerStatistics]()
    for segment in track(replay.segments, "calibrating", len(replay.segments), progress):
        node = segment.site
        try:
            site = initial_site(node, thresholds.get(node.name), ann, recipe.delay, recipe.signed)
            layer = replay.layer(segment, site)
            for step in recipe.steps:
                step.apply(layer)
            statistics[node.name] = replay.finish(layer)
        except Exception as e:
            e.add_note(f"while calibrating {node.name!r}, site {len(sites) + 1} of {len(replay.segments)}")
            raise
        sites[node.name] = layer.site
    return SpikingNetwork(replay.graph, ann, sites, T, recipe, statistics)


def find_thresholds(
    ann: Graph, images: Sequence[Tensor], rule: ThresholdRule, T: int, memory: int, progress: bool = False
) -> dict[str, Tensor]:
    """The firing threshold of every neuron site, by watching the ANN run over the images.

    All sites watch the same passes, as many of them as fit into the memory budget together.
    """
    found: dict[str, Tensor] = {}
    waiting = {node.name: rule.accumulator(T, ann.relative_depth(node.name)) for node in ann.neurons}
    while waiting:
        rows = {name: _rows(ann, ann.by_name[name], rule.per_channel) for name in waiting}
        chosen, used = list[str](), 0
        for name, accumulator in waiting.items():
            used += accumulator.nbytes * rows[name]
            if chosen and used > memory // 2:
                break
            if used > memory:
                raise CalibrationError(
                    f"the thresholds of {name!r} at T={T} need {used / 2**20 + 1:.0f} MiB, more than the memory "
                    "budget; raise it (memory=, --memory), or let the channels of a layer share a threshold "
                    "(per_channel=False)"
                )
            chosen.append(name)

        def watch(node: Node, value: Value, chosen: list[str] = chosen) -> None:
            if node.name in chosen:
                waiting[node.name].update(_by_row(ann, node, value.data, rule.per_channel))

        scratch = SCRATCH * max(prod(ann.by_name[name].shape) for name in chosen)
        each = chunk_of_images(ann, 1, memory // 2, len(images[0]), beside=scratch)
        chunks = list(zip(*(x.split(each) for x in images), strict=True))
        for chunk in track(chunks, "finding thresholds", len(chunks), progress):
            run_ann(ann, chunk, watch)
        for name in chosen:
            threshold = waiting[name].end_pass()
            if threshold is not None:
                found[name] = _broadcast(ann, ann.by_name[name], threshold)
                del waiting[name]
    return found


def _rows(graph: Graph, node: Node, per_channel: bool) -> int:
    return node.shape[graph.channel_axis(node)] if per_channel and node.shape else 1


def _by_row(graph: Graph, node: Node, x: Tensor, per_channel: bool) -> Tensor:
    """(B, C, ...) -> (B, C, n), or (1, 1, n) if all channels share a threshold."""
    if not per_channel or x.ndim == 1:
        return x.reshape(1, 1, -1)
    x = x.movedim(graph.channel_axis(node) + 1, 1)
    return x.reshape(*x.shape[:2], -1)


def _broadcast(graph: Graph, node: Node, threshold: Tensor) -> Tensor:
    """One value a row -> the shape of a sample, with 1 where it is shared."""
    shape = [1] * len(node.shape)
    if shape:
        shape[graph.channel_axis(node)] = len(threshold)
    return threshold.reshape(shape)


def _pick(images: Inputs, count: int, seed: int) -> Inputs:
    """A random choice of images: the first ones of a sorted data set may all be of one class."""
    order = torch.randperm(len(images[0]), generator=torch.Generator().manual_seed(seed))[:count]
    return tuple(x[order.to(x.device)] for x in images)


def check_tensors(graph: Graph) -> None:
    """Raise unless the weights are sound numbers of a precision that neurons can be simulated in."""
    if graph.dtype not in (torch.float32, torch.float64) or len(graph.precisions) > 1:
        found = " and ".join(sorted(map(str, graph.precisions)))
        raise UnsupportedModelError(f"the model computes in {found}; convert it with model.float() first")
    bad = [name.split("*")[0] for name, t in graph.tensors.items() if not torch.isfinite(t).all()]  # * for folded ones
    if bad:
        raise UnsupportedModelError(
            f"the model's weights hold NaN or infinite values: {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}; "
            "load a sound checkpoint (a batch norm whose variance is zero or negative is a common reason)"
        )


def _graph_and_images(model: Any, batches: Iterable[Any], limit: int) -> tuple[Graph, Inputs]:
    """The captured model, before preparation, and the images to calibrate it with."""
    if isinstance(model, SpikingNetwork):
        return model.source, collect(batches, len(model.source.inputs), limit)
    if isinstance(model, ExportedProgram):
        graph = capture(model)
        images = collect(batches, len(graph.inputs), limit)
        check_tensors(graph)
        _check_captured(graph, model.module(), images)
        return graph, images
    model = _unwrapped(model)
    count = len(model.input_shapes) if isinstance(model, OnnxNetwork) else count_inputs(model)
    images = collect(batches, count, limit)
    parameter = next(model.parameters(), images[0])
    images = tuple(x.to(parameter.device, parameter.dtype) for x in images)
    few = [x[:2] for x in images]
    if not isinstance(model, OnnxNetwork):  # which has operators, perhaps, that do not run
        result_of(model, few)
    graph = capture(model, few)
    check_tensors(graph)
    _check_captured(graph, model, images)
    return graph, images


def _check_captured(graph: Graph, model: nn.Module, images: Inputs) -> None:
    """Raise unless the graph computes what the model gives for two images, and for one alone."""
    check_twin(result_of(model, [x[:2] for x in images]), graph, [x[:2] for x in images])
    with suppress(DataError):  # a model need not run on a single image
        check_twin(result_of(model, [x[:1] for x in images]), graph, [x[:1] for x in images])


def _unwrapped(model: Any) -> nn.Module:
    """The module without what training put around it, or an error."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError("TorchScript cannot be captured; give the nn.Module, or use torch.export")
    if not isinstance(model, nn.Module):
        hint = "; build the module and load these weights into it" if isinstance(model, dict) else ""
        raise UnsupportedModelError(
            f"a model must be an nn.Module, an ExportedProgram or a file, not {type(model).__name__}{hint}"
        )
    return model


def open_model(path: Path) -> nn.Module | ExportedProgram | SpikingNetwork:
    """A model from a file: .pt2, .onnx or .spk."""
    if path.suffix not in MODEL_FILES:
        hint = "; this one holds weights: load them into the module" if path.suffix in WEIGHT_FILES else ""
        raise UnsupportedModelError(f"{path.name}: a model file must end in {', '.join(MODEL_FILES)}{hint}")
    if path.suffix == ".spk":
        return load(path)
    if not path.is_file():
        raise UnsupportedModelError(f"there is no file {path}")
    if path.suffix == ".onnx":
        return read_onnx(path)
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)  # it writes a traceback of its own
    try:
        return torch.export.load(path)
    except Exception as e:
        raise UnsupportedModelError(f"{path.name} is not a program that torch.export can read: {e}") from e
    finally:
        log.setLevel(level)


def result_of(model: nn.Module, images: Sequence[Tensor]) -> Any:
    """What the model gives in eval mode. It gets copies of images and buffers: it may write to them."""
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        try:
            return torch.func.functional_call(model, buffers, tuple(x.clone() for x in images))
        except Exception as e:
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in images)
            raise DataError(
                f"the model cannot run on images of shape {shapes}; check their channels and size, and that the first "
                f"axis of a batch counts its images: {e}"
            ) from e


def check_twin(expected: Any, graph: Graph, images: Sequence[Tensor]) -> None:
    """Raise unless the captured graph computes what the model gave for these images."""
    pairs = (torch.utils._pytree.tree_leaves(r) for r in (expected, graph.unflatten(run_ann(graph, images))))
    theirs, ours = ([leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in pairs)
    for wanted, found in zip(theirs, ours, strict=True):
        if not wanted.is_floating_point():
            continue  # nothing that depends on the images
        error = float("inf")
        if wanted.shape == found.shape:
            error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        if not error < 1e-4 and bool(torch.isfinite(wanted).all()):
            raise UnsupportedModelError(
                f"the captured network differs from the model by {error:.2g} of its largest output: its forward pass "
                "probably depends on more than its images and weights (random numbers, global state, batch size)"
            )
