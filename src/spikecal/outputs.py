"""Calibration steps for outputs: what they read of the neurons in front of them, and how much of it at each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from .calibration import checked_factors, scaled
from .errors import CalibrationError
from .functional import clip_floor
from .replay import Layer
from .segments import Segment
from .simulation import Neurons, Readout, with_bias


@dataclass(frozen=True)
class OutputThreshold:
    """θ of the neurons in front of an output, with the least ‖z − z(s̄)‖² there, z(s̄) being what rounded spikes give.

    An output reads sums of many neurons: flooring, a little in each, averages out in them, and clipping does not. So
    what is best for every neuron by itself clips too much for the output. Tried are `factors` times the threshold so
    far, on the ANN's activations; only where neurons reach outputs alone, and these read no other neurons.
    """

    factors: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", checked_factors(self.factors))

    def apply(self, layer: Layer) -> None:
        if isinstance(layer.site, Neurons) and (outputs := layer.outputs_behind()):
            by_output = [self._errors(layer, layer.site, output) for output in outputs]
            errors = {f: sum(found[f] for found in by_output) for f in self.factors}
            best = min(self.factors, key=lambda f: (errors[f], abs(f - 1)))  # where all are alike, nothing changes
            layer.site = scaled(layer.site, best)

    def _errors(self, layer: Layer, site: Neurons, output: Segment) -> dict[float, float]:
        """By factor: summed over all images, relative to the power of the output, both without their means."""
        wrong, whole = {f: _Power() for f in self.factors}, _Power()
        for part in layer.parts_until(output):
            x = layer.target(part)
            z = layer.behind(output, x)
            whole.add(z)
            for f, power in wrong.items():
                theta = f * site.threshold
                power.add(z - layer.behind(output, clip_floor(x, layer.T, theta, theta / 2, site.start)))
        return {f: power.total() / whole.total() if whole.total() else 0.0 for f, power in wrong.items()}


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


@dataclass(frozen=True)
class LateReadout:
    """An output is the mean current of its last steps: the first `share` of the T steps does not count."""

    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise CalibrationError(f"the share of steps that do not count must be in [0, 1), not {self.share}")

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
            raise CalibrationError(f"the ridge must be more than 0, not {self.ridge}")

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
