"""Accuracy of recipes at several T over several seeds, on trained networks: what the accuracy benchmarks share.

Each row is written as soon as it is known, one CSV a network, so a run can be stopped and taken up again. A seed draws
the calibration images; the test images are the same for all rows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import records
import shared_data
import spikecal as sc
from spikecal.conversion import calibrate, find_thresholds
from spikecal.memory import budget

ROOT = Path(__file__).parent
FIELDS = (
    "network",
    "recipe",
    "T",
    "latency",
    "seed",
    "images",
    "accuracy",
    "ann_accuracy",
    "agreement",
    "layers_left_alone",  # where weights calibration did not lower the error
    "convert_s",  # with thresholds, where no earlier row has found them
    "simulate_s",
    "threads",
)
AGAIN = (*FIELDS[:3], "seed", "images", "accuracy", "accuracy_again", "agreement", "agreement_again")


class Converter:
    """Converts one network by many recipes; rows with the same images, threshold rule and T share their thresholds."""

    def __init__(self, model: torch.nn.Module, images: torch.Tensor, seed: int, memory: str = "6GiB") -> None:
        first = sc.convert(model, [images], 1, sc.Recipe(sc.MaxActivation(), threshold_images=1, calibration_images=1))
        self.ann, self.images, self.memory = first.source, images, budget(memory)
        self.order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.thresholds: dict[tuple[object, int], dict[str, torch.Tensor]] = {}

    def __call__(self, recipe: sc.Recipe, T: int) -> sc.SpikingNetwork:
        key = (recipe.threshold, T if isinstance(recipe.threshold, sc.MMSE) else 0)
        if key not in self.thresholds:
            self.thresholds[key] = find_thresholds(self.ann, [self.images], recipe.threshold, T, self.memory)
        images = self.images[self.order[: recipe.images_for(T)]]
        return calibrate(self.ann, self.thresholds[key], [images], T, recipe, self.memory)


def images_for(network: str, T: int) -> int:
    """Long simulations are measured on fewer images: the first of the others'."""
    del network
    return 1000 if T <= 32 else 500


@dataclass(frozen=True)
class Grid:
    """Recipes × T × seeds on some networks; the results in a folder, the tables between two marks of a page."""

    name: str
    recipes: Mapping[str, sc.Recipe]
    networks: Sequence[str]
    times: Sequence[int]
    seeds: Sequence[int] = (0, 1, 2)
    page: Path = ROOT.parent / "docs" / "results.md"
    images: Callable[[str, int], int] = images_for  # test images by network and T

    @property
    def folder(self) -> Path:
        return ROOT / "results" / self.name

    @property
    def marks(self) -> tuple[str, str]:
        return f"<!-- tables of benchmarks/{self.name}.py -->", f"<!-- end of benchmarks/{self.name}.py -->"

    def path_of(self, network: str) -> Path:
        return self.folder / f"{network}.csv"

    def measure(self, network: str, wanted: Iterable[tuple[str, int, int]]) -> Iterator[tuple[object, ...]]:
        """The rows of the wanted (recipe, T, seed) of one network, one by one."""
        dataset = "cifar100" if network.endswith("cifar100") else "cifar10"
        model = shared_data.network(network)
        converters: dict[int, Converter] = {}

        @cache
        def test(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Images, their labels, and the ANN's answers."""
            x, y = (values[:n] for values in shared_data.images(dataset, "test", max(n, 1000), 0, network))
            return x, y, sc.convert(model, [x[:2]], 1).ann(x).argmax(1)

        for recipe, T, seed in wanted:
            if seed not in converters:
                images = shared_data.images(dataset, "train", 1024, seed + 1, network)[0]
                converters[seed] = Converter(model, images, seed)
            n = self.images(network, T)
            (x, y, ann), start = test(n), time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", sc.NoEffectWarning)
                snn = converters[seed](self.recipes[recipe], T)
            converted = time.perf_counter()
            answers, simulated = snn(x).argmax(1), time.perf_counter()
            shares = [float((a == b).double().mean()) for a, b in ((answers, y), (ann, y), (answers, ann))]
            unchanged = sum(issubclass(w.category, sc.NoEffectWarning) for w in caught)
            row = (network, recipe, T, snn.latency, seed, n, *(f"{s:.4f}" for s in shares), unchanged)
            seconds = (f"{converted - start:.2f}", f"{simulated - converted:.2f}")
            print(
                f"{network}  T={T:<3}  seed {seed}  {recipe:28s} {100 * shares[0]:5.1f} %  (ANN {100 * shares[1]:.1f})",
                flush=True,
            )
            yield *row, *seconds, torch.get_num_threads()

    def run(self, network: str, wanted: Iterable[tuple[str, int, int]]) -> None:
        """Measure what is wanted, appending to the results of the network."""
        for row in self.measure(network, wanted):
            records.append(self.path_of(network), FIELDS, row)

    def repeat(self, network: str, wanted: Iterable[tuple[str, int, int]]) -> None:
        """Measure known rows once more, and write both beside each other: do they still hold?"""
        before = {key_of(row): row for row in self.read(network)}
        for values in self.measure(network, wanted):
            row = dict(zip(FIELDS, map(str, values), strict=True))
            both = [value[key] for key in ("accuracy", "agreement") for value in (before[key_of(row)], row)]
            records.append(self.folder / "again.csv", AGAIN, [*(row[key] for key in AGAIN[:5]), *both])

    def read(self, network: str) -> list[dict[str, str]]:
        return records.read(self.path_of(network))

    def write_environment(self) -> None:
        records.write_environment(
            self.folder,
            f"python benchmarks/{self.name}.py",
            recipes={name: recipe.to_dict() for name, recipe in self.recipes.items()},
            calibration="1024 training images drawn with seed + 1; the recipe says how many of them its steps see",
            test={
                network: {T: f"{self.images(network, T)} test images drawn with seed 0" for T in self.times}
                for network in self.networks
            },
        )

    def table(self, network: str) -> str:
        """Mean ± standard deviation over the seeds, in percent, as Markdown."""
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        ann: dict[int, float] = {}
        waiting: dict[str, int] = {}  # steps that a recipe needs beyond T
        for row in self.read(network):
            waiting[row["recipe"]] = int(row["latency"]) - int(row["T"])
            found[row["recipe"], int(row["T"])].append(100 * float(row["accuracy"]))
            ann[int(row["images"])] = 100 * float(row["ann_accuracy"])
        if not found:
            return ""
        lines = [
            f"### {network}",
            "",
            "ANN: " + ", ".join(f"{a:.1f} % on {n} images" for n, a in sorted(ann.items(), reverse=True)) + ".",
            "",
            "| recipe | " + " | ".join(f"T={T}" for T in self.times) + " |",
            "|---|" + "---:|" * len(self.times),
        ]
        for recipe in (r for r in self.recipes if any((r, T) in found for T in self.times)):
            cells = [mean_and_spread(found.get((recipe, T), [])) for T in self.times]
            latency = f" (latency T + {waiting[recipe]})" if waiting[recipe] else ""
            lines.append(f"| {recipe}{latency} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def tables(self) -> str:
        return "\n".join(filter(None, map(self.table, self.networks)))

    def write_tables(self) -> None:
        """Put the tables between the two marks of the page."""
        records.write_between(self.page, self.marks, self.tables())

    def main(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--networks", nargs="+", default=self.networks, choices=self.networks, metavar="NET")
        parser.add_argument(
            "--recipes", nargs="+", default=list(self.recipes), choices=list(self.recipes), metavar="RECIPE"
        )
        parser.add_argument("--T", nargs="+", type=int, default=self.times)
        parser.add_argument("--seeds", nargs="+", type=int, default=self.seeds)
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
        parser.add_argument("--table", action="store_true", help="only write the tables of what is known")
        parser.add_argument("--again", action="store_true", help="measure known rows again, into again.csv beside them")
        options = parser.parse_args()
        if options.table:
            self.write_tables()
            return
        torch.set_num_threads(options.threads)
        if not options.again:
            self.write_environment()
        for network in options.networks:
            known = {key_of(row) for row in self.read(network)}
            grid = itertools.product(options.T, options.seeds, options.recipes)
            wanted = [(r, T, s) for T, s, r in grid if ((r, T, s) in known) == options.again]
            if wanted:
                (self.repeat if options.again else self.run)(network, wanted)


def key_of(row: Mapping[str, str]) -> tuple[str, int, int]:
    """Which row of a network's results this is: its recipe, T and seed."""
    return row["recipe"], int(row["T"]), int(row["seed"])


def mean_and_spread(values: Sequence[float]) -> str:
    """A cell of a table: mean ± standard deviation, and how many seeds if fewer than three."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" + (
        f" ({len(values)} seed{'s' * (len(values) > 1)})" if len(values) < 3 else ""
    )
