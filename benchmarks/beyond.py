"""Beyond the paper: our recipes beside the paper's and FTBC's, at few steps.

    python benchmarks/beyond.py                    # everything that is not in the results yet
    python benchmarks/beyond.py --networks resnet20_cifar10 --T 4 8 --seeds 0
    python benchmarks/beyond.py --table            # only write the tables into docs/results.md

Thresholds see 1024 images, our steps and FTBC 512, the paper's rows 128. Every method has a row; the last one is
apart, because its spikes are not binary.
"""

from __future__ import annotations

from dataclasses import replace

import spikecal as sc
from grid import Grid

SHIFT, WEIGHTS, EVEN, PC, READOUT = sc.best().steps
CHANNELS = sc.MMSE(per_channel=True)


def ours(*steps: object, images: int = 512) -> sc.Recipe:
    return sc.Recipe(CHANNELS, steps, calibration_images=images)  # type: ignore[arg-type]


RECIPES = {
    "light": sc.light(),
    "PC": ours(SHIFT, sc.PotentialCalibration(), images=128),
    "FTBC": ours(SHIFT, sc.TemporalBias()),
    "FTBC, 1024 images": ours(SHIFT, sc.TemporalBias(), images=1024),
    "best": sc.best(),
    "best without closed form": ours(SHIFT, EVEN, PC, READOUT),
    "best without rows for even currents": ours(SHIFT, sc.ClosedFormWeights(even=0.0), EVEN, PC, READOUT),
    "best without even current": ours(SHIFT, WEIGHTS, PC, READOUT),
    "best without weighted readout": ours(SHIFT, WEIGHTS, EVEN, PC),
    "best, late readout instead": ours(SHIFT, WEIGHTS, EVEN, PC, sc.LateReadout(), sc.BiasCalibration()),
    "best, potentials in full": ours(SHIFT, WEIGHTS, EVEN, sc.PotentialCalibration(images=128), READOUT),
    "best, potentials by half": ours(SHIFT, WEIGHTS, EVEN, sc.PotentialCalibration(0.5, 128), READOUT),
    "best, biases instead of potentials": ours(SHIFT, WEIGHTS, EVEN, sc.BiasCalibration(), READOUT),
    "best, then fitted to what fires": ours(SHIFT, WEIGHTS, EVEN, PC, sc.ClosedFormWeights(fired=True), PC, READOUT),
    "LTB + BC": sc.Recipe(sc.LTB(), (SHIFT, sc.BiasCalibration())),
    "best with tuned thresholds": ours(SHIFT, WEIGHTS, sc.TunedThreshold(), EVEN, PC, READOUT),
    "best, then FTBC": ours(SHIFT, WEIGHTS, EVEN, PC, sc.TemporalBias(), READOUT),
    "FTBC with weighted readout": ours(SHIFT, sc.TemporalBias(), READOUT),
    "light, delay 1": sc.light(delay=1),
    "pipelined": sc.pipelined(),
    "pipelined without weighted readout": replace(sc.pipelined(), steps=sc.pipelined().steps[:-1]),
    "best with signed neurons": sc.best(signed=True, name="signed"),
}

GRID = Grid(
    "beyond",
    RECIPES,
    networks=("resnet20_cifar10", "resnet20_cifar100", "resnet32_cifar10", "mobilenet_cifar10"),
    times=(4, 8, 16, 32, 64),
)

if __name__ == "__main__":
    GRID.main(__doc__)
