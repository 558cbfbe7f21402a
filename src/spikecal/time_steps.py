"""The smallest number of time steps that loses next to nothing, found without labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .conversion import convert, open_model
from .errors import CalibrationError, DataError
from .evaluation import gives_class_scores
from .images import as_batches, collect
from .network import SpikingNetwork
from .recipes import DEFAULT, Recipe, find_recipe
from .thresholds import MaxActivation

HELD_OUT = 4  # one image in so many is kept from calibration


@dataclass(frozen=True)
class Search:
    """What a search for T has tried."""

    snn: SpikingNetwork  # at the smallest T that is good enough
    agreement: dict[int, float]  # with the ANN on the held-out images, by T
    held_out: int
    points: float

    @property
    def T(self) -> int:
        return self.snn.T

    @property
    def latencies(self) -> dict[int, int]:
        """Of all that were tried, by T: the steps until the answer is there."""
        return {T: T + self.snn.latency - self.snn.T for T in self.agreement}


def find_T(
    model: Any,
    batches: Iterable[Any],
    points: float = 1.0,
    recipe: Recipe | str | None = None,
    *,
    largest: int = 128,
    memory: str | float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Search:
    """Convert for the smallest T whose agreement with the ANN is within `points` of that at the largest T.

    Agreement is the share of images with the same answer, on a quarter of the images that calibration does not see.
    T is doubled until it is enough, then the gap below it halved: at most 14 conversions for 128. The fewer images
    are held out, the coarser the agreement: of 100, each is a point.
    """
    if not isinstance(points, int | float) or isinstance(points, bool) or not 0 <= points <= 100:
        raise CalibrationError(f"the points that may be lost must be between 0 and 100, not {points!r}")
    if not isinstance(largest, int) or isinstance(largest, bool) or largest < 1:
        raise CalibrationError(f"the largest T must be a whole number of at least 1, not {largest!r}")
    if isinstance(model, str | os.PathLike):
        model = open_model(Path(model))
    source, items = _captured(model, batches)
    if not gives_class_scores(source.graph):
        raise CalibrationError("T can be chosen only for a network with one output, scores of two or more classes")
    if recipe is None:
        recipe = model.recipe if isinstance(model, SpikingNetwork) else DEFAULT
    recipe = find_recipe(recipe)
    wanted = max(recipe.threshold_images, recipe.calibration_images)
    images = collect(items, len(source.source.inputs), wanted * HELD_OUT // (HELD_OUT - 1))
    order = torch.randperm(len(images[0]), generator=torch.Generator().manual_seed(seed))
    held = len(order) // HELD_OUT
    if not held:
        raise DataError(f"{len(order)} images are too few to keep some for the choice of T; give {HELD_OUT} or more")
    seen, kept = (tuple(x[part.to(x.device)] for x in images) for part in (order[held:], order[:held]))
    answers, tried = _answers(source.ann(*kept)), dict[int, float]()

    def attempt(T: int) -> SpikingNetwork:
        snn = convert(source, [seen], T, recipe, memory=memory, seed=seed, progress=progress)
        tried[T] = float((_answers(snn(*kept)) == answers).double().mean())
        return snn

    found = attempt(largest)  # the only one that is kept: the last one that was enough is the smallest

    def enough(T: int) -> bool:
        nonlocal found
        snn = attempt(T)
        if tried[T] < tried[largest] - points / 100:
            return False
        found = snn
        return True

    _smallest(enough, largest)
    return Search(found, dict(sorted(tried.items())), held, points)


def _captured(model: Any, batches: Iterable[Any]) -> tuple[SpikingNetwork, Iterable[Any]]:
    """The model as a spiking network from which others are made, and all batches, also of a stream."""
    if isinstance(model, SpikingNetwork):
        return model, batches
    stream = iter(as_batches(batches))
    try:
        first = next(stream)
    except StopIteration:
        raise CalibrationError("there are no calibration images: the iterable of batches is empty") from None
    once = Recipe(MaxActivation(), threshold_images=1, calibration_images=1)
    return convert(model, [first], 1, once), chain([first], stream)


def _answers(y: Tensor) -> Tensor:
    return y.argmax(1)


def _smallest(enough: Callable[[int], bool], largest: int) -> int:
    """The smallest T that is enough, if all above it are; the largest is, and is not asked about."""
    high = 1
    while high < largest and not enough(high):
        high *= 2
    low, high = high // 2, min(high, largest)  # low is not enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
