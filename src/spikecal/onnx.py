"""From an ONNX file to an nn.Module that computes the same, for capture to read like any other.

An importer of our own, because onnx2torch and onnx2pytorch import torchvision, whose compiled operators do not load
beside every build of torch, and because a conversion needs a free batch size and the name of every node.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import Refusal, UnsupportedModelError
from .onnx_operators import OPERATORS
from .refusals import REMEDIES, UNREAD, Refuse
from .tracing import PartlyRead

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

Shape = tuple[int, ...] | None  # of one sample; None where it is not known

SHAPE_BYTES = 1024  # stored tensors that may hold a shape are smaller
OLDEST_OPSET = 7  # before it, operators broadcast by rules of their own


@torch.library.custom_op(f"spikecal::{UNREAD}", mutates_args=())
def unread(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for an operator that cannot be read, so that tracing goes on and finds what else cannot be converted."""
    return x.new_zeros(x.shape[0], *shape)


@unread.register_fake
def _unread(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], *shape)


@dataclass
class Found:
    """What tracing finds out about a node; an object, because torch.export takes back what it assigns to modules."""

    refusal: Refusal | None = None


class Step(nn.Module):
    """One node of the file: a module of its own, so that every message carries its name."""

    def __init__(
        self, label: tuple[str, str], run: Callable[..., Any], attributes: Mapping[str, Any], fixed: Mapping[int, Any]
    ) -> None:
        """label: what it is, and where. fixed: the inputs, by position, that are the same for all images."""
        super().__init__()
        self.label, self.run, self.attributes = label, run, attributes
        self.shapes: Sequence[Shape] = (None,)  # of its outputs, as far as the file tells
        self.inside: Sequence[Refusal] = ()  # what offends in the graphs that the node holds, as the branches of an If
        self.found = Found()
        self.settings = {i: value for i, value in fixed.items() if not isinstance(value, Tensor)}
        for i in fixed.keys() - self.settings:
            self.register_parameter(f"input{i}", nn.Parameter(fixed[i], requires_grad=False))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        full = [self.settings.get(i, getattr(self, f"input{i}", value)) for i, value in enumerate(inputs)]
        try:
            found = self.run(*full, **self.attributes)
        except (Refuse, TypeError, ValueError, LookupError, ArithmeticError) as e:
            why = str(e) if isinstance(e, Refuse) else f"spikecal does not know this form of it: {e}"
            self.found.refusal = Refusal(*self.label, why)
            x = next((v if v.ndim else v[None] for v in full if isinstance(v, Tensor)), torch.zeros(1))
            return tuple(unread(x, list(x.shape[1:] if shape is None else shape)) for shape in self.shapes)
        return found if isinstance(found, tuple) else (found,)


class OnnxNetwork(PartlyRead):
    """The nodes of an ONNX file, in their order. A file with several outputs gives a tuple.

    input_shapes: those of one sample, by the name of the input; None where the file leaves a size open.
    """

    def __init__(self, input_shapes: Mapping[str, Shape], outputs: Sequence[str]) -> None:
        super().__init__()
        self.input_shapes, self.outputs = dict(input_shapes), tuple(outputs)
        self.order: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []  # of steps: name, inputs, outputs

    @property
    def refusals(self) -> list[Refusal]:
        """What could not be read when the network was last traced."""
        steps = [s for s in self.children() if isinstance(s, Step)]
        return [r for s in steps if s.found.refusal for r in (s.found.refusal, *s.inside)]

    def append(self, name: str, step: Step, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        while hasattr(self, name):
            name += "_"
        self.add_module(name, step)
        self.order.append((name, tuple(inputs), tuple(outputs)))

    def forward(self, *images: Tensor) -> Any:
        values: dict[str, Any] = dict(zip(self.input_shapes, images, strict=True))
        for name, inputs, outputs in self.order:
            values |= zip(outputs, self._modules[name](*map(values.get, inputs)), strict=False)  # type: ignore[misc]
        found = tuple(values[name] for name in self.outputs)
        return found[0] if len(found) == 1 else found


def read_onnx(path: Path) -> OnnxNetwork:
    """The network in an ONNX file. It is data: nothing in it is executed, and it reads no files outside its folder."""
    model = _load(path)
    constants: dict[str, Any] = {"": None} | {t.name: _tensor(t, path.parent) for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in constants]
    network = OnnxNetwork({i.name: _sample_shape(i) for i in inputs}, [o.name for o in model.graph.output])
    read = {name for node in model.graph.node for name in node.input} | set(network.outputs)
    batch, shapes = _sizes(inputs[0])[0] if inputs else None, _inferred(model)
    for number, node in enumerate(model.graph.node):
        node.name = _module_name(node.name or f"{node.op_type}_{number}")
        try:
            step = _step(node, constants, batch, read, path.parent)
        except Refuse as e:
            step = Step((node.op_type, node.name), _refusing(e), {}, {})
            step.inside = _inside(node, node.name)
        step.shapes = [shapes.get(name) for name in node.output]
        if constants.keys() >= set(node.input):
            found = dict(zip(node.output, step(*[None] * len(node.input)), strict=False))
            if not step.found.refusal:
                constants |= found
                continue
        network.append(node.name, step, node.input, node.output)
    for name in constants.keys() & set(network.outputs):  # the same for all images, yet part of the result
        same = Step(("Identity", name), lambda x: x, {}, {0: torch.as_tensor(constants[name])})
        network.append(_module_name(name), same, [name], [name])
    return network


def _load(path: Path) -> ModelProto:
    try:
        import onnx
        from onnx.inliner import inline_local_functions
    except ImportError as e:
        raise UnsupportedModelError(f"to read {path.name}, install onnx: pip install 'spikecal[onnx]' ({e})") from e
    try:
        onnx.checker.check_model(path)
        model = inline_local_functions(onnx.load(path, load_external_data=False))
    except Exception as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise UnsupportedModelError(f"{path.name} is not a sound ONNX model: {first}") from e
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST_OPSET:
        raise UnsupportedModelError(f"{path.name} has opset {opset}; export it anew with {OLDEST_OPSET} or later")
    return model


def _refusing(reason: Refuse) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        raise reason

    return run


def _inferred(model: ModelProto) -> dict[str, Shape]:
    """The shapes of samples of all values, as far as they can be inferred; without copying the weights."""
    import onnx

    outline = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    outline.graph.CopyFrom(onnx.GraphProto(name="outline", node=model.graph.node, input=model.graph.input))
    for tensor in model.graph.initializer:
        if tensor.ByteSize() < SHAPE_BYTES:
            outline.graph.initializer.append(tensor)
        outline.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        known = onnx.shape_inference.infer_shapes(outline).graph.value_info
    except onnx.shape_inference.InferenceError:
        return {}
    return {value.name: _sample_shape(value) for value in known if value.type.tensor_type.HasField("shape")}


def _tensor(tensor: TensorProto, folder: Path) -> Tensor:
    """A stored tensor. Its values may stand in a file of their own; the checker saw to it that it is in the folder."""
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(tensor, base_dir=str(folder)).copy())


def _sizes(value: ValueInfoProto) -> list[int | None]:
    """The declared shape; None for a size that is left open."""
    return [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim] or [None]


def _sample_shape(value: ValueInfoProto) -> tuple[int, ...] | None:
    sizes = _sizes(value)[1:]
    known = tuple(s for s in sizes if s is not None)
    return known if len(known) == len(sizes) else None


def _module_name(name: str) -> str:
    """The name of a node without what could mean something else to torch: a dot, a quote."""
    return re.sub(r"[^\w/:-]", "_", name.strip("/"), flags=re.ASCII) or "_"


def _remedy(node: NodeProto) -> str | None:
    """What to do about an operator without spiking meaning."""
    key = node.op_type.lower().removesuffix("alization")
    if node.op_type == "BatchNormalization":
        return None
    return {name.replace("_", ""): remedy for name, remedy in REMEDIES.items()}.get(key)


def _inside(node: NodeProto, path: str) -> list[Refusal]:
    """Offenders in the graphs that a node holds."""
    found = []
    for inner in (n for a in node.attribute for graph in (*a.graphs, a.g) for n in graph.node):
        where = f"{path}.{inner.name or inner.op_type}"
        if why := _remedy(inner):
            found.append(Refusal(inner.op_type, where, why))
        found += _inside(inner, where)
    return found


def _step(node: NodeProto, constants: Mapping[str, Any], batch: int | None, read: set[str], folder: Path) -> Step:
    found = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if found is None:
        raise Refuse(_remedy(node) or "spikecal does not read this operator; use affine operators and Relu")
    if node.op_type != "Split" and read.intersection(node.output[1:]):
        raise Refuse(f"its output {node.output[1]!r} is used, which has no spiking meaning")
    attributes = {a.name: _attribute(a, folder) for a in node.attribute}
    if node.op_type == "Split":
        attributes.setdefault("num_outputs", len(node.output))
    try:
        inspect.signature(found.run).bind(*node.input, **attributes)
    except TypeError as e:
        raise Refuse(f"spikecal does not know this form of it: {e}") from None
    fixed = {i: _plain(constants[name], found.settings) for i, name in enumerate(node.input) if name in constants}
    if node.op_type == "Reshape" and 0 not in fixed and fixed.get(1) and fixed[1][0] == batch:
        fixed[1] = [0, *fixed[1][1:]]  # the batch size that the file was exported with: 0 keeps what there is
        attributes["allowzero"] = 0
    return Step((node.op_type, node.name), found.run, attributes, fixed)


def _attribute(attribute: Any, folder: Path) -> Any:
    from onnx import TensorProto, helper

    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return _tensor(value, folder)
    return value.decode() if isinstance(value, bytes) else value


def _plain(value: Any, settings: bool) -> Any:
    """Integers and the settings of an operator as numbers and lists."""
    return value.tolist() if isinstance(value, Tensor) and (settings or not value.is_floating_point()) else value
