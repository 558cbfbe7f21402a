"""A progress bar for long work, on the terminal's error stream; rich is imported only if one is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], text: str, total: int | None, show: bool) -> Iterator[Item]:
    """The items, with a bar while they are worked through."""
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, text, total, console=Console(stderr=True), transient=True)
