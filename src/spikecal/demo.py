"""The demo: one small trained network, every recipe, few time steps."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from . import __version__
from .conversion import convert
from .data import load_data
from .evaluation import evaluate, standard_error
from .files import write_json
from .models.digits import digits_net
from .network import SpikingNetwork
from .progress import track
from .recipes import Recipe, advanced, best, light, max_activation, percentile, plain

STEPS = (2, 4, 8, 16, 32)
SAVED = ("best", 8)
#: The paper takes 5000 iterations at lr 1e-5; 200 of those would hardly move a weight. Of 1e-5, 1e-4, 1e-3 and 1e-2
#: the last left the smallest output error on the calibration images; test accuracies had been seen by then.
ITERATIONS, LR = 200, 1e-2


def demo_recipes() -> dict[str, Recipe]:
    """Recipes under the names that the table shows."""
    short = advanced(iterations=ITERATIONS, lr=LR, calibration_images=512)
    found = {recipe.name: recipe for recipe in (max_activation(), percentile(), plain(), light())}
    return {**found, f"advanced ({ITERATIONS} it.)": short, "best": best()}


@dataclass(frozen=True)
class DemoResult:
    """Every number of the demo; accuracies are shares of the test images."""

    accuracy: dict[str, list[float]]  # by recipe, for each of `steps`
    steps: tuple[int, ...]
    ann_accuracy: float
    images: int
    seed: int
    seconds: float
    network: Path
    results: Path

    @property
    def standard_errors(self) -> tuple[float, float]:
        """The smallest and the largest one in the table."""
        shares = [share for row in self.accuracy.values() for share in row] + [self.ann_accuracy]
        errors = [standard_error(share, self.images) for share in shares]
        return min(errors), max(errors)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the versions that it came from, ready for JSON."""
        table = [
            {"recipe": recipe, "T": T, "accuracy": share, "standard_error": standard_error(share, self.images)}
            for recipe, shares in self.accuracy.items()
            for T, share in zip(self.steps, shares, strict=True)
        ]
        return {
            "model": "spikecal.models:digits_net",
            "data": "digits",
            "images": self.images,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "versions": {"spikecal": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "ann_accuracy": self.ann_accuracy,
            "table": table,
            "network": str(self.network),
        }


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and lose much where the cores have other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run_demo(
    out: Path,
    *,
    recipes: Mapping[str, Recipe] | None = None,
    steps: Sequence[int] = STEPS,
    seed: int = 0,
    progress: bool = False,
) -> DemoResult:
    """Convert the digits network with every recipe for every number of steps, and leave the results in `out`.

    Calibration sees the train split, accuracies are those on the test split. The network is captured once: a
    SpikingNetwork holds the ANN it comes from, so converting it again only calibrates anew.
    """
    start = perf_counter()
    recipes = demo_recipes() if recipes is None else recipes
    train, test = load_data("digits", split="train"), load_data("digits", split="test")
    network, results = out / f"digits-{SAVED[0]}-T{SAVED[1]}.spk", out / "results.json"
    accuracy: dict[str, list[float]] = {name: [] for name in recipes}
    ann_accuracy = 0.0
    model: nn.Module | SpikingNetwork = digits_net(pretrained=True)
    for name, T in track(list(product(recipes, steps)), "converting", len(recipes) * len(steps), progress):
        model = convert(model, train.batches(), T, recipes[name], seed=seed)
        evaluation = evaluate(model, test.batches(256))
        assert evaluation.accuracy is not None and evaluation.ann_accuracy is not None  # the digits have labels
        accuracy[name].append(evaluation.accuracy)
        ann_accuracy = evaluation.ann_accuracy
        if (name, T) == SAVED:
            model.save(network)
    result = DemoResult(accuracy, tuple(steps), ann_accuracy, len(test), seed, perf_counter() - start, network, results)
    write_json(results, result.to_dict())
    return result
