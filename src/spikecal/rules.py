"""What each ATen operation means as operations of a `Graph`: one rule a family, all in the table `RULES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .errors import Refusal
from .graph import Graph, Node
from .ops import (
    Activation,
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    Add,
    AvgPool,
    Concat,
    Constant,
    Conv,
    Expand,
    Linear,
    Max,
    MaxPool,
    Mean,
    Op,
    Pad,
    Permute,
    Reshape,
    Scale,
    Select,
    Slice,
    Upsample,
)

aten = torch.ops.aten

#: Modules that are one operation each, so that their path is name enough; and files that are no user's code.
LEAVES = ("torch.nn.modules.", "spikecal.onnx")
_OURS = ("onnx", "onnx_operators", "capture", "tracing", "observation")
_INTERNAL = ("/torch/", "<", *(f"/spikecal/{name}.py" for name in _OURS))


_KNOWN_AS = {
    "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm",
    "_native_batch_norm_legit_functional": "batch_norm",
    "_unsafe_view": "reshape",
    "_prelu_kernel": "prelu",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}


class Refuse(Exception):
    """Raised by a rule that cannot import this call; says why, and what to do."""


def refusal_message(refused: Sequence[Refusal]) -> str:
    """All of them at once, so that nobody meets them one by one."""
    places = "1 place" if len(refused) == 1 else f"{len(refused)} places"
    return f"this model cannot become a spiking network as it is, because of {places}:\n" + "\n".join(map(str, refused))


class Importer(Protocol):
    """What a rule needs of the graph in the making."""

    nodes: list[Node]
    tensors: dict[str, Tensor]
    batch: Any  # the size of dimension 0 of all inputs, a symbol

    def add(self, op: Op, inputs: tuple[str, ...], node: fx.Node, shape: Any = None) -> str:
        """Add a node and return its name."""

    def tensor(self, name: str, value: Tensor) -> str:
        """Keep a tensor and return its name."""


# -- where a call comes from ------------------------------------------------------------------------------------------


def _modules(node: fx.Node) -> list[tuple[str, str]]:
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, str) else kind.__name__) for path, kind in stack.values()]


def call_site(node: fx.Node) -> str:
    """The path of the module that made the call; with the operation behind it, unless it is a single operation."""
    path, kind = (_modules(node) or [("", "")])[-1]
    path = path.removeprefix("L['self'].").split("@")[0]
    if path.startswith("_empty"):  # torch's word for a call of which it does not know the module
        path = ""
    if kind.startswith(LEAVES) and not kind.startswith("torch.nn.modules.container"):
        return path or op_name(node)
    return f"{path}.{op_name(node)}" if path else op_name(node)


def place(node: fx.Node) -> str:
    """Module path and source line of a call, for messages."""
    path = call_site(node)
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    own = [f for f in frames if is_users_code(f.split('"')[1])]
    if not own:
        return path
    file, line = own[-1].split('"')[1], own[-1].split("line ")[1].split(",")[0]
    return f"{path} ({Path(file).name}:{line})"


def is_users_code(file: str) -> bool:
    return not any(part in file for part in _INTERNAL)


def op_name(node: fx.Node) -> str:
    """The name of an operation as its users know it: `_native_batch_norm_legit` is a batch norm."""
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return _KNOWN_AS.get(name, name)


# -- the rules --------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One ATen call: its arguments by name, and how to add our nodes for it."""

    importer: Importer
    node: fx.Node
    args: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def out(self) -> Any:
        return self.node.meta["val"]

    def ndim(self, name: str) -> int:
        return len(self.shape(name)) + 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one sample of an input."""
        return next(n.shape for n in reversed(self.importer.nodes) if n.name == self[name])

    def fixed(self, name: str) -> Tensor | None:
        """An argument as a tensor, (1, ...) or without batch, if it does not depend on the images."""
        value = self[name]
        if isinstance(value, Tensor):
            return value
        if isinstance(value, int | float):
            return torch.tensor(value, dtype=torch.float64)
        op = next((n.op for n in self.importer.nodes if n.name == value), None)
        return self.importer.tensors[op.value].unsqueeze(0) if isinstance(op, Constant) else None

    def axis(self, dim: int, ndim: int) -> int:
        """A dimension as an axis of a sample; the batch dimension is refused."""
        dim = dim % ndim
        if dim == 0:
            raise Refuse("it works along the batch dimension; keep dimension 0 the batch")
        return dim - 1

    def data(self, name: str) -> str:
        """The name of the node behind an argument that must depend on the images."""
        value = self[name]
        if not isinstance(value, str):
            raise Refuse(f"its argument {name!r} does not depend on the images")
        return value

    def add(self, op: Op, *inputs: str, shape: Any = None) -> str:
        return self.importer.add(op, inputs, self.node, shape)

    def keep(self, suffix: str, value: Tensor) -> str:
        """Store a tensor under the name that the next node of this call will have."""
        return self.importer.tensor(f"{call_site(self.node)}.{suffix}", value)

    def optional(self, suffix: str, value: Tensor | None) -> str | None:
        return None if value is None else self.keep(suffix, value)


Rule = Callable[[Call], Any]
RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    """ATen writes one number for all dimensions, or a list."""
    value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(value * n if len(value) == 1 else value)


def _parameter(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refuse(f"its {what} depends on the images, so it is a product of two activations; keep it fixed")
    return value


@_rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
@_rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
@_rule(aten.convolution.default)
@_rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv(c: Call) -> str:
    weight, x = _parameter(c["weight"], "weight"), c.data("input")
    n = weight.ndim - 2
    if len(c.shape("input")) != n + 1:
        raise Refuse("its input has no batch dimension")
    stride, dilation = _tuple(c["stride"], n), _tuple(c["dilation"], n)
    padding = c["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [t // 2 for t in totals]
        if any(t % 2 for t in totals):
            x, padding = _pad_odd(c, x, totals), 0
    transposed = bool(c.get("transposed")) or "transpose" in str(c.node.target)
    extra = _tuple(c.get("output_padding") or 0, n)
    op = Conv(
        c.keep("weight", weight), c.optional("bias", c["bias"]), stride, _tuple(padding, n), dilation, c["groups"],
        transposed, extra,
    )  # fmt: skip
    return c.add(op, x)


def _pad_odd(c: Call, x: str, totals: list[int]) -> str:
    """Padding 'same' of an even kernel: the odd pixel goes to the right, as in torch."""
    widths = [w for t in reversed(totals) for w in (t // 2, t - t // 2)]
    channels, *space = c.shape("input")
    return c.add(Pad(tuple(widths)), x, shape=(channels, *(s + t for s, t in zip(space, totals, strict=True))))


@_rule(aten.linear.default)
def _linear(c: Call) -> str:
    weight = _parameter(c["weight"], "weight")
    return c.add(Linear(c.keep("weight", weight), c.optional("bias", c["bias"])), c.data("input"))


@_rule(aten.addmm.default)
def _addmm(c: Call) -> str:
    if c["beta"] != 1 or c["alpha"] != 1:
        raise Refuse("it scales its terms; write it as a linear layer")
    weight = _parameter(c["mat2"], "second matrix").T.contiguous()
    return c.add(Linear(c.keep("weight", weight), c.keep("bias", _parameter(c["self"], "bias"))), c.data("mat1"))


@_rule(aten.mm.default, aten.matmul.default)
def _matmul(c: Call) -> str:
    other = c["mat2"] if "mat2" in c.args else c["other"]
    weight = _parameter(other, "second factor")
    if not isinstance(c["self"], str) or weight.ndim != 2:
        raise Refuse("only images times a matrix is a linear layer")
    return c.add(Linear(c.keep("weight", weight.T.contiguous())), c["self"])


@_rule(aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)
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


@_rule(aten.relu.default)
def _relu(c: Call) -> str:
    return c.add(Activation(), c.data("self"))


@_rule(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor)
@_rule(aten.clamp_max.default, aten.clamp_max.Tensor, aten.clip.default, aten.clip.Tensor)
def _clamp(c: Call) -> str:
    bounds = {name: c.fixed(name) for name in ("min", "max") if c.get(name) is not None}
    if None in bounds.values():
        raise Refuse("a bound that depends on the images is not one of a ReLU")
    return _clipped(c, c.data("self"), bounds.get("min"), bounds.get("max"))


@_rule(aten.hardtanh.default)
def _hardtanh(c: Call) -> str:
    return _clipped(c, c.data("self"), c["min_val"], c["max_val"])


@_rule(aten.relu6.default)
def _relu6(c: Call) -> str:
    return _clipped(c, c.data("self"), 0, 6)


@_rule(aten.maximum.default, aten.max.other)
def _maximum(c: Call) -> str:
    if c.fixed("self") is None and c.fixed("other") is None:
        return _larger_of_two(c)
    return _clipped(c, *_value_and_bound(c, "maximum"), None)


@_rule(aten.minimum.default, aten.min.other)
def _minimum(c: Call) -> str:
    x, bound = _value_and_bound(c, "minimum")
    return _clipped(c, x, None, bound)


def _larger_of_two(c: Call) -> str:
    """max(a, b) of two activations."""
    if not c.shape("self") == c.shape("other") == tuple(c.out.shape[1:]):
        raise Refuse("the maximum of two values of different shape has no rule; expand one of them")
    return _largest(c, [c.data("self"), c.data("other")], c.out.shape[1:])


def _largest(c: Call, names: Sequence[str], shape: Sequence[int]) -> str:
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
    below = _of_sample(c, 0.0 if low is None else low)
    cap = None if high is None else _of_sample(c, high) - below
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


@_rule(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
def _compare(c: Call) -> Comparison:
    if c["other"] != 0 or any(user.target not in _WHERE for user in c.node.users):
        raise Refuse("a comparison has no spiking meaning, but for torch.where(x > 0, x, 0)")
    return Comparison(c.data("self"), op_name(c.node) in ("gt", "ge"))


@_rule(*_WHERE)
def _where(c: Call) -> str:
    condition = c["condition"]
    if isinstance(condition, Comparison):
        x, other = ("self", "other") if condition.positive else ("other", "self")
        zero = c.fixed(other)
        if c[x] == condition.x and zero is not None and not zero.any():
            return c.add(Activation(), condition.x)
    raise Refuse("a choice between values has no spiking meaning, but for torch.where(x > 0, x, 0)")


@_rule(aten.threshold.default)
def _threshold(c: Call) -> str:
    if c["threshold"] != 0 or c["value"] != 0:
        raise Refuse("only a threshold at 0 that gives 0 is a ReLU")
    return c.add(Activation(), c.data("self"))


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(c: Call) -> str:
    return _sum(c, c["self"], c["other"], c["alpha"])


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(c: Call) -> str:
    return _sum(c, c["self"], c["other"], -c["alpha"])


@_rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(c: Call) -> str:
    if c["alpha"] != 1:
        raise Refuse("it scales the value it subtracts; write it as a subtraction")
    return _sum(c, c["other"], c["self"], -1)


def _sum(c: Call, x: Any, y: Any, alpha: float) -> str:
    if isinstance(x, str) and isinstance(y, str):
        return c.add(Add(float(alpha)), x, y)
    if isinstance(x, str):
        return c.add(Scale(None, c.keep("shift", _of_sample(c, y) * alpha)), x)
    minus = torch.full((1,) * (c.out.ndim - 1), float(alpha), dtype=c.out.dtype, device=c.out.device)
    return c.add(Scale(None if alpha == 1 else c.keep("scale", minus), c.keep("shift", _of_sample(c, x))), y)


@_rule(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar)
def _mul(c: Call) -> str:
    x, y = (c["self"], c["other"]) if isinstance(c["self"], str) else (c["other"], c["self"])
    if isinstance(y, str):
        raise Refuse(PRODUCTS["mul"])
    return c.add(Scale(c.keep("scale", _of_sample(c, y))), x)


@_rule(aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.divide.Scalar)
def _div(c: Call) -> str:
    if isinstance(c["other"], str):
        raise Refuse(PRODUCTS["div"])
    return c.add(Scale(c.keep("scale", 1 / _of_sample(c, c["other"]))), c.data("self"))


@_rule(aten.neg.default)
def _neg(c: Call) -> str:
    return c.add(Scale(c.keep("scale", _of_sample(c, -1.0))), c.data("self"))


def _of_sample(c: Call, value: Any) -> Tensor:
    """A constant as it broadcasts against one sample."""
    ndim = c.out.ndim - 1
    if not isinstance(value, Tensor):
        if not isinstance(value, (int, float)):
            raise Refuse("it computes with the batch size")
        return torch.full((1,) * ndim, float(value), dtype=c.out.dtype, device=c.out.device)
    constant: Tensor = value.to(c.out.dtype)
    if constant.ndim > ndim:
        if constant.shape[0] != 1:
            raise Refuse("it combines the images with a constant that has a batch of its own")
        constant = constant[0]
    return constant.reshape((1,) * (ndim - constant.ndim) + tuple(constant.shape))


@_rule(aten.cat.default)
def _cat(c: Call) -> str:
    tensors, axis = c["tensors"], c.axis(c["dim"], c.out.ndim)
    anchor = next(t for t in tensors if isinstance(t, str))
    names = [t if isinstance(t, str) else _constant(c, t, anchor) for t in tensors]
    return c.add(Concat(axis), *names)


@dataclass(frozen=True)
class Stacked:
    """Values on an axis in front of the batch, which a sum, mean or maximum takes away again."""

    names: tuple[str, ...]


_OVER_A_STACK = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)


def is_stack(node: fx.Node) -> bool:
    """Whether a call is torch.stack(values), of which something is taken over the new axis 0."""
    dims = [user.args[1] if len(user.args) > 1 else user.kwargs.get("dim") for user in node.users]
    reduced = all(user.target in _OVER_A_STACK and len(user.args) < 3 for user in node.users)
    return node.target is aten.stack.default and len(node.args) == 1 and reduced and all(d == [0] for d in dims)


def reduce_stack(c: Call) -> str:
    """torch.stack([a, b, c]).mean(0), or its sum or maximum."""
    names, shape = c["self"].names, tuple(c.out.shape[1:])
    if op_name(c.node) == "amax":
        return _largest(c, names, shape)
    total = names[0]
    for name in names[1:]:
        total = c.add(Add(), total, name)
    return total if op_name(c.node) == "sum" else c.add(Scale(c.keep("scale", _of_sample(c, 1 / len(names)))), total)


@_rule(aten.stack.default)
def _stack(c: Call) -> str | Stacked:
    if is_stack(c.node) and all(isinstance(t, str) for t in c["tensors"]):
        return Stacked(tuple(c["tensors"]))
    axis = c.axis(c["dim"], c.out.ndim)
    anchor = next(t for t in c["tensors"] if isinstance(t, str))
    shape = tuple(1 if a == axis else n for a, n in enumerate(c.out.shape[1:]))
    names = [t if isinstance(t, str) else _constant(c, t, anchor) for t in c["tensors"]]
    return c.add(Concat(axis), *(c.add(Reshape(shape), name, shape=shape) for name in names))


def _constant(c: Call, value: Tensor, anchor: str) -> str:
    if value.shape[0] != 1:
        raise Refuse("it combines the images with a constant that has a batch of its own")
    return c.add(Constant(c.keep("value", value[0])), anchor, shape=value.shape[1:])


@_rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
@_rule(aten.zeros.default, aten.ones.default, aten.full.default, aten.new_zeros.default, aten.new_ones.default)
@_rule(aten.new_full.default)
def _filled(c: Call) -> str:
    batch, *sizes = c.out.shape
    if batch != c.importer.batch or not all(isinstance(size, int) for size in sizes):
        raise Refuse("it makes a tensor whose first dimension is not the batch; keep dimension 0 the batch")
    name = op_name(c.node)
    fill = c["fill_value"] if "full" in name else float("ones" in name)
    anchor = c.importer.nodes[0].name
    value = torch.full(tuple(c.out.shape[1:]), fill, dtype=c.out.dtype, device=c.out.device)
    return c.add(Constant(c.keep("value", value)), anchor)


def _axes_of_pool(c: Call) -> int:
    """Over how many axes a pool goes; torch takes an input without channels for a single image."""
    n = next(n for n in (1, 2, 3) if f"pool{n}d" in op_name(c.node))
    if c.ndim("self") != n + 2:
        raise Refuse("its input has no axis of channels, so it pools over the batch; add one with x.unsqueeze(1)")
    return n


@_rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(c: Call) -> str:
    n = _axes_of_pool(c)
    kernel = _tuple(c["kernel_size"], n)
    stride = _tuple(c["stride"], n) if c["stride"] else kernel
    return c.add(
        AvgPool(
            kernel,
            stride,
            _tuple(c["padding"], n),
            c["ceil_mode"],
            c["count_include_pad"],
            c.get("divisor_override"),
        ),
        c.data("self"),
    )


@_rule(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def _adaptive_avg_pool(c: Call) -> str:
    _axes_of_pool(c)
    return c.add(AdaptiveAvgPool(tuple(c.out.shape[2:])), c.data("self"))


@_rule(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
@_rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(c: Call) -> Any:
    n = _axes_of_pool(c)
    kernel = _tuple(c["kernel_size"], n)
    stride = _tuple(c["stride"], n) if c["stride"] else kernel
    op = MaxPool(kernel, stride, _tuple(c["padding"], n), _tuple(c["dilation"], n), c["ceil_mode"])
    return _first_of(c, op)


@_rule(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(c: Call) -> Any:
    _axes_of_pool(c)
    return _first_of(c, AdaptiveMaxPool(tuple(c.out[0].shape[2:])))


@_rule(aten.amax.default, aten.max.dim)
def _amax(c: Call) -> Any:
    dims = c["dim"] if isinstance(c["dim"], list) else [c["dim"]]
    if not dims:
        raise Refuse("it takes the maximum over the batch as well; name the dimensions")
    return _first_of(c, Max(tuple(sorted(c.axis(d, c.ndim("self")) for d in dims)), bool(c["keepdim"])))


def _first_of(c: Call, op: Op) -> Any:
    """Add a maximum; where torch gives (values, indices), only the values exist."""
    several = isinstance(c.out, (tuple, list))
    name = c.add(op, c.data("self"), shape=(c.out[0] if several else c.out).shape[1:])
    return [name] if several else name


@_rule(aten.mean.dim)
def _mean(c: Call) -> str:
    axes = tuple(sorted(c.axis(d, c.ndim("self")) for d in c["dim"] or ()))
    if not axes:
        raise Refuse("it averages over the batch as well; name the dimensions")
    return c.add(Mean(axes, bool(c["keepdim"])), c.data("self"))


@_rule(aten.sum.dim_IntList)
def _sum_over(c: Call) -> str:
    mean, shape = _mean(c), c.shape("self")
    count = 1
    for d in c["dim"]:
        count *= shape[c.axis(d, c.ndim("self"))]
    return c.add(Scale(c.keep("scale", _of_sample(c, float(count)))), mean)


@_rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
@_rule(aten.unflatten.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default)
def _reshape(c: Call) -> str:
    return c.add(Reshape(tuple(c.out.shape[1:])), c.data("self"))


@_rule(aten.permute.default)
def _permute(c: Call) -> str:
    return _permuted(c, [d % c.ndim("self") for d in c["dims"]])


@_rule(aten.transpose.int)
def _transpose(c: Call) -> str:
    dims = list(range(c.ndim("self")))
    a, b = c["dim0"], c["dim1"]
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(c, dims)


def _permuted(c: Call, dims: list[int]) -> str:
    if dims[0] != 0:
        raise Refuse("it moves the batch dimension; keep dimension 0 the batch")
    return c.add(Permute(tuple(d - 1 for d in dims[1:])), c.data("self"))


@_rule(aten.expand.default)
def _expand(c: Call) -> str:
    shape = tuple(c.out.shape[1:])
    if isinstance(c["self"], Tensor):  # a parameter, repeated for every image
        return c.add(Constant(c.keep("value", _of_sample(c, c["self"]).expand(shape))), c.importer.nodes[0].name)
    return c.add(Expand(shape), c.data("self"))


@_rule(aten.slice.Tensor, aten.narrow.default)
def _slice(c: Call) -> str:
    x, dim = c.data("self"), c["dim"] % c.ndim("self")
    start = c.get("start") or 0
    stop = start + c["length"] if "length" in c.args else c.get("end")
    step = c.get("step") or 1
    if dim == 0:
        if start == 0 and step == 1 and (stop is None or not isinstance(stop, int) or stop >= 2**62):
            return x
        raise Refuse("it picks images out of the batch")
    size = c.shape("self")[dim - 1]
    return c.add(Slice(dim - 1, *slice(start, stop, step).indices(size)), x)


@_rule(aten.select.int)
def _select(c: Call) -> str:
    x, axis = c.data("self"), c.axis(c["dim"], c.ndim("self"))
    shape = list(c.shape("self"))
    at = c["index"] % shape[axis]
    shape[axis] = 1
    return c.add(Reshape(tuple(c.out.shape[1:])), c.add(Slice(axis, at, at + 1), x, shape=shape))


@_rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)
def _split(c: Call) -> list[str]:
    x, axis = c.data("self"), c.axis(c["dim"], c.ndim("self"))
    parts, start = [], 0
    unbind = c.node.target is aten.unbind.int
    for part in c.out:
        shape = list(c.shape("self"))
        shape[axis] = 1 if unbind else part.shape[axis + 1]
        name = c.add(Slice(axis, start, start + shape[axis]), x, shape=shape)
        parts.append(c.add(Reshape(tuple(part.shape[1:])), name, shape=part.shape[1:]) if unbind else name)
        start += shape[axis]
    return parts


@_rule(aten.index_select.default)
def _index_select(c: Call) -> str:
    return _selected(c, c.data("self"), c["dim"], _parameter(c["index"], "index"))


@_rule(aten.index.Tensor)
def _index(c: Call) -> str:
    used = [(dim, index) for dim, index in enumerate(c["indices"]) if index is not None]
    if len(used) != 1 or not isinstance(used[0][1], Tensor) or used[0][1].ndim != 1:
        raise Refuse("only a list of places along one axis can be read, the same for all images")
    return _selected(c, c.data("self"), *used[0])


@_rule(aten.flip.default)
def _flip(c: Call) -> str:
    x = c.data("self")
    for dim in c["dims"]:
        x = _selected(c, x, dim, torch.arange(c.out.shape[dim]).flip(0))
    return x


@_rule(aten.roll.default)
def _roll(c: Call) -> str:
    x, shifts, dims = c.data("self"), _tuple(c["shifts"], 1), _tuple(c["dims"], 1)
    if len(shifts) != len(dims):
        raise Refuse("it rolls over the batch as well; name the dimensions")
    for shift, dim in zip(shifts, dims, strict=True):
        x = _selected(c, x, dim, torch.arange(c.out.shape[dim]).roll(shift))
    return x


@_rule(aten.repeat.default)
def _repeat(c: Call) -> str:
    if isinstance(c["self"], Tensor):  # a parameter, repeated for every image
        value = _of_sample(c, c["self"]).repeat(c["repeats"][1:])
        return c.add(Constant(c.keep("value", value)), c.importer.nodes[0].name)
    x, repeats = c.data("self"), list(c["repeats"])
    if len(repeats) != c.ndim("self"):
        raise Refuse("it adds dimensions in front of the batch; keep dimension 0 the batch")
    for dim, times in enumerate(repeats):
        if times != 1:
            x = _selected(c, x, dim, torch.arange(c.out.shape[dim]) % c.shape("self")[dim - 1])
    return x


def _selected(c: Call, x: str, dim: int, places: Tensor) -> str:
    """A selection along one axis of the node x, which need not be the call's own argument."""
    shape = list(next(n.shape for n in reversed(c.importer.nodes) if n.name == x))
    axis = c.axis(dim, len(shape) + 1)
    if places.dtype == torch.bool:
        places = places.nonzero().flatten()
    chosen = tuple(int(place) % shape[axis] for place in places)
    shape[axis] = len(chosen)
    return c.add(Select(axis, chosen), x, shape=shape)


@_rule(aten.pixel_shuffle.default)
def _pixel_shuffle(c: Call) -> str:
    channels, height, width = c.shape("self")
    r = c["upscale_factor"]
    return _regrouped(c, (channels // r**2, r, r, height, width), (0, 3, 1, 4, 2))


@_rule(aten.pixel_unshuffle.default)
def _pixel_unshuffle(c: Call) -> str:
    channels, height, width = c.shape("self")
    r = c["downscale_factor"]
    return _regrouped(c, (channels, height // r, r, width // r, r), (0, 2, 4, 1, 3))


@_rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(c: Call) -> str:
    channels, *space = c.shape("self")
    return _regrouped(c, (c["groups"], channels // c["groups"], *space), (1, 0, *range(2, 2 + len(space))))


def _regrouped(c: Call, split: tuple[int, ...], order: tuple[int, ...]) -> str:
    """Split axes, put them into another order, and join them to the shape of the result."""
    x = c.add(Reshape(split), c.data("self"), shape=split)
    x = c.add(Permute(order), x, shape=[split[axis] for axis in order])
    return c.add(Reshape(tuple(c.out.shape[1:])), x)


@_rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(c: Call) -> str:
    widths = tuple(c["pad"])
    if len(widths) // 2 >= c.ndim("self") and any(widths[2 * (c.ndim("self") - 1) :]):
        raise Refuse("it pads the batch dimension")
    return c.add(Pad(widths, str(c.get("mode") or "constant"), float(c.get("value") or 0)), c.data("self"))


@_rule(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(c: Call) -> str:
    return c.add(Pad(tuple(c["padding"]), "reflect"), c.data("self"))


@_rule(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(c: Call) -> str:
    return c.add(Pad(tuple(c["padding"]), "replicate"), c.data("self"))


_UPSAMPLE = {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear",
}  # fmt: skip


@_rule(*(getattr(getattr(aten, name), overload) for name in _UPSAMPLE for overload in ("default", "vec")))
def _upsample(c: Call) -> str:
    factors = c.get("scale_factors")
    op = Upsample(
        tuple(c.out.shape[2:]),
        _UPSAMPLE[op_name(c.node)],
        c.get("align_corners"),
        tuple(factors) if factors else None,
    )
    return c.add(op, c.data("input" if "input" in c.args else "self"))


@_rule(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
@_rule(
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
def _identity(c: Call) -> str:
    if c.get("train"):
        raise Refuse("dropout is active in the exported program; export it in eval mode")
    return str(c.data("input" if "input" in c.args else "self"))


@_rule(aten._to_copy.default, aten.to.dtype, aten.type_as.default)
def _to(c: Call) -> str:
    before, after = c.node.args[0].meta["val"].dtype, c.out.dtype  # type: ignore[union-attr]
    if before != after:
        raise Refuse(f"it goes from {before} to {after}, but a spiking network has one precision; remove the cast")
    return c.data("self")


_ATTENTION = "it multiplies activations with each other, as attention does; put convolutions in its place"

_SOFTMAX = (
    "a softmax has no spiking meaning; behind the last layer, apply it outside the model; in attention, put "
    "convolutions in place of the block"
)
_NOT_RELU = "it is not a ReLU; train or fine-tune the network with ReLU in its place"

#: What to do about well-known operations without a rule.
REMEDIES = {
    "silu": "SiLU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "gelu": "GELU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "hardswish": "Hardswish is not a ReLU; train or fine-tune the network with ReLU in its place",
    "hardsigmoid": "a gate has no spiking meaning; remove the squeeze-excitation blocks",
    "sigmoid": "a sigmoid has no spiking meaning; remove the gate; behind the last layer, apply it outside the model",
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "tanh": "tanh is not a ReLU; train or fine-tune the network with ReLU in its place",
    **dict.fromkeys(("mish", "selu", "celu", "softplus", "softsign", "log_sigmoid", "rrelu"), _NOT_RELU),
    "elu": "ELU is not a ReLU; train or fine-tune the network with ReLU in its place",
    "leaky_relu": "the negative slope has no spiking meaning; fine-tune the network with ReLU in its place",
    "prelu": "the negative slope has no spiking meaning; fine-tune the network with ReLU in its place",
    "layer_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "group_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "batch_norm": "batch norm without running statistics, or in training mode, mixes images; use eval mode",
    "cond": "which way it goes depends on the images; spiking networks have no control flow",
    "instance_norm": "it normalises by the statistics of each image; use batch norm, which folds into the weights",
    "scaled_dot_product_attention": _ATTENTION,
    "native_dropout": "dropout is active in the exported program; export it in eval mode",
    "abs": "the absolute value is not affine; write it as relu(x) + relu(-x)",
    "bmm": _ATTENTION,
    "baddbmm": _ATTENTION,
    **dict.fromkeys(
        ("slice_scatter", "select_scatter", "copy", "fill", "index_put"),
        "it writes into a part of a tensor, in place; put the parts together with torch.cat",
    ),
}

#: What is said of operations that are affine unless two of their arguments depend on the images.
PRODUCTS = {
    "mul": "it multiplies two activations, as attention and squeeze-excitation gates do; remove the gate",
    "div": "it divides by an activation, which is not affine; divide by a constant, or use batch norm to normalise",
    **dict.fromkeys(("matmul", "mm", "bmm", "baddbmm", "einsum"), _ATTENTION),
}

UNREAD = "unread"  # stands for what the reader of a file did not understand; it says so itself

NO_RULE = "spikecal has no rule for it; use affine operations and ReLU"
