"""Which networks of torchvision, timm and pytorchcv can be converted, and what is said of the others.

    python benchmarks/coverage.py                             # every network that is not in the results yet
    python benchmarks/coverage.py timm:resnet18 torchvision:vgg11   # these, known or not
    python benchmarks/coverage.py --library pytorchcv --limit 600
    python benchmarks/coverage.py --table                     # only tidy the results and write docs/coverage.md

It needs `pip install --no-deps torchvision timm pytorchcv efficientnet_lite_pytorch` beside spikecal. Each network is
built with random weights and random batch norm statistics, in a process of its own with a limit of processor time, and
its row is written as soon as it is known. `nonlinearities.py` tells, without spikecal, which networks have no other
non-linearity than ReLU, clamps and maxima: all of those must be converted, with a twin that equals the model, and all
others must be refused with a list that names every module in which a non-linearity was found.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import resource
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import records
import spikecal as sc
from nonlinearities import NonLinear, nonlinear_calls
from spikecal.capture import capture
from spikecal.cli.factories import build_model
from spikecal.preparation import prepare
from spikecal.simulation import run_ann

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "coverage"
DOCS = HERE.parent / "docs" / "coverage.md"
MARKS = ("<!-- tables of benchmarks/coverage.py -->", "<!-- end of tables -->")
LIBRARIES = ("torchvision", "timm", "pytorchcv", "efficientnet_lite_pytorch")
T, IMAGES, MEMORY = 8, 4, "2GiB"
SIZES = (64, 96, 128)  # tried in turn, then the network's own
LARGE = 150_000_000  # parameters; beyond, a network is captured and its twin compared, but not converted
TWIN = 1e-4  # of the largest output
FIELDS = (
    "library",
    "family",
    "network",
    "size",  # side of the images
    "parameters",
    "rectifiers",  # ReLUs, clamps and maxima that the forward pass calls
    "nonlinear",  # what else it calls that is not affine, with the number of calls
    "outcome",  # converted, captured, refused, failed, does not run
    "twin_error",  # largest difference between twin and model, relative to the largest output
    "places",  # on the list of the refusal
    "refused",  # operations on that list
    "unlisted",  # modules with a non-linearity that the list does not name
    "seconds",  # of processor time, for capture, conversion and the simulation of the images
    "note",
)
Row = dict[str, Any]
OPERATORS: list[torch.library.Library] = []  # they go with the last reference to them


# -- networks ---------------------------------------------------------------------------------------------------------


def load_torchvision() -> None:
    """Import torchvision. If it is built for another torch its operators are missing, but no classifier uses them."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            OPERATORS[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def load_libraries() -> None:
    """Import all libraries once, before processes branch off."""
    warnings.simplefilter("ignore")
    load_torchvision()
    for name in ("timm", "pytorchcv.model_provider", "efficientnet_lite_pytorch"):
        importlib.import_module(name)


def networks() -> Iterator[tuple[str, str]]:
    """All that is to be measured, as (library, name)."""
    models = importlib.import_module("torchvision.models")
    yield from (("torchvision", name) for name in models.list_models(module=models))
    library = ""
    for line in (HERE / "coverage_models.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        if words and words[0].startswith("["):
            library = words[0].strip("[]")
        else:
            yield from ((library, name) for name in words)
    yield "efficientnet_lite_pytorch", "efficientnet-lite0"


def build(library: str, name: str) -> nn.Module:
    """As the command line builds it: without downloads."""
    torch.manual_seed(zlib.crc32(name.encode()))
    if library == "efficientnet_lite_pytorch":
        return importlib.import_module(library).EfficientNet.from_name(name).eval()
    return build_model(f"{library}:{name}").eval()  # type: ignore[union-attr]


def family_of(library: str, name: str) -> str:
    """The module of the library in which the network is defined."""
    if library == "torchvision":
        return importlib.import_module("torchvision.models").get_model_builder(name).__module__.split(".")[-1]
    if library == "timm":
        return importlib.import_module("timm").model_entrypoint(name).__module__.split(".")[-1]
    if library == "pytorchcv":
        return importlib.import_module("pytorchcv.model_provider")._models[name].__module__.split(".")[-1]
    return "efficientnet_lite"


def own_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """The image sizes a network is made for, as far as it says."""
    found = []
    if isinstance(config := getattr(model, "default_cfg", None), dict):  # timm
        found.append(tuple(config["input_size"][1:]))
    if isinstance(size := getattr(model, "in_size", None), tuple):  # pytorchcv
        found.append(tuple(size))
    return [*found, (224, 224), (299, 299)]


def images_for(model: nn.Module) -> Tensor:
    """Random images of the first size that the network takes. Raises what the network raised if it takes none."""
    error: Exception | None = None
    for height, width in [*((s, s) for s in SIZES), *own_sizes(model)]:
        x = torch.randn(IMAGES, 3, height, width)
        try:
            with torch.no_grad():
                model(x[:2].clone())
            return x
        except Exception as e:
            error = e
    assert error is not None
    raise error


@torch.no_grad()
def randomise(model: nn.Module, x: Tensor) -> None:
    """Batch norm statistics near those of the images, but not at them, and random scales and shifts."""
    norms = [m for m in model.modules() if getattr(m, "running_var", None) is not None]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
        if norm.weight is not None:
            norm.weight.uniform_(0.5, 1.5)
        if norm.bias is not None:
            norm.bias.normal_(0, 0.1)
    model(x.clone())
    for norm in norms:
        norm.eval()
        norm.running_mean.add_(torch.randn_like(norm.running_mean) * norm.running_var.sqrt(), alpha=0.1)
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.5, 1.5)).add_(1e-3)


# -- one network ------------------------------------------------------------------------------------------------------


def measure(library: str, name: str) -> Row:
    """The row of one network."""
    row: Row = {"library": library, "family": family_of(library, name), "network": name, "outcome": "does not run"}
    try:
        model = build(library, name)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        x = images_for(model)
        randomise(model, x)
    except Exception as e:
        return {**row, "note": _message(e)}
    row["size"] = x.shape[-1] if x.shape[-1] == x.shape[-2] else "×".join(map(str, x.shape[-2:]))
    return {**row, **judge(model, x)}


def judge(model: nn.Module, x: Tensor) -> Row:
    """What the independent check finds in a network, and what spikecal makes of it."""
    calls, rectifiers = nonlinear_calls(model, [x[:1].clone()])
    row: Row = {"rectifiers": rectifiers, "nonlinear": _counts(call.operation for call in calls)}
    start = time.process_time()
    try:
        row |= attempt(model, x)
    except sc.UnsupportedModelError as e:
        row |= {"outcome": "refused", "places": len(e.refusals), "refused": _counts(r.what for r in e.refusals)}
        row["unlisted"] = len(unlisted(model, calls, e.refusals))
        row["note"] = "" if e.refusals else _message(e)
    except Exception as e:
        row |= {"outcome": "failed", "note": f"{_message(e)} at {_innermost(e)}"}
    return {**row, "seconds": f"{time.process_time() - start:.1f}"}


@torch.no_grad()
def attempt(model: nn.Module, x: Tensor) -> Row:
    """Convert the network and run it; a large one is only captured. The twin must equal the model."""
    expected = [y for y in tree_leaves(model(x.clone())) if isinstance(y, Tensor)]
    if sum(p.numel() for p in model.parameters()) > LARGE:
        graph = prepare(capture(model, [x[:2]]))
        found, row = tree_leaves(graph.unflatten(run_ann(graph, [x]))), {"outcome": "captured"}
    else:
        snn = sc.convert(model, [x], T=T, recipe="light", memory=MEMORY)
        found, row = tree_leaves(snn.ann(x)), {"outcome": "converted"}
        if not all(bool(y.isfinite().all()) for y in tree_leaves(snn(x)) if isinstance(y, Tensor)):
            raise ArithmeticError("the spiking network gives numbers that are not finite")
    error = max(relative(y, z) for y, z in zip([y for y in found if isinstance(y, Tensor)], expected, strict=True))
    if not error < TWIN:
        row = {"outcome": "failed", "note": "the twin differs from the model"}
    return {**row, "twin_error": f"{error:.1e}"}


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def unlisted(model: nn.Module, calls: Iterable[NonLinear], refusals: Iterable[sc.errors.Refusal]) -> set[str]:
    """The modules with a non-linearity of which a refusal says nothing, under none of their names."""
    named: set[str] = set()
    for refusal in refusals:
        path = refusal.where.partition(" (")[0]
        named |= {path, *(path.removesuffix(call).rstrip(".") for call in (refusal.what, "forward"))}
    modules = dict(model.named_modules(remove_duplicate=False))
    listed = {id(modules[path]) for path in named if path in modules}
    return {call.module for call in calls if call.module not in named and id(modules[call.module]) not in listed}


def _counts(words: Iterable[str]) -> str:
    """`silu 49, mul 16`: the most frequent first."""
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


def _message(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]


def _innermost(e: BaseException) -> str:
    frame = traceback.extract_tb(e.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


# -- all networks -----------------------------------------------------------------------------------------------------


def run(wanted: list[tuple[str, str]], limit: int) -> None:
    """Measure every network in a process of its own, and write its row."""
    for i, (library, name) in enumerate(wanted, 1):
        row = isolated(library, name, limit)
        append(row)
        words = (row[key] for key in ("outcome", "refused", "note") if row.get(key))
        print(f"{i}/{len(wanted)}  {library}:{name}  {'  '.join(map(str, words))}", flush=True)


def isolated(library: str, name: str, limit: int) -> Row:
    """`measure` in a process that has so many seconds of processor time, and whose memory ends with it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, library, name, limit))
    process.start()
    send.close()
    try:
        row: Row = receive.recv()
    except EOFError:
        row = {"library": library, "family": family_of(library, name), "network": name, "outcome": "failed"}
    process.join()
    if process.exitcode:
        row["note"] = f"ended by signal {-process.exitcode}, after at most {limit} seconds of processor time"
    return row


def _child(send: Any, library: str, name: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    torch.set_num_threads(1)
    send.send(measure(library, name))


def path_of_results() -> Path:
    return RESULTS / "coverage.csv"


def append(row: Row) -> None:
    records.append(path_of_results(), FIELDS, row)


def read() -> dict[tuple[str, str], dict[str, str]]:
    """The last row of every network."""
    return {(row["library"], row["network"]): row for row in records.read(path_of_results())}


def tidy() -> None:
    """One row a network, sorted."""
    rows = sorted(read().values(), key=lambda row: (LIBRARIES.index(row["library"]), row["family"], row["network"]))
    records.write(path_of_results(), FIELDS, rows)


def write_environment() -> None:
    records.write_environment(
        RESULTS,
        "python benchmarks/coverage.py",
        **{name: version(name) for name in LIBRARIES},
        conversion=f"recipe light, T={T}, {IMAGES} random images, memory={MEMORY}",
        weights="as each library initialises them; batch norm with random scales, shifts and statistics",
        only_captured=f"networks of more than {LARGE:,} parameters",
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def is_right(row: dict[str, str]) -> bool:
    """Whether a network without other non-linearities was converted; or another one refused, with a complete list."""
    if not row["nonlinear"]:
        return row["outcome"] in ("converted", "captured")
    return row["outcome"] == "refused" and row["unlisted"] == "0"


def tables(rows: Iterable[dict[str, str]]) -> str:
    ran = [row for row in rows if row["outcome"] != "does not run"]
    wrong = [row for row in ran if not is_right(row)]
    parts = [summary(ran), by_family(ran)]
    if wrong:
        parts.append("Not as it should be:\n\n" + "\n".join(_defect(row) for row in wrong) + "\n")
    return "\n".join(parts)


def summary(rows: list[dict[str, str]]) -> str:
    """The figures of every library."""
    lines = [
        "| library | networks | only ReLU, clamps and maxima | of them converted | others | of them refused with a "
        "complete list | largest twin error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for library in (*LIBRARIES, "all"):
        mine = [row for row in rows if library in (row["library"], "all")]
        plain, others = ([row for row in mine if bool(row["nonlinear"]) == other] for other in (False, True))
        errors = [float(row["twin_error"]) for row in mine if row["twin_error"]]
        figures = (len(mine), len(plain), sum(map(is_right, plain)), len(others), sum(map(is_right, others)))
        if mine:
            cells = [*map(str, figures), f"{max(errors):.0e}" if errors else ""]
            lines.append(f"| {library} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_family(rows: list[dict[str, str]]) -> str:
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["library"], row["family"]].append(row)
    lines = ["| library | family | networks | converted | refused | because of |", "|---|---|---:|---:|---:|---|"]
    for (library, family), mine in groups.items():
        outcomes = Counter(row["outcome"] for row in mine)
        converted = outcomes["converted"] + outcomes["captured"]
        reasons = ", ".join(sorted({word.split()[0] for row in mine for word in row["refused"].split(", ") if word}))
        cells = (len(mine), converted or "", outcomes["refused"] or "", reasons)
        lines.append(f"| {library} | {family} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _defect(row: dict[str, str]) -> str:
    found = f"has {row['nonlinear']}" if row["nonlinear"] else "has only ReLU, clamps and maxima"
    return f"- {row['library']}:{row['network']} {found}, but: {row['outcome']} {row['refused'] or row['note']}"


def write_tables() -> None:
    """Put the tables between the two marks of the page."""
    tidy()
    records.write_between(DOCS, MARKS, tables(read().values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="LIBRARY:NAME")
    parser.add_argument("--library", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--limit", type=int, default=300, help="seconds of processor time for a network")
    parser.add_argument("--table", action="store_true", help="only write the tables of what is known")
    options = parser.parse_args()
    if options.table:
        write_tables()
        return
    load_libraries()
    write_environment()
    known = read()
    wanted = [tuple(name.split(":", 1)) for name in options.networks] or [
        key for key in networks() if key[0] in options.library and key not in known
    ]
    run(wanted, options.limit)


if __name__ == "__main__":
    main()
