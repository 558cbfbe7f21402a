"""SpikingNetwork: what a conversion gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .engine import check_engine, is_native, lowered
from .graph import Graph
from .images import Inputs, fit_inputs
from .memory import CACHE, CACHE_OF_BITS, block_of_steps, budget, chunk_of_images
from .recipes import Recipe
from .replay import LayerStatistics
from .simulation import Instruction, Neurons, Readout, Site, Tap, run_ann, run_snn

if TYPE_CHECKING:
    from typing import Self


class SpikingNetwork:
    """A network of integrate-and-fire neurons, calibrated for T time steps, beside the ANN it comes from.

    graph: the operations with calibrated weights; source: the same with the original ones, the ANN twin.
    sites: the parameters of neurons and outputs by name. statistics: what the calibration images showed there.
    memory: the most memory a call may use, such as "2GiB"; by default half of what is free.
    preprocessing: what `load_data` did to the images it was calibrated with, where the command line did so.
    engine: with "dense" torch does all convolutions; with "event" native kernels where they can; "auto" mixes both.
    With SPIKECAL_NATIVE=0 in the environment, everything is torch.
    """

    def __init__(
        self,
        graph: Graph,
        source: Graph,
        sites: Mapping[str, Site],
        T: int,
        recipe: Recipe,
        statistics: Mapping[str, LayerStatistics],
        memory: str | float | None = None,
        engine: str = "auto",
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph, self.source, self.sites = graph, source, dict(sites)
        self._T, self.recipe, self.statistics, self.memory = T, recipe, dict(statistics), memory
        self.engine, self.preprocessing = engine, dict(preprocessing or {})
        self._lowered: dict[str, tuple[tuple[Any, ...], list[Instruction]]] = {}  # by engine

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made anew when needed: it holds pointers."""
        return {**self.__dict__, "_lowered": {}}

    @property
    def engine(self) -> str:
        """What simulates: "auto", "event" (native kernels wherever they can) or "dense" (torch)."""
        return self._engine

    @engine.setter
    def engine(self, name: str) -> None:
        check_engine(name)
        self._engine = name

    @property
    def T(self) -> int:
        """Time steps. Thresholds and corrections are made for them, so another number needs another conversion."""
        return self._T

    def __call__(self, *inputs: Tensor) -> Any:
        """The mean output over the T steps, in the structure of the model's own result: compare it with the ANN's.

        Named tuples come back as plain tuples.
        """
        return self._collect(inputs, self._mean, 0)

    def over_time(self, *inputs: Tensor) -> Any:
        """The running mean of the output after 1, 2, ... steps, (latency, B, ...); 0 while nothing has arrived there.

        Without firing delay the latency is T.
        """
        return self._collect(inputs, lambda chunk: [self.running(i, y) for i, y in enumerate(self.currents(chunk))], 1)

    def running(self, output: int, current: Tensor) -> Tensor:
        """The running mean at one output, (latency, B, ...), from its current, (T, B, ...)."""
        site = self.sites[self.graph.outputs[output].name]
        mean = running_mean(current, site.weights if isinstance(site, Readout) else None)
        waited = mean.new_zeros(self._waits[output], *mean.shape[1:])
        held = mean[-1:].expand(self.latency - len(mean) - len(waited), *mean.shape[1:])
        return torch.cat([waited, mean, held])

    @property
    def latency(self) -> int:
        """Steps from the first input to the end of the last output: T, and the delays on the longest way."""
        return self.T + max(self._waits)

    @property
    def _waits(self) -> list[int]:
        return [self.begins[node.name] for node in self.graph.outputs]

    @property
    def begins(self) -> dict[str, int]:
        """After how many steps each node has its first value: shortcuts wait for the longest way."""
        begins: dict[str, int] = {}
        for node in self.graph.nodes:
            site = self.sites.get(node.name)
            own = site.delay if isinstance(site, Neurons) else 0
            begins[node.name] = max((begins[i] for i in node.inputs), default=0) + own
        return begins

    def ann(self, *inputs: Tensor) -> Any:
        """The ANN twin: equals the model that was converted."""
        return self._collect(inputs, lambda chunk: run_ann(self.source, chunk), 0, T=1)

    def simulate(self, inputs: Inputs, tap: Tap | None = None) -> Iterator[list[Tensor]]:
        """The current at every output, [(t, B, ...)] for t steps after t steps; `tap` sees every site."""
        block = block_of_steps(self.graph, self.T, budget(self.memory), len(inputs[0]), self._cache)
        if any(isinstance(site, Neurons) and site.needs_all_steps for site in self.sites.values()):
            block = self.T
        return run_snn(self._program(), self.sites, inputs, self.T, tap, block)

    def _program(self) -> list[Instruction]:
        """What is run, made anew only where weights or neurons have changed."""
        parts = (self.graph, *self.sites.values())
        known, program = self._lowered.get(self.engine, ((), []))
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            rates = {name: s.firing_rate for name, s in self.statistics.items() if s.firing_rate is not None}
            program = lowered(self.graph, self.sites, rates, self.engine)
            self._lowered[self.engine] = (parts, program)
        return program

    @torch.no_grad()
    def currents(self, inputs: Inputs, tap: Tap | None = None) -> list[Tensor]:
        """The current at every output and step, [(T, B, ...)]."""
        return [torch.cat(parts) for parts in zip(*self.simulate(inputs, tap), strict=True)]

    def _mean(self, inputs: Inputs) -> list[Tensor]:
        total = [sum(parts) for parts in zip(*([y.sum(0) for y in ys] for ys in self.simulate(inputs)), strict=True)]
        return [y / self.T for y in total]

    def chunk_size(self, images: int, T: int | None = None, beside: int = 0) -> int:
        """How many images to simulate at once, where each needs some bytes beside."""
        return chunk_of_images(self.graph, T or self.T, budget(self.memory), images, beside=beside, cache=self._cache)

    @property
    def _cache(self) -> int:
        return CACHE_OF_BITS if is_native(self.graph) else CACHE

    @torch.no_grad()
    def _collect(
        self,
        inputs: tuple[Tensor, ...],
        run: Callable[[Inputs], list[Tensor]],
        dim: int,
        T: int | None = None,
    ) -> Any:
        """Run chunk by chunk, join along the batch dimension, and restore the structure of the result."""
        images = fit_inputs(self.graph, inputs)
        size = self.chunk_size(len(images[0]), T)
        parts = [run(chunk) for chunk in zip(*(x.split(size) for x in images), strict=True)]
        return self.graph.unflatten([torch.cat(p, dim) for p in zip(*parts, strict=True)])

    def to(self, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to a device or to another precision, in place."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        done: dict[int, Tensor] = {}

        def move(t: Tensor) -> Tensor:  # a tensor that ANN and SNN share stays shared
            return done.setdefault(id(t), t.to(device, dtype) if device is not None else t.to(dtype or t.dtype))

        self.graph, self.source = self.graph.map_tensors(move), self.source.map_tensors(move)
        self.sites = {name: site.map(move) for name, site in self.sites.items()}
        return self

    def float(self) -> Self:
        return self.to(dtype=torch.float32)

    def double(self) -> Self:
        return self.to(dtype=torch.float64)

    def binary(self) -> SpikingNetwork:
        """The same network with spikes of height 1: thresholds are folded into the weights (Eq. 5)."""
        from .normalisation import with_binary_spikes

        return with_binary_spikes(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one file; `spikecal.load` needs no other."""
        from .checkpoint import save

        save(self, path)

    def _repr_html_(self) -> str:
        """For notebooks: what the calibration images showed in every layer."""
        rows = [
            (name, "" if s.firing_rate is None else f"{s.firing_rate:.3f}", f"{s.error:.4f}")
            for name, s in self.statistics.items()
        ]
        return f"<p>{escape(repr(self))}</p>{html_table(('site', 'firing rate', 'error'), rows)}"

    def __repr__(self) -> str:
        neurons = sum(prod(n.shape) for n in self.graph.neurons)
        latency = f"latency={self.latency}, " if self.latency > self.T else ""
        return (
            f"SpikingNetwork(T={self.T}, {latency}recipe={self.recipe.title!r}, "
            f"{len(self.graph.neurons)} layers of neurons, {neurons:,} neurons, {len(self.graph.outputs)} output(s))"
        )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; names of layers may hold anything."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def running_mean(y: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, B, ...) -> the mean of the first 1, 2, ... T steps, 0 if none of them counts.

    weights: (T, ...), of the steps; y is multiplied by them already.
    """
    weights = y.new_ones(len(y), *(1,) * (y.ndim - 2)) if weights is None else weights
    counted = weights.cumsum(0).unsqueeze(1)
    return torch.where(counted > 1e-6, y.cumsum(0) / counted.clamp(min=1e-6), 0)
