"""Calibration steps: each looks at one layer of the spiking network and corrects it. Equations as in the paper."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from .functional import channel_mean, clip_floor_ste
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
    """v(0) ← v(0) + T·e, the mean error of each neuron (Eq. 16). An output has no membrane; its bias takes e."""

    def apply(self, layer: Layer) -> None:
        e = layer.mean_error()  # (C, ...)
        if isinstance(layer.site, Neurons):
            layer.site = replace(layer.site, v0=layer.site.v0 + layer.T * e)
        else:
            layer.site = with_bias(layer.site, e)


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
        if isinstance(layer.site, Neurons):
            z = clip_floor_ste(z, layer.T, layer.site.threshold, layer.site.v0)
        channels = target.shape[1:][layer.channel_axis] if target.ndim > 1 else 1
        return (z - target).square().mean() * channels
