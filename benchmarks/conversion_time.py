"""What a conversion costs, beside simulating its images once, and beside other recipes.

    python benchmarks/conversion_time.py       # writes benchmarks/results/conversion_time/

Seconds of processor time on one thread, each the best of several rounds that take turns. The yardstick of `light` at
T=32 is twice the simulation of its 128 calibration images and six ANN passes over the 1024 images for thresholds;
`best` and `pipelined` are compared with `light`. Capturing the model is counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

import records
import shared_data
import spikecal as sc
from spikecal.bench import race

FOLDER = Path(__file__).parent / "results" / "conversion_time"
FIELDS = ("what", "network", "T", "seconds", "of", "reference_seconds", "ratio")


def images_of(network: str) -> torch.Tensor:
    return shared_data.images("cifar10", "train", 1024, 1, network)[0]


def beside_simulation(network: str, rounds: int) -> tuple[object, ...]:
    model, x, T = shared_data.network(network), images_of(network), 32
    snn = sc.convert(model, [x], T, "light")
    seconds = race(
        {
            "convert": lambda: sc.convert(model, [x], T, "light"),
            "simulate": lambda: snn(x[:128]),
            "ann": lambda: snn.ann(x),
        },
        rounds,
        time.process_time,
    )
    yardstick = 2 * seconds["simulate"] + 6 * seconds["ann"]
    return row("light", network, T, seconds["convert"], "2 simulations + 6 ANN passes", yardstick)


def beside_light(network: str, T: int, rounds: int) -> list[tuple[object, ...]]:
    model, x = shared_data.network(network), images_of(network)
    recipes = ("light", "best", "pipelined")
    seconds = race({name: lambda n=name: sc.convert(model, [x], T, n) for name in recipes}, rounds, time.process_time)  # type: ignore[misc]
    return [row(name, network, T, seconds[name], "light", seconds["light"]) for name in recipes[1:]]


def by_depth(rounds: int) -> tuple[object, ...]:
    names, T = ("resnet20_cifar10", "resnet32_cifar10"), 8
    models = {name: (shared_data.network(name), images_of(name)) for name in names}
    candidates: dict[str, Callable[[], object]] = {
        name: lambda m=model, x=x: sc.convert(m, [x], T, "light")  # type: ignore[misc]
        for name, (model, x) in models.items()
    }
    seconds = race(candidates, rounds, time.process_time)
    return row("light", names[1], T, seconds[names[1]], names[0], seconds[names[0]])


def row(what: str, network: str, T: int, seconds: float, of: str, reference: float) -> tuple[object, ...]:
    print(f"{what} on {network}, T={T}: {seconds:.1f} s, {seconds / reference:.2f} of {of}", flush=True)
    return what, network, T, f"{seconds:.2f}", of, f"{reference:.2f}", f"{seconds / reference:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records.write_environment(FOLDER, f"python benchmarks/conversion_time.py --rounds {options.rounds}")
    network, rounds = "resnet20_cifar10", options.rounds
    rows = [row for T in (16, 8, 4) for row in beside_light(network, T, rounds)]
    rows += [beside_simulation(network, rounds), by_depth(rounds)]
    records.write(FOLDER / "conversion_time.csv", FIELDS, rows)


if __name__ == "__main__":
    main()
