"""From a PyTorch model to a `Graph`, through torch.export.

One table, `RULES`, says what each ATen operation means. What is not in it is refused, all places at once.
Export shows `nn.ReLU`, `F.relu`, `x.relu_()` and a module called twice as the same thing, a call at a call site;
its functionalisation gives in-place operations their meaning; values that depend on no input are computed here.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from .calls import RULES, Call
from .errors import Refusal, UnsupportedModelError
from .graph import Graph, Node
from .ops import Input, Op, Output
from .refusals import NO_RULE, PRODUCTS, REMEDIES, UNREAD, Refuse, call_site, op_name, place, refusal_message
from .rules import Comparison
from .shape_rules import Stacked, is_stack, reduce_stack
from .tracing import PartlyRead, Traced, quiet, traced


def capture(model: nn.Module | ExportedProgram, example: Sequence[Tensor] = ()) -> Graph:
    """The graph of a model, exactly as it computes in eval mode. `example` is a batch of inputs for an nn.Module."""
    graph, refusals = survey(model, example)
    if error := objection(graph, refusals):
        raise error
    return graph


def objection(graph: Graph, refusals: Sequence[Refusal]) -> UnsupportedModelError | None:
    """Why the surveyed model cannot be converted, if it cannot."""
    if refusals:
        return UnsupportedModelError(refusal_message(refusals), refusals)
    if not graph.neurons:
        return UnsupportedModelError(
            "the model has no activation to convert: it needs at least one ReLU, ReLU6 or clamp(0, c). "
            "Was it captured without its non-linearities, or are they outside forward()?"
        )
    return None


def survey(model: nn.Module | ExportedProgram, example: Sequence[Tensor] = ()) -> tuple[Graph, tuple[Refusal, ...]]:
    """The whole graph of a model, and what in it cannot be converted; there, `Refused` stands in the graph."""
    found = Traced(model) if isinstance(model, ExportedProgram) else _traced(model, example)
    with quiet(), torch.random.fork_rng(devices=[]):
        graph, refusals = _Importer(_pure(found.program), refused=list(found.reasons)).graph()
    refusals = with_lines(refusals, found.seen)
    return graph, (*refusals, *(r for r in found.elsewhere if r not in refusals))


def with_lines(refusals: Sequence[Refusal], seen: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Refusals with the lines of those that were seen: of a call in a helper method, tracing knows only forward()'s."""

    def key(refusal: Refusal) -> tuple[str, str]:
        return refusal.what, refusal.where.partition(" (")[0]

    lines: dict[tuple[str, str], Iterator[str]] = {}
    for k, asked in Counter(map(key, refusals)).items():
        calls = [call for call in seen if key(call) == k]
        for some in (calls, [call for call in calls if call.why]):  # all of that name, or those that offend by it
            if len(some) == asked:
                lines[k] = iter([call.where for call in some])
    return tuple(replace(r, where=next(lines[key(r)])) if key(r) in lines else r for r in refusals)


def _traced(model: nn.Module, example: Sequence[Tensor]) -> Traced:
    """The program of a model; what could not be read of its file is a reason that it is not the whole model."""
    try:
        found = traced(model, example)
    except UnsupportedModelError as e:
        if not _unread(model):
            raise
        refusals = [*_unread(model), *e.refusals]
        raise UnsupportedModelError(refusal_message(refusals), refusals) from e
    return replace(found, reasons=[*found.reasons, *_unread(model)])


def _unread(model: nn.Module) -> list[Refusal]:
    return model.refusals if isinstance(model, PartlyRead) else []


def _pure(program: ExportedProgram) -> ExportedProgram:
    """The program with operations in place made pure; none is decomposed. It takes as long as tracing does."""
    if _is_pure(program):
        return program
    try:
        pure: ExportedProgram = program.run_decompositions({})
        return pure
    except Exception as e:
        first = str(e).strip().partition("\n")[0]
        raise UnsupportedModelError(
            f"torch.export cannot give the operations in place of this model their meaning: {first or type(e).__name__}"
        ) from e


#: Operations that write nowhere, and whose rules give the same whether torch makes a program pure or not.
_PURE = {
    torch.ops.aten.conv2d.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.relu.default,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.avg_pool2d.default,
    torch.ops.aten.adaptive_avg_pool2d.default,
    torch.ops.aten.max_pool2d.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.pad.default,
    torch.ops.aten.cat.default,
}


def _is_pure(program: ExportedProgram) -> bool:
    """Whether a program is of the simplest kind, with nothing in it that nobody reads."""
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    return all(node.op == "call_function" and node.target in _PURE and node.users for node in calls)


@dataclass
class _Importer:
    """Walks an exported program once. `env` maps its nodes to constants (Tensor, int, ...) or names of our nodes."""

    program: ExportedProgram
    env: dict[fx.Node, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    batch: Any = None

    def graph(self) -> tuple[Graph, tuple[Refusal, ...]]:
        self._inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        self._refuse_mutations()
        self._refuse_sizes()
        structure = self._outputs_of_refused() if self.refused else self._outputs()
        return Graph(tuple(self.nodes), self.tensors, structure), tuple(self.refused)

    # -- values ---------------------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        state = {**self.program.state_dict, **self.program.constants}
        clones: dict[int, Tensor] = {}
        placeholders = (n for n in self.program.graph.nodes if n.op == "placeholder")
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                self._user_input(node)
            else:
                value = state[spec.target]
                if isinstance(value, Tensor):
                    value = clones.setdefault(id(value), value.detach().clone())
                self.env[node] = value

    def _user_input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            self.env[node] = value
            return
        if not all(isinstance(size, int) for size in value.shape[1:]):
            why = "its size is free in this program; export it with a fixed image size and only the batch free"
            refusals = [Refusal("input", node.name, why), *_known_offenders(self.program.graph)]
            raise UnsupportedModelError(refusal_message(refusals), refusals)
        if self.batch is None:
            self.batch = value.shape[0] if value.ndim else 1
        if isinstance(self.batch, int) and not self.refused:
            why = (
                f"the exported program has a fixed batch size of {self.batch}; export it with "
                'dynamic_shapes=({0: torch.export.Dim("batch")},) so that batches of any size can run'
            )
            self.refused.append(Refusal("batch size", node.name, why))
        self.env[node] = self.add(Input(), (), node, name=node.name)

    def _returned(self) -> list[tuple[str, Any]]:
        """What the model returns, with a name for each."""
        (output,) = (n for n in self.program.graph.nodes if n.op == "output")
        specs = self.program.graph_signature.output_specs
        returned = [v for v, s in zip(output.args[0], specs, strict=True) if s.kind is OutputKind.USER_OUTPUT]
        return [("output" if len(returned) == 1 else f"output.{i}", value) for i, value in enumerate(returned)]

    def _outputs_of_refused(self) -> Any:
        """The outputs as nodes, for whoever looks at the graph; it will not run."""
        shapes = {node.name: node.shape for node in self.nodes}
        for name, value in self._returned():
            self.nodes += [Node(name, Output(), (n,), shapes[n]) for n in _names(self.resolve(value))]
        return 0

    def _refuse_mutations(self) -> None:
        changed = [s for s in self.program.graph_signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION]
        why = "the model changes its own buffers in forward(), so it is not a function of its inputs; leave that out"
        self.refused += [Refusal("buffer", str(s.target), why) for s in changed]

    def _refuse_sizes(self) -> None:
        sizes = [name for name, value in self._returned() if isinstance(self.resolve(value), torch.SymInt)]
        why = "the model returns its batch size; return only tensors"
        self.refused += [Refusal("output", name, why) for name in sizes]

    def _outputs(self) -> Any:
        leaves = [_Leaf(self._leaf(value, name)) for name, value in self._returned()]
        if not any(isinstance(leaf.meaning, int) for leaf in leaves):
            raise UnsupportedModelError("the model's result does not depend on the images")
        spec = self.program.call_spec.out_spec
        return _structure(torch.utils._pytree.tree_unflatten(leaves, spec)) if spec is not None else 0

    def _leaf(self, value: Any, name: str) -> Any:
        """The number of an output; or what the model always returns, as it is."""
        source = self.resolve(value)
        if isinstance(source, str) and not isinstance(source, _Text):
            shape = next(n.shape for n in self.nodes if n.name == source)
            self.nodes.append(Node(self.unique(name), Output(), (source,), shape))
            return sum(isinstance(n.op, Output) for n in self.nodes) - 1
        if isinstance(source, Tensor):
            return {"tensor": self.tensor(name, source)}
        return {"constant": source}

    def _call(self, node: fx.Node) -> None:
        if not node.users and ("val" not in node.meta or op_name(node).startswith("_assert")):
            return  # a check that torch adds for itself
        args, kwargs = self.resolve(node.args), self.resolve(node.kwargs)
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool)):
            self.env[node] = node.meta["val"]
            return
        if _mentions((args, kwargs), _Lost):
            self._refuse(node, _reason_behind_lost(node, args), (args, kwargs))
            return
        try:
            if not any(_mentions((args, kwargs), what) for what in (str, torch.SymInt, Comparison, Stacked)):
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    raise Refuse("it draws random numbers, so the model is no function of its inputs; leave it out")
                self.env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                self.env[node] = self._import(node, args, kwargs)
        except Refuse as e:
            self._refuse(node, str(e), (args, kwargs))
        except (RuntimeError, ValueError, TypeError, LookupError) as e:
            first = str(e).partition("\n")[0]
            unread = f"spikecal cannot read this call ({type(e).__name__}: {first}); leave it out"
            self._refuse(node, REMEDIES.get(op_name(node), unread), (args, kwargs))

    def _refuse(self, node: fx.Node, why: str, arguments: Any) -> None:
        """Put a stand-in in place of the value, so that offenders behind it are found too."""
        if why:
            self.refused.append(Refusal(op_name(node), place(node), why))
        self.refused += [r for branch in _branches(node) for r in _known_offenders(branch)]
        value, name = node.meta.get("val"), self.unique(call_site(node))
        sizes = tuple(value.shape) if isinstance(value, Tensor) else ()
        batched = bool(sizes) and self._is_batch(sizes[0]) and all(isinstance(size, int) for size in sizes[1:])
        shape = tuple(size if isinstance(size, int) else -1 for size in (sizes[1:] if batched else sizes))
        self.nodes.append(Node(name, Refused(op_name(node), why), tuple(_names(arguments)), shape, place(node)))
        self.env[node] = name if batched else _Lost(name)

    def _import(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is operator.getitem:
            if isinstance(args[0], list) and args[1] >= len(args[0]):
                raise Refuse("the positions of maxima have no spiking meaning")
            return args[0][args[1]] if isinstance(args[0], (list, tuple)) else args[0]
        value, rule = node.meta["val"], RULES.get(node.target)
        for part in value if isinstance(value, list) else value[:1] if isinstance(value, tuple) else [value]:
            if is_stack(node):
                break
            if isinstance(part, Tensor) and (part.ndim == 0 or not self._is_batch(part.shape[0])):
                raise Refuse("it mixes the images of a batch or moves the batch dimension; keep dimension 0 the batch")
        if rule is None:
            raise Refuse("" if op_name(node) == UNREAD else REMEDIES.get(op_name(node), NO_RULE))
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        named = dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)
        full = {a.name: named.get(a.name, a.default_value) for a in schema}
        call = Call(self, node, full)
        return reduce_stack(call) if isinstance(full.get("self"), Stacked) else rule(call)

    def _is_batch(self, size: Any) -> bool:
        """Whether a size is that of the batch, and not one that only the images tell."""
        return isinstance(size, type(self.batch)) and str(size) == str(self.batch)

    def resolve(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.env.get(value, _Lost(value.name)) if value.op == "get_attr" else self.env[value]
        if isinstance(value, (list, tuple)):
            return type(value)(self.resolve(v) for v in value)
        if isinstance(value, dict):
            return {k: self.resolve(v) for k, v in value.items()}
        return _Text(value) if isinstance(value, str) else value

    # -- nodes ----------------------------------------------------------------------------------------------------

    def add(self, op: Op, inputs: tuple[str, ...], node: fx.Node, shape: Any = None, name: str = "") -> str:
        shape = tuple(node.meta["val"].shape[1:]) if shape is None else tuple(shape)
        if not all(isinstance(d, int) for d in shape):
            raise Refuse("its size depends on something other than the batch; capture with a fixed image size")
        name = self.unique(name or call_site(node))
        self.nodes.append(Node(name, op, inputs, shape, place(node)))
        return name

    def unique(self, name: str) -> str:
        self.names[name] = self.names.get(name, 0) + 1
        return name if self.names[name] == 1 else self.unique(f"{name}@{self.names[name]}")

    def tensor(self, name: str, value: Tensor) -> str:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = value
        return name


class _Text(str):
    """A string argument of an ATen call, kept apart from the name of a node."""


@dataclass(frozen=True)
class Refused(Op):
    """A call that has no meaning as an operation of a graph; or has it only behind one that is mended: no `why`."""

    what: str
    why: str


@dataclass(frozen=True)
class _Lost:
    """The value of a refused call in which the images cannot be told apart any more: no rule can go on from it."""

    name: str


def _reason_behind_lost(node: fx.Node, args: Any) -> str:
    """What is wrong with a call on a lost value, as far as its name tells; nothing if it may be affine."""
    name = op_name(node)
    if name in PRODUCTS:
        return PRODUCTS[name] if sum(1 for _ in _names(args)) > 1 else ""
    if node.target is operator.getitem or node.target in RULES or name == UNREAD:
        return ""
    return REMEDIES.get(name, NO_RULE)


def _names(value: Any) -> Iterator[str]:
    """The nodes that the arguments of a call mention."""
    if isinstance(value, _Lost):
        yield value.name
    elif isinstance(value, str) and not isinstance(value, _Text):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _names(part)


def _mentions(value: Any, what: type) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_mentions(v, what) for v in value)
    if isinstance(value, dict):
        return any(_mentions(v, what) for v in value.values())
    if what is str:
        return isinstance(value, str) and not isinstance(value, _Text)
    return isinstance(value, what)


@dataclass(frozen=True)
class _Leaf:
    """What a leaf of the model's result is in `Graph.structure`."""

    meaning: Any


def _structure(tree: Any) -> Any:
    if isinstance(tree, _Leaf):
        return tree.meaning
    if isinstance(tree, dict) and all(isinstance(k, (str, int)) for k in tree):
        return {"dict": [[k, _structure(v)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"tuple": isinstance(tree, tuple), "items": [_structure(v) for v in tree]}
    raise UnsupportedModelError(
        f"the model returns a {type(tree).__name__}; return tensors in tuples, lists, or dicts with names or numbers "
        "as keys"
    )


def _branches(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a call holds, as those of torch.cond."""
    modules = (getattr(node.graph.owning_module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr")
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def _known_offenders(graph: fx.Graph) -> list[Refusal]:
    """By name alone, where shapes are not known."""
    found = []
    for node in (n for n in graph.nodes if n.op == "call_function"):
        if op_name(node) in REMEDIES:
            found.append(Refusal(op_name(node), place(node), REMEDIES[op_name(node)]))
        found += [r for branch in _branches(node) for r in _known_offenders(branch)]
    return found
