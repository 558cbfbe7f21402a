"""What goes to the two streams: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120  # of tables in a file or a pipe, which have no width of their own


def show(*parts: RenderableType) -> None:
    """Tables and lines of text, on stdout."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # what it means is said in one place, for tables and for JSON

    fixed = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    console = Output(width=fixed, highlight=False)
    for part in parts:
        console.print(part)


def show_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def say(text: str, label: str = "", style: str = "") -> None:
    """One message on stderr, never wrapped or read as markup: it may hold code, paths and brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((label, style), text), soft_wrap=True)
