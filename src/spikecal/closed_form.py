"""Closed-form weights calibration: the weights in front of a site as the solution of a least-squares problem.

Between two neurons the map is affine, so "the mean current of the spiking network should equal the ANN's
pre-activation" is linear in the weights of each convolution on the way. With P the mean spikes under the kernel
(centred), D what the ANN has more, both over all images and positions,

    ΔW = (PᵀP + λ·mean(diag PᵀP)·I)⁻¹ PᵀD,        Δb = mean(D) − ΔW·mean(P).

No learning rate and no iterations: one Gram matrix a layer, summed over chunks of images.

A current with the right mean may still arrive unevenly, and a spike that was fired too early is not taken back. So the
same least squares asks the weights for even currents too: with P_t, I_t the means over the first t steps, the current
(t/T)·(I_t − I) that has arrived too early should vanish. It is linear in the weights as well, and adds rows
P ← (t/T)·(P_t − P), D ← −(t/T)·(I_t − I) for some t < T. Where neurons fire only from a step `start` on, what is due by
step t is the share (t − start)/(T − start) of I, in the place of t/T.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .calibration import NoEffectWarning
from .errors import CalibrationError
from .graph import Graph, Node
from .ops import Add, Conv, Linear
from .replay import Layer
from .simulation import Neurons, with_bias

Places = tuple[slice, ...]

FEW = 30  # λ grows by 1 + FEW · inputs / samples: a classifier has as many samples as there are images
BAND = 96  # rows of a Gram matrix that are summed at once, at least: fewer would be slow
ROUNDING = 100  # a variance is a difference of sums: below so many times their precision nothing of it is real


@dataclass(frozen=True)
class ClosedFormWeights:
    """Least squares for every convolution and linear layer of a segment, in the order they run.

    ridge: λ, relative to the mean power of the inputs; more where there are few samples for many inputs. Of several,
        each layer takes the one with the least error on either half of the images when fitted on the other half.
    rows: about how many positions a layer is fitted on, at most; on large maps, an eighth of those of fewer images.
    masked: do not correct what the neurons hide: where both are negative, or both above what the neurons can fire.
    fired: D is what the neurons lack in spikes, x − s̄, not in current: unevenness shows only there.
    even: how much the rows that ask for even currents weigh, against those that ask for the right mean.
    """

    ridge: float | tuple[float, ...] = 0.1
    masked: bool = True
    rows: int = 32768
    fired: bool = False
    even: float = 0.3

    def __post_init__(self) -> None:
        if isinstance(self.ridge, list):  # from JSON
            object.__setattr__(self, "ridge", tuple(self.ridge))
        if not (self._ridges and all(0 < r < inf for r in self._ridges) and 0 <= self.even < inf and self.rows >= 1):
            raise CalibrationError(
                "a ridge above 0, rows for even currents that weigh 0 or more, and at least one position are wanted, "
                f"not ridge={self.ridge}, even={self.even} and rows={self.rows}"
            )

    @property
    def _ridges(self) -> tuple[float, ...]:
        return self.ridge if isinstance(self.ridge, tuple) else (self.ridge,)

    def apply(self, layer: Layer) -> None:
        for node in layer.segment.nodes:
            if isinstance(node.op, Conv | Linear) and _can_fit(layer.graph, node) and self._has_room(layer, node):
                self._fit(layer, node)

    def _has_room(self, layer: Layer, node: Node) -> bool:
        """Whether the Gram matrices, and what solving takes, fit into half of the memory budget."""
        assert isinstance(node.op, Conv | Linear)
        taps = layer.graph.tensors[node.op.weight][0].numel()
        groups = node.op.groups if isinstance(node.op, Conv) else 1
        matrices = 3 + bool(self.even) + (3 + bool(self.even)) * (len(self._ridges) > 1)
        needed = 8 * groups * taps * taps * matrices
        if needed <= layer.memory / 2:
            return True
        warnings.warn(
            f"the weights of {node.name!r} stay as they are: least squares for {taps} inputs needs "
            f"{2 * needed / 2**20:,.0f} MiB of memory budget, and has {layer.memory / 2**20:,.0f}; raise it "
            "(memory=, --memory)",
            NoEffectWarning,
            stacklevel=2,
        )
        return False

    def _fit(self, layer: Layer, node: Node) -> None:
        assert isinstance(node.op, Conv | Linear)
        anchor = _anchor(layer, node)
        weight = layer.graph.tensors[node.op.weight]
        groups = node.op.groups if isinstance(node.op, Conv) else 1
        folds = [_Moments(weight, groups) for _ in range(min(2, len(self._ridges)))]
        times = self._times(layer, anchor)
        uneven = _Moments(weight, groups) if times else None
        positions, long_axes = prod(_axes(node)), sum(n > 1 for n in _axes(node))
        images = min(layer.images, -(-8 * self.rows // positions))
        every = max(1, round((images * positions / self.rows) ** (1 / max(1, long_axes))))
        fired = layer.mean_outputs() if self.fired and anchor == layer.segment.source else None
        for turn, (part, ann, snn) in enumerate(layer.means(images)):
            at = _places(node, every, turn)
            if fired is not None:
                residual = (layer.target(part) - fired[part])[at]  # (B, C, ...)
            elif anchor == layer.segment.source:
                residual = self._residual(layer, ann[anchor][at], snn[anchor][at], at)
            else:
                residual = (ann[anchor] - snn[anchor])[at]
            size = -(-len(residual) // len(folds))
            pairs = zip(snn[node.inputs[0]].split(size), residual.split(size), strict=True)
            for i, (x, d) in enumerate(pairs, turn):  # an odd image goes to one half and to the other in turn
                folds[i % len(folds)].add(*_samples(node, weight, x, d, at))
            for t in times if turn % 2 == 0 else ():  # half of the images will do
                assert uneven is not None
                some = _places(node, 2 * every, turn + t)
                p, d = _too_early(layer, node, anchor, snn, t, part, some)
                uneven.add(*_samples(node, weight, p, -d, some), block=t)
        samples = sum(fold.sums[0][0] for fold in folds if fold.sums)
        ridges = [ridge * (1 + FEW * weight[0].numel() / samples) for ridge in self._ridges]
        ridge = _best_ridge(folds, ridges, uneven, self.even)
        delta, shift = _merged(folds).solve(ridge, uneven, self.even)
        layer.set_weights({node.op.weight: weight + delta})
        if anchor == layer.segment.source:
            shape = [1] * len(node.shape)
            shape[layer.graph.channel_axis(node)] = -1  # that of the neurons may be another, behind a sum
            layer.site = with_bias(layer.site, shift.reshape(shape))
        elif node.op.bias is not None:
            layer.set_weights({node.op.bias: layer.graph.tensors[node.op.bias] + shift})

    def _times(self, layer: Layer, anchor: str) -> list[int]:
        """The steps at which currents should be even: two at most. Neurons that fire with a delay do not mind much."""
        if not self.even or anchor != layer.segment.source:
            return []
        if not isinstance(layer.site, Neurons) or layer.site.delay > 0:
            return []
        start, steps = layer.site.start, layer.T - layer.site.start
        return sorted({start + round(steps / 3), start + round(steps * 2 / 3)} - {start, layer.T})

    def _residual(self, layer: Layer, z: Tensor, current: Tensor, at: Places) -> Tensor:
        """What the ANN has more at some positions, as far as the neurons can show it."""
        site, shape = layer.site, layer.segment.site.shape
        current = current + site.bias.expand(shape)[at[1:]]
        if not self.masked or not isinstance(site, Neurons):
            return z - current
        residual = torch.where(z < 0, (-current).clamp(max=0), z - current)
        most = (site.threshold * ((layer.T - site.start) / layer.T)).expand(shape)[at[1:]]
        return torch.where((z > most) & (current > most), 0, residual)


def _can_fit(graph: Graph, node: Node) -> bool:
    """Convolutions and linear layers whose weights serve no other node."""
    op = node.op
    users = [n for n in graph.nodes if isinstance(n.op, Conv | Linear) and n.op.weight == op.weight]  # type: ignore[attr-defined]
    return (isinstance(op, Linear) or (isinstance(op, Conv) and not op.transposed)) and len(users) == 1


def _anchor(layer: Layer, node: Node) -> str:
    """Where the error of a layer is measured: behind the sums that only it feeds, so that it corrects them as well."""
    names = {n.name for n in layer.segment.nodes}
    while len(readers := layer.graph.readers[node.name]) == 1:
        (reader,) = readers
        if reader.name not in names or not isinstance(reader.op, Add) or reader.shape != node.shape:
            break
        if reader.op.alpha != 1 and reader.inputs[0] != node.name:
            break
        node = reader
    return node.name


def _axes(node: Node) -> tuple[int, ...]:
    """How many positions there are along each axis of a map, or of the tokens of a linear layer."""
    return node.shape[1:] if isinstance(node.op, Conv) else node.shape[:-1]


def _places(node: Node, every: int, turn: int) -> Places:
    """The index of every so-many-th position along each axis, of others in every turn."""
    steps = [min(every, n) for n in _axes(node)]
    positions = [slice(turn % step, None, step) for step in steps]
    return (slice(None), slice(None), *positions) if isinstance(node.op, Conv) else (slice(None), *positions)


def _too_early(
    layer: Layer, node: Node, anchor: str, snn: Mapping[str, Tensor], t: int, part: slice, at: Places
) -> tuple[Tensor, Tensor]:
    """What has arrived by step t and is not due by then: of the inputs, and of the current at some places."""
    start = layer.site.start if isinstance(layer.site, Neurons) else 0
    early, due = layer.means_until(t, part), (t - start) / (layer.T - start)  # of what arrives in all
    inputs = t / layer.T * early[node.inputs[0]] - due * snn[node.inputs[0]]
    return inputs, t / layer.T * early[anchor][at] - due * snn[anchor][at]


def _samples(node: Node, weight: Tensor, x: Tensor, residual: Tensor, at: Places) -> tuple[Tensor, Tensor]:
    """Inputs under the kernel at some places (B, groups, taps, n), and residuals there (B, groups, outputs, n)."""
    op = node.op
    if isinstance(op, Linear):
        return x[at].flatten(0, -2).T[None, None], residual.flatten(0, -2).T[None, None]
    assert isinstance(op, Conv)
    axes, places = len(op.stride), at[2:]
    x = F.pad(x, [p for p in reversed(op.padding) for _ in range(2)])
    sizes = zip(weight.shape[2:], op.stride, op.dilation, places, strict=True)
    for axis, (size, stride, step, some) in enumerate(sizes, 2):
        x = x.narrow(axis, some.start * stride, x.shape[axis] - some.start * stride)
        x = x.unfold(axis, step * (size - 1) + 1, stride * some.step)[..., ::step]
    taps = x.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))  # (B, C, kernel, places)
    taps, residual = taps.flatten(1, 1 + axes).flatten(2).contiguous(), residual.flatten(2)
    if any(some.step > 1 for some in places):  # picked out of a map; a whole one stays as it lies in memory
        residual = residual.contiguous()
    return taps.unflatten(1, (op.groups, -1)), residual.unflatten(1, (op.groups, -1))


class _Moments:
    """Sums over all samples, in float64, from which the solution follows. Each block of them has means of its own."""

    def __init__(self, weight: Tensor, groups: int) -> None:
        taps, outputs = weight[0].numel(), len(weight) // groups
        self.weight, self.groups = weight, groups
        self.new = partial(torch.zeros, dtype=torch.float64, device=weight.device)
        self.gram, self.cross = self.new((groups, taps, taps)), self.new((groups, taps, outputs))
        size = -(-taps // min(6, max(1, taps // BAND)))
        self.bands = [slice(i, min(i + size, taps)) for i in range(0, taps, size)]
        self.sums: dict[int, tuple[int, Tensor, Tensor]] = {}  # by block: samples, of the inputs, of the residuals

    def add(self, p: Tensor, d: Tensor, block: int = 0) -> None:
        """p: (B, groups, taps, n), d: (B, groups, outputs, n)."""
        for rows in self.bands:  # the matrix is symmetric: below the diagonal it is filled in the end
            self.gram[:, rows, rows.start :] += _products(p[:, :, rows], p[:, :, rows.start :])
        self.cross += _products(p, d)
        zero = self.new(())
        samples, inputs, residuals = self.sums.get(block, (0, zero, zero))
        self.sums[block] = samples + len(p) * p.shape[3], inputs + p.sum((0, 3)), residuals + d.sum((0, 3))

    def clone(self) -> _Moments:
        twin = _Moments(self.weight, self.groups)
        twin.gram, twin.cross, twin.sums = self.gram.clone(), self.cross.clone(), dict(self.sums)
        return twin

    def means(self, block: int = 0) -> tuple[Tensor, Tensor]:
        """Of inputs, (groups, taps), and residuals, (groups, outputs)."""
        samples, inputs, residuals = self.sums[block]
        return inputs / samples, residuals / samples

    def centre(self) -> None:
        """Turn the sums into covariances, in place: these matrices are large."""
        for rows in self.bands:
            self.gram[:, rows.stop :, rows] = self.gram[:, rows, rows.stop :].mT
        total = sum(samples for samples, _, _ in self.sums.values())
        self.gram /= total
        self.cross /= total
        for block, (samples, _, _) in self.sums.items():
            p, d = self.means(block)
            self.gram -= samples / total * p.unsqueeze(2) * p.unsqueeze(1)
            self.cross -= samples / total * p.unsqueeze(2) * d.unsqueeze(1)

    def solve(self, ridge: float, other: _Moments | None = None, share: float = 0.0) -> tuple[Tensor, Tensor]:
        """ΔW in the shape of the weights, and Δb, (outputs,). The other rows weigh this share of our own."""
        solution = self.solution(ridge, other, share)
        p, d = self.means()
        shift = d - (solution * p.unsqueeze(2)).sum(1)
        delta = solution.mT.reshape(self.weight.shape)
        return delta.to(self.weight.dtype), shift.flatten().to(self.weight.dtype)

    def solution(self, ridge: float, other: _Moments | None, share: float) -> Tensor:
        """(groups, taps, outputs). The sums are used up."""
        total = sum(samples for samples, _, _ in self.sums.values())
        square = self.gram.diagonal(dim1=1, dim2=2).mean(1) / total  # (groups,)
        self.centre()
        power = self.gram.diagonal(dim1=1, dim2=2).mean(1)
        varies = power > ROUNDING * torch.finfo(self.weight.dtype).eps * square  # else what is left of it is rounding
        power = torch.where(varies, power, 1.0)
        if other is not None:
            other.centre()
            self.gram.add_(other.gram, alpha=share)
            self.cross.add_(other.cross, alpha=share)
        self.gram.diagonal(dim1=1, dim2=2).add_(ridge * power[:, None])
        found: Tensor = torch.linalg.solve(self.gram, self.cross)
        return torch.where(varies[:, None, None], found, 0)  # inputs that do not vary, or are dead, explain nothing

    def gain(self, solution: Tensor) -> float:
        """By how much a solution lowers the mean squared error of these samples, which must be centred."""
        return float((solution * (2 * self.cross - self.gram @ solution)).sum())


def _merged(folds: Sequence[_Moments]) -> _Moments:
    """The moments of all samples, in the place of the first ones."""
    first, *others = (fold for fold in folds if fold.sums)
    for other in others:
        first.gram += other.gram
        first.cross += other.cross
        (n, inputs, residuals), (more_n, more_inputs, more_residuals) = first.sums[0], other.sums[0]
        first.sums[0] = n + more_n, inputs + more_inputs, residuals + more_residuals
    return first


def _best_ridge(folds: Sequence[_Moments], ridges: Sequence[float], uneven: _Moments | None, share: float) -> float:
    """The one that gains most on one half of the samples, fitted on the other; both take their turn."""
    if len(ridges) == 1 or not all(fold.sums for fold in folds):
        return ridges[0]
    gains = dict.fromkeys(ridges, 0.0)
    for here, there in (folds, folds[::-1]):
        judge = there.clone()
        judge.centre()
        for ridge in ridges:
            rows = uneven.clone() if uneven is not None else None
            gains[ridge] += judge.gain(here.clone().solution(ridge, rows, share))
    return max(ridges, key=lambda ridge: gains[ridge])


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Σ over batch and n of a·bᵀ: (B, groups, i, n), (B, groups, j, n) -> (groups, i, j)."""
    if a.shape[1] == 1:  # never more than one matrix at a time
        return a.new_zeros(a.shape[2], b.shape[2]).addbmm_(a[:, 0], b[:, 0].mT)[None]
    total = a.new_zeros(a.shape[1], a.shape[2], b.shape[2])
    for p, d in zip(a, b, strict=True):
        total.baddbmm_(p, d.mT)
    return total
