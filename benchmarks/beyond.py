"""Beyond the paper: our recipes beside the paper's and FTBC's, at few steps.

    python benchmarks/beyond.py                    # everything that is not in the results yet
    python benchmarks/beyond.py --networks resnet20_cifar10 --T 4 8 --seeds 0
    python benchmarks/beyond.py --table            # only write the tables into docs/results.md

Thresholds see 1024 images, so does `best` with fewer than 16 steps; otherwise our steps and FTBC see 512, the paper's
rows 128. All are tested on 5000 images. `ablation.py` has what each method is worth.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import records
import spikecal as sc
from grid import Grid, mean_and_spread

FTBC = sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.TemporalBias()), calibration_images=512)

HESITATION, PIPELINED = sc.Hesitation(), sc.pipelined()

RECIPES = {
    "light": sc.light(),
    "advanced": sc.advanced(iterations=200, lr=3e-4, calibration_images=128),
    "FTBC": FTBC,
    "FTBC with 1024 images": replace(FTBC, calibration_images=1024),
    "best": sc.best(),
    "pipelined without hesitation": replace(
        PIPELINED, name="custom", steps=[s for s in PIPELINED.steps if s != HESITATION]
    ),
    "pipelined": PIPELINED,
}


GRID = Grid(
    "beyond",
    RECIPES,
    networks=("resnet20_cifar10", "resnet20_cifar100", "resnet32_cifar10", "mobilenet_cifar10"),
    times=(4, 8, 16, 32, 64),
    images=lambda *_: 5000,
)

MARKS = ("<!-- table of equal latency -->", "<!-- end of equal latency -->")


def equal_latency() -> str:
    """`pipelined` beside `best` with as many steps as its latency allows, in percent."""
    lines = [
        "| network | `pipelined`, T | latency | accuracy | `best`, T | accuracy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for network in GRID.networks:
        rows = GRID.read(network)
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        latency = {int(row["T"]): int(row["latency"]) for row in rows if row["recipe"] == "pipelined"}
        for row in rows:
            found[row["recipe"], int(row["T"])].append(100 * float(row["accuracy"]))
        for T in sorted(latency):
            other = max((t for recipe, t in found if recipe == "best" and t <= latency[T]), default=None)
            if other is not None:
                cells = [mean_and_spread(found[key]) for key in (("pipelined", T), ("best", other))]
                lines.append(f"| {network} | {T} | {latency[T]} | {cells[0]} | {other} | {cells[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GRID.main(__doc__)
    records.write_between(GRID.page, MARKS, equal_latency())
