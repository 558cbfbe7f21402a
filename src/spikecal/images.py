"""Batches as users have them: tensors, or tuples that begin with the model's inputs and may end with labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from .errors import CalibrationError, DataError, UnsupportedModelError
from .graph import Graph

Inputs = tuple[Tensor, ...]


def count_inputs(model: nn.Module) -> int:
    """How many positional arguments forward() needs."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in kinds and p.default is p.empty for p in parameters)
    if not count and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UnsupportedModelError("forward(*inputs) does not tell how many inputs the model has; name them")
    return max(1, count)


def split_batch(item: Any, inputs: int) -> tuple[Inputs, Any]:
    """A batch as (the model's inputs, what follows them): x, (x, y), (x1, x2, y) and ((x1, x2), y) all do."""
    if isinstance(item, Tensor) and item.ndim == 0:
        raise DataError("a batch must hold images along its first dimension, not be a single number")
    if isinstance(item, Tensor):
        found, rest = (item,), ()
    elif isinstance(item, (tuple, list)) and item and isinstance(item[0], (tuple, list)):
        found, rest = tuple(item[0]), tuple(item[1:])
    elif isinstance(item, (tuple, list)):
        found, rest = tuple(item[:inputs]), tuple(item[inputs:])
    else:
        hint = "; make tensors of arrays with torch.from_numpy" if hasattr(item, "__array__") else ""
        if isinstance(item, dict):
            hint = "; take out what the model gets, as in ((b['image'], b['label']) for b in loader)"
        raise DataError(f"a batch must be a tensor or a tuple that starts with one, not {type(item).__name__}{hint}")
    if len(found) != inputs or not all(isinstance(x, Tensor) for x in found):
        kinds = ", ".join(type(x).__name__ for x in found) or "nothing"
        raise DataError(f"a batch must start with {inputs} tensor(s) for the model, but starts with {kinds}")
    if len({len(x) for x in found}) > 1:
        raise DataError(f"the inputs of one batch hold different numbers of images: {[len(x) for x in found]}")
    return found, rest


def as_batches(batches: Any) -> Iterable[Any]:
    """An iterable of batches; one tensor is one batch."""
    if isinstance(batches, Tensor):
        return [batches]
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise DataError(
            f"a {type(batches).__name__} gives single images; put it into a DataLoader(dataset, batch_size=64, "
            "shuffle=True), which gives batches"
        )
    if isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(x, Tensor) for x in batches):
        x, y = batches
        if x.ndim > 1 and y.ndim == 1 and not y.is_floating_point():
            raise DataError("these are images and their labels, one pair, not a list of batches; write [(x, y)]")
    if not isinstance(batches, Iterable):
        raise DataError(f"batches must be an iterable of tensors, such as a DataLoader, not {type(batches).__name__}")
    return batches


def collect(batches: Iterable[Any], inputs: int, limit: int) -> Inputs:
    """The first `limit` images of an iterable of batches, joined: (N, ...) for each input of the model."""
    parts: list[Inputs] = []
    count = 0
    for item in as_batches(batches):
        found, _ = split_batch(item, inputs)
        if parts and [x.shape[1:] for x in found] != [x.shape[1:] for x in parts[0]]:
            shapes = [[tuple(x.shape[1:]) for x in p] for p in (parts[0], found)]
            raise CalibrationError(
                f"calibration images differ in shape: {shapes[0]} and {shapes[1]}; resize or crop them"
            )
        parts.append(found)
        count += len(found[0])
        if count >= limit:
            break
    if not count:
        raise CalibrationError("there are no calibration images: the iterable of batches is empty")
    joined = tuple(torch.cat(p)[:limit] for p in zip(*parts, strict=True))
    for x in joined:
        check_images(x)
    return joined


def check_images(x: Tensor) -> None:
    if not x.is_floating_point():
        raise CalibrationError(
            f"images must be floating point numbers, scaled as in training, not {x.dtype}; try x.float() / 255"
        )
    if not _is_finite(x):
        raise CalibrationError("the images hold NaN or infinite values; check the preprocessing")


def _is_finite(x: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, without a copy of x."""
    return not x.numel() or all(bool(torch.isfinite(end)) for end in x.aminmax())


def fit_inputs(graph: Graph, inputs: Sequence[Any]) -> Inputs:
    """The inputs on the network's device and in its precision, or an error that says what does not fit."""
    nodes = graph.inputs
    if len(inputs) != len(nodes):
        raise DataError(f"the network takes {len(nodes)} input(s), not {len(inputs)}")
    for node, x in zip(nodes, inputs, strict=True):
        if not isinstance(x, Tensor):
            raise DataError(f"input {node.name!r} must be a tensor, not {type(x).__name__}")
        if tuple(x.shape[1:]) != node.shape or x.ndim == 0:
            wanted = ", ".join(map(str, node.shape))
            raise DataError(f"input {node.name!r} must have shape (batch, {wanted}), not {tuple(x.shape)}")
        if not x.is_floating_point():
            raise DataError(f"input {node.name!r} must be floating point, scaled as in training, not {x.dtype}")
    if not all(map(_is_finite, inputs)):
        raise DataError("the images hold NaN or infinite values; check the preprocessing")
    if len({len(x) for x in inputs}) > 1:
        raise DataError(f"the inputs hold different numbers of images: {[len(x) for x in inputs]}")
    return tuple(_laid_out(x.detach().to(graph.device, graph.dtype)) for x in inputs)


def _laid_out(x: Tensor) -> Tensor:
    """Images with the channels last in memory: faster to convolve on a CPU, and torch keeps them so."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
