"""The paper's pipelines on trained networks: accuracy of every recipe at every T, over several seeds.

    python benchmarks/paper_pipeline.py                    # everything that is not in the results yet
    python benchmarks/paper_pipeline.py --networks resnet20_cifar10 --T 4 8 --seeds 0
    python benchmarks/paper_pipeline.py --table            # only write the tables into docs/results.md

Each row is written as soon as it is known, one CSV a network in benchmarks/results/paper_pipeline/, so a run can be
stopped and taken up again. A seed draws the calibration images; the test images are the same for all rows.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import platform
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch

import shared_data
import spikecal as sc
from spikecal.conversion import calibrate, find_thresholds
from spikecal.memory import budget

RESULTS = Path(__file__).parent / "results" / "paper_pipeline"
DOCS = Path(__file__).parent.parent / "docs" / "results.md"
MARKS = ("<!-- tables of benchmarks/paper_pipeline.py -->", "<!-- end of tables -->")
NETWORKS = ("resnet20_cifar10", "resnet8_mlperf_cifar10", "resnet20_cifar100", "resnet32_cifar10")
TIMES = (4, 8, 16, 32, 64, 128)
CALIBRATION_IMAGES = 128
SHIFT, CHANNELS = sc.BiasShift(), sc.MMSE(per_channel=True)

#: What is compared. As in the paper every row has the bias shift, so neighbouring rows differ in one thing. Weights
#: calibration takes 200 iterations where the paper takes 5000; `learning_rate.py` chose the rate that goes with them.
RECIPES: dict[str, sc.Recipe] = {
    "maximum": sc.opt(),
    "percentile": sc.Recipe(sc.Percentile(), (SHIFT,)),
    "MMSE": sc.plain(per_channel=False),
    "MMSE*": sc.plain(),
    "maximum + BC": sc.Recipe(sc.MaxActivation(), (SHIFT, sc.BiasCalibration())),
    "percentile + BC": sc.Recipe(sc.Percentile(), (SHIFT, sc.BiasCalibration())),
    "light (MMSE + BC)": sc.light(per_channel=False),
    "light (MMSE* + BC)": sc.light(),
    "MMSE* + PC": sc.Recipe(CHANNELS, (SHIFT, sc.PotentialCalibration())),
    "advanced (MMSE* + PC + WC)": sc.advanced(iterations=200, lr=3e-4, calibration_images=CALIBRATION_IMAGES),
}
FIELDS = (
    "network",
    "recipe",
    "T",
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


def images_for(T: int) -> int:
    """Long simulations are measured on fewer images."""
    return 1000 if T <= 32 else 500


class Converter:
    """Converts one network by many recipes; rows with the same images, threshold rule and T share their thresholds."""

    def __init__(self, model: torch.nn.Module, images: torch.Tensor, seed: int) -> None:
        first = sc.convert(model, [images], 1, sc.Recipe(sc.MaxActivation(), threshold_images=1, calibration_images=1))
        self.ann, self.images, self.memory = first.source, images, budget("4GiB")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.calibration = images[order[:CALIBRATION_IMAGES]]
        self.thresholds: dict[tuple[object, int], dict[str, torch.Tensor]] = {}

    def __call__(self, recipe: sc.Recipe, T: int) -> sc.SpikingNetwork:
        key = (recipe.threshold, T if isinstance(recipe.threshold, sc.MMSE) else 0)
        if key not in self.thresholds:
            self.thresholds[key] = find_thresholds(self.ann, [self.images], recipe.threshold, T, self.memory)
        return calibrate(self.ann, self.thresholds[key], [self.calibration], T, recipe, self.memory)


def run(network: str, wanted: list[tuple[str, int, int]]) -> None:
    """Measure the wanted (recipe, T, seed) of one network, appending to its results."""
    dataset = "cifar100" if network.endswith("cifar100") else "cifar10"
    model = shared_data.network(network)
    x, y = shared_data.images(dataset, "test", 1000, 0, network)
    converters: dict[int, Converter] = {}
    ann = sc.convert(model, [x[:2]], 1).ann(x).argmax(1)
    for recipe, T, seed in wanted:
        if seed not in converters:
            converters[seed] = Converter(model, shared_data.images(dataset, "train", 1024, seed + 1, network)[0], seed)
        n, start = images_for(T), time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", sc.NoEffectWarning)
            snn = converters[seed](RECIPES[recipe], T)
        converted = time.perf_counter()
        answers, simulated = snn(x[:n]).argmax(1), time.perf_counter()
        pairs = ((answers, y[:n]), (ann[:n], y[:n]), (answers, ann[:n]))
        shares = [float((a == b).double().mean()) for a, b in pairs]
        unchanged = sum(issubclass(w.category, sc.NoEffectWarning) for w in caught)
        row = (network, recipe, T, seed, n, *(f"{s:.4f}" for s in shares), unchanged)
        append(network, (*row, f"{converted - start:.2f}", f"{simulated - converted:.2f}", torch.get_num_threads()))
        print(
            f"{network}  T={T:<3}  seed {seed}  {recipe:28s} {100 * shares[0]:5.1f} %  (ANN {100 * shares[1]:.1f})",
            flush=True,
        )


def path_of(network: str) -> Path:
    return RESULTS / f"{network}.csv"


def append(network: str, row: tuple[object, ...]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    new = not path_of(network).exists()
    with path_of(network).open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        writer.writerow(row)


def read(network: str) -> list[dict[str, str]]:
    if not path_of(network).exists():
        return []
    with path_of(network).open(newline="") as file:
        return list(csv.DictReader(file))


def write_environment() -> None:
    """What the figures were made with, beside them."""
    facts = {
        "command": "python benchmarks/paper_pipeline.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "spikecal": sc.__version__,
        "machine": platform.machine(),
        "recipes": {name: recipe.to_dict() for name, recipe in RECIPES.items()},
        "calibration": "1024 training images drawn with seed + 1 for the thresholds, 128 of them for the steps",
        "test": "1000 test images drawn with seed 0, of which the first 500 for T >= 64",
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "environment.json").write_text(json.dumps(facts, indent=2) + "\n")


def table(network: str) -> str:
    """Mean ± standard deviation over the seeds, in percent, as Markdown."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    ann: dict[int, float] = {}
    for row in read(network):
        found[row["recipe"], int(row["T"])].append(100 * float(row["accuracy"]))
        ann[int(row["images"])] = 100 * float(row["ann_accuracy"])
    if not found:
        return ""
    lines = [
        f"### {network}",
        "",
        "ANN: " + ", ".join(f"{a:.1f} % on {n} images" for n, a in sorted(ann.items(), reverse=True)) + ".",
        "",
        "| recipe | " + " | ".join(f"T={T}" for T in TIMES) + " |",
        "|---|" + "---:|" * len(TIMES),
    ]
    for recipe in RECIPES:
        cells = [_cell(found.get((recipe, T), [])) for T in TIMES]
        lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_tables() -> None:
    """Put the tables between the two marks of the results page."""
    head, _, rest = DOCS.read_text().partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    tables = "\n".join(filter(None, map(table, NETWORKS)))
    DOCS.write_text(f"{head}{MARKS[0]}\n\n{tables}\n{MARKS[1]}{tail}")


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" + (
        f" ({len(values)} seed{'s' * (len(values) > 1)})" if len(values) < 3 else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS, metavar="NET")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--T", nargs="+", type=int, default=TIMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--table", action="store_true", help="only write the tables of what is known")
    options = parser.parse_args()
    if options.table:
        write_tables()
        return
    torch.set_num_threads(options.threads)
    write_environment()
    for network in options.networks:
        known = {(row["recipe"], int(row["T"]), int(row["seed"])) for row in read(network)}
        grid = itertools.product(options.T, options.seeds, options.recipes)
        wanted = [(r, T, s) for T, s, r in grid if (r, T, s) not in known]
        if wanted:
            run(network, wanted)


if __name__ == "__main__":
    main()
