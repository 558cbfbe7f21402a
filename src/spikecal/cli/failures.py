"""Errors become one clear message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import CalibrationError, CheckpointError, DataError, SpikecalError, UnsupportedModelError
from .output import say

UNEXPECTED, INTERRUPTED, CLOSED_PIPE = 1, 130, 141
CODES: dict[type[SpikecalError], int] = {
    UnsupportedModelError: 3,
    CalibrationError: 4,
    DataError: 4,
    CheckpointError: 5,
}


class CommandGroup(TyperGroup):
    """All commands, with one place where their errors end."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except (KeyboardInterrupt, Exception) as e:
                if hasattr(e, "exit_code") or isinstance(e, typer.Abort):
                    raise  # typer's own: help, usage errors and the like
                raise typer.Exit(_report(e, debug=ctx.params.get("debug", False))) from e


def _report(e: BaseException, debug: bool) -> int:
    """Say what went wrong; gives the exit code."""
    if isinstance(e, KeyboardInterrupt):
        say("interrupted")
        return INTERRUPTED
    if isinstance(e, BrokenPipeError):  # as in `spikecal ... | head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing fails when it is flushed at exit
        return CLOSED_PIPE
    if debug:
        say("".join(traceback.format_exception(e)))
    notes = "".join(f"\n({note})" for note in getattr(e, "__notes__", ()))
    if isinstance(e, SpikecalError):
        say(f"{e}{notes}", "error: ", "bold red")
        hidden = e.__cause__ is not None
        code = next((code for kind, code in CODES.items() if isinstance(e, kind)), UNEXPECTED)
    else:
        say(f"{type(e).__name__}: {e}{notes}", "unexpected failure: ", "bold red")
        hidden, code = True, UNEXPECTED
    if hidden and not debug:
        say("`spikecal --debug ...` shows the traceback")
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(str(message), "warning: ", "yellow")
