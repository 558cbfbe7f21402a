"""Beyond the paper: our recipes beside the paper's and FTBC's, at few steps.

    python benchmarks/beyond.py                    # everything that is not in the results yet
    python benchmarks/beyond.py --networks resnet20_cifar10 --T 4 8 --seeds 0
    python benchmarks/beyond.py --table            # only write the tables into docs/results.md

Thresholds see 1024 images; the calibration steps see 512, those of the paper's rows 128. Every method has a row; the
last one is apart, because its spikes are not binary.
"""

from __future__ import annotations

import spikecal as sc
from grid import Grid

SHIFT, CHANNELS, PC = sc.BiasShift(), sc.MMSE(per_channel=True), sc.PotentialCalibration()
WEIGHTS, FIRED = sc.ClosedFormWeights(), sc.ClosedFormWeights(fired=True)


def ours(*steps: object, **options: object) -> sc.Recipe:
    return sc.Recipe(CHANNELS, steps, calibration_images=512, **options)  # type: ignore[arg-type]


RECIPES = {
    "light": sc.light(),
    "PC": sc.Recipe(CHANNELS, (SHIFT, PC)),
    "FTBC": ours(SHIFT, sc.TemporalBias()),
    "best without closed form": ours(SHIFT, PC),
    "best": sc.best(),
    "best, then fitted to what fires": ours(SHIFT, WEIGHTS, PC, FIRED, PC),
    "LTB + BC": sc.Recipe(sc.LTB(), (SHIFT, sc.BiasCalibration())),
    "best with tuned thresholds": ours(SHIFT, WEIGHTS, sc.TunedThreshold(), PC),
    "best, then FTBC": ours(SHIFT, WEIGHTS, PC, sc.TemporalBias()),
    "best, late readout": ours(SHIFT, WEIGHTS, PC, sc.LateReadout()),
    "light, delay 1": sc.light(delay=1),
    "pipelined": sc.pipelined(),
    "best with signed neurons": sc.best(signed=True, name="signed"),
}

GRID = Grid(
    "beyond",
    RECIPES,
    networks=("resnet20_cifar10", "resnet20_cifar100", "resnet32_cifar10", "mobilenet_cifar10"),
    times=(4, 8, 16, 32),
)

if __name__ == "__main__":
    GRID.main(__doc__)
