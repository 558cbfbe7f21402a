"""Which learning rate the weights calibration gets, chosen without a look at test images.

    python benchmarks/learning_rate.py

ResNet-8, T = 8. Each setting calibrates on 128 training images; it is judged by how often the spiking network agrees
with the ANN on 1000 *other* training images. The paper's own setting (5000 iterations at 1e-5) stands beside them.
"""

from __future__ import annotations

import csv
import time
import warnings
from pathlib import Path

import torch

import shared_data
import spikecal as sc
from grid import Converter

RESULTS = Path(__file__).parent / "results" / "learning_rate.csv"
NETWORK, T, SEED, HELD_OUT = "resnet8_mlperf_cifar10", 8, 100, 1000
FIELDS = ("iterations", "lr", "agreement", "last_error", "layers_left_alone", "seconds")
SETTINGS = ((0, 0.0), (200, 1e-5), (200, 1e-4), (200, 3e-4), (200, 1e-3), (200, 3e-3), (200, 1e-2), (5000, 1e-5))


def main() -> None:
    images = shared_data.images("cifar10", "train", 1024 + HELD_OUT, SEED, NETWORK)[0]
    convert = Converter(shared_data.network(NETWORK), images[:1024], SEED)
    held_out = images[1024:]
    rows = []
    for iterations, lr in SETTINGS:
        recipe = sc.advanced(iterations=iterations, lr=lr, calibration_images=128)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", sc.NoEffectWarning)
            snn = convert(recipe, T)
        seconds = time.perf_counter() - start
        agreement = float((snn(held_out).argmax(1) == snn.ann(held_out).argmax(1)).double().mean())
        error = snn.statistics[snn.graph.neurons[-1].name].error
        rows.append((iterations, lr, f"{agreement:.4f}", f"{error:.4f}", len(caught), f"{seconds:.1f}"))
        print(
            f"{iterations:5d} iterations, lr {lr:g}: agreement {100 * agreement:.1f} %, error {error:.3f}", flush=True
        )
        with RESULTS.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("network", "T", "seed", *FIELDS))
            writer.writerows((NETWORK, T, SEED, *row) for row in rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
