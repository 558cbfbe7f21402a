"""The errors a user can meet. Each message says what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class SpikecalError(Exception):
    """Base of every error that spikecal raises on purpose."""


@dataclass(frozen=True)
class Refusal:
    """One place of a model that cannot be converted."""

    what: str  # the operation
    where: str  # the path of the module, and the line of its code
    why: str  # and what to do about it

    def __str__(self) -> str:
        return f"  {self.what} at {self.where}: {self.why}"


class UnsupportedModelError(SpikecalError):
    """The network holds something that has no spiking meaning; `refusals`, and the message, list every such place."""

    def __init__(self, message: str, refusals: Sequence[Refusal] = ()) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)


class CalibrationError(SpikecalError):
    """The calibration images, the recipe or the time steps do not allow a conversion."""


class MemoryBudgetError(CalibrationError):
    """The spike trains of so many images do not fit into the memory budget."""


class CheckpointError(SpikecalError):
    """A file cannot be read as a spiking network."""


class DataError(SpikecalError):
    """Images or labels cannot be read."""


def did_you_mean(name: str, names: Iterable[str], most: int = 3) -> str:
    """The end of a message about a name that does not exist."""
    close = get_close_matches(name, list(names), most)
    return f"; did you mean {' or '.join(close)}?" if close else ""
