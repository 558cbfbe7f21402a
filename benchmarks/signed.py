"""A league of its own: neurons that may take a spike back by a negative one, so that spikes are not binary.

    python benchmarks/signed.py                    # everything that is not in the results yet
    python benchmarks/signed.py --table            # only write the tables into docs/results.md

Each recipe beside itself with signed neurons; thresholds and `best` see 1024 images, `light` calibrates on 128.
"""

from __future__ import annotations

import spikecal as sc
from grid import Grid

RECIPES = {
    "light": sc.light(),
    "light with signed neurons": sc.light(signed=True),
    "best": sc.best(),
    "best with signed neurons": sc.best(signed=True),
}

GRID = Grid("signed", RECIPES, networks=("resnet20_cifar10",), times=(4, 8))

if __name__ == "__main__":
    GRID.main(__doc__)
