"""Potential and weights calibration, alone and in both orders: is it the order that makes the second one help little?

    python benchmarks/weights_order.py             # everything that is not in the results yet
    python benchmarks/weights_order.py --table     # only write the table into docs/results.md

One seed: neighbouring rows share calibration and test images.
"""

from __future__ import annotations

import spikecal as sc
from grid import Grid

SHIFT, PC, WC = sc.BiasShift(), sc.PotentialCalibration(), sc.WeightCalibration(iterations=200, lr=3e-4)
GENTLE = sc.WeightCalibration(iterations=200, lr=3e-5)

RECIPES = {
    name: sc.Recipe(sc.MMSE(per_channel=True), (SHIFT, *steps))
    for name, steps in {
        "PC": (PC,),
        "WC": (WC,),
        "PC, WC (the paper's order)": (PC, WC),
        "WC, PC": (WC, PC),
        "PC, WC, PC": (PC, WC, PC),
        "WC at a tenth of the rate, PC": (GENTLE, PC),
    }.items()
}

GRID = Grid("weights_order", RECIPES, networks=("resnet20_cifar10",), times=(8,), seeds=(0,))

if __name__ == "__main__":
    GRID.main(__doc__)
