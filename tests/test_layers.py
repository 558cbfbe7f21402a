"""Imports inside the package point one way, and importing it loads nothing that it does not need."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spikecal

PACKAGE = Path(spikecal.__file__).parent

#: From the ground up: a module may import only what stands in front of it.
ORDER = [
    "errors",
    "files",
    "work",
    "native",
    "functional",
    "progress",
    "thresholds",
    "values",
    "ops",
    "kernels",
    "graph",
    "memory",
    "segments",
    "images",
    "refusals",
    "calls",
    "rules",
    "shape_rules",
    "preparation",
    "observation",
    "tracing",
    "capture",
    "simulation",
    "engine",
    "replay",
    "calibration",
    "closed_form",
    "timing",
    "outputs",
    "recipes",
    "network",
    "normalisation",
    "checkpoint",
    "onnx_operators",
    "onnx",
    "conversion",
    "energy",
    "bench",
    "layer_results",
    "evaluation",
    "judgement",
    "figures",
    "report",
    "time_steps",
    "data",
    "models",
    "demo",
    "cli",
    "__main__",
]

#: What `SpikingNetwork` and `Evaluation` import only when they are asked for it: these build on them.
LAZY = {("network", "normalisation"), ("network", "checkpoint"), ("evaluation", "judgement")}

HEAVY = {"sklearn", "PIL", "matplotlib", "rich", "typer", "torchvision", "pandas", "scipy"}


def part_of(path: Path) -> str:
    """The module of the list that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether it does so at once."""
    tree, depth = ast.parse(path.read_text()), len(path.relative_to(PACKAGE).parts)
    inside = {
        node for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)
    }  # of functions
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "spikecal"]
            assert not names, f"{path.name} imports {names}: inside the package, imports are relative"
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            assert (node.module or "").split(".")[0] != "spikecal", f"{path.name}: inside, imports are relative"
            if node.level == depth:
                targets = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                found += [(target, node not in inside) for target in targets if target != "__version__"]
    return found


def test_every_module_has_its_place() -> None:
    assert {part_of(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = part_of(path)
    for target, at_once in imports(path):
        if (here, target) in LAZY:
            assert not at_once, f"{here} may import {target} only inside a function"
        else:
            assert ORDER.index(target) < ORDER.index(here), f"{here} must not import {target}"


def test_lazy_imports_are_still_there() -> None:
    found = {(part_of(path), target) for path in FILES for target, _ in imports(path)}
    assert found >= LAZY


@pytest.mark.parametrize("name", ["errors", "files", "functional", "progress"])
def test_the_ground_imports_nothing_of_ours(name: str) -> None:
    assert imports(PACKAGE / f"{name}.py") == []


def test_the_maths_needs_torch_and_nothing_else() -> None:
    tree = ast.parse((PACKAGE / "functional.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names | modules <= {"torch", "collections.abc", "typing", "__future__"}


def loaded(code: str) -> set[str]:
    """The top-level modules that are loaded after this code, in a fresh interpreter."""
    code += "; import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


EVERYTHING = "import spikecal; [getattr(spikecal, name) for name in spikecal.__all__]"


def test_importing_all_of_spikecal_loads_nothing_heavy() -> None:
    modules = loaded(EVERYTHING)
    assert "torch" in modules
    assert modules & HEAVY == set()


def test_importing_spikecal_itself_loads_next_to_nothing() -> None:
    assert loaded("import spikecal") & (HEAVY | {"torch", "numpy", "safetensors"}) == set()


def test_public_names_are_there_and_all_are_documented() -> None:
    for name in spikecal.__all__:
        assert getattr(spikecal, name).__doc__, f"{name} has no docstring"
    assert set(spikecal.__all__) <= set(dir(spikecal))
    with pytest.raises(AttributeError, match="module 'spikecal' has no attribute 'nothing'"):
        spikecal.nothing  # noqa: B018


@pytest.mark.slow
def test_importing_all_of_spikecal_takes_hardly_longer_than_torch() -> None:
    times: dict[str, list[float]] = {"import torch": [], EVERYTHING: []}
    for _ in range(3):
        for code, seconds in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds.append(time.perf_counter() - start)
    torch, ours = (min(seconds) for seconds in times.values())
    assert ours < 1.5 * torch
