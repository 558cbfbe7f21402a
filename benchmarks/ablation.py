"""What each method beyond the paper is worth: `best` and `pipelined` with one thing changed at a time.

    python benchmarks/ablation.py                  # everything that is not in the results yet
    python benchmarks/ablation.py --T 8 --seeds 0
    python benchmarks/ablation.py --table          # only write the tables into docs/results.md

Thresholds see 1024 images, and so does `best`, whatever is changed in it, with fewer than 16 steps; otherwise our rows
see 512 and the paper's 128.
Accuracy is that on 1000 test images. Every method has a row, but for signed neurons, which are not binary: they are in
`signed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import spikecal as sc
from grid import Grid

LATE, THETA, SHIFT, WEIGHTS, EVEN, PC, READOUT = sc.best().steps
CHANNELS = sc.MMSE(per_channel=True)


def ours(*steps: object, images: int = 512) -> sc.Recipe:
    return sc.Recipe(CHANNELS, steps, calibration_images=images)  # type: ignore[arg-type]


def changed(change: Mapping[object, Sequence[object]], recipe: sc.Recipe | None = None) -> sc.Recipe:
    """A recipe, `best` by default, with other steps in the place of some of its own."""
    recipe = recipe or sc.best()
    return replace(recipe, name="custom", steps=[new for old in recipe.steps for new in change.get(old, [old])])


HESITATION, PIPELINED = sc.Hesitation(), sc.pipelined()

RECIPES = {
    "light": sc.light(),
    "PC": ours(sc.BiasShift(), sc.PotentialCalibration(), images=128),
    "FTBC": ours(sc.BiasShift(), sc.TemporalBias()),
    "best": sc.best(),
    "best with 512 images": sc.best(calibration_images=512, name="custom"),
    "best, thresholds as if spikes were floored": replace(sc.best(), name="custom", threshold=CHANNELS),
    "best, the same rounding in all layers": replace(
        sc.best(), name="custom", threshold=sc.MMSE(per_channel=True, shift=0.5, lost=3.0)
    ),
    "best without closed form": changed({WEIGHTS: []}),
    "best without rows for even currents": changed({WEIGHTS: [sc.ClosedFormWeights(even=0.0)]}),
    "best without even current": changed({EVEN: []}),
    "best without late start": changed({LATE: []}),
    "best without output threshold": changed({THETA: []}),
    "best without weighted readout": changed({READOUT: []}),
    "best, late readout instead": changed({READOUT: [sc.LateReadout(), sc.BiasCalibration()]}),
    "best, potentials in full": changed({PC: [sc.PotentialCalibration(images=128)]}),
    "best, biases instead of potentials": changed({PC: [sc.BiasCalibration()]}),
    "best, then fitted to what fires": changed({PC: [PC, sc.ClosedFormWeights(fired=True), PC]}),
    "best with tuned thresholds": changed({WEIGHTS: [WEIGHTS, sc.TunedThreshold()]}),
    "best, then FTBC": changed({PC: [PC, sc.TemporalBias()]}),
    "LTB + BC": sc.Recipe(sc.LTB(), (sc.BiasShift(), sc.BiasCalibration())),
    "light, delay 1": sc.light(delay=1),
    "best, delay 1 behind the middle": replace(sc.best(), name="custom", steps=(sc.FiringDelay(), *sc.best().steps)),
    "best with hesitation": changed({EVEN: [EVEN, HESITATION]}),
    "pipelined": PIPELINED,
    "pipelined without hesitation": changed({HESITATION: []}, PIPELINED),
    "pipelined with even current instead": changed({HESITATION: [EVEN]}, PIPELINED),
    "pipelined with both": changed({HESITATION: [EVEN, HESITATION]}, PIPELINED),
}

GRID = Grid("ablation", RECIPES, networks=("resnet20_cifar10",), times=(4, 8, 16))

if __name__ == "__main__":
    GRID.main(__doc__)
