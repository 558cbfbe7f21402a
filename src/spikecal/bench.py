"""How long a spiking network takes beside its ANN, on this machine: ratios of times that took turns."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import native
from .errors import DataError
from .network import SpikingNetwork
from .simulation import run_ann


@dataclass(frozen=True)
class Timing:
    """One engine at one batch size."""

    engine: str
    batch: int
    seconds: float  # of one batch
    ann_seconds: float  # of one pass of the ANN over the same batch
    ratio: float  # to T passes of the ANN
    difference: float  # largest, of the mean outputs from those of the dense engine, of the largest output


@dataclass(frozen=True)
class Benchmark:
    T: int
    latency: int
    threads: int
    rounds: int
    kernels: bool  # whether the native ones are there
    peak_bytes: int  # of memory, of the whole process
    timings: list[Timing]


def race(
    candidates: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The best time of each, in seconds. They take turns, so that a slow moment of the machine hits all of them."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


@torch.no_grad()
def bench(
    snn: SpikingNetwork, images: Tensor, batches: Sequence[int] = (1, 32), *, rounds: int = 3, threads: int = 1
) -> Benchmark:
    """Time every engine on the first images, some at a time, beside the ANN twin on as many threads."""
    if min(batches, default=0) < 1 or rounds < 1 or threads < 1:
        raise DataError("batch sizes, rounds and threads must be 1 or more")
    if len(images) < max(batches):
        raise DataError(
            f"there are only {len(images)} images, too few for a batch of {max(batches)}; "
            "give more, or a smaller batch (batches=, --batch)"
        )
    before = snn.engine
    with use_threads(threads):
        timings = [timing for batch in batches for timing in _timings(snn, images[:batch], rounds)]
    snn.engine = before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Benchmark(snn.T, snn.latency, threads, rounds, native.library() is not None, peak, timings)


def _timings(snn: SpikingNetwork, x: Tensor, rounds: int) -> Iterator[Timing]:
    engines = ("dense", "event", "auto") if native.library() is not None else ("dense",)

    def run(engine: str) -> Tensor:
        """All that it gives, in one row."""
        snn.engine = engine
        leaves = (leaf for leaf in torch.utils._pytree.tree_leaves(snn(x)) if isinstance(leaf, Tensor))
        return torch.cat([leaf.flatten() for leaf in leaves if leaf.is_floating_point()])

    outputs = {engine: run(engine) for engine in engines}  # also packs the weights
    candidates: dict[str, Callable[[], object]] = {engine: lambda e=engine: run(e) for engine in engines}  # type: ignore[misc]
    anns = {"ann": lambda: snn.ann(x), "whole": lambda: run_ann(snn.source, (x,))}  # ours takes some images at a time
    best = race({**anns, **candidates}, rounds)
    best["ann"] = min(best["ann"], best["whole"])
    largest = float(outputs["dense"].abs().max()) or 1.0
    for engine in engines:
        difference = float((outputs[engine] - outputs["dense"]).abs().max()) / largest
        ratio = best[engine] / (snn.T * best["ann"])
        yield Timing(engine, len(x), best[engine], best["ann"], ratio, difference)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch and the kernels use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
