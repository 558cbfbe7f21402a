"""What options mean; a wrong one is reported with the option it stands in, before any long work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from ..errors import SpikecalError


def numbers(option: str, text: str | None) -> list[float] | None:
    """`0.49,0.48,0.45` as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise _wrong(option, f"{text!r} is not a list of numbers such as 0.49,0.48,0.45") from None


def shape(option: str, text: str) -> tuple[int, ...]:
    """`3,32,32` as the shape of one image."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise _wrong(option, f"{text!r} is not a shape such as 3,32,32 (channels, height, width)")
    return sizes


def check_writable(path: Path, suffix: str) -> None:
    """Fail now rather than after the work whose result could not be written."""
    if path.suffix != suffix:
        raise _wrong("--output", f"{path.name!r} must end in {suffix}")
    if path.is_dir():
        raise _wrong("--output", f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise _wrong("--output", f"there is no folder {path.parent} to write {path.name} into; create it first")
    if not os.access(path.parent, os.W_OK):
        raise _wrong("--output", f"the folder {path.parent} cannot be written to")


@contextmanager
def blamed_on(option: str) -> Iterator[None]:
    """What the library says of an option's value, as wrong usage of that option."""
    try:
        yield
    except SpikecalError as e:
        raise _wrong(option, str(e)) from e


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _wrong("--output", f"cannot make the folder {path}: {e.strerror}") from None


def _wrong(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{option}'")
