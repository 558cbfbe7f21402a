"""Compile the native kernels with AddressSanitizer and UndefinedBehaviorSanitizer, and run their tests on them.

    python scripts/sanitize.py [arguments of pytest]

Everything happens in a copy under build/sanitized: what is installed stays as it is. Needs g++ and its sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "sanitized"
FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from hatch_build import compile_library

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        print("no g++ was found", file=sys.stderr)
        return 1
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "src", COPY / "src")
    compile_library(compiler, COPY, FLAGS)
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory until it ends
        "PYTHONPATH": str(COPY / "src"),
        "OMP_NUM_THREADS": "1",
    }
    tests = sys.argv[1:] or ["tests/test_engine.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
