"""What ATen operations mean that gather values: concatenation, pooling, and all that puts them elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .calls import Call, as_tuple, parameter, rule
from .ops import (
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    Add,
    AvgPool,
    Concat,
    Constant,
    Expand,
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
from .refusals import Refuse, op_name
from .rules import largest

aten = torch.ops.aten


@rule(aten.cat.default)
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
        return largest(c, names, shape)
    total = names[0]
    for name in names[1:]:
        total = c.add(Add(), total, name)
    return total if op_name(c.node) == "sum" else c.add(Scale(c.keep("scale", c.of_sample(1 / len(names)))), total)


@rule(aten.stack.default)
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


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
@rule(aten.zeros.default, aten.ones.default, aten.full.default, aten.new_zeros.default, aten.new_ones.default)
@rule(aten.new_full.default)
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


@rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(c: Call) -> str:
    n = _axes_of_pool(c)
    kernel = as_tuple(c["kernel_size"], n)
    stride = as_tuple(c["stride"], n) if c["stride"] else kernel
    return c.add(
        AvgPool(
            kernel,
            stride,
            as_tuple(c["padding"], n),
            c["ceil_mode"],
            c["count_include_pad"],
            c.get("divisor_override"),
        ),
        c.data("self"),
    )


@rule(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def _adaptive_avg_pool(c: Call) -> str:
    _axes_of_pool(c)
    return c.add(AdaptiveAvgPool(tuple(c.out.shape[2:])), c.data("self"))


@rule(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(c: Call) -> Any:
    n = _axes_of_pool(c)
    kernel = as_tuple(c["kernel_size"], n)
    stride = as_tuple(c["stride"], n) if c["stride"] else kernel
    op = MaxPool(kernel, stride, as_tuple(c["padding"], n), as_tuple(c["dilation"], n), c["ceil_mode"])
    return _first_of(c, op)


@rule(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(c: Call) -> Any:
    _axes_of_pool(c)
    return _first_of(c, AdaptiveMaxPool(tuple(c.out[0].shape[2:])))


@rule(aten.amax.default, aten.max.dim)
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


@rule(aten.mean.dim)
def _mean(c: Call) -> str:
    axes = tuple(sorted(c.axis(d, c.ndim("self")) for d in c["dim"] or ()))
    if not axes:
        raise Refuse("it averages over the batch as well; name the dimensions")
    return c.add(Mean(axes, bool(c["keepdim"])), c.data("self"))


@rule(aten.sum.dim_IntList)
def _sum_over(c: Call) -> str:
    mean, shape = _mean(c), c.shape("self")
    count = 1
    for d in c["dim"]:
        count *= shape[c.axis(d, c.ndim("self"))]
    return c.add(Scale(c.keep("scale", c.of_sample(float(count)))), mean)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
@rule(aten.unflatten.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default)
def _reshape(c: Call) -> str:
    return c.add(Reshape(tuple(c.out.shape[1:])), c.data("self"))


@rule(aten.permute.default)
def _permute(c: Call) -> str:
    return _permuted(c, [d % c.ndim("self") for d in c["dims"]])


@rule(aten.transpose.int)
def _transpose(c: Call) -> str:
    dims = list(range(c.ndim("self")))
    a, b = c["dim0"], c["dim1"]
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(c, dims)


def _permuted(c: Call, dims: list[int]) -> str:
    if dims[0] != 0:
        raise Refuse("it moves the batch dimension; keep dimension 0 the batch")
    return c.add(Permute(tuple(d - 1 for d in dims[1:])), c.data("self"))


@rule(aten.expand.default)
def _expand(c: Call) -> str:
    shape = tuple(c.out.shape[1:])
    if isinstance(c["self"], Tensor):  # a parameter, repeated for every image
        return c.add(Constant(c.keep("value", c.of_sample(c["self"]).expand(shape))), c.importer.nodes[0].name)
    return c.add(Expand(shape), c.data("self"))


@rule(aten.slice.Tensor, aten.narrow.default)
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


@rule(aten.select.int)
def _select(c: Call) -> str:
    x, axis = c.data("self"), c.axis(c["dim"], c.ndim("self"))
    shape = list(c.shape("self"))
    at = c["index"] % shape[axis]
    shape[axis] = 1
    return c.add(Reshape(tuple(c.out.shape[1:])), c.add(Slice(axis, at, at + 1), x, shape=shape))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)
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


@rule(aten.index_select.default)
def _index_select(c: Call) -> str:
    return _selected(c, c.data("self"), c["dim"], parameter(c["index"], "index"))


@rule(aten.index.Tensor)
def _index(c: Call) -> str:
    used = [(dim, index) for dim, index in enumerate(c["indices"]) if index is not None]
    if len(used) != 1 or not isinstance(used[0][1], Tensor) or used[0][1].ndim != 1:
        raise Refuse("only a list of places along one axis can be read, the same for all images")
    return _selected(c, c.data("self"), *used[0])


@rule(aten.flip.default)
def _flip(c: Call) -> str:
    x = c.data("self")
    for dim in c["dims"]:
        x = _selected(c, x, dim, torch.arange(c.out.shape[dim]).flip(0))
    return x


@rule(aten.roll.default)
def _roll(c: Call) -> str:
    x, shifts, dims = c.data("self"), as_tuple(c["shifts"], 1), as_tuple(c["dims"], 1)
    if len(shifts) != len(dims):
        raise Refuse("it rolls over the batch as well; name the dimensions")
    for shift, dim in zip(shifts, dims, strict=True):
        x = _selected(c, x, dim, torch.arange(c.out.shape[dim]).roll(shift))
    return x


@rule(aten.repeat.default)
def _repeat(c: Call) -> str:
    if isinstance(c["self"], Tensor):  # a parameter, repeated for every image
        value = c.of_sample(c["self"]).repeat(c["repeats"][1:])
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


@rule(aten.pixel_shuffle.default)
def _pixel_shuffle(c: Call) -> str:
    channels, height, width = c.shape("self")
    r = c["upscale_factor"]
    return _regrouped(c, (channels // r**2, r, r, height, width), (0, 3, 1, 4, 2))


@rule(aten.pixel_unshuffle.default)
def _pixel_unshuffle(c: Call) -> str:
    channels, height, width = c.shape("self")
    r = c["downscale_factor"]
    return _regrouped(c, (channels, height // r, r, width // r, r), (0, 2, 4, 1, 3))


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(c: Call) -> str:
    channels, *space = c.shape("self")
    return _regrouped(c, (c["groups"], channels // c["groups"], *space), (1, 0, *range(2, 2 + len(space))))


def _regrouped(c: Call, split: tuple[int, ...], order: tuple[int, ...]) -> str:
    """Split axes, put them into another order, and join them to the shape of the result."""
    x = c.add(Reshape(split), c.data("self"), shape=split)
    x = c.add(Permute(order), x, shape=[split[axis] for axis in order])
    return c.add(Reshape(tuple(c.out.shape[1:])), x)


@rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(c: Call) -> str:
    widths = tuple(c["pad"])
    if len(widths) // 2 >= c.ndim("self") and any(widths[2 * (c.ndim("self") - 1) :]):
        raise Refuse("it pads the batch dimension")
    return c.add(Pad(widths, str(c.get("mode") or "constant"), float(c.get("value") or 0)), c.data("self"))


@rule(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(c: Call) -> str:
    return c.add(Pad(tuple(c["padding"]), "reflect"), c.data("self"))


@rule(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(c: Call) -> str:
    return c.add(Pad(tuple(c["padding"]), "replicate"), c.data("self"))


_UPSAMPLE = {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear",
}  # fmt: skip


@rule(*(getattr(getattr(aten, name), overload) for name in _UPSAMPLE for overload in ("default", "vec")))
def _upsample(c: Call) -> str:
    factors = c.get("scale_factors")
    op = Upsample(
        tuple(c.out.shape[2:]),
        _UPSAMPLE[op_name(c.node)],
        c.get("align_corners"),
        tuple(factors) if factors else None,
    )
    return c.add(op, c.data("input" if "input" in c.args else "self"))


@rule(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
@rule(
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


@rule(aten._to_copy.default, aten.to.dtype, aten.type_as.default)
def _to(c: Call) -> str:
    before, after = c.node.args[0].meta["val"].dtype, c.out.dtype  # type: ignore[union-attr]
    if before != after:
        raise Refuse(f"it goes from {before} to {after}, but a spiking network has one precision; remove the cast")
    return c.data("self")
