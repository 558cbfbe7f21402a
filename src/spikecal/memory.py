"""How many images at a time fit into a memory budget."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path

from . import native
from .errors import CalibrationError
from .graph import Graph, Node

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
CACHE = 4 * 2**20  # a layer's values should fit into the processor's caches: beyond, speed halves
CACHE_OF_BITS = 4 * CACHE  # the same where spikes travel as bits, in bytes of floats
BLOCK = CACHE // 2  # of floats that are made of bits and given back at once: larger ones go back to the system


def budget(memory: str | float | None) -> int:
    """Bytes for a budget such as "2GiB", "500MB" or a number; by default half of what is free now."""
    if memory is None:
        return _free_lately(int(time.monotonic())) // 2
    if isinstance(memory, int | float) and isfinite(memory):
        size = int(memory)
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]i?)?b?\s*", str(memory).lower())
        if match is None:
            raise CalibrationError(f'cannot read the memory budget {memory!r}; write it as "2GiB" or "500MB"')
        size = int(float(match[1]) * _UNITS[match[2] or ""])
    if size <= 0:
        raise CalibrationError(f"the memory budget must be positive, not {memory!r}")
    return size


@lru_cache(maxsize=1)
def _free_lately(second: int) -> int:
    """Asked once a second: reading it takes as long as a small network does for an image."""
    del second
    return _free()


def _free(root: Path = Path("/")) -> int:
    """What this process may still take: what the machine has left, within the limits of a container or a job."""
    try:
        found = re.search(r"MemAvailable: +(\d+)", (root / "proc/meminfo").read_text())
    except OSError:
        found = None
    machine = int(found[1]) * 1024 if found else 4 * 2**30  # a guess for systems that do not tell
    return max(0, min([machine, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each control group that holds this process leaves of its limit; file caches give way."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in memberships):
        if controllers == "":
            top, names, cache = root / "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif controllers == "memory":
            top, cache = root / "sys/fs/cgroup/memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit, used = (int((folder / name).read_text()) for name in names)
                found = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            except (OSError, ValueError):
                continue  # not a group with a limit
            yield limit - used + (int(found[1]) if found else 0)


def chunk_of_images(
    graph: Graph,
    T: int,
    limit: int,
    images: int,
    nodes: Iterable[Node] | None = None,
    beside: int = 0,
    cache: int = CACHE,
) -> int:
    """How many images to run at once over T steps: within the limit, and not more than the caches like.

    `beside` is what each of them needs on top of the values of the nodes.
    """
    nodes = list(graph.nodes if nodes is None else nodes)
    fitting = limit // max(1, peak_bytes(graph, T, nodes) + beside)
    return max(1, min(images, fitting, cache // (T * _widest(graph, nodes))))


def block_of_steps(graph: Graph, T: int, limit: int, images: int, cache: int = CACHE) -> int:
    """How many of T steps to take at once with this many images, by the same measure."""
    images = max(1, images)
    fitting = limit // max(1, images * peak_bytes(graph, 1))
    return max(1, min(T, fitting, cache // (images * _widest(graph, graph.nodes))))


def _widest(graph: Graph, nodes: Iterable[Node]) -> int:
    """Bytes of the largest value of one image at one step, among what the nodes read and give."""
    names = {name for n in nodes for name in (n.name, *n.inputs)}
    return max(max(prod(graph.by_name[name].shape) for name in names) * graph.dtype.itemsize, 1)


def padded_size(shape: Sequence[int]) -> int:
    """Values of a sample, with its channels padded as the native kernels want them."""
    return prod(shape) // shape[0] * native.padded(shape[0]) if 1 <= len(shape) <= 3 and shape[0] else prod(shape)


def peak_bytes(graph: Graph, T: int, nodes: Iterable[Node] | None = None) -> int:
    """The most bytes one image needs while these nodes (or all) run over T steps at once."""
    order = list(graph.nodes if nodes is None else nodes)
    inside = {n.name for n in order}
    waiting = {n.name: sum(r.name in inside for r in graph.readers[n.name]) for n in order}
    size = {n.name: prod(n.shape) * T * graph.dtype.itemsize for n in graph.nodes}
    size |= {n.name: padded_size(n.shape) * T * graph.dtype.itemsize for n in graph.neurons}  # as kernels see currents
    now = peak = sum(size[i] for i in {i for n in order for i in n.inputs if i not in inside})
    for node in order:
        now += size[node.name]
        # potentials and thresholds of a neuron, or the copy in another layout that an operation makes of its input
        peak = max(peak, now + 2 * max(size[name] for name in (node.name, *node.inputs)))
        for name in (i for i in node.inputs if i in inside):
            waiting[name] -= 1
            now -= 0 if waiting[name] else size[name]
    return peak
