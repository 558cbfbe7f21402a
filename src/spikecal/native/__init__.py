"""The native kernels, through ctypes: plain buffers in, plain buffers out, no dependence on torch's binary interface.

The library is compiled when spikecal is installed, if there is a C++ compiler (`hatch_build.py`). Without it `library`
gives None, with one note, and everything runs on torch alone.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import warnings
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..work import note_work

INTERFACE = 11
PATH = Path(__file__).parent / "libspikecal.so"
PAD = 16  # channels of float buffers are a multiple of this


_SIZES = (
    *(
        "in_channels",
        "in_h",
        "in_w",
        "window_h",
        "window_w",
        "hop_h",
        "hop_w",
        "map_h",
        "map_w",
        "kernel_h",
        "kernel_w",
    ),
    *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "tables"),
)


class Conv(Structure):
    """`struct Conv` of layer.h."""

    _fields_ = (("spikes", c_void_p), ("weights", c_void_p), *((name, c_int32) for name in _SIZES))


class Layer(Structure):
    """`struct Layer` of layer.h."""

    _fields_ = (
        ("convs", c_void_p),
        *((name, c_int32) for name in ("n_convs", "T", "N", "out_h", "out_w", "out_channels")),
        ("constant", c_void_p),
        ("constant_stride", c_int64),
        *((name, c_void_p) for name in ("addend", "shortcut", "height", "bias", "threshold", "v", "fired", "currents")),
        ("delay", c_int32),
        ("start", c_int32),
        ("threads", c_int32),
    )


class Pool(Structure):
    """`struct Pool` of layer.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("spikes", "fired", "counts", "most", "rows", "row_start", "columns", "column_start")),
        *((n, c_int32) for n in ("T", "N", "channels", "in_h", "in_w", "out_h", "out_w", "threads")),
    )


class NativeNote(UserWarning):
    """The native kernels are not there; torch does their work."""


@cache
def library() -> Any:
    """The loaded library, or None."""
    if os.environ.get("SPIKECAL_NATIVE", "1") == "0":
        return None
    try:
        lib = ctypes.CDLL(str(PATH))
        if lib.spikecal_interface() != INTERFACE:
            raise OSError("it was compiled from another version of spikecal")
    except (OSError, AttributeError) as e:
        warnings.warn(
            f"spikecal runs without its native kernels, which is slower ({e}); install it again where there is a C++ "
            "compiler, or set SPIKECAL_NATIVE=0 to hide this note",
            NativeNote,
            stacklevel=2,
        )
        return None
    lib.spikecal_packed_floats.argtypes = (POINTER(Conv), c_int)
    lib.spikecal_packed_floats.restype = c_size_t
    lib.spikecal_pack.argtypes = (POINTER(Conv), c_int, c_void_p, c_void_p, c_void_p)
    lib.spikecal_pack.restype = None
    lib.spikecal_unpack.argtypes = (c_void_p, c_size_t, c_int, c_void_p, c_void_p, c_int)
    lib.spikecal_unpack.restype = None
    lib.spikecal_count.argtypes = (c_void_p, c_int, c_size_t, c_int, c_void_p, c_void_p, c_int)
    lib.spikecal_count.restype = None
    lib.spikecal_cells.argtypes = (
        *(c_void_p, c_int, c_int, c_size_t),
        *(c_void_p, c_int, c_void_p, c_int, c_void_p, c_int),
    )
    lib.spikecal_cells.restype = None
    lib.spikecal_pack_spikes.argtypes = (c_void_p, c_size_t, c_int, c_void_p)
    lib.spikecal_pack_spikes.restype = None
    lib.spikecal_pool.argtypes = (POINTER(Pool),)
    lib.spikecal_pool.restype = None
    lib.spikecal_run.argtypes = (POINTER(Layer),)
    lib.spikecal_run.restype = c_int64
    return lib


def padded(channels: int) -> int:
    return -(-channels // PAD) * PAD


def words(channels: int) -> int:
    """64-bit words that hold one bit a channel."""
    return -(-channels // 64)


def pack_weights(conv: Conv, out_channels: int, weight: Tensor, height: Tensor) -> Tensor:
    """Weights (out, in / groups, kh, kw), times the height of the spikes they meet (in,), laid out for the kernels."""
    lib = library()
    weight, height = weight.detach().contiguous(), height.detach().contiguous()
    _check_form(conv, out_channels)
    _check("weight", weight, (out_channels, conv.in_channels // conv.groups, conv.kernel_h, conv.kernel_w))
    _check("height", height, (conv.in_channels,))
    packed = torch.empty(lib.spikecal_packed_floats(conv, out_channels))
    lib.spikecal_pack(conv, out_channels, weight.data_ptr(), height.data_ptr(), packed.data_ptr())
    return packed


def unpack(bits: Tensor, height: Tensor) -> Tensor:
    """(..., words) -> (..., C) floats, 0 or the height (C,) of the channel."""
    _check("bits", bits, (*bits.shape[:-1], words(len(height))), torch.int64)
    _check("height", height, (len(height),))
    dense = torch.empty(*bits.shape[:-1], len(height))
    pixels = bits.numel() // bits.shape[-1]
    note_work(calls=1)
    library().spikecal_unpack(
        bits.data_ptr(), pixels, len(height), height.data_ptr(), dense.data_ptr(), torch.get_num_threads()
    )
    return dense


def count(bits: Tensor, height: Tensor) -> Tensor:
    """(T, ..., words) -> (..., C): how often each neuron fires, times the height (C,) of its channel."""
    _check("bits", bits, (*bits.shape[:-1], words(len(height))), torch.int64)
    _check("height", height, (len(height),))
    counts = torch.empty(*bits.shape[1:-1], len(height))
    pixels = counts.numel() // len(height)
    note_work(calls=1)
    library().spikecal_count(
        bits.data_ptr(),
        len(bits),
        pixels,
        len(height),
        height.data_ptr(),
        counts.data_ptr(),
        torch.get_num_threads(),
    )
    return counts


def add_cells(x: Tensor, top: Tensor, column_of: Tensor, totals: Tensor) -> None:
    """Add number and sum of the positive values of every row of x, (B, rows, n), to columns, (rows, columns, 2).

    A cell is as wide as one of equal parts between 0 and the top, (rows,), of its row; the last one has the top itself.
    column_of: the column of every cell, int32, (cells + 1,).
    """
    rows, columns = totals.shape[:2]
    _check("values", x, (len(x), rows, x.shape[-1]))
    _check("top", top, (rows,), torch.float64)
    _check("columns", column_of, (column_of.numel(),), torch.int32)
    _check("totals", totals, (rows, columns, 2), torch.float64)
    cells = len(column_of) - 1
    if cells < 1 or not bool((top > 0).all()):
        raise ValueError("the native kernels want at least one cell below the top, and every top above 0")
    if not 0 <= int(column_of.min()) <= int(column_of.max()) < columns:
        raise ValueError(f"the native kernels want a column from 0 to {columns - 1} for every cell")
    note_work(calls=1)
    library().spikecal_cells(
        *(x.data_ptr(), len(x), rows, x.shape[2]),
        *(top.data_ptr(), cells, column_of.data_ptr(), columns, totals.data_ptr()),
        torch.get_num_threads(),
    )


def pack_spikes(dense: Tensor) -> Tensor:
    """(..., C) -> (..., words): every value but 0 is a spike."""
    dense = dense.contiguous()
    _check("spikes", dense, tuple(dense.shape))
    channels = dense.shape[-1]
    bits = torch.empty(*dense.shape[:-1], words(channels), dtype=torch.int64)
    note_work(calls=1)
    library().spikecal_pack_spikes(dense.data_ptr(), dense.numel() // channels, channels, bits.data_ptr())
    return bits


def pool(
    bits: Tensor,
    counts: Tensor,
    most: Tensor,
    rows: list[list[int]],
    columns: list[list[int]],
) -> Tensor:
    """Max-pooling of spikes (T, N, H, W, words) -> (T, N, H', W', words).

    counts: (N, H, W, C) and most: (N, H', W', C), int32, of the spikes so far; both are updated. rows, columns: for
    every row or column of the input, those of the output whose windows hold it.
    """
    (T, N, in_h, in_w, size), (_, out_h, out_w, channels) = bits.shape, most.shape
    _check("spikes", bits, (T, N, in_h, in_w, words(channels)), torch.int64)
    _check("counts", counts, (N, in_h, in_w, channels), torch.int32)
    _check("most", most, (N, out_h, out_w, channels), torch.int32)
    for windows, inside, outside in ((rows, in_h, out_h), (columns, in_w, out_w)):
        if len(windows) != inside or not all(0 <= o < outside for window in windows for o in window):
            raise ValueError(f"windows must be given for {inside} places, within {outside} outputs")
    fired = torch.zeros(T, N, out_h, out_w, size, dtype=torch.int64)
    lists = [table for windows in (rows, columns) for table in _as_lists(windows)]
    pointers = (x.data_ptr() for x in (bits, fired, counts, most, *lists))
    note_work(calls=1)
    library().spikecal_pool(Pool(*pointers, T, N, channels, in_h, in_w, out_h, out_w, torch.get_num_threads()))
    return fired


def _as_lists(windows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All of them behind each other, and where each begins."""
    starts = [0, *itertools.accumulate(len(w) for w in windows)]
    return torch.tensor([*itertools.chain(*windows)], dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)


def run(
    shape: tuple[int, int, int],
    convs: Sequence[tuple[Conv, Tensor, Tensor]],
    steps: int,
    images: int,
    *,
    constant: Tensor | None = None,
    addend: Tensor | None = None,
    shortcut: Tensor | None = None,
    height: Tensor | None = None,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    v: Tensor | None = None,
    delay: int = 0,
    start: int = 0,
) -> tuple[Tensor, int]:
    """One layer of (channels, height, width) over T steps: what its neurons fire, as bits; and how many events it had.

    Without a threshold there are no neurons, and the currents are given, (T, N, H, W, padded C). convs: what they are
    like, their spikes as bits, and packed weights. The rest is as `struct Layer` says; v is updated.
    """
    if (shortcut is None) != (height is None) or (threshold is None) != (v is None):
        raise ValueError("a shortcut needs the height of its spikes, and a threshold the potentials v")
    if delay < 0 or len({form.groups for form, _, _ in convs}) > 1:
        raise ValueError("the native kernels want a delay of 0 or more, and convolutions with as many groups each")
    channels, *space = shape
    floats, bits = (images, *space, padded(channels)), (steps, images, *space, words(channels))
    shared = constant is not None and len(constant) == 1  # by all images
    _check("constant", constant, (1 if shared else images, *floats[1:]))
    _check("addend", addend, (steps, *floats))
    _check("shortcut", shortcut, bits, torch.int64)
    _check("height", height, floats[-1:])
    _check("bias", bias, (steps, floats[-1]))
    _check("threshold", threshold, floats[-1:])
    _check("v", v, floats)
    forms = (Conv * len(convs))()
    for i, (form, spikes, weights) in enumerate(convs):
        _check_form(form, channels)
        _check("spikes", spikes, (steps, images, form.in_h, form.in_w, words(form.in_channels)), torch.int64)
        _check("weights", weights, (int(library().spikecal_packed_floats(form, channels)),))
        forms[i] = form
        forms[i].spikes, forms[i].weights = spikes.data_ptr(), weights.data_ptr()
    if threshold is None:
        found = torch.empty(steps, *floats)
    else:
        found = torch.zeros(bits, dtype=torch.int64)
    pointers = {"constant": constant, "addend": addend, "shortcut": shortcut, "height": height, "bias": bias}
    pointers |= {"threshold": threshold, "v": v, "currents" if threshold is None else "fired": found}
    layer = Layer(
        ctypes.addressof(forms),
        len(convs),
        *(steps, images, *space, channels),
        constant_stride=0 if constant is None or shared else prod(constant.shape[1:]),
        delay=delay,
        start=start,
        threads=torch.get_num_threads(),
        **{name: x.data_ptr() for name, x in pointers.items() if x is not None},
    )
    note_work(calls=1)
    events = int(library().spikecal_run(layer))
    if events < 0:
        raise MemoryError("the native kernels found no memory for their lists of events")
    return found, events


def _check(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """The kernels trust what they are given, so nothing else may reach them."""
    if x is None:
        return
    if x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous() or tuple(x.shape) != shape:
        raise ValueError(
            f"the native kernels want {name} as {dtype} of shape {shape}, contiguous, in the processor's memory, not "
            f"{x.dtype} of shape {tuple(x.shape)} on {x.device} with strides {x.stride()}"
        )


def _check_form(form: Conv, outputs: int) -> None:
    sizes = {name: getattr(form, name) for name in _SIZES}
    free = {"pad_h", "pad_w", "tables"}
    if min(sizes[n] for n in free) < 0 or min(size for n, size in sizes.items() if n not in free) < 1:
        raise ValueError(f"the native kernels cannot do a convolution of these sizes: {sizes}")
    if form.in_channels % form.groups or outputs % form.groups:
        raise ValueError(f"{form.in_channels} channels and {outputs} outputs do not go into {form.groups} groups")
    depthwise = form.groups == form.in_channels == outputs
    if form.groups > 1 and not depthwise and outputs // form.groups % lanes():
        raise ValueError(f"{outputs} outputs in {form.groups} groups do not go into vectors of {lanes()}")
    for axis in ("h", "w"):
        size, window, hop, seen = (getattr(form, f"{name}_{axis}") for name in ("in", "window", "hop", "map"))
        if (seen - 1) * hop + window > size:
            raise ValueError(f"windows of {window} every {hop} reach beyond {size} pixels: there are {seen} of them")


def lanes() -> int:
    """Floats per vector register."""
    return int(library().spikecal_lanes(0))
