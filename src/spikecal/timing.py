"""Calibration steps that care for *when* spikes come: unevenness is the largest error of a few steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, inf

import torch
from torch import Tensor

from .calibration import BiasCalibration, scaled
from .errors import CalibrationError
from .functional import channel_mean, delayed, signs
from .replay import Layer
from .simulation import Neurons


@dataclass(frozen=True)
class FiringDelay:
    """Layers that lie deeper than `behind`, 1 being the last, begin to fire `steps` after their input begins.

    `Recipe(delay=...)` is that for all layers. Errors pile up with depth, so a delay pays most behind the middle of a
    network; the latency grows by the layers that wait on the longest way. Put it in front of all steps but `LateStart`.
    """

    steps: int = 1
    behind: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 <= self.behind <= 1:
            raise CalibrationError(
                f"steps of 0 or more and a depth in [0, 1] are wanted, not {self.steps} and {self.behind}"
            )

    def apply(self, layer: Layer) -> None:
        if isinstance(layer.site, Neurons) and layer.depth > self.behind:
            layer.site = replace(layer.site, delay=self.steps)


@dataclass(frozen=True)
class LateStart:
    """Neurons deep in the network fire from step ⌊latest·f^power + ½⌋ on, and keep what arrives before.

    f is how deep they lie, 1 for the last; no start lies behind ⌊latest⌋, which is share·T, or root·√T if that is less.
    By then there is evidence for what they decide: what the first t steps tell is wrong by about 1/t, and waiting for
    them coarsens the spikes by t/T, so with many steps t had better grow with √T. T stays what it is, so thresholds
    grow by T / (T − start). Put it in front of steps that depend on those.
    """

    share: float = 0.25
    power: float = 2.0
    root: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.share < 1 and self.power > 0):
            raise CalibrationError(
                f"a share in [0, 1) and a power above 0 are wanted, not {self.share} and {self.power}"
            )
        if self.root is not None and not 0 <= self.root < inf:
            raise CalibrationError(f"a root of 0 or more is wanted, or none, not {self.root}")

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        latest = self.share * layer.T
        if self.root is not None:
            latest = min(latest, self.root * layer.T**0.5)
        start = min(floor(latest), floor(latest * layer.depth**self.power + 0.5))
        growth = (layer.T - layer.site.start) / (layer.T - start)
        layer.site = replace(scaled(layer.site, growth), start=start)


@dataclass(frozen=True)
class TemporalBias:
    """b[t] ← b[t] + rate·μ_c(x − s[t]), step after step, each firing with what the steps before it got (FTBC).

    After Wu et al., ECCV 2024. One value a channel and step is kept. All images together weigh as much as `rounds`
    corrections at this rate; they pass some at a time.
    """

    rate: float = 0.5
    rounds: float = 8.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.rounds > 0):
            raise CalibrationError(f"rate and rounds must be above 0, not {self.rate} and {self.rounds}")

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
        theta, v, start = layer.site.threshold, layer.site.v0, layer.site.start
        target = target * (layer.T / (layer.T - start))  # in fewer steps, more at each
        given = torch.zeros_like(target)  # spikes so far, of signed neurons those up less those down
        for t in range(layer.T):
            v = v + current[t] + temporal[t]
            if t < start:
                continue
            step = rate * channel_mean(target - _fired(layer.site, v, given) * theta, layer.channel_axis)
            temporal[t] += step
            v = v + step
            spikes = _fired(layer.site, v, given)
            given += spikes
            v = v - spikes * theta


def _fired(neurons: Neurons, v: Tensor, given: Tensor) -> Tensor:
    return signs(v, neurons.threshold, given) if neurons.signed else v >= neurons.threshold


@dataclass(frozen=True)
class EvenCurrent:
    """A current of its own at every step, b[t] ← b[t] + μ_c(Ī) − μ_c(I[t]): each channel's mean current gets even.

    Over all steps it adds nothing. What stays uneven is what differs from image to image and from place to place.
    Currents of single steps that were there before are spread evenly too.
    Neurons that start late get all of it from then on, and nothing before.
    """

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        current = layer.current_by_step()  # (T, C, ...)
        means = torch.stack([channel_mean(step[None], layer.channel_axis) for step in current])  # (T, C, 1, ...)
        start, total = layer.site.start, means.sum(0)
        if layer.site.temporal is not None:
            total = total + layer.site.temporal.sum(0)
        even = torch.zeros_like(means)
        even[start:] = total / (layer.T - start)
        if not start:  # what arrives with a delay is even before it is delayed
            even = delayed(even, layer.site.delay)
        layer.site = replace(layer.site, temporal=even - delayed(means, layer.site.delay))


@dataclass(frozen=True)
class Hesitation:
    """b[first] ← b[first] − share·θ, paid back in equal parts over the last ⌊back·T + ½⌋ steps, by default in the last.

    `first` is the first step at which neurons may fire. Over all steps it adds nothing: a neuron that is sure fires as
    often, a little later, and one that is not waits for more evidence. Neurons with a firing delay have the time: their
    last steps bring nothing new.
    """

    share: float = 0.25
    back: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.share < inf and 0 <= self.back <= 1):
            raise CalibrationError(
                f"a share of 0 or more and back in [0, 1] are wanted, not {self.share} and {self.back}"
            )

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        steps = max(1, floor(self.back * layer.T + 0.5))
        temporal = torch.zeros(layer.T, *layer.site.threshold.shape).to(layer.site.threshold)
        temporal[layer.site.start] -= self.share * layer.site.threshold
        temporal[-steps:] += self.share * layer.site.threshold / steps
        if layer.site.temporal is not None:
            temporal = temporal + layer.site.temporal
        layer.site = replace(layer.site, temporal=temporal)
