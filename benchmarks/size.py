"""Peak memory of networks of full size, beside the budget they were given.

    python benchmarks/size.py                               # every row that is not in the results yet
    python benchmarks/size.py --networks resnet50 --budgets 1GiB
    python benchmarks/size.py --table                       # only write the table into docs/coverage.md

Each row is measured in a process of its own: torchvision's network with random weights and random batch norm
statistics, 16 random images of 224×224 pixels, the recipe `light` at T=32, then `evaluate` on the same images.
Memory is what the system says the process has resident (Linux only). What the process has before it calls spikecal
(Python, torch, the model and the images) is the base; the rest is what the budget is for.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import records
import spikecal as sc
from coverage import load_torchvision, randomise
from spikecal.memory import budget

RESULTS = Path(__file__).parent / "results" / "size"
DOCS = Path(__file__).parent.parent / "docs" / "coverage.md"
MARKS = ("<!-- table of benchmarks/size.py -->", "<!-- end of table -->")
NETWORKS = ("resnet50", "vgg16")
BUDGETS = ("4GiB", "3GiB", "2GiB")
T, IMAGES, SIDE = 32, 16, 224
FIELDS = (
    "network",
    "budget",
    "budget_mib",
    "base_mib",  # resident before spikecal is called
    "convert_mib",  # the most resident while converting
    "evaluate_mib",  # and while simulating the images
    "convert_s",  # processor time
    "evaluate_s",
    "threads",
    "note",  # why there are no figures
)


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def watched(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What the work gives, the most memory resident meanwhile, and its seconds of processor time."""
    forget_peak()
    start = time.process_time()
    result = work()
    return result, resident("VmHWM"), time.process_time() - start


def measure(network: str, memory: str) -> dict[str, Any]:
    """The row of one network and budget."""
    load_torchvision()
    torch.manual_seed(0)
    model = importlib.import_module("torchvision.models").get_model(network).eval()
    x, y = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(1000, (IMAGES,))
    randomise(model, x[:4])
    gc.collect()
    base = resident("VmRSS")
    try:
        snn, convert_mib, convert_s = watched(lambda: sc.convert(model, [x], T=T, recipe="light", memory=memory))
    except sc.CalibrationError as e:
        return {"network": network, "budget": memory, "note": str(e).splitlines()[0]}
    snn.memory = memory
    _, evaluate_mib, evaluate_s = watched(lambda: sc.evaluate(snn, [(x, y)]))
    figures = (budget(memory) / 2**20, base, convert_mib, evaluate_mib, convert_s, evaluate_s)
    row = (network, memory, *(f"{figure:.0f}" for figure in figures), torch.get_num_threads(), "")
    return dict(zip(FIELDS, row, strict=True))


def isolated(network: str, memory: str) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--one", network, memory]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def path_of_results() -> Path:
    return RESULTS / "size.csv"


def append(row: dict[str, Any]) -> None:
    records.append(path_of_results(), FIELDS, row)


def read() -> list[dict[str, str]]:
    return records.read(path_of_results())


def write_environment() -> None:
    records.write_environment(
        RESULTS,
        "python benchmarks/size.py",
        torchvision=version("torchvision"),
        work=f"recipe light, T={T}, {IMAGES} images of {SIDE}×{SIDE}, then evaluate on the same images",
    )


def table(rows: list[dict[str, str]]) -> str:
    """Peaks over the base, beside the budget."""
    lines = [
        "| network | budget | before | converting | evaluating | over the base at most | processor time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if not row["note"]):
        base, convert, evaluate = (int(row[key]) for key in ("base_mib", "convert_mib", "evaluate_mib"))
        seconds = int(row["convert_s"]) + int(row["evaluate_s"])
        cells = [row["network"], *(f"{n} MiB" for n in (row["budget_mib"], base, convert, evaluate))]
        lines.append("| " + " | ".join([*cells, f"{max(convert, evaluate) - base} MiB", f"{seconds} s"]) + " |")
    notes = [f"- {row['network']} with {row['budget']}: {row['note']}" for row in rows if row["note"]]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def write_table() -> None:
    """Put the table between the two marks of the page."""
    records.write_between(DOCS, MARKS, table(read()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "BUDGET"), help="measure this row here, and print it")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    if options.table:
        write_table()
        return
    write_environment()
    known = {(row["network"], row["budget"]) for row in read()}
    for network in options.networks:
        for memory in options.budgets:
            if (network, memory) not in known:
                append(row := isolated(network, memory))
                print(row, flush=True)


if __name__ == "__main__":
    main()
