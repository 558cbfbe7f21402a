"""How much the result depends on the calibration images: their number, and where they come from.

    python benchmarks/robustness.py             # everything that is not in the results yet
    python benchmarks/robustness.py --table     # only write the table into docs/results.md

ResNet-20 on CIFAR-10 at T=8. Thresholds and calibration steps see the same images: 32 to 1024 training images of
CIFAR-10, or 512 images of CIFAR-100, which the network was not trained for. Labels are used for accuracy alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import records
import shared_data
import spikecal as sc

ROOT = Path(__file__).parent
FOLDER, PAGE = ROOT / "results" / "robustness", ROOT.parent / "docs" / "results.md"
MARKS = ("<!-- tables of benchmarks/robustness.py -->", "<!-- end of benchmarks/robustness.py -->")
RESULTS = FOLDER / "resnet20_cifar10.csv"
NETWORK, T, SEEDS = "resnet20_cifar10", 8, (0, 1, 2)
SOURCES = [("cifar10", n) for n in (32, 64, 128, 256, 512, 1024)] + [("cifar100", 512)]
FIELDS = (
    "recipe", "source", "calibration_images", "T", "latency", "seed", "images", "accuracy", "ann_accuracy", "agreement",
)  # fmt: skip


def recipes(images: int) -> dict[str, sc.Recipe]:
    count = {"calibration_images": images, "threshold_images": images}
    temporal = (sc.BiasShift(), sc.TemporalBias())
    return {
        "light": sc.light(**count),
        "FTBC": sc.Recipe(sc.MMSE(per_channel=True), temporal, "FTBC", **count),
        "best": sc.best(**count),
        "pipelined": sc.pipelined(**count),
    }


def measure() -> None:
    records.write_environment(FOLDER, "python benchmarks/robustness.py", test="1000 test images drawn with seed 0")
    known = {(r["recipe"], r["source"], r["calibration_images"], r["seed"]) for r in records.read(RESULTS)}
    model = shared_data.network(NETWORK)
    x, y = shared_data.images("cifar10", "test", 1000, 0, NETWORK)
    for seed in SEEDS:
        for source, count in SOURCES:
            images = shared_data.images(source, "train", count, seed + 1, NETWORK)[0]
            for name, recipe in recipes(count).items():
                if (name, source, str(count), str(seed)) not in known:
                    snn = sc.convert(model, [images], T, recipe, seed=seed)
                    answers, ann = snn(x).argmax(1), snn.ann(x).argmax(1)
                    shares = [float((a == b).double().mean()) for a, b in ((answers, y), (ann, y), (answers, ann))]
                    about = (name, source, count, T, snn.latency, seed, len(x))
                    records.append(RESULTS, FIELDS, (*about, *(f"{s:.4f}" for s in shares)))
                    print(f"seed {seed}  {source} {count:4d}  {name:10s} {100 * shares[0]:.1f} %", flush=True)


def table() -> str:
    found = defaultdict[tuple[str, str, int], list[float]](list)
    latency: dict[str, int] = {}
    for row in records.read(RESULTS):
        latency[row["recipe"]] = int(row["latency"])
        key = row["recipe"], row["source"], int(row["calibration_images"])
        found[key].append(100 * float(row["accuracy"]))
    titles = [f"{n} of {source.upper().replace('CIFAR', 'CIFAR-')}" for source, n in SOURCES]
    lines = ["| recipe | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(SOURCES)]
    for name in recipes(1):
        cells = [cell(found.get((name, source, n), [])) for source, n in SOURCES]
        waits = f" (latency {latency[name]})" if latency.get(name, T) > T else ""
        lines.append(f"| {name}{waits} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    missing = f" ({len(values)} of {len(SEEDS)} seeds)" if len(values) < len(SEEDS) else ""
    return f"{statistics.mean(values):.1f}{spread}{missing}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    if not parser.parse_args().table:
        measure()
    records.write_between(PAGE, MARKS, table())


if __name__ == "__main__":
    main()
