"""Values of a run: the same at every step, a train over time, or spikes as bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import native
from .functional import mean_over_time
from .work import note_work

USUAL_RATE = 0.1  # spikes per neuron and step, where nobody has measured it


@dataclass(frozen=True)
class Value:
    """What a node gives: the same at every step, or a train over time."""

    data: Tensor  # (B, ...) if constant, else (t, B, ...)
    constant: bool = True
    height: Tensor | None = None  # of spikes: every element is 0 or this

    @property
    def images(self) -> int:
        return self.data.shape[0 if self.constant else 1]

    @property
    def steps(self) -> int:
        """Of a train over time."""
        return len(self.data)

    def dense(self, steps: int) -> Tensor:
        """With time in the batch dimension: (t·B, ...)."""
        if self.constant:
            return self.data.expand(steps, *self.data.shape).flatten(0, 1)
        return self.data.flatten(0, 1)

    def part(self, images: slice) -> Value:
        """That of some of the images."""
        if images.start == 0 and images.stop >= self.images:
            return self
        data = self.data[images] if self.constant else self.data[:, images]
        return Value(data, self.constant, self.height)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.data.nbytes

    def mean(self) -> Tensor:
        """Mean over the steps, (B, ...)."""
        return self.data if self.constant else mean_over_time(self.data)


class PackedSpikes(Value):
    """Spikes as bits, channels last; floats are made of them when somebody asks."""

    def __init__(self, bits: Tensor, height: Tensor, shape: tuple[int, ...], rate: float = USUAL_RATE) -> None:
        fields = {"bits": bits, "constant": False, "channel_height": height, "shape": shape, "rate": rate}
        self.__dict__.update(fields, height=height.reshape(-1, *(1,) * (len(shape) - 1)))

    bits: Tensor  # (t, B, H, W, words)
    channel_height: Tensor  # (C,)
    shape: tuple[int, ...]  # of a sample
    rate: float  # about how often a neuron fires, if that is known

    @property
    def images(self) -> int:
        return self.bits.shape[1]

    @property
    def steps(self) -> int:
        return len(self.bits)

    def part(self, images: slice) -> Value:
        if images.start == 0 and images.stop >= self.images:
            return self
        return PackedSpikes(self.bits[:, images].contiguous(), self.channel_height, self.shape, self.rate)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    @cached_property
    def data(self) -> Tensor:
        return self.unpacked().data

    def unpacked(self) -> Value:
        """The same as floats, which nobody keeps."""
        dense = native.unpack(self.bits, self.channel_height)  # (t, B, H, W, C)
        note_work(bytes=dense.nbytes)
        data = dense.permute(0, 1, 4, 2, 3).reshape(*dense.shape[:2], *self.shape)
        return Value(data, constant=False, height=self.height)

    def mean(self) -> Tensor:
        counts = native.count(self.bits, self.channel_height / len(self.bits))  # (B, H, W, C)
        return counts.permute(0, 3, 1, 2).reshape(len(counts), *self.shape)


def spikes_by_step(value: Value) -> Tensor:
    """How many neurons of all images fire at each step, of either sign, (t,)."""
    if isinstance(value, PackedSpikes):
        ones = torch.tensor([bin(byte).count("1") for byte in range(256)], dtype=torch.float64)
        counts = [torch.bincount(step.flatten().view(torch.uint8), minlength=256) for step in value.bits]
        return torch.stack(counts).double() @ ones
    return (value.data != 0).flatten(1).sum(1, dtype=torch.float64).cpu()


def bits_of(value: Value) -> Tensor:
    """Spikes of any kind as bits, (t, B, H, W, words)."""
    if isinstance(value, PackedSpikes):
        return value.bits
    channels, height, width = image_shape(value.data.shape[2:])
    images = value.data.reshape(*value.data.shape[:2], channels, height, width)
    return native.pack_spikes(images.permute(0, 1, 3, 4, 2))


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """A sample of up to three axes as (channels, height, width)."""
    channels, *space = shape
    return (channels, *(1,) * (2 - len(space)), *space)  # type: ignore[return-value]


def is_image(shape: Sequence[int]) -> bool:
    return 1 <= len(shape) <= 3


def channels_last(x: Tensor, shape: Sequence[int], channels: int) -> Tensor:
    """(B, *shape) -> (B, H, W, padded channels), contiguous."""
    x = x.expand(x.shape[0], *shape).reshape(x.shape[0], *image_shape(shape)).permute(0, 2, 3, 1)
    missing = native.padded(channels) - channels
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).contiguous()
