"""Calibration steps: each looks at one layer of the spiking network and corrects it. Equations as in the paper."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from .errors import CalibrationError
from .functional import channel_mean, clip_floor_error
from .replay import Layer
from .simulation import Neurons, with_bias


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
            raise CalibrationError(f"the number of images must be 0 (all) or more, not {self.images}")

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
class TunedThreshold:
    """θ with the least ‖x − s̄‖² of the neurons as they really fire, on the spiking network's own currents.

    Tried are `factors` times the threshold so far; an initial potential keeps its share of it.
    """

    factors: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", checked_factors(self.factors))

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        before = layer.site
        candidates = [scaled(before, f) for f in self.factors]
        errors = [torch.zeros_like(before.threshold, dtype=torch.float64) for _ in candidates]
        for part, values in layer.chunks():
            target = layer.target(part)
            for error, layer.site in zip(errors, candidates, strict=True):
                wrong = (target - layer.output(values).mean()).square().sum(0, keepdim=True)
                error += _like(wrong, before.threshold)
        best = torch.stack(errors).argmin(0)  # (C, 1, ...)
        factor = torch.tensor(self.factors, dtype=before.threshold.dtype, device=best.device)[best]
        layer.site = scaled(before, factor)


def checked_factors(factors: Iterable[float]) -> tuple[float, ...]:
    """Of thresholds."""
    factors = tuple(factors)
    if not factors or not all(0 < f < inf for f in factors):
        raise CalibrationError(f"there must be factors, all of them above 0 and finite, not {factors}")
    return factors


def scaled(neurons: Neurons, factor: Tensor | float) -> Neurons:
    """With other thresholds; an initial potential keeps its share of them."""
    return replace(neurons, threshold=neurons.threshold * factor, v0=neurons.v0 * factor)


def _like(wrong: Tensor, threshold: Tensor) -> Tensor:
    """(1, C, ...) summed to the shape of a threshold: one value a channel, or one in all."""
    axes = [d for d, n in enumerate(threshold.shape) if n == 1]
    return wrong[0].sum(axes, keepdim=True) if axes else wrong[0]


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

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.batch_size < 1 or not self.lr > 0:
            raise CalibrationError("iterations must be 0 or more, a batch have an image at least, and lr be above 0")

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
            site = layer.site
            return channels * clip_floor_error(z, target, layer.T, site.threshold, site.v0, site.start)
        return channels * (z - target).square().mean()
