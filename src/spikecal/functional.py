"""The maths of the paper, as pure functions of tensors. Equation numbers are those of Li et al., ICML 2021.

θ is the firing threshold V_th, v the membrane potential, T the number of time steps. Parameters of neurons
(θ, v0, bias) have the shape of one sample, with 1 where they are shared: (C, 1, 1) is one value a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def clipped_relu(z: Tensor, cap: Tensor | None = None) -> Tensor:
    """The ANN's activation: max(z, 0), and at most `cap` where the network has one (ReLU6, clamp)."""
    return z.relu() if cap is None else torch.minimum(z.relu(), cap)


def clip_floor(z: Tensor, T: int, threshold: Tensor, v0: Tensor | float = 0.0, start: int = 0) -> Tensor:
    """Mean output of an IF neuron that gets the constant current z, Eq. 10 and 15, if it fires from step `start` on.

    θ/T · clip(⌊(T·z + v0) / θ⌋, 0, T − start)
    """
    return ((T * z + v0) / threshold).floor().clamp(0, max(0, T - start)) * (threshold / T)


class _ClipFloorError(torch.autograd.Function):
    """Forward and gradient in one pass, in place: recorded step by step they would take three times as long."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor, T: int, threshold: Tensor, v0: Tensor, start: int) -> Tensor:
        x = (T * z).add_(v0).div_(threshold)
        inside = (x >= 0).logical_and_(x <= T - start)
        x.floor_().clamp_(0, T - start).mul_(threshold / T).sub_(target)
        error = x.square().mean()
        ctx.save_for_backward(x.mul_(inside).mul_(2 / x.numel()))
        return error

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.saved_tensors[0], None, None, None, None, None


def clip_floor_error(z: Tensor, target: Tensor, T: int, threshold: Tensor, v0: Tensor, start: int = 0) -> Tensor:
    """Mean of (clip_floor(z) − target)², to be minimised over z.

    The floor is straight-through, d⌊x⌋/dx = 1 (Eq. 18): clip_floor has gradient 1 inside the clip, 0 outside.
    """
    error: Tensor = _ClipFloorError.apply(z, target, T, threshold, v0, start)  # type: ignore[no-untyped-call]
    return error


def integrate_and_fire(current: Tensor, threshold: Tensor, v: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """IF neurons with soft reset, Eq. 2-4: v += I[t]; s[t] = θ where v ≥ θ, else 0; v -= s[t].

    current: (T, B, ...) and v: broadcastable to (B, ...). Returns the spikes (T, B, ...) and v after step T.
    start: the first step at which they may fire; what arrives before it is kept.
    """
    spikes = torch.empty_like(current)  # (T, B, ...), laid out as the current is: mixed layouts are slow
    v = _integrated(current[:start], v, spikes)  # (B, ...)
    threshold = torch.empty_like(v).copy_(threshold)
    for t in range(start, len(current)):
        v += current[t]
        torch.ge(v, threshold, out=spikes[t])
        spikes[t] *= threshold
        v -= spikes[t]
    return spikes, v


def _integrated(current: Tensor, v: Tensor, spikes: Tensor) -> Tensor:
    """The potential after these steps, at which nothing fires."""
    v = torch.empty_like(spikes[0]).copy_(v)
    for t in range(len(current)):
        v += current[t]
        spikes[t] = 0
    return v


def signed_integrate_and_fire(current: Tensor, threshold: Tensor, v: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """The same with signed neurons with memory: −θ where v ≤ −θ, if the neuron has fired more often up than down."""
    spikes = torch.empty_like(current)  # (T, B, ...)
    v = _integrated(current[:start], v, spikes)  # (B, ...)
    given = torch.zeros_like(v)  # spikes up minus spikes down
    for t in range(start, len(current)):
        v += current[t]
        sign = signs(v, threshold, given)
        given += sign
        spikes[t] = sign * threshold
        v -= spikes[t]
    return spikes, v


def signs(v: Tensor, threshold: Tensor, given: Tensor) -> Tensor:
    """What signed neurons fire at this potential: 1, −1 or 0, having `given` more spikes up than down so far."""
    return (v >= threshold).to(v.dtype) - ((v <= -threshold) & (given > 0)).to(v.dtype)


def delayed(current: Tensor, delay: int) -> Tensor:
    """What neurons see that begin to fire `delay` steps after their input begins: (T, B, ...) -> (T, B, ...).

    Before their first decision they have integrated I[0] + ... + I[delay]; their last steps bring nothing new.
    """
    if not delay:
        return current
    first = current[: delay + 1].sum(0, keepdim=True)
    rest = current[delay + 1 :]
    return torch.cat([first, rest, torch.zeros_like(current[: len(current) - 1 - len(rest)])])


def increments(
    f: Callable[[Tensor], Tensor], x: Tensor, past: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """f(x[0] + ... + x[t]) − f(x[0] + ... + x[t − 1]) for every step t: its mean over time is f of the mean.

    That holds where f(a·x) = a·f(x), as for a maximum; the maximum of spikes of one height is then a spike or none.
    x: (T, B, ...). `past` holds the sum and f of the sum before these steps; what it is after them is returned.
    """
    total = x.cumsum(0)  # (T, B, ...)
    if past is not None:
        total += past[0]
    values = f(total.flatten(0, 1)).unflatten(0, (len(x), -1))
    before = torch.zeros_like(values[:1]) if past is None else past[1].unsqueeze(0)
    return values - torch.cat([before, values[:-1]]), (total[-1], values[-1])


def channel_mean(e: Tensor, axis: int) -> Tensor:
    """μ_c of Eq. 13, averaged over the batch too: (B, C, ...) -> (C, 1, ...) for channel axis `axis` of a sample."""
    keep = axis if axis < 0 else axis + 1
    return e.mean([d for d in range(e.ndim) if d not in (keep, keep + e.ndim)], keepdim=True)[0]


def mean_over_time(x: Tensor) -> Tensor:
    """(T, ...) -> (...). Adding step to step is faster than torch's reduction along the outermost dimension."""
    total = x[0].clone()
    for step in x[1:]:
        total += step
    return total / len(x)


def pack_bits(spikes: Tensor, height: Tensor) -> Tensor:
    """(T, ...) spikes of this height -> (⌈T/8⌉, ...) bytes, step t in bit t mod 8 of byte t div 8."""
    packed = torch.empty_like(spikes[::8], dtype=torch.uint8)  # keeps the layout in memory
    for i, byte in enumerate(spikes.split(8)):
        bits = byte[0].clone()
        for k, step in enumerate(byte[1:], 1):
            bits.add_(step, alpha=2**k)
        packed[i] = bits.div_(height).round_()
    return packed


def unpack_bits(packed: Tensor, T: int, height: Tensor) -> Tensor:
    """The inverse of `pack_bits`: (⌈T/8⌉, ...) bytes -> (T, ...) spikes of this height."""
    spikes = torch.empty_like(packed[:1], dtype=height.dtype).expand(T, *packed.shape[1:])
    spikes = torch.empty_like(spikes)
    for t in range(T):
        torch.mul((packed[t // 8] >> (t % 8)) & 1, height, out=spikes[t])
    return spikes


def count_spikes(packed: Tensor, T: int) -> Tensor:
    """Spikes of every neuron over all T steps, from packed bits: (⌈T/8⌉, ...) -> (...)."""
    total = torch.zeros(packed.shape[1:], dtype=torch.int32, device=packed.device)
    for t in range(T):
        total += (packed[t // 8] >> (t % 8)) & 1
    return total
