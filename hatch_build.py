"""Compiles the native kernels while the package is built. Without a compiler the package is built without them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src/spikecal/native")
LIBRARY = SOURCES / "libspikecal.so"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")

#: Name, floats per register, flags: the kernels are compiled once for each, and chosen when they are loaded.
INSTRUCTION_SETS = [("portable", 4, ())]
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS += [
        ("avx2", 8, ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mpopcnt")),
        ("avx512", 16, ("-mavx512f", "-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mpopcnt")),
    ]


def compile_library(compiler: str, root: Path, more: Sequence[str] = ()) -> None:
    """All objects in a folder that goes away, then the library in one move. more: flags beside our own."""
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for name, lanes, flags in INSTRUCTION_SETS:
            objects.append(f"{folder}/{name}.o")
            names = (f"-DNAME={name}", f"-DLANES={lanes}")
            run([compiler, *FLAGS, *more, *flags, *names, "-c", str(root / SOURCES / "kernels.cpp"), "-o", objects[-1]])
        built = f"{folder}/{LIBRARY.name}"
        run([compiler, *FLAGS, *more, "-shared", "-pthread", str(root / SOURCES / "engine.cpp"), *objects, "-o", built])
        shutil.move(built, root / LIBRARY)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class NativeKernels(BuildHookInterface):
    """Named in pyproject.toml."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
        (root / LIBRARY).unlink(missing_ok=True)
        if compiler is None or os.name != "posix":
            print("spikecal: no C++ compiler, so the native kernels are left out", file=sys.stderr)
            return
        try:
            compile_library(compiler, root)
        except subprocess.CalledProcessError as e:
            print(
                f"spikecal: the native kernels do not compile here, so they are left out\n{e.stderr}", file=sys.stderr
            )
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
