"""The paper's pipelines on trained networks: accuracy of every recipe at every T, over several seeds.

    python benchmarks/paper_pipeline.py                    # everything that is not in the results yet
    python benchmarks/paper_pipeline.py --networks resnet20_cifar10 --T 4 8 --seeds 0
    python benchmarks/paper_pipeline.py --table            # only write the tables into docs/results.md

The results are in benchmarks/results/paper_pipeline/, one CSV a network; a run can be stopped and taken up again.
"""

from __future__ import annotations

import spikecal as sc
from grid import Grid

CALIBRATION_IMAGES = 128
SHIFT, CHANNELS = sc.BiasShift(), sc.MMSE(per_channel=True)

#: What is compared. As in the paper every row has the bias shift, so neighbouring rows differ in one thing. Weights
#: calibration takes 200 iterations where the paper takes 5000; `learning_rate.py` chose the rate that goes with them.
RECIPES = {
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

GRID = Grid(
    "paper_pipeline",
    RECIPES,
    networks=("resnet20_cifar10", "resnet8_mlperf_cifar10", "resnet20_cifar100", "resnet32_cifar10"),
    times=(4, 8, 16, 32, 64, 128),
)

if __name__ == "__main__":
    GRID.main(__doc__)
