"""Calibration steps: each looks at one layer of the spiking network and corrects it. Equations as in the paper."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from .errors import CalibrationError
from .functional import channel_mean, clip_floor, clip_floor_error, delayed
from .replay import Layer
from .segments import Segment
from .simulation import Neurons, Readout, with_bias


class Step(Protocol):
    """Anything with this method can stand in a recipe."""

    def apply(self, layer: Layer) -> None:
        """Correct the layer's site or weights."""


@dataclass(frozen=True)
class BiasShift:
    """A constant current of fraction·θ/T at every step: on average it undoes the floor (Deng & Gu 2021)."""

    fraction: float = 0.5

    def apply(self, layer: Layer) -> None:
        if isinstance(layer.site, Neurons):
            layer.site = with_bias(layer.site, self.fraction * layer.site.threshold / layer.T)


@dataclass(frozen=True)
class InitialPotential:
    """Start with fraction·θ on the membrane: the bias shift, paid in advance (OPI, Bu et al. 2022)."""

    fraction: float = 0.5

    def apply(self, layer: Layer) -> None:
        if isinstance(layer.site, Neurons):
            layer.site = replace(layer.site, v0=layer.site.v0 + self.fraction * layer.site.threshold)


@dataclass(frozen=True)
class BiasCalibration:
    """b ← b + μ_c(e), the mean error of each channel (Eq. 14)."""

    def apply(self, layer: Layer) -> None:
        e = layer.mean_error().unsqueeze(0)  # (1, C, ...)
        layer.site = with_bias(layer.site, channel_mean(e, layer.channel_axis))


@dataclass(frozen=True)
class PotentialCalibration:
    """v(0) ← v(0) + T·e, the mean error of each neuron (Eq. 16). An output has no membrane; its bias takes e.

    rate, common: how much of e is corrected, of what differs from neuron to neuron of a channel, and of what they have
    in common (as the rest if it is None). The paper has 1; less fits less to the images, for e has as many values as
    the layer has neurons. In a linear layer every neuron is a channel of its own, and only `common` counts.
    images: how many of them e is the mean of, at most; all if it is 0.
    """

    rate: float = 1.0
    images: int = 0
    common: float | None = None

    def __post_init__(self) -> None:
        if self.images < 0:
            raise ValueError(f"the number of images must be 0 (all) or more, not {self.images}")

    def apply(self, layer: Layer) -> None:
        e = layer.mean_error(self.images)  # (C, ...)
        if isinstance(layer.site, Neurons):
            mean = channel_mean(e.unsqueeze(0), layer.channel_axis)  # (C, 1, ...)
            common = self.rate if self.common is None else self.common
            share = self.rate * e + (common - self.rate) * mean
            layer.site = replace(layer.site, v0=layer.site.v0 + layer.T * share)
        else:
            layer.site = with_bias(layer.site, e)


@dataclass(frozen=True)
class TemporalBias:
    """b[t] ← b[t] + rate·μ_c(x − s[t]), step after step, each firing with what the steps before it got (FTBC).

    After Wu et al., ECCV 2024. One value a channel and step is kept. All images together weigh as much as `rounds`
    corrections at this rate; they pass some at a time.
    """

    rate: float = 0.5
    rounds: float = 8.0

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            BiasCalibration().apply(layer)
            return
        sample = layer.segment.site.shape
        axis = layer.channel_axis % max(1, len(sample))
        shape = (layer.T, *(n if d == axis else 1 for d, n in enumerate(sample)))
        temporal = torch.zeros(shape, dtype=layer.graph.dtype, device=layer.graph.device)
        if layer.site.temporal is not None:
            temporal += layer.site.temporal
        for part, values in layer.chunks():
            target, current = layer.target(part), layer.arriving(values)
            rate = min(self.rate, self.rate * self.rounds * len(target) / layer.images)
            self._correct(temporal, rate, target, current, layer)
        layer.site = replace(layer.site, temporal=temporal)

    @staticmethod
    def _correct(temporal: Tensor, rate: float, target: Tensor, current: Tensor, layer: Layer) -> None:
        assert isinstance(layer.site, Neurons)
        if layer.site.signed:
            raise CalibrationError("temporal bias is made for binary spikes; leave it out of a recipe with signed=True")
        theta, v = layer.site.threshold, layer.site.v0
        for t in range(layer.T):
            v = v + current[t] + temporal[t]
            step = rate * channel_mean(target - (v >= theta) * theta, layer.channel_axis)
            temporal[t] += step
            v = v + step
            v = v - (v >= theta) * theta


@dataclass(frozen=True)
class EvenCurrent:
    """A current of its own at every step, b[t] ← b[t] + μ_c(Ī) − μ_c(I[t]): each channel's mean current gets even.

    Over all steps it adds nothing. What stays uneven is what differs from image to image and from place to place.
    """

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        current = layer.current_by_step()  # (T, C, ...)
        means = torch.stack([channel_mean(step[None], layer.channel_axis) for step in current])  # (T, C, 1, ...)
        temporal = delayed(means.mean(0, keepdim=True) - means, layer.site.delay)
        if layer.site.temporal is not None:
            temporal = temporal + layer.site.temporal.mean(0, keepdim=True)
        layer.site = replace(layer.site, temporal=temporal)


@dataclass(frozen=True)
class TunedThreshold:
    """θ with the least ‖x − s̄‖² of the neurons as they really fire, on the spiking network's own currents.

    Tried are `factors` times the threshold so far; an initial potential and a bias shift keep their share of it.
    """

    factors: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        before = layer.site
        candidates = [_scaled(before, f) for f in self.factors]
        errors = [torch.zeros_like(before.threshold, dtype=torch.float64) for _ in candidates]
        for part, values in layer.chunks():
            target = layer.target(part)
            for error, layer.site in zip(errors, candidates, strict=True):
                wrong = (target - layer.output(values).mean()).square().sum(0, keepdim=True)
                error += _like(wrong, before.threshold)
        best = torch.stack(errors).argmin(0)  # (C, 1, ...)
        factor = torch.tensor(self.factors, dtype=before.threshold.dtype, device=best.device)[best]
        layer.site = _scaled(before, factor)


@dataclass(frozen=True)
class OutputThreshold:
    """θ of the neurons in front of an output, with the least ‖z − z(s̄)‖² there, z(s̄) being what rounded spikes give.

    An output reads sums of many neurons: flooring, a little in each, averages out in them, and clipping does not. So
    what is best for every neuron by itself clips too much for the output. Tried are `factors` times the threshold so
    far, on the ANN's activations; only where neurons reach outputs alone, and these read no other neurons.
    """

    factors: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        if not self.factors or not all(f > 0 for f in self.factors):
            raise ValueError(f"there must be factors, all of them above 0, not {self.factors}")

    def apply(self, layer: Layer) -> None:
        if isinstance(layer.site, Neurons) and (outputs := layer.outputs_behind()):
            errors = {f: sum(self._error(layer, output, f) for output in outputs) for f in self.factors}
            best = min(self.factors, key=lambda f: (errors[f], abs(f - 1)))  # where all are alike, nothing changes
            layer.site = _scaled(layer.site, best)

    @staticmethod
    def _error(layer: Layer, output: Segment, factor: float) -> float:
        """Summed over all images, relative to the power of the output, both without their means."""
        assert isinstance(layer.site, Neurons)
        theta = factor * layer.site.threshold
        wrong, whole = _Power(), _Power()
        for part in layer.parts_until(output):
            x = layer.target(part)
            z = layer.behind(output, x)
            wrong.add(z - layer.behind(output, clip_floor(x, layer.T, theta, theta / 2)))
            whole.add(z)
        return wrong.total() / whole.total() if whole.total() else 0.0


class _Power:
    """Σ(x − x̄)² over all images, some at a time."""

    def __init__(self) -> None:
        self.images, self.sum, self.squares = 0, torch.zeros(()), 0.0

    def add(self, x: Tensor) -> None:
        x = x.double()  # (B, ...)
        self.images += len(x)
        self.sum = self.sum.to(x) + x.sum(0)
        self.squares += float(x.square().sum())

    def total(self) -> float:
        """0 where images do not differ, but for rounding."""
        total = self.squares - float(self.sum.square().sum()) / self.images
        return total if total > 1e-9 * self.squares else 0.0


def _scaled(neurons: Neurons, factor: Tensor | float) -> Neurons:
    """With other thresholds; an initial potential keeps its share of them."""
    return replace(neurons, threshold=neurons.threshold * factor, v0=neurons.v0 * factor)


def _like(wrong: Tensor, threshold: Tensor) -> Tensor:
    """(1, C, ...) summed to the shape of a threshold: one value a channel, or one in all."""
    axes = [d for d, n in enumerate(threshold.shape) if n == 1]
    return wrong[0].sum(axes, keepdim=True) if axes else wrong[0]


@dataclass(frozen=True)
class LateReadout:
    """An output is the mean current of its last steps: the first `share` of the T steps does not count."""

    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"the share of steps that do not count must be in [0, 1), not {self.share}")

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Readout):
            return
        skipped = min(int(self.share * layer.T), layer.T - 1)
        weights = torch.zeros(layer.T, *(1,) * len(layer.segment.site.shape))
        weights[skipped:] = layer.T / (layer.T - skipped)
        layer.site = replace(layer.site, weights=weights.to(layer.site.bias))


@dataclass(frozen=True)
class WeightedReadout:
    """An output is a weighted mean of its current over the steps: min_w ‖x − Σ_t w[t]·I[t]/T‖² + λ‖w − 1‖².

    Late steps know more. The weights are never negative and 1 on average, the same for all images and classes; means
    over the images are taken off both sides, and the output's bias makes up for them.
    ridge: λ, relative to the mean power of the I[t]/T.
    """

    ridge: float = 0.03

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise ValueError(f"the ridge must be more than 0, not {self.ridge}")

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Readout):
            return
        gram, cross, power = _moments_over_time(layer)
        gram.diagonal().add_(self.ridge * power)
        weights = (1 + _correction(gram, cross)).reshape(-1, *(1,) * len(layer.segment.site.shape))
        layer.site = replace(layer.site, weights=weights.to(layer.site.bias))
        layer.site = with_bias(layer.site, layer.mean_error())


def _moments_over_time(layer: Layer) -> tuple[Tensor, Tensor, float]:
    """Covariances of the currents at an output, I[t]/T, with each other, (T, T), and with what lacks, (T,).

    The third is their mean power, never 0: where images do not differ, a tiny share of what they have in common.
    """
    size = prod(layer.segment.site.shape)
    new = partial(torch.zeros, dtype=torch.float64, device=layer.graph.device)
    gram, cross, total, lacking = new(layer.T, layer.T), new(layer.T), new(layer.T, size), new(size)
    for part, values in layer.chunks():
        for arriving, target in zip(layer.arriving(values).unbind(1), layer.target(part), strict=True):
            current = arriving.reshape(layer.T, size).double() / layer.T  # (T, n)
            residual = target.reshape(size).double() - current.sum(0)  # (n,)
            gram += current @ current.T
            cross += current @ residual
            total += current
            lacking += residual
    in_common = 1e-9 * float(gram.diagonal().mean())
    gram -= total @ total.T / layer.images
    power = max(float(gram.diagonal().mean()), in_common) or 1.0
    return gram, cross - total @ lacking / layer.images, power


def _correction(gram: Tensor, cross: Tensor) -> Tensor:
    """The d that minimises dᵀ·gram·d − 2·crossᵀ·d, where Σd = 0 and no d is below −1, (T,): an active-set method.

    From d = 0 on, to the minimum over the `free` steps, or as far as the first of them allows, which is held at −1.
    At a minimum, the held step that would lower it most is freed. It only ever goes down.
    """
    d, free = torch.zeros_like(cross), torch.ones_like(cross, dtype=torch.bool)
    for _ in range(10 * len(d)):  # rarely more than a few; rounding could make two steps take turns
        n = int(free.sum())
        system = torch.ones(n + 1, n + 1, dtype=d.dtype, device=d.device)  # with the multiplier μ of Σd = 0
        system[:n, :n], system[n, n] = gram[free][:, free], 0
        slope = cross - gram @ d  # (T,), downhill
        *_, mu = found = torch.linalg.solve(system, torch.cat([slope[free], slope.new_zeros(1)]))
        move = torch.zeros_like(d).masked_scatter(free, found[:n])
        way = torch.where(move < 0, (-1 - d) / move, torch.inf)  # to the bound
        if bool(way.min() < 1):
            d = d + way.min() * move
            d[way.argmin()], free[way.argmin()] = -1, False
            continue
        d = (d + move).clamp(min=-1)
        gain = torch.where(free, -torch.inf, cross - gram @ d - mu)
        if bool(gain.max() <= 0):
            break
        free[gain.argmax()] = True
    return d


class NoEffectWarning(UserWarning):
    """Something that a recipe asks for changed nothing: there was no place for it, or it made things worse."""


@dataclass(frozen=True)
class WeightCalibration:
    """min_W ‖e‖² (Eq. 17) by SGD on mean spikes, through `clip_floor` with a straight-through floor (Eq. 18)."""

    iterations: int = 5000
    lr: float = 1e-5
    momentum: float = 0.9
    batch_size: int = 32
    seed: int = 0

    def apply(self, layer: Layer) -> None:
        weights = {name: layer.graph.tensors[name].clone().requires_grad_() for name in layer.weights}
        if not weights or not self.iterations:
            return
        inputs, target = layer.mean_inputs(self.batch_size), layer.target()
        before = self._mean_loss(layer, inputs, target, weights)
        optimizer = torch.optim.SGD(list(weights.values()), self.lr, self.momentum)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)
        for batch in self.batches(len(target)):
            with torch.enable_grad():
                loss = self._loss(layer, {k: x[batch] for k, x in inputs.items()}, target[batch], weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        after = self._mean_loss(layer, inputs, target, weights)
        if not after < before:  # also where it is not a number
            warnings.warn(
                f"weights calibration at {layer.segment.site.name!r} would not lower the error of {float(before):.3g}, "
                f"but change it by {100 * float(after / before - 1):+.2g} %, so its weights stay as they were; "
                f"try a smaller lr than {self.lr:g}",
                NoEffectWarning,
                stacklevel=2,
            )
            return
        layer.set_weights({name: w.detach() for name, w in weights.items()})

    def batches(self, images: int) -> Iterator[Tensor]:
        """The images of every iteration: permutations of all, one after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        size, order = min(self.batch_size, images), torch.empty(0, dtype=torch.long)
        for _ in range(self.iterations):
            if len(order) < size:
                order = torch.randperm(images, generator=generator)
            yield order[:size]
            order = order[size:]

    def _mean_loss(self, layer: Layer, inputs: dict[str, Tensor], target: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The loss over all images, some at a time."""
        parts = [slice(i, i + self.batch_size) for i in range(0, len(target), self.batch_size)]
        losses = [
            self._loss(layer, {k: x[p] for k, x in inputs.items()}, target[p], weights) * len(target[p]) for p in parts
        ]
        return torch.stack(losses).sum() / len(target)

    @staticmethod
    def _loss(layer: Layer, inputs: dict[str, Tensor], target: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Squared error, summed over the channels, averaged over images and space."""
        z = layer.current(inputs, weights) + layer.site.bias
        channels = target.shape[1:][layer.channel_axis] if target.ndim > 1 else 1
        if isinstance(layer.site, Neurons):
            return channels * clip_floor_error(z, target, layer.T, layer.site.threshold, layer.site.v0)
        return channels * (z - target).square().mean()
