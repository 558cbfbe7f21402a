"""Max-pooling in spiking networks: accuracy by T of its candidates, beside the same network with average pools.

    python benchmarks/pooling.py                  # everything that is not in the results yet
    python benchmarks/pooling.py --T 4 8 --seeds 0 --recipes light
    python benchmarks/pooling.py --paired         # the two exact ways against each other, on the other test images
    python benchmarks/pooling.py --table          # only write the table into docs/results.md

Each row is written as soon as it is known, so a run can be stopped and taken up again. The two networks come from
benchmarks/train_cifar.py. A seed draws the calibration images; the test images are the same for all rows. Which way
the library takes is decided on the test images that the table does not show, so the table is no result of the choice.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import records
import shared_data
import spikecal as sc
from grid import ROOT, Converter
from spikecal.graph import Graph
from spikecal.ops import Activation, MaxPool, Op, Tensors

RESULTS, DOCS = ROOT / "results" / "pooling", ROOT.parent / "docs" / "results.md"
MARKS = ("<!-- table of benchmarks/pooling.py -->", "<!-- end of the table of benchmarks/pooling.py -->")
TIMES = (4, 8, 16, 32, 64)
TABLE_IMAGES, OTHER_IMAGES = slice(0, 1000), slice(1000, 3000)  # of the test images, drawn with seed 0
RECIPES = {"light": sc.light(), "best": sc.best()}
ACCURACY, PAIRED = "accuracy.csv", "paired.csv"
FIELDS = (
    "pooling",
    "recipe",
    "T",
    "seed",
    "images",
    "accuracy",
    "standard_error",
    "ann_accuracy",
    "agreement",
    "convert_s",  # processor time, with thresholds where no earlier row has found them
    "simulate_s",
)
PAIRED_FIELDS = (
    "recipe",
    "T",
    "seed",
    "images",
    "accuracy_spikes",
    "accuracy_currents",
    "difference",
    "standard_error",  # of the difference, from the images on which one is right and the other is not
    "agreement_spikes",
    "agreement_currents",
)


@dataclass(frozen=True)
class StepwiseMaxPool(Op):
    """The maximum of each step by itself. Its mean over time is at least the maximum of the mean, mostly more."""

    pool: MaxPool

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return self.pool.run(p, *x)


def in_front_of_neurons(graph: Graph) -> Graph:
    """Max-pools change places with the activations they read: the maximum of ReLUs is the ReLU of the maximum."""
    nodes = dict(graph.by_name)
    for pool in (n for n in graph.nodes if isinstance(n.op, MaxPool)):
        relu = nodes[pool.inputs[0]]
        assert isinstance(relu.op, Activation)
        assert graph.readers[relu.name] == [pool]
        nodes[relu.name] = replace(relu, op=pool.op, shape=pool.shape)
        nodes[pool.name] = replace(pool, op=relu.op)
    return replace(graph, nodes=tuple(nodes.values()))


def step_by_step(graph: Graph) -> Graph:
    """Max-pools that remember nothing."""
    pools = {n.name: replace(n, op=StepwiseMaxPool(n.op)) for n in graph.nodes if isinstance(n.op, MaxPool)}
    return replace(graph, nodes=tuple(pools.get(n.name, n) for n in graph.nodes))


@dataclass(frozen=True)
class Pooling:
    """One way to pool: a trained network, and what is done to its graph before it is converted."""

    network: str
    rewrite: Callable[[Graph], Graph] = lambda graph: graph


SPIKES, CURRENTS = (f"max-pool of {what}, increment of the cumulative maximum" for what in ("spikes", "currents"))

#: What is compared. A max-pool that the simulation finds in a graph gives the increment of the cumulative maximum.
POOLINGS = {
    "average pool": Pooling("vgg6avg_cifar10"),
    SPIKES: Pooling("vgg6max_cifar10"),
    CURRENTS: Pooling("vgg6max_cifar10", in_front_of_neurons),
    "max-pool of currents, step by step": Pooling("vgg6max_cifar10", lambda g: step_by_step(in_front_of_neurons(g))),
}


class Bench:
    """Test images, and converters that rows with the same pooling and seed share."""

    def __init__(self, part: slice) -> None:
        x, y = shared_data.images("cifar10", "test", part.stop, 0, "vgg6max_cifar10")
        self.x, self.y = x[part], y[part]
        self._converters: dict[tuple[str, int], Converter] = {}

    def converter(self, pooling: str, seed: int) -> Converter:
        if (pooling, seed) not in self._converters:
            way = POOLINGS[pooling]
            images, _ = shared_data.images("cifar10", "train", 1024, seed + 1, way.network)
            converter = Converter(shared_data.network(way.network), images, seed)
            converter.ann = way.rewrite(converter.ann)
            self._converters[pooling, seed] = converter
        return self._converters[pooling, seed]

    def measure(self, pooling: str, recipe: str, T: int, seed: int) -> tuple[object, ...]:
        """A row of the table's results."""
        convert, start = self.converter(pooling, seed), time.process_time()
        snn = convert(RECIPES[recipe], T)
        converted = time.process_time()
        answers, simulated = snn(self.x).argmax(1), time.process_time()
        ann = snn.ann(self.x).argmax(1)
        accuracy = share(answers == self.y)
        error = math.sqrt(accuracy * (1 - accuracy) / len(self.y))
        shares = (f"{s:.4f}" for s in (accuracy, error, share(ann == self.y), share(answers == ann)))
        seconds = (f"{s:.2f}" for s in (converted - start, simulated - converted))
        return (pooling, recipe, T, seed, len(self.y), *shares, *seconds)

    def compare(self, recipe: str, T: int, seed: int) -> tuple[object, ...]:
        """Pooling of spikes against pooling of currents on the same images."""
        networks = [self.converter(pooling, seed)(RECIPES[recipe], T) for pooling in (SPIKES, CURRENTS)]
        ann, answers = networks[0].ann(self.x).argmax(1), [snn(self.x).argmax(1) for snn in networks]
        right = [(a == self.y).double() for a in answers]
        difference = right[1] - right[0]  # 1, 0 or -1 for every image
        error = float(difference.std()) / math.sqrt(len(self.y))
        shares = (*map(share, right), share(difference), error, *(share(a == ann) for a in answers))
        return (recipe, T, seed, len(self.y), *(f"{s:.4f}" for s in shares))


def share(x: Tensor) -> float:
    return float(x.double().mean())


def write_environment() -> None:
    records.write_environment(
        RESULTS,
        "python benchmarks/pooling.py",
        recipes={name: recipe.to_dict() for name, recipe in RECIPES.items()},
        networks="vgg6max_cifar10 and vgg6avg_cifar10, trained by benchmarks/train_cifar.py with seed 0",
        calibration="1024 training images drawn with seed + 1; the recipe says how many of them its steps see",
        test="test images drawn with seed 0: the first 1000 in accuracy.csv, 2000 others in paired.csv",
    )


def table() -> str:
    """Mean ± standard deviation over the seeds, in percent, as Markdown."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    ann: dict[str, float] = {}
    for row in records.read(RESULTS / ACCURACY):
        found[row["recipe"], row["pooling"], int(row["T"])].append(100 * float(row["accuracy"]))
        ann[row["pooling"]] = 100 * float(row["ann_accuracy"])
    lines = ["| recipe | pooling | ANN | " + " | ".join(f"T={T}" for T in TIMES) + " |"]
    lines.append("|---|---|" + "---:|" * (len(TIMES) + 1))
    for recipe, pooling in itertools.product(RECIPES, POOLINGS):
        cells = [cell(found[recipe, pooling, T]) for T in TIMES]
        if not any(cells):
            continue
        lines.append(f"| {recipe} | {pooling} | {ann.get(pooling, 0):.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + paired_table()


def paired_table() -> str:
    """Currents minus spikes in points, for every seed, with the standard error of each difference."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in records.read(RESULTS / PAIRED):
        difference, error = (100 * float(row[key]) for key in ("difference", "standard_error"))
        found[row["recipe"], int(row["T"])].append(f"{difference:+.1f} ± {error:.1f}")
    lines = ["| recipe | T | currents − spikes, by seed |", "|---|---:|---|"]
    lines += [f"| {recipe} | {T} | {', '.join(cells)} |" for (recipe, T), cells in sorted(found.items())]
    return "\n".join(lines) + "\n"


def cell(values: list[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f} (1 seed)"
    few = f" ({len(values)} seeds)" if len(values) < 3 else ""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}{few}"


def write_table() -> None:
    """Put the table between its two marks on the results page."""
    records.write_between(DOCS, MARKS, table())


def run(wanted: list[tuple[int, int, str, str]]) -> None:
    """Measure the wanted (T, seed, recipe, pooling) for the table."""
    bench = Bench(TABLE_IMAGES)
    known = {
        (int(row["T"]), int(row["seed"]), row["recipe"], row["pooling"]) for row in records.read(RESULTS / ACCURACY)
    }
    for T, seed, recipe, pooling in (key for key in wanted if key not in known):
        row = bench.measure(pooling, recipe, T, seed)
        records.append(RESULTS / ACCURACY, FIELDS, row)
        print(f"T={T:<3} seed {seed}  {recipe:6s} {pooling:60s} {row[5]} (ANN {row[7]})", flush=True)


def run_paired(wanted: list[tuple[int, int, str]]) -> None:
    """Compare spikes and currents for the wanted (T, seed, recipe)."""
    bench = Bench(OTHER_IMAGES)
    known = {(int(row["T"]), int(row["seed"]), row["recipe"]) for row in records.read(RESULTS / PAIRED)}
    for T, seed, recipe in (key for key in wanted if key not in known):
        row = bench.compare(recipe, T, seed)
        records.append(RESULTS / PAIRED, PAIRED_FIELDS, row)
        print(*(f"{name} {value}" for name, value in zip(PAIRED_FIELDS, row, strict=True)), sep=", ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--poolings", nargs="+", default=list(POOLINGS), choices=list(POOLINGS), metavar="POOLING")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--T", nargs="+", type=int, default=TIMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--paired", action="store_true", help="compare pooling of spikes and of currents")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    options = parser.parse_args()
    if options.table:
        write_table()
        return
    write_environment()
    if options.paired:
        run_paired(list(itertools.product(options.T, options.seeds, options.recipes)))
    else:
        run(list(itertools.product(options.T, options.seeds, options.recipes, options.poolings)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
