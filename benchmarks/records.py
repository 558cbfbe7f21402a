"""Results on disk: rows that are appended one by one, what they were made with, and tables between marks of a page."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import spikecal as sc


def append(path: Path, fields: Sequence[str], row: Mapping[str, Any] | Sequence[Any]) -> None:
    """Add a row, by name or in the order of the fields, so that a run can be stopped and taken up again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row if isinstance(row, Mapping) else dict(zip(fields, row, strict=True)))


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> None:
    """All rows at once, in place of those that were there."""
    path.unlink(missing_ok=True)
    for row in rows:
        append(path, fields, row)


def write_environment(folder: Path, command: str, **facts: Any) -> None:
    """What the figures were made with, beside them."""
    found = {
        "command": command,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "spikecal": sc.__version__,
        "machine": platform.machine(),
        **facts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(found, indent=2) + "\n")


def with_text_between(page: str, marks: tuple[str, str], text: str) -> str:
    """The page with text between two marks of it."""
    head, _, rest = page.partition(marks[0])
    _, _, tail = rest.partition(marks[1])
    return f"{head}{marks[0]}\n\n{text}\n{marks[1]}{tail}"


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Put text between two marks of a page."""
    page.write_text(with_text_between(page.read_text(), marks, text))
