"""The operations of a spikecal graph: small frozen records with a meaning, nothing else.

Every operation but `Activation` and the maxima is affine, so it commutes with averaging over time; time steps ride
in the batch dimension. Fields of type `str` that stand for a tensor are keys of `Graph.tensors`. Shapes, axes and
parameters are those of one sample, without the batch dimension: axis 0 is the channel of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional import clipped_relu

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Op:
    """Base of all operations; `run` is what it does to batched values."""

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Input(Op):
    """A positional argument of the model; the same at every time step (direct coding)."""


@dataclass(frozen=True)
class Constant(Op):
    """A tensor that does not depend on the images; its input only tells the batch size."""

    value: str

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return p[self.value].expand(x[0].shape[0], *p[self.value].shape)


@dataclass(frozen=True)
class Conv(Op):
    """Convolution in 1, 2 or 3 dimensions, or its transpose."""

    weight: str
    bias: str | None = None
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        bias = None if self.bias is None else p[self.bias]
        extra = self.output_padding if self.transposed else (0,) * len(self.stride)
        return torch.convolution(
            x[0],
            p[self.weight],
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            extra,
            self.groups,
        )


@dataclass(frozen=True)
class Linear(Op):
    """x Wᵀ + b on the last axis."""

    weight: str
    bias: str | None = None

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return F.linear(x[0], p[self.weight], None if self.bias is None else p[self.bias])


@dataclass(frozen=True)
class Scale(Op):
    """x · scale + shift, both broadcast against a sample: batch norm, gains, offsets."""

    scale: str | None = None
    shift: str | None = None

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        y = x[0] if self.scale is None else x[0] * p[self.scale]
        return y if self.shift is None else y + p[self.shift]


@dataclass(frozen=True)
class Activation(Op):
    """ReLU, clipped at `cap` if there is one. The one operation that is not affine: here neurons will stand."""

    cap: str | None = None

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return clipped_relu(x[0], None if self.cap is None else p[self.cap])


@dataclass(frozen=True)
class Add(Op):
    """x + alpha · y, broadcasting."""

    alpha: float = 1.0

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return torch.add(x[0], x[1], alpha=self.alpha)


@dataclass(frozen=True)
class Concat(Op):
    axis: int

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return torch.cat(x, self.axis + 1)


@dataclass(frozen=True)
class AvgPool(Op):
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        args: list[Any] = [self.kernel, self.stride, self.padding, self.ceil_mode, self.count_include_pad]
        if len(self.kernel) == 1:
            return F.avg_pool1d(x[0], *args)
        pool: Any = F.avg_pool2d if len(self.kernel) == 2 else F.avg_pool3d
        return cast(Tensor, pool(x[0], *args, self.divisor))


@dataclass(frozen=True)
class AdaptiveAvgPool(Op):
    size: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(self.size) - 1]
        return cast(Tensor, pool(x[0], self.size))


@dataclass(frozen=True)
class Peak(Op):
    """Base of operations that pick the maximum of a window. Not affine, but f(a·x) = a·f(x) for a > 0, so what they
    make of the input summed up to now, step by step, has the right mean over time (`functional.increments`)."""


@dataclass(frozen=True)
class MaxPool(Peak):
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.kernel) - 1]
        return cast(Tensor, pool(x[0], self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode))


@dataclass(frozen=True)
class AdaptiveMaxPool(Peak):
    size: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        pool: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(self.size) - 1]
        return cast(Tensor, pool(x[0], self.size))


@dataclass(frozen=True)
class Max(Peak):
    axes: tuple[int, ...]
    keepdim: bool = False

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].amax([a + 1 for a in self.axes], keepdim=self.keepdim)


@dataclass(frozen=True)
class Mean(Op):
    axes: tuple[int, ...]
    keepdim: bool = False

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].mean([a + 1 for a in self.axes], keepdim=self.keepdim)


@dataclass(frozen=True)
class Reshape(Op):
    shape: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].reshape(x[0].shape[0], *self.shape)


@dataclass(frozen=True)
class Permute(Op):
    axes: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].permute(0, *(a + 1 for a in self.axes))


@dataclass(frozen=True)
class Expand(Op):
    """Repeat along axes of size 1."""

    shape: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].expand(x[0].shape[0], *self.shape)


@dataclass(frozen=True)
class Slice(Op):
    axis: int
    start: int
    stop: int
    step: int = 1

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0][(slice(None),) * (self.axis + 1) + (slice(self.start, self.stop, self.step),)]


@dataclass(frozen=True)
class Select(Op):
    """What stands at these places along an axis, in this order: an index, a flip, a roll, a repetition."""

    axis: int
    places: tuple[int, ...]

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0].index_select(self.axis + 1, torch.tensor(self.places, device=x[0].device))


@dataclass(frozen=True)
class Pad(Op):
    """Padding as in torch: widths for the last axis first, two a side."""

    widths: tuple[int, ...]
    mode: str = "constant"
    value: float = 0.0

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return F.pad(x[0], self.widths, self.mode, self.value if self.mode == "constant" else None)


@dataclass(frozen=True)
class Upsample(Op):
    """Nearest or linear interpolation to a fixed size."""

    size: tuple[int, ...]
    mode: str
    align_corners: bool | None = None
    factors: tuple[float, ...] | None = None

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        size, factors = (self.size, None) if self.factors is None else (None, self.factors)
        align = None if self.mode.startswith("nearest") else self.align_corners
        return F.interpolate(x[0], size, factors, self.mode, align_corners=align)


@dataclass(frozen=True)
class Output(Op):
    """A leaf of the model's result: the mean over time of what arrives here."""

    def run(self, p: Tensors, *x: Tensor) -> Tensor:
        return x[0]


OPS: dict[str, type[Op]] = {cls.__name__: cls for cls in (*Op.__subclasses__(), *Peak.__subclasses__()) if cls != Peak}
