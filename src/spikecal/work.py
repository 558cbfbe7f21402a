"""Counts of what a simulation does: unlike seconds they are the same on every machine, so tests can watch them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Work:
    """What was computed inside a block."""

    node_steps: int = 0  # images × steps for every node that was run over time
    neuron_steps: int = 0
    events: int = 0  # active inputs that the native kernels went through
    calls: int = 0  # of native kernels
    bytes: int = 0  # of values that were written: spikes as bits or floats, currents that are not fused


_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def count_work() -> Iterator[Work]:
    """Count what is simulated inside the block."""
    work = Work()
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)


def note_work(nodes: int = 0, neurons: int = 0, events: int = 0, calls: int = 0, bytes: int = 0) -> None:
    """Add to the count, if anybody counts."""
    if (work := _work.get()) is not None:
        work.node_steps += nodes
        work.neuron_steps += neurons
        work.events += events
        work.calls += calls
        work.bytes += bytes
