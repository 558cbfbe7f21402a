"""What ATen operations mean that compute with values: convolutions and products, rectifiers, sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calls import Call, as_tuple, parameter, rule
from .graph import Graph
from .ops import (
    Activation,
    Add,
    Concat,
    Conv,
    Linear,
    Max,
    Pad,
    Reshape,
    Scale,
)
from .refusals import PRODUCTS, Refuse, op_name

aten = torch.ops.aten


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
@rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
@rule(aten.convolution.default)
@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv(c: Call) -> str:
    weight, x = parameter(c["weight"], "weight"), c.data("input")
    n = weight.ndim - 2
    if len(c.shape("input")) != n + 1:
        raise Refuse("its input has no batch dimension")
    stride, dilation = as_tuple(c["stride"], n), as_tuple(c["dilation"], n)
    padding = c["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [t // 2 for t in totals]
        if any(t % 2 for t in totals):
            x, padding = _pad_odd(c, x, totals), 0
    transposed = bool(c.get("transposed")) or "transpose" in str(c.node.target)
    extra = as_tuple(c.get("output_padding") or 0, n)
    op = Conv(
        c.keep("weight", weight), c.optional("bias", c["bias"]), stride, as_tuple(padding, n), dilation, c["groups"],
        transposed, extra,
    )  # fmt: skip
    return c.add(op, x)


def _pad_odd(c: Call, x: str, totals: list[int]) -> str:
    """Padding 'same' of an even kernel: the odd pixel goes to the right, as in torch."""
    widths = [w for t in reversed(totals) for w in (t // 2, t - t // 2)]
    channels, *space = c.shape("input")
    return c.add(Pad(tuple(widths)), x, shape=(channels, *(s + t for s, t in zip(space, totals, strict=True))))


@rule(aten.linear.default)
def _linear(c: Call) -> str:
    weight = parameter(c["weight"], "weight")
    return c.add(Linear(c.keep("weight", weight), c.optional("bias", c["bias"])), c.data("input"))


@rule(aten.addmm.default)
def _addmm(c: Call) -> str:
    if c["beta"] != 1 or c["alpha"] != 1:
        raise Refuse("it scales its terms; write it as a linear layer")
    weight = parameter(c["mat2"], "second matrix").T.contiguous()
    return c.add(Linear(c.keep("weight", weight), c.keep("bias", parameter(c["self"], "bias"))), c.data("mat1"))


@rule(aten.mm.default, aten.matmul.default)
def _matmul(c: Call) -> str:
    other = c["mat2"] if "mat2" in c.args else c["other"]
    weight = parameter(other, "second factor")
    if not isinstance(c["self"], str) or weight.ndim != 2:
        raise Refuse("only images times a matrix is a linear layer")
    return c.add(Linear(c.keep("weight", weight.T.contiguous())), c["self"])


@rule(aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)
def _batch_norm(c: Call) -> str:
    """γ (x − μ) / σ + β with running statistics, as one scale and one shift a channel (Eq. 19)."""
    mean, var = c["running_mean"], c["running_var"]
    if c.get("training") or mean is None or var is None:
        raise Refuse("batch norm without running statistics mixes the images of a batch; use eval mode statistics")
    mean64, scale = mean.double(), 1 / (var.double() + c["eps"]).sqrt()
    if c["weight"] is not None:
        scale = scale * c["weight"].double()
    shift = -mean64 * scale
    if c["bias"] is not None:
        shift = shift + c["bias"].double()
    shape = (-1, *(1,) * (c.ndim("input") - 2))  # one value a channel
    keep = [c.keep(k, v.to(mean.dtype).view(shape)) for k, v in (("scale", scale), ("shift", shift))]
    value = c.out[0] if isinstance(c.out, (tuple, list)) else c.out
    return c.add(Scale(*keep), c.data("input"), shape=value.shape[1:])


@rule(aten.relu.default)
def _relu(c: Call) -> str:
    return c.add(Activation(), c.data("self"))


@rule(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor)
@rule(aten.clamp_max.default, aten.clamp_max.Tensor, aten.clip.default, aten.clip.Tensor)
def _clamp(c: Call) -> str:
    bounds = {name: c.fixed(name) for name in ("min", "max") if c.get(name) is not None}
    if None in bounds.values():
        raise Refuse("a bound that depends on the images is not one of a ReLU")
    return _clipped(c, c.data("self"), bounds.get("min"), bounds.get("max"))


@rule(aten.hardtanh.default)
def _hardtanh(c: Call) -> str:
    return _clipped(c, c.data("self"), c["min_val"], c["max_val"])


@rule(aten.relu6.default)
def _relu6(c: Call) -> str:
    return _clipped(c, c.data("self"), 0, 6)


@rule(aten.maximum.default, aten.max.other)
def _maximum(c: Call) -> str:
    if c.fixed("self") is None and c.fixed("other") is None:
        return _larger_of_two(c)
    return _clipped(c, *_value_and_bound(c, "maximum"), None)


@rule(aten.minimum.default, aten.min.other)
def _minimum(c: Call) -> str:
    x, bound = _value_and_bound(c, "minimum")
    return _clipped(c, x, None, bound)


def _larger_of_two(c: Call) -> str:
    """max(a, b) of two activations."""
    if not c.shape("self") == c.shape("other") == tuple(c.out.shape[1:]):
        raise Refuse("the maximum of two values of different shape has no rule; expand one of them")
    return largest(c, [c.data("self"), c.data("other")], c.out.shape[1:])


def largest(c: Call, names: Sequence[str], shape: Sequence[int]) -> str:
    """The maximum over an axis on which all of them stand."""
    apart = [c.add(Reshape((1, *shape)), name, shape=(1, *shape)) for name in names]
    return c.add(Max((0,)), c.add(Concat(0), *apart, shape=(len(names), *shape)), shape=shape)


def _value_and_bound(c: Call, what: str) -> tuple[str, Tensor]:
    for x, other in (("self", "other"), ("other", "self")):
        bound = c.fixed(other)
        if bound is not None:
            return c.data(x), bound
    raise Refuse(f"the {what} of two values that depend on the images is not a ReLU")


def _clipped(c: Call, x: str, low: Tensor | float | None, high: Tensor | float | None) -> str:
    """clamp(x, a, b) = a + clamp(x − a, 0, b − a): an activation between two shifts."""
    if low is None and not Graph(tuple(c.importer.nodes), {}).is_nonnegative(x):
        raise Refuse("an upper bound alone is not a ReLU; put a ReLU in front of it")
    below = c.of_sample(0.0 if low is None else low)
    cap = None if high is None else c.of_sample(high) - below
    if cap is not None and not bool((cap > 0).all()):
        raise Refuse("its bounds leave nothing between them")
    if not below.any():
        return c.add(Activation(c.optional("cap", cap)), x)
    x = c.add(Scale(None, c.keep("below", -below)), x)
    x = c.add(Activation(c.optional("cap", cap)), x)
    return c.add(Scale(None, c.keep("above", below)), x)


@dataclass(frozen=True)
class Comparison:
    """Where x is positive, or where it is not: the condition of a ReLU written as torch.where."""

    x: str
    positive: bool


_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)


@rule(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
def _compare(c: Call) -> Comparison:
    if c["other"] != 0 or any(user.target not in _WHERE for user in c.node.users):
        raise Refuse("a comparison has no spiking meaning, but for torch.where(x > 0, x, 0)")
    return Comparison(c.data("self"), op_name(c.node) in ("gt", "ge"))


@rule(*_WHERE)
def _where(c: Call) -> str:
    condition = c["condition"]
    if isinstance(condition, Comparison):
        x, other = ("self", "other") if condition.positive else ("other", "self")
        zero = c.fixed(other)
        if c[x] == condition.x and zero is not None and not zero.any():
            return c.add(Activation(), condition.x)
    raise Refuse("a choice between values has no spiking meaning, but for torch.where(x > 0, x, 0)")


@rule(aten.threshold.default)
def _threshold(c: Call) -> str:
    if c["threshold"] != 0 or c["value"] != 0:
        raise Refuse("only a threshold at 0 that gives 0 is a ReLU")
    return c.add(Activation(), c.data("self"))


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(c: Call) -> str:
    return _sum(c, c["self"], c["other"], c["alpha"])


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(c: Call) -> str:
    return _sum(c, c["self"], c["other"], -c["alpha"])


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(c: Call) -> str:
    if c["alpha"] != 1:
        raise Refuse("it scales the value it subtracts; write it as a subtraction")
    return _sum(c, c["other"], c["self"], -1)


def _sum(c: Call, x: Any, y: Any, alpha: float) -> str:
    if isinstance(x, str) and isinstance(y, str):
        return c.add(Add(float(alpha)), x, y)
    if isinstance(x, str):
        return c.add(Scale(None, c.keep("shift", c.of_sample(y) * alpha)), x)
    minus = torch.full((1,) * (c.out.ndim - 1), float(alpha), dtype=c.out.dtype, device=c.out.device)
    return c.add(Scale(None if alpha == 1 else c.keep("scale", minus), c.keep("shift", c.of_sample(x))), y)


@rule(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar)
def _mul(c: Call) -> str:
    x, y = (c["self"], c["other"]) if isinstance(c["self"], str) else (c["other"], c["self"])
    if isinstance(y, str):
        raise Refuse(PRODUCTS["mul"])
    return c.add(Scale(c.keep("scale", c.of_sample(y))), x)


@rule(aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.divide.Scalar)
def _div(c: Call) -> str:
    if isinstance(c["other"], str):
        raise Refuse(PRODUCTS["div"])
    return c.add(Scale(c.keep("scale", 1 / c.of_sample(c["other"]))), c.data("self"))


@rule(aten.neg.default)
def _neg(c: Call) -> str:
    return c.add(Scale(c.keep("scale", c.of_sample(-1.0))), c.data("self"))
