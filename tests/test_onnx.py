"""ONNX files, built by hand and checked against onnx's own reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import spikecal
from spikecal.capture import capture
from spikecal.cli import app
from spikecal.onnx import OnnxNetwork, read_onnx
from spikecal.simulation import run_ann

onnx = pytest.importorskip("onnx", reason="onnx is not installed; it comes with the extra spikecal[onnx]")
reference = pytest.importorskip("onnx.reference")


class File:
    """An ONNX graph in the making: a call adds a node and gives the name of its output."""

    def __init__(self, *shape: int | str, batch: int | str = "n", opset: int = 18) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs = [self._info("x", batch, *shape)]
        self.opset, self.rng = opset, np.random.default_rng(0)

    def _info(self, name: str, *shape: Any) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    def __call__(self, op: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: Any) -> Any:
        names = [f"{op.lower()}{len(self.nodes)}{'abc'[i] if i else ''}" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(op, inputs, names, name or names[0], **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        return self.constant(self.rng.uniform(low, high, shape).astype(np.float32))

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.weights.append(onnx.numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def conv(self, x: str, i: int, o: int, k: int = 3, **attributes: Any) -> str:
        found = self("Conv", x, self.weight(o, i, k, k), self.weight(o), **{"pads": [k // 2] * 4, **attributes})
        return str(found)

    def model(self, *outputs: str) -> Any:
        results = [self._info(name) for name in outputs]  # without the right shapes, which nobody reads
        graph = onnx.helper.make_graph(self.nodes, "net", self.inputs, results, self.weights)
        opset = onnx.helper.make_opsetid("", self.opset)
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)

    def save(self, path: Path, *outputs: str) -> Path:
        onnx.save(self.model(*outputs), path)
        return path


def expected(path: Path, x: torch.Tensor, one_by_one: bool = False) -> list[torch.Tensor]:
    """What the file computes, by the reference; a file of batch size 1 gets one image at a time."""
    session = reference.ReferenceEvaluator(str(path))
    parts = [session.run(None, {"x": part.numpy()}) for part in (x.split(1) if one_by_one else [x])]
    return [torch.cat([torch.from_numpy(np.array(p)) for p in leaf]) for leaf in zip(*parts, strict=True)]


def assert_reads(path: Path, *shape: int, one_by_one: bool = False) -> spikecal.graph.Graph:
    """The network and its captured graph both compute what the reference computes, for a batch of any size."""
    x = torch.randn(3, *shape)
    network = read_onnx(path)
    graph = capture(network, [x])
    wanted = expected(path, x, one_by_one)
    for found in (network(x), run_ann(graph, [x])):
        found = [found] if isinstance(found, torch.Tensor) else found
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return graph


# --- whole networks ------------------------------------------------------------------------------------------


def residual(f: File) -> str:
    """conv + batch norm + ReLU, a residual sum, pools, a fully connected layer."""
    norm = [f.weight(4, low=0.5, high=1.5), f.weight(4), f.weight(4), f.weight(4, low=0.5, high=1.5)]
    stem = f("Relu", f("BatchNormalization", f.conv("x", 3, 4), *norm, epsilon=1e-3))
    pooled = f("MaxPool", stem, kernel_shape=[2, 2], strides=[2, 2])
    y = f("Relu", f("Add", f.conv(f("Relu", f.conv(pooled, 4, 4)), 4, 4), pooled), name="/block/relu")
    y = f("Flatten", f("GlobalAveragePool", y))
    return str(f("Gemm", y, f.weight(5, 4), f.weight(5), transB=1, name="/fc/Gemm"))


@pytest.mark.parametrize("batch", ["n", 1])
def test_a_residual_network(tmp_path: Path, batch: int | str) -> None:
    f = File(3, 8, 8, batch=batch)
    graph = assert_reads(f.save(tmp_path / "net.onnx", residual(f)), 3, 8, 8, one_by_one=batch == 1)
    names = [node.name for node in graph.nodes]
    assert "block/relu" in names
    assert "fc/Gemm" in names


def test_convert_reads_an_onnx_file(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    path = f.save(tmp_path / "net.onnx", residual(f))
    x = torch.randn(24, 3, 8, 8)
    (wanted,) = expected(path, x)
    errors = []
    for T in (4, 64):
        snn = spikecal.convert(str(path), [x.double()], T)  # images of another precision than the file's
        torch.testing.assert_close(snn.ann(x), wanted, rtol=1e-4, atol=1e-5)
        errors.append(float((snn(x) - wanted).square().mean()))
    assert errors[1] < errors[0] / 4


def test_concat_and_several_outputs(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    a = f("Relu", f.conv("x", 3, 4))
    b = f("Relu", f.conv("x", 3, 2, 1))
    both = f("Concat", a, b, axis=1)
    path = f.save(tmp_path / "net.onnx", f.conv(both, 6, 2), f("ReduceMean", both, f.constant([2, 3]), keepdims=0))
    assert_reads(path, 3, 8, 8)
    snn = spikecal.convert(path, torch.randn(8, 3, 8, 8), T=2)
    assert [y.shape for y in snn(torch.randn(5, 3, 8, 8))] == [(5, 2, 8, 8), (5, 6)]


def test_an_output_that_is_always_the_same(tmp_path: Path) -> None:
    f = File(4)
    anchors = f("Mul", f.weight(2, 3), f.constant(np.float32(2)))
    path = f.save(tmp_path / "net.onnx", f("Relu", "x"), anchors)
    x = torch.randn(5, 4)
    y, constant = spikecal.convert(path, x, T=2)(x)
    assert y.shape == (5, 4)
    torch.testing.assert_close(
        constant, torch.from_numpy(reference.ReferenceEvaluator(str(path)).run([anchors], {"x": x.numpy()})[0])
    )


def test_several_inputs(tmp_path: Path) -> None:
    f = File(4)
    f.inputs.append(f._info("z", "n", 3))
    left, right = f("MatMul", "x", f.weight(4, 6)), f("MatMul", "z", f.weight(3, 6))
    path = f.save(tmp_path / "net.onnx", f("Relu", f("Sub", left, right)))
    x, z = torch.randn(8, 4), torch.randn(8, 3)
    snn = spikecal.convert(path, [(x, z)], T=4)
    (wanted,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy(), "z": z.numpy()})
    torch.testing.assert_close(snn.ann(x, z), torch.from_numpy(wanted))


# --- operators -----------------------------------------------------------------------------------------------


def window(op: str, **attributes: Any) -> Callable[[File], str]:
    attributes = {"kernel_shape": [3, 3], **attributes}
    return lambda f: str(f("Relu", f(op, "x", **attributes)))


def conv(**attributes: Any) -> Callable[[File], str]:
    return lambda f: str(f("Relu", f("Conv", "x", f.weight(4, 3, 3, 2), f.weight(4), **attributes)))


def transposed(**attributes: Any) -> Callable[[File], str]:
    return lambda f: str(f("ConvTranspose", f("Relu", "x"), f.weight(3, 2, 3, 3), f.weight(2), **attributes))


def resized(scales: list[float], **attributes: Any) -> Callable[[File], str]:
    return lambda f: str(f("Resize", f("Relu", "x"), "", f.constant(np.float32([1, 1, *scales])), **attributes))


def resized_to_a_size(f: File) -> str:
    size = f("Concat", f("Shape", "x", end=2), f.constant([12, 9]), axis=0)
    return str(f("Resize", f("Relu", "x"), "", "", size, mode="linear"))


def shape_arithmetic(f: File) -> str:
    """What exporters write for x.view(x.size(0), -1) and for half of the channels."""
    x = f("Relu", "x")
    batch = f("Unsqueeze", f("Gather", f("Shape", x), f.constant(0)), f.constant([0]))
    rest = f("Slice", f("Shape", x), f.constant([1]), f.constant([3]))
    halves = f("Div", f("Mul", rest, f.constant([1, 2])), f.constant(2))
    shape = f("Concat", batch, f("Cast", halves, to=7), f.constant([-1]), axis=0)
    y = f("Reshape", x, shape)
    return str(f("Reshape", y, f("Concat", batch, f("Reshape", f.constant(-1), f.constant([1])), axis=0)))


def shuffled(f: File) -> str:
    """The channel shuffle of a file that was exported with batch size 1."""
    y = f("Reshape", f("Relu", f.conv("x", 3, 4)), f.constant([1, 2, 2, 8, 6]), allowzero=1)
    y = f("Reshape", f("Transpose", y, perm=[0, 2, 1, 3, 4]), f.constant([1, 4, 8, 6]))
    return str(f("Reshape", y, f.constant([1, -1])))


def gathered(f: File) -> str:
    x = f("Relu", "x")
    rows = f("Gather", x, f.constant([4, 1, -1]), axis=2)
    column = f("Gather", rows, f.constant(2), axis=-1)
    return str(f("Squeeze", f("Unsqueeze", column, f.constant([1, -1])), f.constant([1])))


def sliced(f: File) -> str:
    x = f("Relu", "x")
    starts, ends = f.constant([1, -5]), f.constant([2**63 - 1, -1])
    a = f("Slice", x, starts, ends, f.constant([2, 3]), f.constant([2, 1]))
    left, right = f("Split", a, f.constant([3, 1]), axis=-1, outputs=2)
    first, second = f("Split", left, axis=2, num_outputs=2, outputs=2)
    return str(f("Concat", f("ReduceMax", left, f.constant([-1])), f("Concat", second, first, axis=2), right, axis=-1))


def arithmetic(f: File) -> str:
    x = f("Mul", f("Max", "x", f.constant(np.float32(0))), f("Identity", f.weight(3, 1, 1)))
    x = f("Sum", f("Div", x, f.constant(np.float32(2))), f("Neg", x), f.weight(1, 3, 8, 6))
    return str(f("Sub", f.weight(6), f("Dropout", f("Relu", x))))


def gemm(f: File) -> str:
    x = f("Relu", f("Gemm", f("Flatten", "x"), f.weight(144, 6), f.weight(1, 6), alpha=0.5, beta=2.0))
    return str(f("Gemm", x, f("Transpose", f.weight(5, 6))))


def clips(f: File) -> str:
    zero, six = f.constant(np.float32(0)), f("Constant", value_float=0.6)
    both = f("Clip", "x", zero, f("Cast", six, to=1))
    return str(
        f("Add", f("Clip", "x", zero), f("Clip", both, f.constant(np.float32(-0.5)), f.constant(np.float32(0.3))))
    )


def pads(mode: str) -> Callable[[File], str]:
    return lambda f: str(f("Pad", f("Relu", "x"), f.constant([0, 0, 1, 2, 0, 0, 0, 3]), mode=mode))


OPERATORS: dict[str, list[Callable[[File], str]]] = {
    "conv": [
        conv(pads=[0, 1, 2, 0], strides=[2, 1]),
        conv(auto_pad="SAME_UPPER", strides=[2, 2]),
        conv(auto_pad="SAME_LOWER"),
        conv(auto_pad="VALID", dilations=[2, 1]),
    ],
    "transposed conv": [
        transposed(strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0]),
        transposed(strides=[2, 1], pads=[0, 1, 1, 0]),
    ],
    "max pool": [
        window("MaxPool", pads=[1, 1, 1, 1], strides=[2, 2]),
        window("MaxPool", strides=[2, 2], ceil_mode=1),
        window("MaxPool", pads=[0, 1, 1, 0], strides=[2, 1]),
        window("MaxPool", auto_pad="SAME_UPPER", strides=[2, 2]),
        window("MaxPool", kernel_shape=[2, 2], dilations=[2, 1], pads=[1, 0, 0, 0], strides=[3, 2]),
        lambda f: f("GlobalMaxPool", f("Relu", "x")),
    ],
    "average pool": [
        window("AveragePool", pads=[1, 1, 1, 1], strides=[2, 1]),
        window("AveragePool", pads=[0, 1, 1, 0], count_include_pad=1),
        window("AveragePool", pads=[0, 1, 1, 0], strides=[2, 2]),
        window("AveragePool", strides=[2, 2], ceil_mode=1),
    ],
    "resize": [
        resized([2, 3], mode="nearest"),
        resized([1.5, 2], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        resized([2, 1.5], mode="linear"),
        resized([2, 2], mode="linear", coordinate_transformation_mode="align_corners"),
        resized_to_a_size,
    ],
    "reshape": [
        lambda f: f("Reshape", f("Relu", "x"), f.constant([-1, 144])),
        lambda f: f("Reshape", f("Relu", "x"), f.constant([0, -1])),
        lambda f: f("Reshape", f("Relu", "x"), f.constant([0, 0, 2, -1])),
        shape_arithmetic,
    ],
    "pick": [gathered, sliced],
    "reduce": [lambda f: f("ReduceSum", f("ReduceMean", "x", f.constant([-1])), f.constant([2]), keepdims=0), clips],
    "arithmetic": [arithmetic, gemm],
    "pad": [pads("constant"), pads("reflect"), pads("edge")],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(tmp_path: Path, name: str) -> None:
    f = File(3, 8, 6)
    assert_reads(f.save(tmp_path / "net.onnx", *(build(f) for build in OPERATORS[name])), 3, 8, 6)


def test_a_batch_size_fixed_in_reshapes_becomes_free(tmp_path: Path) -> None:
    f = File(3, 8, 6, batch=1)
    assert_reads(f.save(tmp_path / "net.onnx", shuffled(f)), 3, 8, 6, one_by_one=True)


def test_attributes_of_older_opsets(tmp_path: Path) -> None:
    f = File(3, 8, 8, opset=9)
    x = f("Clip", f("Pad", "x", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=0.5), min=0.0, max=1.0)
    x = f("Upsample", x, f.constant(np.float32([1, 1, 2, 2])), mode="nearest")
    x = f("Slice", x, starts=[1, 0], ends=[3, 100], axes=[1, 2])
    x = f("Unsqueeze", f("ReduceMean", x, axes=[2], keepdims=0), axes=[1])
    assert_reads(f.save(tmp_path / "net.onnx", f("Squeeze", x, axes=[1])), 3, 8, 8)


def test_an_open_image_size_is_taken_from_the_images(tmp_path: Path) -> None:
    f = File(3, "h", "w")
    path = f.save(tmp_path / "net.onnx", f("Relu", f.conv("x", 3, 4)))
    assert read_onnx(path).input_shapes == {"x": None}
    assert_reads(path, 3, 5, 7)


# --- refusals ------------------------------------------------------------------------------------------------


def test_all_unsupported_operators_are_listed_with_their_names(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    y = f("Sigmoid", f.conv("x", 3, 3), name="/gate/Sigmoid")
    y = f("Celu", y, name="/celu")
    y = f("LayerNormalization", y, f.weight(8), name="norm")
    values, _ = f("MaxPool", y, kernel_shape=[2, 2], outputs=2, name="pool")
    gated = f("Mul", values, f("Relu", f.conv(values, 3, 3)), name="gate")
    path = f.save(tmp_path / "net.onnx", gated, "maxpool4b")
    with pytest.raises(spikecal.UnsupportedModelError) as e:
        capture(read_onnx(path), [torch.randn(2, 3, 8, 8)])
    first, *lines = str(e.value).splitlines()
    assert "5 places" in first
    assert [line.strip().partition(":")[0] for line in lines] == [
        "Celu at celu", "LayerNormalization at norm", "MaxPool at pool", "sigmoid at gate/Sigmoid", "mul at gate",
    ]  # fmt: skip
    assert "it is not a ReLU; train or fine-tune the network with ReLU in its place" in lines[0]
    assert "it normalises by the statistics" in lines[1]
    assert "its output 'maxpool4b' is used" in lines[2]


def test_what_stands_behind_an_operator_that_changes_the_shape_is_listed(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    x = f("SpaceToDepth", f("Relu", f.conv("x", 3, 4)), blocksize=2, name="fold")  # (16, 4, 4)
    path = f.save(tmp_path / "net.onnx", f("Tanh", f.conv(x, 16, 4), name="tanh"))
    with pytest.raises(spikecal.UnsupportedModelError) as e:
        spikecal.convert(path, torch.randn(4, 3, 8, 8))
    assert [(r.what, r.where) for r in e.value.refusals] == [("SpaceToDepth", "fold"), ("tanh", "tanh")]


def test_what_stands_in_the_branches_of_an_if_is_listed(tmp_path: Path) -> None:
    def branch(op: str) -> Any:
        node = onnx.helper.make_node(op, [hidden], [f"{op}_out"], name=f"inner{op}")
        info = onnx.helper.make_tensor_value_info(f"{op}_out", onnx.TensorProto.FLOAT, None)
        return onnx.helper.make_graph([node], op, [], [info])

    f = File(3, 8, 8)
    hidden = f("Identity", f("Relu", f.conv("x", 3, 4)))
    most = f("Greater", f("ReduceMax", hidden, keepdims=0), f.constant(np.float32(1)))
    chosen = f("If", most, then_branch=branch("Sigmoid"), else_branch=branch("Tanh"), name="choice")
    path = f.save(tmp_path / "net.onnx", chosen)
    with pytest.raises(spikecal.UnsupportedModelError) as e:
        spikecal.convert(path, torch.randn(4, 3, 8, 8))
    found = [(r.what, r.where) for r in e.value.refusals]
    inner = [("Sigmoid", "choice.innerSigmoid"), ("Tanh", "choice.innerTanh")]
    assert sorted(found) == sorted([("Greater", most), ("If", "choice"), *inner, ("amax", "reducemax3")])


def test_operators_that_cannot_be_read_are_listed_even_if_tracing_fails_behind_them(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    x = f("NonZero", f("Relu", f.conv("x", 3, 4)), name="places")
    path = f.save(tmp_path / "net.onnx", f.conv(f("Cast", x, to=1), 4, 4))
    with pytest.raises(spikecal.UnsupportedModelError) as e:
        spikecal.convert(path, torch.randn(4, 3, 8, 8))
    assert next((r.what, r.where) for r in e.value.refusals) == ("NonZero", "places")


CONSTANTS: dict[str, Callable[[File], str]] = {
    "Neg": lambda f: str(f("Neg", f.constant([1]))),
    "Max": lambda f: str(f("Max", f.constant([1]), f.constant([2]))),
    "Pow": lambda f: str(f("Pow", f.constant([2]), f.constant([2]))),
    "Sqrt": lambda f: str(f("Sqrt", f("Cast", f.constant([4]), to=1))),
    "Div": lambda f: str(f("Div", f.constant([4]), f.constant([0]))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_arithmetic_of_constants_that_cannot_be_read_is_listed_with_the_rest(tmp_path: Path, name: str) -> None:
    f = File(3, 8, 8)
    x = f("Tanh", f("Relu", "x"))
    path = f.save(tmp_path / "net.onnx", f("Add", x, f("Cast", CONSTANTS[name](f), to=1)))
    with pytest.raises(spikecal.UnsupportedModelError) as e:
        spikecal.convert(path, torch.randn(4, 3, 8, 8))
    assert {name, "tanh"} <= {r.what for r in e.value.refusals}


def test_what_torch_can_do_but_spikes_cannot_is_refused_by_capture(tmp_path: Path) -> None:
    f = File(3, 8, 8)
    x = f("Relu", "x")
    path = f.save(tmp_path / "net.onnx", f("Mul", x, f("Relu", f.conv(x, 3, 3)), name="gate"))
    with pytest.raises(spikecal.UnsupportedModelError, match=r"mul at gate: it multiplies two activations"):
        spikecal.convert(path, torch.randn(4, 3, 8, 8))


def training_batch_norm(f: File) -> str:
    norm = [f.weight(3) for _ in range(4)]
    return str(f("Relu", f("BatchNormalization", "x", *norm, training_mode=1, outputs=3)[0]))


FORMS: dict[str, tuple[Callable[[File], str], str]] = {
    "cubic": (resized([2, 2], mode="cubic"), "Resize at resize1: torch has no cubic interpolation"),
    "antialias": (resized([2, 2], mode="linear", antialias=1), "torch has no linear interpolation"),
    "axes": (lambda f: str(f("Resize", "x", "", f.constant(np.float32([2, 2])), axes=[2, 3])), "unexpected keyword"),
    "channels": (lambda f: str(f("Resize", f("Relu", "x"), "", f.constant(np.float32([1, 2, 1, 1])))), "channels"),
    "same": (transposed(auto_pad="SAME_UPPER"), "ConvTranspose at convtranspose1: the padding"),
    "ceil": (window("MaxPool", pads=[0, 1, 1, 0], ceil_mode=1), "export it without ceil_mode"),
    "wrap": (lambda f: str(f("Pad", f("Relu", "x"), f.constant([0, 0, 1, 1, 0, 0, 1, 1]), mode="wrap")), "mode 'wrap'"),
    "backwards": (
        lambda f: str(f("Slice", f("Relu", "x"), *(f.constant([v]) for v in (7, 0, 2, -1)))), "turns an axis around"
    ),
    "whole": (lambda f: str(f("Cast", f("Relu", "x"), to=7)), "rounds to whole numbers"),
    "training": (training_batch_norm, "batch norm in training mode"),
    "batch": (lambda f: str(f("ReduceMean", f("Relu", "x"), f.constant([0]))), "batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    build, message = FORMS[name]
    f = File(3, 8, 8, opset=19)
    path = f.save(tmp_path / "net.onnx", build(f))
    with pytest.raises(spikecal.UnsupportedModelError, match=message):
        capture(read_onnx(path), [torch.randn(2, 3, 8, 8)])


def test_an_old_opset_is_refused(tmp_path: Path) -> None:
    f = File(3, 8, 8, opset=6)
    with pytest.raises(spikecal.UnsupportedModelError, match="has opset 6; export it anew with 7 or later"):
        read_onnx(f.save(tmp_path / "net.onnx", f("Relu", "x")))


def test_without_onnx_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(spikecal.UnsupportedModelError, match=r"install onnx: pip install 'spikecal\[onnx\]'"):
        read_onnx(tmp_path / "net.onnx")


# --- files are data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x0a\x12\xff\xff\xff"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(spikecal.UnsupportedModelError, match=r"net.onnx is not a sound ONNX model"):
        spikecal.convert(tmp_path / "net.onnx", torch.randn(2, 3))


def with_external_weights(folder: Path, location: str) -> Path:
    f = File(3, 8, 8)
    model = f.model(f("Relu", f.conv("x", 3, 4)))
    onnx.external_data_helper.convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    onnx.save(model, folder / "net.onnx")
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
        tensor.ClearField("raw_data")
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    return folder / "net.onnx"


def test_weights_may_lie_beside_the_file(tmp_path: Path) -> None:
    assert_reads(with_external_weights(tmp_path, "weights.bin"), 3, 8, 8)


@pytest.mark.parametrize("kind", ["up", "absolute", "link"])
def test_weights_outside_the_folder_are_not_read(tmp_path: Path, kind: str) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "secret.bin"
    inside.mkdir()
    outside.write_bytes(bytes(10_000))
    (inside / "link.bin").symlink_to(outside)
    location = {"up": "../secret.bin", "absolute": str(outside), "link": "link.bin"}[kind]
    path = with_external_weights(inside, location)
    with pytest.raises(spikecal.UnsupportedModelError, match=r"absolute path|outside the directory|symbolic link"):
        read_onnx(path)


def test_names_in_a_file_are_never_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = "a\"); __import__('pathlib').Path('pwned').touch() #\n"
    f = File(3, 8, 8)
    x = f("Relu", f("Conv", "x", f.weight(4, 3, 3, 3), name=hostile), name="forward")
    path = f.save(tmp_path / "net.onnx", f("Relu", x, name="forward"))
    snn = spikecal.convert(path, torch.randn(2, 3, 8, 8), T=1)
    assert [node.name for node in snn.graph.neurons] == ["forward_"]
    assert not (tmp_path / "pwned").exists()


# --- on the command line -------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    f = File(3, 8, 8)
    f.save(tmp_path / "net.onnx", residual(f))
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((8, 3, 8, 8), dtype=np.float32))
    found = CliRunner().invoke(app, ["inspect", "net.onnx"])
    assert found.exit_code == 0, found.output
    assert "input 3×8×8, output 5" in found.stdout
    options = ["--data", "data.npz", "-T", "2", "-o", "net.spk"]
    assert CliRunner().invoke(app, ["convert", "net.onnx", *options]).exit_code == 0
    assert spikecal.load("net.spk").T == 2
    refused = CliRunner().invoke(app, ["convert", "net.onnx", *options, "--weights", "w.pth"])
    assert refused.exit_code == 2
    assert "net.onnx holds its own weights" in refused.stderr


def test_a_file_with_an_open_image_size_needs_it(tmp_path: Path) -> None:
    f = File(3, "h", "w")
    path = f.save(tmp_path / "net.onnx", f("Relu", f.conv("x", 3, 4)))
    assert isinstance(read_onnx(path), OnnxNetwork)
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 2
    assert CliRunner().invoke(app, ["inspect", str(path), "--input", "3,8,8"]).exit_code == 0
