"""How a graph falls into segments: the affine nodes between one site and the neurons in front of it.

Every node belongs to exactly one segment, that of the first site that needs it, so running all segments once is
running the network once. A value that a later segment reads too is handed over at the segment's frontier.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Graph, Node
from .ops import Input


@dataclass(frozen=True)
class Segment:
    """The affine map in front of one site (an activation or an output)."""

    site: Node
    nodes: tuple[Node, ...]  # what it computes, in order, without the site
    frontier: tuple[str, ...]  # the values it reads from inputs, neurons and earlier segments

    @property
    def source(self) -> str:
        """The node whose value is the current of the site."""
        return self.site.inputs[0]


def segments(graph: Graph) -> list[Segment]:
    """The segments of all sites, in the order in which they can be computed."""
    owned: set[str] = {n.name for n in graph.nodes if n.is_site or isinstance(n.op, Input)}
    found = []
    for site in (n for n in graph.nodes if n.is_site):
        mine = _unowned_ancestors(graph, site, owned)
        nodes = tuple(n for n in graph.nodes if n.name in mine)
        read = [i for n in (*nodes, site) for i in n.inputs if i not in mine]
        found.append(Segment(site, nodes, tuple(dict.fromkeys(read))))
        owned |= mine
    return found


def _unowned_ancestors(graph: Graph, site: Node, owned: set[str]) -> set[str]:
    found: set[str] = set()
    stack = list(site.inputs)
    while stack:
        name = stack.pop()
        if name not in found and name not in owned:
            found.add(name)
            stack.extend(graph.by_name[name].inputs)
    return found


def last_readers(parts: list[Segment]) -> dict[str, int]:
    """For every frontier value, the index of the last segment that reads it."""
    return {name: i for i, part in enumerate(parts) for name in part.frontier}
