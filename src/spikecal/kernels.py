"""Convolutions and neurons on the native kernels: what they can do, and what of it is faster than torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod, sqrt

import torch
from torch import Tensor

from . import native
from .ops import AdaptiveMaxPool, Conv, Linear, MaxPool, Op, Pad, Slice, Tensors
from .values import PackedSpikes, channels_last, image_shape, is_image


def conv_form(
    op: Conv | Linear,
    kernel: Sequence[int],
    source: Sequence[int],
    outputs: int,
    window: tuple[int, int] = (1, 1),
    hop: tuple[int, int] = (1, 1),
    zeros: tuple[int, int] = (0, 0),
) -> native.Conv | None:
    """A convolution over spikes of this shape, averaged over windows, as the kernels take it; None if they cannot.

    zeros: what has been padded above and on the left, besides the convolution's own padding.
    """
    channels, in_h, in_w = image_shape(source)
    conv = op if isinstance(op, Conv) else Conv("")
    if conv.transposed or len(conv.stride) > 2:
        return None
    form = native.Conv(in_channels=channels, in_h=in_h, in_w=in_w, groups=conv.groups)
    (form.window_h, form.window_w), (form.hop_h, form.hop_w) = window, hop
    form.map_h, form.map_w = (in_h - window[0]) // hop[0] + 1, (in_w - window[1]) // hop[1] + 1
    form.kernel_h, form.kernel_w = kernel
    form.stride_h, form.stride_w = two(conv.stride, 1)
    form.pad_h, form.pad_w = (own + more for own, more in zip(two(conv.padding, 0), zeros, strict=True))
    form.dilation_h, form.dilation_w = two(conv.dilation, 1)
    if is_depthwise(form, outputs):
        return None if is_pooled(form) else form
    if conv.groups > 1 and outputs // conv.groups % native.lanes():
        return None  # a block of output channels would reach into the next group
    return form


def two(sizes: Sequence[int], missing: int) -> tuple[int, int]:
    """Sizes along height and width; a one-dimensional convolution runs along the width."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (missing, sizes[0])


def is_depthwise(form: native.Conv, outputs: int) -> bool:
    return bool(1 < form.groups == form.in_channels == outputs)


def is_pooled(form: native.Conv) -> bool:
    """Whether the spikes pass an average pool first, be it one that only leaves some out."""
    return bool(form.window_h * form.window_w * form.hop_h * form.hop_w > 1)


def choose(form: native.Conv, outputs: int, rate: float) -> str:
    """The cheapest way to one output pixel, by nanoseconds measured on one machine: only their ratios matter."""
    if is_depthwise(form, outputs):
        return "depthwise"
    per_group = form.in_channels // form.groups
    taps, vectors = form.kernel_h * form.kernel_w * per_group, max(1, outputs // 8)
    pooled = form.window_h * form.window_w
    events = 7 * form.kernel_h * form.groups + taps * _inside(form) * rate * pooled * vectors * 0.5
    tables = taps / 4 * vectors * 0.52  # more than measured: they are larger than weights, and few images reuse them
    read = form.in_channels * form.stride_h * form.stride_w  # of bits that become floats
    dense = taps * outputs * 0.024 + 0.5 * (read + outputs) + (read * pooled if pooled > 1 else 0)
    if is_pooled(form) or (form.groups > 1 and (per_group % 4 or 64 % per_group)):
        tables = float("inf")  # what is looked up must lie in one word
    if taps * min(outputs, 64) * 16 > 2**20:
        tables = float("inf")  # the tables of one block of outputs would not stay in the cache
    costs = {"events": events, "tables": tables, "dense": dense}
    return min(costs, key=lambda k: costs[k])


def _inside(form: native.Conv) -> float:
    """The share of the taps of a kernel that do not lie on padding, on average over all of its places."""
    names = ("map", "kernel", "stride", "pad", "dilation")
    return prod(_inside_along(*(getattr(form, f"{name}_{axis}") for name in names)) for axis in ("h", "w"))


@lru_cache(maxsize=1024)
def _inside_along(size: int, kernel: int, stride: int, pad: int, dilation: int) -> float:
    first = range(-pad, max(1 - pad, size + pad - dilation * (kernel - 1)), stride)
    return sum(0 <= i + dilation * k < size for i in first for k in range(kernel)) / (kernel * len(first))


def convolve(op: Conv | Linear, tensors: Tensors, x: PackedSpikes, shape: Sequence[int]) -> Tensor | None:
    """The current (t, B, *shape) that spikes give through a convolution; None where torch should do it."""
    weight = tensors[op.weight]
    if not is_image(shape) or (isinstance(op, Linear) and len(x.shape) > 1):
        return None
    weight = weight.reshape(*weight.shape[:2], *two(weight.shape[2:] or (1,), 1))
    form = conv_form(op, weight.shape[2:], x.shape, shape[0])
    if form is None or (way := choose(form, shape[0], x.rate)) == "dense":
        return None
    form.tables = int(way == "tables")
    packed = native.pack_weights(form, shape[0], weight, x.channel_height)
    channels, steps, images = shape[0], *x.bits.shape[:2]
    bias = None
    if op.bias is not None:
        bias = torch.nn.functional.pad(tensors[op.bias], (0, native.padded(channels) - channels)).repeat(steps, 1)
    current, _ = native.run(image_shape(shape), [(form, x.bits.contiguous(), packed)], steps, images, bias=bias)
    return current[..., :channels].permute(0, 1, 4, 2, 3).reshape(steps, images, *shape)


PoolState = tuple[Tensor, Tensor]  # spikes so far: of every neuron, and of the busiest one of each window


def pool_spikes(
    op: MaxPool | AdaptiveMaxPool, x: PackedSpikes, shape: tuple[int, ...], past: PoolState | None
) -> tuple[PackedSpikes, PoolState]:
    """Max-pooling over time: an output fires when the busiest neuron of its window gets one spike ahead."""
    channels, *size = image_shape(x.shape)
    _, *space = image_shape(shape)
    if past is None:
        zeros = [torch.zeros(x.images, *s, channels, dtype=torch.int32) for s in (size, space)]
        past = (zeros[0], zeros[1])
    axes = range(2 - len(shape[1:]), 2)  # of the pool, among height and width
    windows = [
        _outputs_of(op, axis - axes[0], n, m) if axis in axes else [[0]]
        for axis, (n, m) in enumerate(zip(size, space, strict=True))
    ]
    fired = native.pool(x.bits.contiguous(), *past, *windows)
    return PackedSpikes(fired, x.channel_height, shape, pooled_rate(x.rate, x.shape, shape)), past


def pooled_rate(rate: float, before: Sequence[int], after: Sequence[int]) -> float:
    """About how often the busiest neuron of a window fires."""
    return min(1.0, rate * sqrt(prod(before) / max(1, prod(after))))


def _outputs_of(op: MaxPool | AdaptiveMaxPool, axis: int, inputs: int, outputs: int) -> list[list[int]]:
    """For every place along an axis the outputs whose windows hold it."""
    found: list[list[int]] = [[] for _ in range(inputs)]
    for o in range(outputs):
        if isinstance(op, AdaptiveMaxPool):
            window = range(o * inputs // outputs, -(-(o + 1) * inputs // outputs))
        else:
            first, hop = o * op.stride[axis] - op.padding[axis], op.dilation[axis]
            window = range(first, first + op.kernel[axis] * hop, hop)
        for i in (i for i in window if 0 <= i < inputs):
            found[i].append(o)
    return found


def moves_bits(op: Op, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether an operation leaves out pixels, or adds pixels or channels that never fire: bits can do that."""
    if not (is_image(before) and is_image(after)):
        return False
    if isinstance(op, Slice):
        return op.axis > 0
    return isinstance(op, Pad) and op.mode == "constant" and op.value == 0 and min(op.widths, default=0) >= 0


def move_spikes(op: Slice | Pad, x: PackedSpikes, shape: tuple[int, ...]) -> PackedSpikes:
    """The same as the operation itself does to floats."""
    rate = moved_rate(x.rate, x.shape, shape)
    if isinstance(op, Slice):
        axis = 4 - len(x.shape) + op.axis  # of (t, B, H, W, words)
        bits = x.bits[(slice(None),) * axis + (slice(op.start, op.stop, op.step),)]
        return PackedSpikes(bits.contiguous(), x.channel_height, shape, rate)
    space = 2 * (len(x.shape) - 1)
    bits = torch.nn.functional.pad(x.bits, (0, 0, *op.widths[:space]))
    bits = _with_channels_in_front(bits, sum(op.widths[space : space + 1]), native.words(shape[0]))
    return PackedSpikes(bits, moved_height(op, x.channel_height, x.shape), shape, rate)


def moved_rate(rate: float, before: Sequence[int], after: Sequence[int]) -> float:
    """About how often the neurons behind it fire, with those that never do."""
    return rate * min(1.0, prod(before) / max(1, prod(after)))


def moved_height(op: Slice | Pad, height: Tensor, shape: Sequence[int]) -> Tensor:
    """The height of spikes behind it, (C,): 0 for channels that never fire."""
    return height if isinstance(op, Slice) else torch.nn.functional.pad(height, op.widths[2 * (len(shape) - 1) :])


def _with_channels_in_front(bits: Tensor, count: int, words: int) -> Tensor:
    """(..., some words) -> (..., words), every bit `count` places further."""
    moved = bits.new_zeros(*bits.shape[:-1], words)
    whole, rest = divmod(count, 64)
    for i, word in enumerate(bits.unbind(-1)):
        moved[..., i + whole] |= word << rest
        if rest and i + whole + 1 < words:
            moved[..., i + whole + 1] |= (word >> (64 - rest)) & ((1 << rest) - 1)  # what does not fit
    return moved


def can_scan(current: Tensor, threshold: Tensor, temporal: Tensor | None = None) -> bool:
    """Whether the kernels can simulate neurons that get this current, (t, B, ...)."""
    return (
        is_image(current.shape[2:])
        and prod(threshold.shape[1:]) == 1
        and (temporal is None or prod(temporal.shape[2:]) == 1)
        and current.dtype == torch.float32
        and current.device.type == "cpu"
        and native.library() is not None
    )


def scan(
    current: Tensor, threshold: Tensor, v0: Tensor, temporal: Tensor | None = None, delay: int = 0, start: int = 0
) -> tuple[PackedSpikes, Tensor]:
    """Neurons that get this current, (t, B, ...): their spikes, and their potential afterwards, (B, H, W, C)."""
    (steps, images), shape = current.shape[:2], tuple(current.shape[2:])
    channels = image_shape(shape)[0]
    addend = channels_last(current.flatten(0, 1), shape, channels)
    theta = padded_threshold(threshold, channels)
    v = channels_last(v0.expand(1, *shape), shape, channels).repeat(images, 1, 1, 1)
    fired, _ = native.run(
        image_shape(shape),
        (),
        steps,
        images,
        addend=addend.unflatten(0, (steps, images)),
        bias=None if temporal is None else padded_bias(temporal, channels),
        threshold=theta,
        v=v,
        delay=delay,
        start=start,
    )
    return PackedSpikes(fired, theta[:channels], shape), v


def padded_threshold(threshold: Tensor, channels: int) -> Tensor:
    """(padded C,): what is only padding never fires."""
    theta = threshold.reshape(-1).expand(channels)
    return torch.nn.functional.pad(theta, (0, native.padded(channels) - channels), value=torch.inf).contiguous()


def padded_bias(temporal: Tensor, channels: int) -> Tensor:
    """(T, padded C)."""
    temporal = temporal.reshape(len(temporal), -1).expand(-1, channels)
    return torch.nn.functional.pad(temporal, (0, native.padded(channels) - channels)).contiguous()
