"""What each ONNX operator does, in torch: inputs are positional and attributes are keywords, named as in ONNX.

So an input that was an attribute in an older opset needs no second function. Integers (shapes, axes, indices) are plain
numbers and lists, whether the file stores them or computes them from the shape of a value: the batch size stays
symbolic. Tensors are floating point. What an operator means for spikes is not decided here but in `rules`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .refusals import Refuse

Run = Callable[..., Any]
Ints = Sequence[int] | None


@dataclass(frozen=True)
class Operator:
    run: Run
    settings: bool = False  # whether stored inputs are wanted as numbers and lists rather than as tensors


def _elementwise(f: Callable[[Any, Any], Any]) -> Operator:
    """Of two tensors, or of integers: lists of one length, or a list and a number."""

    def run(x: Any, y: Any) -> Any:
        if not isinstance(x, list) and not isinstance(y, list):
            return f(x, y)
        length = max(len(_list(x)), len(_list(y)))
        xs, ys = (_list(v) * (length // len(_list(v))) for v in (x, y))
        return [f(a, b) for a, b in zip(xs, ys, strict=True)]

    return Operator(run)


def _reduction(method: str) -> Operator:
    def run(x: Tensor, axes: Ints = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        if not axes and noop_with_empty_axes:
            return x
        return getattr(x, method)(tuple(axes or range(x.ndim)), keepdim=bool(keepdims))

    return Operator(run, settings=True)


def _list(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


#: The operators that fit on a line; the others follow below.
OPERATORS: dict[str, Operator] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(lambda x, y: x / y if isinstance(x, Tensor) or isinstance(y, Tensor) else x // y),
    "Sum": Operator(lambda *x: reduce(operator.add, x)),
    "Max": Operator(lambda *x: reduce(torch.maximum, x)),
    "Neg": Operator(lambda x: -x),
    "Relu": Operator(lambda x: torch.relu(x)),
    "Clip": Operator(lambda x, min=None, max=None: torch.clamp(x, min, max), settings=True),
    "MatMul": Operator(lambda x, y: x @ y),
    # What has no spiking meaning is read all the same, so that one list has all that is refused.
    "Sigmoid": Operator(lambda x: torch.sigmoid(x)),
    "Tanh": Operator(lambda x: torch.tanh(x)),
    "Erf": Operator(lambda x: torch.erf(x)),
    "Exp": Operator(lambda x: torch.exp(x)),
    "Sqrt": Operator(lambda x: torch.sqrt(x)),
    "Softplus": Operator(lambda x: F.softplus(x)),
    "Mish": Operator(lambda x: F.mish(x)),
    "HardSwish": Operator(lambda x: F.hardswish(x)),
    "Gelu": Operator(lambda x, approximate="none": F.gelu(x, approximate=approximate)),
    "HardSigmoid": Operator(lambda x, alpha=0.2, beta=0.5: F.hardsigmoid(x)),
    "Softmax": Operator(lambda x, axis=-1: x.softmax(axis)),
    "LogSoftmax": Operator(lambda x, axis=-1: x.log_softmax(axis)),
    "LeakyRelu": Operator(lambda x, alpha=0.01: F.leaky_relu(x, alpha)),
    "Elu": Operator(lambda x, alpha=1.0: F.elu(x, alpha)),
    "Pow": Operator(lambda x, y: torch.pow(x, y)),
    "ReduceMean": _reduction("mean"),
    "ReduceSum": _reduction("sum"),
    "ReduceMax": _reduction("amax"),
    "GlobalAveragePool": Operator(lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True)),
    "GlobalMaxPool": Operator(lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True)),
    "Identity": Operator(lambda x: x),
    "Shape": Operator(lambda x, start=0, end=None: list(x.shape)[start:end]),
    "Flatten": Operator(lambda x, axis=1: x.reshape(prod(x.shape[:axis]), -1)),
    "Transpose": Operator(lambda x, perm=None: x.permute(perm or tuple(reversed(range(x.ndim))))),
    "Concat": Operator(
        lambda *x, axis: [i for part in x for i in part] if isinstance(x[0], list) else torch.cat(x, axis)
    ),
}


def _operator(name: str, *, settings: bool = False) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        OPERATORS[name] = Operator(run, settings)
        return run

    return register


# -- windows over the image -------------------------------------------------------------------------------------------


class _Window:
    """Where a kernel stands: for each axis of space its size, stride and dilation, and (before, after) of padding."""

    def __init__(
        self, x: Tensor, kernel_shape: Sequence[int], strides: Ints = None, dilations: Ints = None,
        pads: Ints = None, auto_pad: str = "NOTSET",
    ) -> None:  # fmt: skip
        n = len(kernel_shape)
        self.kernel, self.strides, self.dilations = list(kernel_shape), strides or [1] * n, dilations or [1] * n
        if auto_pad.startswith("SAME"):
            self.pairs = [self._same(i, size, auto_pad == "SAME_LOWER") for i, size in enumerate(x.shape[2:])]
        else:
            pads = pads or [0] * 2 * n
            self.pairs = list(zip(pads[:n], pads[n:], strict=True))
        self.symmetric = all(before == after for before, after in self.pairs)
        self.padding = [before if self.symmetric else 0 for before, _ in self.pairs]  # left to the operation itself

    def _same(self, i: int, size: int, lower: bool) -> tuple[int, int]:
        """Padding for which a stride of one keeps the size; an odd pixel goes behind, or before."""
        total = max((-(-size // self.strides[i]) - 1) * self.strides[i] + self._reach(i) - size, 0)
        return ((total + 1) // 2, total // 2) if lower else (total // 2, (total + 1) // 2)

    def _reach(self, i: int) -> int:
        return self.dilations[i] * (self.kernel[i] - 1) + 1

    def pad(self, x: Tensor) -> Tensor:
        """What the operation cannot do itself: torch has one width for both sides."""
        return x if self.symmetric else F.pad(x, [width for pair in reversed(self.pairs) for width in pair])

    def pick(self, x: Tensor, y: Tensor) -> Tensor:
        """The windows that are asked for, out of all: y has stride 1, and the wider padding on both sides."""
        for i, (before, after) in enumerate(self.pairs):
            start, count = max(after - before, 0), x.shape[i + 2] + before + after - self._reach(i) + 1
            y = _cut(y, i + 2, start, start + count, self.strides[i])
        return y


def _cut(x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    return x[(*[slice(None)] * (axis % x.ndim), slice(start, stop, step))]


@_operator("Conv")
def _conv(x: Tensor, w: Tensor, b: Tensor | None = None, *, group: int = 1, **window: Any) -> Tensor:
    at = _Window(x, **{"kernel_shape": w.shape[2:], **window})
    none = [0] * len(at.kernel)
    return torch.convolution(at.pad(x), w, b, at.strides, at.padding, at.dilations, False, none, group)


@_operator("ConvTranspose")
def _conv_transpose(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, group: int = 1, output_padding: Ints = None, **window: Any
) -> Tensor:
    if "output_shape" in window or window.get("auto_pad", "").startswith("SAME"):
        raise Refuse("the padding of a transposed convolution must be given; export it with pads")
    at = _Window(x, **{"kernel_shape": w.shape[2:], **window})
    extra = output_padding or [0] * len(at.kernel)
    y = torch.convolution(x, w, b, at.strides, at.padding, at.dilations, True, extra, group)
    for axis, (before, after) in enumerate(() if at.symmetric else at.pairs, start=2):
        y = _cut(y, axis, before, y.shape[axis] - after)
    return y


@_operator("MaxPool")
def _max_pool(x: Tensor, *, ceil_mode: int = 0, storage_order: int = 0, **window: Any) -> Any:
    at = _Window(x, **window)
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(at.kernel) - 1]
    if at.symmetric:
        return pool(x, at.kernel, at.strides, at.padding, at.dilations, bool(ceil_mode))
    if ceil_mode:
        raise Refuse("its sides are padded differently and it rounds up; export it without ceil_mode")
    return at.pick(x, pool(x, at.kernel, 1, [max(pair) for pair in at.pairs], at.dilations))


@_operator("AveragePool")
def _average_pool(x: Tensor, *, ceil_mode: int = 0, count_include_pad: int = 0, **window: Any) -> Any:
    at = _Window(x, **window)
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(at.kernel) - 1]
    if any(d != 1 for d in at.dilations):
        raise Refuse("an average over pixels with gaps between them; write it as a convolution")
    if not at.symmetric and ceil_mode:
        raise Refuse("its sides are padded differently and it rounds up; export it without ceil_mode")
    y = pool(at.pad(x), at.kernel, at.strides, at.padding, bool(ceil_mode), bool(count_include_pad))
    if at.symmetric or count_include_pad:
        return y
    return y / pool(at.pad(torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)), at.kernel, at.strides)  # the share inside


@_operator("Upsample", settings=True)
def _upsample(x: Tensor, scales: Sequence[float], *, mode: str = "nearest") -> Tensor:
    if mode != "nearest" or any(s != 1 for s in scales[:2]):
        raise Refuse("only to the nearest pixel, and in space, is it what torch does; export it with opset 13")
    return F.interpolate(x, scale_factor=tuple(scales[2:]))


@_operator("Resize", settings=True)
def _resize(
    x: Tensor, *rest: Any, mode: str = "nearest", coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor", cubic_coeff_a: float = -0.75, exclude_outside: int = 0,
    extrapolation_value: float = 0.0, antialias: int = 0, keep_aspect_ratio_policy: str = "stretch",
) -> Any:  # fmt: skip
    if len(rest) == 1:
        return _upsample(x, rest[0], mode=mode)  # opset 10
    _, scales, sizes = (*rest, None)[:3]
    ratios = scales or [1, *(b / a for a, b in zip(x.shape[1:], sizes[1:], strict=True))]
    at, half = coordinate_transformation_mode, ("half_pixel", "pytorch_half_pixel")
    like_torch = {
        "nearest": (at, nearest_mode) == ("asymmetric", "floor")
        or (at in half and nearest_mode.startswith("round_prefer") and all(r == int(r) for r in ratios)),
        "linear": at in (*half, "align_corners"),
    }
    if not like_torch.get(mode) or ratios[:2] != [1, 1] or antialias or keep_aspect_ratio_policy != "stretch":
        raise Refuse(f"torch has no {mode} interpolation with {at} and {nearest_mode}, or it resizes channels")
    size, factors = (sizes[2:], None) if sizes else (None, scales[2:])
    if mode == "nearest":
        return F.interpolate(x, size, factors)
    linear = ("linear", "bilinear", "trilinear")[x.ndim - 3]
    return F.interpolate(x, size, factors, linear, align_corners=at == "align_corners")


# -- other layers -----------------------------------------------------------------------------------------------------


@_operator("Gemm")
def _gemm(
    x: Tensor, w: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    y = F.linear(x.T if transA else x, (w if transB else w.T) * alpha)
    return y if c is None else y + c * beta


@_operator("BatchNormalization")
def _batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5, momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise Refuse("batch norm in training mode mixes the images of a batch; export it in eval mode")
    return F.batch_norm(x, mean, var, scale, bias, eps=epsilon)


@_operator("Dropout", settings=True)
def _dropout(x: Tensor, ratio: float = 0.5, training_mode: bool = False, *, seed: int = 0) -> Tensor:
    return F.dropout(x, ratio, training_mode)


@_operator("Cast")
def _cast(x: Any, *, to: int) -> Any:
    dtypes = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # as numbered by ONNX
    if isinstance(x, Tensor) and to not in dtypes:
        raise Refuse("it rounds to whole numbers")
    return x.to(dtypes[to]) if isinstance(x, Tensor) else x


# -- shapes -----------------------------------------------------------------------------------------------------------


@_operator("Constant")
def _constant(*, value: Tensor | None = None, **other: Any) -> Tensor:
    return torch.tensor(next(iter(other.values()))) if value is None else value


@_operator("Reshape", settings=True)
def _reshape(x: Any, shape: list[int], *, allowzero: int = 0) -> Any:
    if not isinstance(x, Tensor):
        return _list(x) if shape else _list(x)[0]
    return x.reshape([x.shape[i] if s == 0 and not allowzero else s for i, s in enumerate(shape)])


@_operator("Squeeze", settings=True)
def _squeeze(x: Any, axes: Ints = None) -> Any:
    if not isinstance(x, Tensor):
        return _list(x)[0]
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@_operator("Unsqueeze", settings=True)
def _unsqueeze(x: Any, axes: Sequence[int]) -> Any:
    if not isinstance(x, Tensor):
        return _list(x)
    return reduce(torch.unsqueeze, sorted(a % (x.ndim + len(axes)) for a in axes), x)


@_operator("Gather", settings=True)
def _gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    if isinstance(x, list):
        return [x[i] for i in indices] if isinstance(indices, list) else x[indices]
    if not isinstance(indices, list):
        return x.select(axis, indices)
    return torch.cat([x.narrow(axis, i % x.shape[axis], 1) for i in indices], axis)


@_operator("Slice", settings=True)
def _slice(x: Any, starts: list[int], ends: list[int], axes: Ints = None, steps: Ints = None) -> Any:
    if isinstance(x, list):
        return x[starts[0] : ends[0] : steps[0] if steps else 1]
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    if min(steps) < 1:
        raise Refuse("it turns an axis around")
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = _cut(x, axis, start, end, step)
    return x


@_operator("Split", settings=True)
def _split(x: Tensor, split: list[int] | None = None, *, axis: int = 0, num_outputs: int) -> Any:
    return x.split(split or -(-x.shape[axis] // num_outputs), axis)


@_operator("Pad", settings=True)
def _pad(
    x: Tensor, pads: list[int], value: float | None = None, axes: Ints = None, *, mode: str = "constant"
) -> Tensor:
    n = len(pads) // 2
    pairs = dict(zip((a % x.ndim for a in axes or range(n)), zip(pads[:n], pads[n:], strict=True), strict=True))
    first = min((axis for axis, pair in pairs.items() if pair != (0, 0)), default=x.ndim - 1)
    widths = [width for axis in reversed(range(first, x.ndim)) for width in pairs.get(axis, (0, 0))]
    if mode not in ("constant", "reflect", "edge"):
        raise Refuse(f"padding of mode {mode!r}; export it with constant, reflect or edge")
    return F.pad(x, widths, {"edge": "replicate"}.get(mode, mode), value if mode == "constant" else None)
