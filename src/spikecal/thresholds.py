"""Rules that choose the firing threshold of every site from the ANN's activations.

A rule hands out an accumulator for each site; all of them watch the ANN run over the images, as often as they ask
for. What they keep is an exact statistic of all images, whatever their order and number.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf
from typing import Protocol

import torch
from torch import Tensor

from . import native
from .errors import CalibrationError

SCRATCH = 64  # bytes that an update needs beside each value that it takes in, at most


class Accumulator(Protocol):
    """Watches the activations of one site, arranged as (B, rows, values): one row a channel, or one in all."""

    def update(self, x: Tensor) -> None:
        """Take in some activations, (B, rows, n)."""

    def end_pass(self) -> Tensor | None:
        """After all images: the thresholds, (rows,), or None to see all images once more."""

    @property
    def nbytes(self) -> int:
        """Memory that a pass needs for one row."""


class ThresholdRule(Protocol):
    @property
    def per_channel(self) -> bool: ...

    def accumulator(self, T: int, depth: float) -> Accumulator:
        """For one site, at this depth in the network: 1 for the last."""


def _alive(threshold: Tensor) -> Tensor:
    """A row that never was positive gets the threshold 1: it will not fire, and nothing divides by zero."""
    return torch.where(threshold > 0, threshold, torch.ones_like(threshold))


def _untied(threshold: Tensor) -> Tensor:
    """A hair below an activation: at the very activation rounding would decide over a spike, at every step anew."""
    return threshold * (1 - 1e-5)  # more than sums of thousands of float32 products are off by


@dataclass(frozen=True)
class MaxActivation:
    """θ = the largest activation (Diehl et al. 2015): nothing is clipped, small values are floored away."""

    per_channel: bool = False

    def accumulator(self, T: int, depth: float = 1.0) -> Accumulator:
        return _Maximum()


@dataclass
class _Maximum:
    top: Tensor | None = None
    nbytes: int = 8

    def update(self, x: Tensor) -> None:
        top = x.amax((0, 2))
        self.top = top if self.top is None else torch.maximum(self.top, top)

    def end_pass(self) -> Tensor:
        assert self.top is not None
        return _alive(_untied(self.top))


@dataclass(frozen=True)
class Percentile:
    """θ = the q-quantile of the activations (Rueckauer et al. 2017): the least one that a share q does not exceed."""

    q: float = 0.999
    per_channel: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise CalibrationError(f"the percentile q must be in (0, 1], not {self.q}")

    def accumulator(self, T: int, depth: float = 1.0) -> Accumulator:
        return _Quantile(self.q)


@dataclass
class _Quantile:
    """Selects the k-th smallest value exactly, by radix: the bits of positive floats sort like the floats.

    Each pass counts the values by their next DIGIT bits among those that share the bits found so far.
    """

    q: float
    prefix: Tensor | None = None  # bits found so far, (rows,)
    rank: Tensor | None = None  # rank of the wanted value among those that share them, from 1
    top: Tensor | None = None
    counts: Tensor | None = None
    seen: int = 0
    remaining: int = 0  # bits not yet found
    dtype: torch.dtype = torch.float32

    DIGIT = 11
    nbytes: int = 24 * 2**11  # counts, those of the images in hand, and their sum

    def update(self, x: Tensor) -> None:
        x = x.transpose(0, 1).flatten(1).relu() + 0.0  # (rows, n), no negative zero
        bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64).long()
        if self.prefix is None:
            self.dtype = x.dtype
            self.remaining = self.remaining or torch.finfo(x.dtype).bits
            self.seen += x.shape[1]
            top = x.amax(1)
            self.top = top if self.top is None else torch.maximum(self.top, top)
        rows, shift = x.shape[0], max(0, self.remaining - self.DIGIT)
        digit = (bits >> shift) & (2 ** min(self.DIGIT, self.remaining) - 1)
        row = torch.arange(rows, device=x.device)[:, None].expand_as(digit)
        if self.prefix is not None:
            match = (bits >> self.remaining) == self.prefix[:, None]
            digit, row = digit[match], row[match]
        counts = torch.bincount((row * 2**self.DIGIT + digit).flatten(), minlength=rows * 2**self.DIGIT)
        self.counts = counts if self.counts is None else self.counts + counts

    def end_pass(self) -> Tensor | None:
        assert self.counts is not None and self.top is not None
        counts = self.counts.view(-1, 2**self.DIGIT)  # (rows, digits)
        if self.rank is None or self.prefix is None:
            self.rank = torch.full_like(counts[:, 0], ceil(self.q * self.seen))
            self.prefix = torch.zeros_like(self.rank)
        below = counts.cumsum(1)
        digit = (below < self.rank[:, None]).sum(1)
        self.rank = self.rank - torch.where(digit > 0, below.gather(1, (digit - 1).clamp(0)[:, None])[:, 0], 0)
        self.prefix = (self.prefix << min(self.DIGIT, self.remaining)) | digit
        self.remaining -= min(self.DIGIT, self.remaining)
        self.counts = None
        if self.remaining:
            return None
        bits = self.prefix.to(torch.int32 if self.dtype == torch.float32 else torch.int64)
        value = bits.view(self.dtype)
        return _alive(_untied(torch.where(value > 0, value, self.top)))


@dataclass(frozen=True)
class MMSE:
    """θ with the least squared error of `clip_floor` against the ReLU (Eq. 11), among `grid` values up to the maximum.

    `shift` says how the neurons will round: 0 floors, 0.5 rounds to the nearest level. It is a fraction with a
    denominator of at most 64, so that the search can be exact. `lost` is what uneven spikes take of it, in parts of a
    step, and `regained` how much less they take in the last layer: counted with is shift − (lost − regained·depth)/T,
    to the nearest eighth between 0 and the shift.
    """

    grid: int = 100
    per_channel: bool = False
    shift: float = 0.0
    lost: float = 0.0
    regained: float = 0.0

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise CalibrationError(f"the grid must have at least one value, not {self.grid}")
        if not 0 <= self.shift < 1:
            raise CalibrationError(f"the shift must be in [0, 1), not {self.shift}")
        if abs(_as_fraction(self.shift) - self.shift) > 1e-9:
            raise CalibrationError(f"the shift must be a fraction with a denominator of at most 64, not {self.shift}")
        if not 0 <= self.lost < inf:
            raise CalibrationError(f"what is lost of the shift must be 0 or more, not {self.lost}")
        if not 0 <= self.regained <= self.lost:
            raise CalibrationError(f"what is regained must be between 0 and the {self.lost} lost, not {self.regained}")

    def accumulator(self, T: int, depth: float = 1.0) -> Accumulator:
        return _LeastError(T=T, grid=self.grid, shift=self.shift_left(T, depth))

    def shift_left(self, T: int, depth: float) -> float:
        """What uneven spikes leave of the shift."""
        if not self.lost:
            return self.shift
        left = self.shift - (self.lost - self.regained * depth) / T
        return min(max(0.0, floor(8 * left + 0.5) / 8), self.shift)


def _as_fraction(shift: float) -> Fraction:
    return Fraction(shift).limit_denominator(64)


@dataclass
class _ByCells:
    """Base of rules that need of the activations only how many, and how much, lie in each of many equal cells.

    A first pass finds the maximum of every row, a second one counts. Cells that a rule never tells apart share a
    column.
    """

    top: Tensor | None = None
    totals: Tensor | None = None  # number and sum, (rows, columns, 2)
    seen: int = 0  # in every row
    final: bool = False

    @property
    def column_of(self) -> Tensor:
        """The column of each cell between 0 and the maximum, and of the maximum itself: int32, ascending."""
        raise NotImplementedError

    @property
    def columns(self) -> int:
        return int(self.column_of[-1]) + 1

    @property
    def nbytes(self) -> int:
        return 40 * self.columns if self.top is not None else 8  # counts, sums, and what becomes of them

    def update(self, x: Tensor) -> None:
        if not self.final:
            top = x.amax((0, 2))
            self.top = top if self.top is None else torch.maximum(self.top, top)
            return
        assert self.top is not None
        if self.totals is None:
            self.totals = torch.zeros(len(self.top), self.columns, 2, dtype=torch.float64, device=x.device)
        add_cells(x, self.top.double(), self.column_of.to(x.device), self.totals)
        self.seen += x.shape[0] * x.shape[2]

    def end_pass(self) -> Tensor | None:
        assert self.top is not None
        if not self.final:
            if not torch.isfinite(self.top).all():
                raise CalibrationError("the network's activations are infinite for some images; check their scale")
            self.top, self.final = _alive(self.top), True
            return None
        top, n, s = self.by_row()
        found = self.threshold(top, n, s).to(self.top.dtype)
        dead = (n.sum(1) == 0) | (found <= 0)
        return torch.where(dead, self.top, torch.minimum(found, _untied(self.top)))

    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """The maxima, (rows,), and number and sum in each column, (rows, columns)."""
        assert self.top is not None and self.totals is not None
        n, s = self.totals.unbind(2)
        return self.top.double(), n, s

    def threshold(self, top: Tensor, n: Tensor, s: Tensor) -> Tensor:
        """What the rule makes of `by_row`."""
        raise NotImplementedError


@lru_cache(maxsize=8)  # layers of one network differ by a few eighths of the shift
def _columns_of(T: int, grid: int, shift: float) -> tuple[Tensor, Tensor]:
    """For `_LeastError`: the column of each cell, int32, and that of each level of each candidate, (grid, T).

    Only the level boundaries tell cells apart; the first column is below all of them. Shared by all sites.
    """
    d = _as_fraction(shift).denominator
    levels = torch.arange(1, T + 1)  # level k is reached at (k − shift)·θ/T
    boundaries = torch.arange(1, grid + 1)[:, None] * ((levels - shift) * d).round().long()  # in cells
    begins = torch.zeros(grid * T * d + 1, dtype=torch.int32)
    begins[boundaries.flatten()] = 1
    column_of = begins.cumsum(0, dtype=torch.int32)
    return column_of, column_of[boundaries].long()


@dataclass
class _LeastError(_ByCells):
    """An exact search that touches every activation once, not once for each candidate.

    The candidates are θ_g = g·max/grid, so every level boundary (k − shift)·θ_g/T lies on the lattice of cells of
    width max/(grid·T·d), where d makes shift·d whole. Number and sum of the activations between boundaries therefore
    give the squared error of every candidate exactly: Σ(x − q)² = Σx² + Σ_k q_k·(n_k·q_k − 2·Σ_k x). There are at most
    grid·T boundaries, whatever d is.
    """

    T: int = 1
    grid: int = 100
    shift: float = 0.0

    @property
    def column_of(self) -> Tensor:
        return _columns_of(self.T, self.grid, self.shift)[0]

    def threshold(self, top: Tensor, n: Tensor, s: Tensor) -> Tensor:
        return self.candidates(top).gather(1, self.errors(top, n, s).argmin(1)[:, None])[:, 0]

    def candidates(self, top: Tensor) -> Tensor:
        steps = torch.arange(1, self.grid + 1, dtype=torch.float64, device=top.device)
        return top[:, None] * steps / self.grid  # (rows, grid)

    def errors(self, top: Tensor, n: Tensor, s: Tensor) -> Tensor:
        """Squared error of every candidate, (rows, grid), up to the constant Σx²."""
        n, s = ((c.sum(1, keepdim=True) - c.cumsum(1) + c) for c in (n, s))  # how many, how much, from a column on
        levels = torch.arange(1, self.T + 1, device=n.device)
        columns = _columns_of(self.T, self.grid, self.shift)[1].to(n.device)
        candidates = self.candidates(top)
        errors = torch.empty_like(candidates)
        for g, (theta, at) in enumerate(zip(candidates.T, columns, strict=True)):
            unit = (theta / self.T)[:, None]  # (rows, 1)
            # Σ_k over the steps k−1 → k of q²: q_k² − q_{k−1}² = unit²·(2k − 1), and of q: unit
            gain = unit**2 * (2 * levels - 1) * n[:, at] - 2 * unit * s[:, at]
            errors[:, g] = gain.sum(1)
        return errors


@dataclass(frozen=True)
class LTB:
    """θ ← θ + 2·μ((x − θ)⁺), `iterations` times from 0: local threshold balancing. It does not depend on T.

    The step is that of gradient descent on the squared error of clipping, ‖x − min(x, θ)‖², which only the maximum
    makes zero: the number of iterations says how rare the clipped activations become.
    """

    iterations: int = 1000
    per_channel: bool = True

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise CalibrationError(f"local threshold balancing needs at least one iteration, not {self.iterations}")

    def accumulator(self, T: int, depth: float = 1.0) -> Accumulator:
        return _Balance(iterations=self.iterations)


@dataclass
class _Balance(_ByCells):
    """Number and sum of the activations in many cells between 0 and the maximum stand for all of them.

    Only of the cell in which θ lies it is not known what is above θ; it counts as if all of it were at its mean.
    """

    iterations: int = 1000

    @property
    def column_of(self) -> Tensor:
        return torch.arange(4097, dtype=torch.int32)

    def threshold(self, top: Tensor, n: Tensor, s: Tensor) -> Tensor:
        above_n, above_s = ((c.sum(1, keepdim=True) - c.cumsum(1)) for c in (n, s))  # in the cells above one
        cells = self.columns - 1
        width, theta = top[:, None] / cells, torch.zeros_like(n[:, :1])
        for _ in range(self.iterations):
            cell = (theta / width).long().clamp_(max=cells)
            own, above = ((b.gather(1, cell) - theta * a.gather(1, cell)) for a, b in ((n, s), (above_n, above_s)))
            theta += 2 * (own.clamp(min=0) + above.clamp(min=0)) / self.seen
        return theta[:, 0]


def add_cells(x: Tensor, top: Tensor, column_of: Tensor, totals: Tensor) -> None:
    """Add number and sum of the positive values, row by row, to the column of the cell of width top/cells they lie in.

    The last cell has the top.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and native.library() is not None:
        native.add_cells(x.contiguous(), top, column_of, totals)
        return
    batch, row, place = (x > 0).nonzero(as_tuple=True)
    values, cells = x[batch, row, place].double(), len(column_of) - 1
    column = column_of[(values * cells / top[row]).long().clamp_(max=cells)]
    index, size = row * totals.shape[1] + column, totals[..., 0].numel()
    totals[..., 0] += torch.bincount(index, minlength=size).view(totals.shape[:2])
    totals[..., 1] += torch.bincount(index, values, minlength=size).view(totals.shape[:2])
