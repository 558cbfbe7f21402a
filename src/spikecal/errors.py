"""The errors a user can meet. Each message says what is wrong and what to do about it."""

from __future__ import annotations


class SpikecalError(Exception):
    """Base of every error that spikecal raises on purpose."""


class UnsupportedModelError(SpikecalError):
    """The network holds something that has no spiking meaning; the message lists every such place."""


class CalibrationError(SpikecalError):
    """The calibration images, the recipe or the time steps do not allow a conversion."""


class CheckpointError(SpikecalError):
    """A file cannot be read as a spiking network."""


class DataError(SpikecalError):
    """Images or labels cannot be read."""
