"""A conversion keeps within its memory budget: measured on the process itself, and the budget's own default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spikecal import memory

CONVERT = """
import json, resource, sys, warnings
import torch
from torch import nn
import spikecal as sc

warnings.simplefilter("ignore")
torch.set_num_threads(1)
weights = sc.Recipe(sc.Percentile(per_channel=True), (sc.PotentialCalibration(), sc.WeightCalibration(iterations=3)))
recipes = {"light": sc.light(), "weights": weights}


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


wide = nn.Sequential(conv(3, 24), conv(24, 24), conv(24, 24), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24 * 64, 10))
small = nn.Sequential(conv(3, 2), nn.Flatten(), nn.Linear(2 * 256, 2))
x = torch.rand(256, 3, 16, 16)
snn = sc.convert(wide, x[:2], 1, "max_activation")  # all that is loaded and captured is there from now on
sc.convert(small, x[:2], 1, sc.advanced(iterations=1))
before, budget = most(), 12 * 2**20
while True:
    try:
        sc.convert(snn, list(x.split(32)), 16, recipes[sys.argv[1]], memory=budget)
        break
    except sc.CalibrationError:
        budget = budget * 5 // 4
print(json.dumps({"budget": budget, "growth": most() - before}))
"""


WIDE = """
import json, resource, sys, warnings
import torch
from torch import nn
import spikecal as sc

warnings.simplefilter("error", sc.NoEffectWarning)  # of a layer without room for its least squares
torch.set_num_threads(1)


def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


channels, groups, images, mebibytes = map(int, sys.argv[1:])
second = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
wide = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), second, nn.ReLU()]
model = nn.Sequential(*wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).eval()
x = torch.rand(images, 3, 6, 6)
snn = sc.convert(model, x[:2], 1, "max_activation")  # all that is loaded and captured is there from now on
before, budget = most(), mebibytes * 2**20
snn = sc.convert(snn, [x], 8, sc.best(), memory=budget)
weight = max((snn.graph.tensors[n.op.weight] for n in snn.graph.nodes if hasattr(n.op, "weight")), key=torch.numel)
changed = not torch.equal(weight, model[2].weight)
sound = bool(weight.isfinite().all() and snn(x).isfinite().all())
print(json.dumps({"budget": budget, "growth": most() - before, "changed": changed, "sound": sound}))
"""

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the peak of a process is measured in other units elsewhere"
)


def run_alone(script: str, *arguments: str) -> dict[str, Any]:
    """What a process of its own prints. Without the allocator's caches, which depend on what was freed before."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@on_linux
@pytest.mark.slow
def test_the_widest_layers_of_vgg16_are_fitted_within_the_budget() -> None:
    """512·9 inputs, and fewer samples than unknowns."""
    assert_fitted_within(run_alone(WIDE, "512", "1", "16", "1500"))


@on_linux
def test_layers_with_groups_are_fitted_within_the_budget() -> None:
    """One Gram matrix a group, not one a group and image."""
    assert_fitted_within(run_alone(WIDE, "256", "4", "64", "200"))


def assert_fitted_within(found: dict[str, Any]) -> None:
    assert found["changed"]
    assert found["sound"]
    assert found["growth"] < found["budget"]


@on_linux
@pytest.mark.parametrize("recipe", ["light", "weights"])
def test_a_conversion_takes_no_more_memory_than_its_budget(recipe: str) -> None:
    """With a budget that is just enough."""
    found = run_alone(CONVERT, recipe)
    assert found["budget"] > 12 * 2**20, "this is more than enough"
    assert found["growth"] < found["budget"] + 4 * 2**20


# ---------------------------------------------------------------------- the default


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder that looks like the root of a machine with 8 GiB available."""
    for name, text in {"proc/meminfo": "MemTotal: 16 kB\nMemAvailable:  8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GIB = 2**30
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{V2}/job/memory.max": f"{3 * GIB}\n",
                f"{V2}/job/memory.current": f"{2 * GIB}\n",
                f"{V2}/job/memory.stat": f"anon 7\ninactive_file {GIB}\n",
                f"{V2}/job/step/memory.max": "max\n",
                f"{V2}/job/step/memory.current": f"{GIB}\n",
                f"{V2}/job/step/memory.stat": "",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:devices:/\n4:memory:/docker/abc\n0::/\n",
                f"{V1}/memory.limit_in_bytes": f"{4 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{3 * GIB}\n",
                f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
            },
            3 * GIB // 2,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "5\n",
                f"{V2}/memory.current": "9\n",
                f"{V2}/memory.stat": "",
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "limit of a job", "version 1, in a container", "nothing left"],
)
def test_the_default_respects_the_limits_of_control_groups(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert memory._free(machine(tmp_path, files)) == free


def test_the_default_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._free_lately.cache_clear()
    monkeypatch.setattr(memory, "_free", lambda: 10**9)
    assert memory.budget(None) == 5 * 10**8
    memory._free_lately.cache_clear()


def test_a_machine_that_tells_nothing_gets_a_guess(tmp_path: Path) -> None:
    assert memory._free(tmp_path) == 4 * GIB
