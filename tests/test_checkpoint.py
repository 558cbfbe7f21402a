"""One file for a network: what is saved comes back bit by bit, and nothing else is ever taken for a network."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import spikecal as sc
from helpers import converted, inputs, leaves, twin_of
from spikecal import checkpoint

RECIPES: dict[str, sc.Recipe] = {
    "light": sc.light(),
    "advanced": sc.advanced(iterations=20, lr=1e-3),
    "pools": sc.light(pool_to_conv=True),
}


def network(name: str, recipe: str = "light") -> sc.SpikingNetwork:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sc.NoEffectWarning)
        return converted(name, RECIPES[recipe])


def same(a: sc.SpikingNetwork, b: sc.SpikingNetwork, name: str) -> bool:
    x = inputs(name, 3, seed=7)
    ours, theirs = (leaves((n(*x), n.over_time(*x), n.ann(*x))) for n in (a, b))
    return all(torch.equal(y, z) for y, z in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlp", "light"),
        ("resnet_block", "advanced"),
        ("avg_pools", "pools"),
        ("two_inputs_two_outputs", "light"),
        ("dict_output", "light"),
        ("repeated_output", "light"),
        ("clipped_spellings", "light"),
        ("tokens", "advanced"),
        ("constants", "light"),
        ("unet", "light"),
        ("shared_conv", "advanced"),
    ],
)
@pytest.mark.parametrize("binary", [False, True])
def test_a_saved_network_comes_back(name: str, recipe: str, binary: bool, tmp_path: Path) -> None:
    snn, path = network(name, recipe), tmp_path / "net.spk"
    snn = snn.binary() if binary else snn
    snn.save(path)
    loaded = sc.load(path)
    assert same(loaded, snn, name)
    assert loaded.T == snn.T
    assert loaded.recipe == snn.recipe
    assert loaded.statistics == snn.statistics
    assert loaded.graph.nodes == snn.graph.nodes
    assert loaded.graph.structure == snn.graph.structure
    assert repr(loaded) == repr(snn)


def test_precision_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    for dtype in (torch.float32, torch.float64):
        twin_of(network("mlp")).to(dtype=dtype).save(path)
        assert sc.load(path).graph.dtype == dtype


def test_a_channels_last_model_comes_back(tmp_path: Path) -> None:
    snn, path = twin_of(network("resnet_block")), tmp_path / "net.spk"
    laid_out = {
        k: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for k, t in snn.graph.tensors.items()
    }
    snn.graph = snn.graph.with_tensors(laid_out)
    snn.save(path)
    (x,) = inputs("resnet_block", 3, seed=7)
    torch.testing.assert_close(sc.load(path)(x), snn(x), rtol=1e-9, atol=1e-12)


def test_a_loaded_network_is_saved_as_it_was(tmp_path: Path) -> None:
    first, second = tmp_path / "a.spk", tmp_path / "b.spk"
    network("resnet_block", "advanced").save(first)
    sc.load(first).save(second)
    with safe_open(first, "pt") as a, safe_open(second, "pt") as b:
        assert a.metadata() == b.metadata()  # the checksum covers the tensors


def test_tensors_that_are_shared_are_stored_once(tmp_path: Path) -> None:
    snn, path = network("mlp"), tmp_path / "net.spk"
    snn.save(path)
    with safe_open(path, "pt") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    weights = sum(t.nbytes for t in snn.graph.tensors.values())
    sites = sum(t.nbytes for site in snn.sites.values() for t in site.tensors().values())
    assert stored <= weights + sites


def test_the_file_is_data_without_code(tmp_path: Path) -> None:
    """It is read by safetensors and json, and holds no pickle."""
    path = tmp_path / "net.spk"
    network("mlp").save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "spikecal"
    assert json.loads(metadata["header"])["T"] == 8
    with pytest.raises(Exception, match=r".") as caught:
        pickle.loads(path.read_bytes())
    assert not isinstance(caught.value, AssertionError)


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.spk"
    network("mlp").save(path)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    assert same(sc.load(path), network("mlp"), "mlp")


# ---------------------------------------------------------------------- writing


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.spk"
    network("mlp").save(path)
    before = path.read_bytes()

    def full(tensors: Any, filename: str, metadata: Any) -> None:
        Path(filename).write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(sc.CheckpointError, match=r"cannot write .*net.spk: No space left"):
        network("resnet_block").save(path)
    assert os.listdir(tmp_path) == ["net.spk"]
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits on files are set otherwise elsewhere")
def test_a_file_that_cannot_grow_is_told(tmp_path: Path) -> None:
    """A limit on the size of files fails like a full disk: in the midst of writing."""
    code = (
        "import resource, signal, sys, spikecal; snn = spikecal.load(sys.argv[1]);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "snn.save(sys.argv[2])"
    )
    network("mlp").save(tmp_path / "net.spk")
    command = [sys.executable, "-c", code, str(tmp_path / "net.spk"), str(tmp_path / "other.spk")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "CheckpointError: cannot write" in done.stderr
    assert os.listdir(tmp_path) == ["net.spk"]


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        network("mlp").save(tmp_path / "net.spk")
    assert os.listdir(tmp_path) == []


def test_saving_into_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sc.CheckpointError, match=r"there is no folder .*nowhere to write net.spk into"):
        network("mlp").save(tmp_path / "nowhere" / "net.spk")


def test_a_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    network("mlp").save(tmp_path / "net.spk")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("net.spk", "other")}
    assert len(modes) == 1


def test_a_recipe_with_a_step_of_ones_own_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class OfOnesOwn:
        def apply(self, layer: Any) -> None:
            """Nothing."""

    snn = twin_of(network("mlp"))
    snn.recipe = sc.Recipe(sc.MMSE(), (OfOnesOwn(),))
    with pytest.raises(sc.SpikecalError, match="OfOnesOwn is not a part of spikecal"):
        snn.save(tmp_path / "net.spk")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- files that are something else


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(sc.CheckpointError, match="there is no file"):
        sc.load(tmp_path / "net.spk")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(sc.CheckpointError, match=r"is a folder; name the .spk file in it"):
        sc.load(tmp_path)


@pytest.mark.parametrize("name", ["net.pth", "net.pt2", "net.onnx", "net"])
def test_a_file_of_another_kind(name: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / name)
    with pytest.raises(sc.CheckpointError, match=f"{name} is not a spiking network, a .spk file: a model must be"):
        sc.load(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 8, b"\xff" * 64, b"hello", pickle.dumps({"a": 1}), struct.pack("<Q", 2) + b"{}", b"\x93NUMPY"],
    ids=["empty", "zeros", "ones", "text", "pickle", "empty safetensors", "numpy"],
)
def test_other_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    path.write_bytes(content)
    with pytest.raises(sc.CheckpointError, match=r"net.spk"):
        sc.load(path)


def test_a_pickled_model(tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(sc.CheckpointError, match=r"net.spk is truncated, or not a spikecal file"):
        sc.load(path)


def test_other_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    for metadata in (None, {"format": "pt"}, {"format": "spikecal"}):
        save_file({"weight": torch.zeros(3)}, path, metadata)
        with pytest.raises(sc.CheckpointError, match="not a spiking network of spikecal"):
            sc.load(path)


# ---------------------------------------------------------------------- damage


@cache
def good() -> bytes:
    """The bytes of a small network in a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.spk"
        network("mlp").save(path)
        return path.read_bytes()


def check_damaged(content: bytes, path: Path) -> None:
    """It is refused, or it still is the network."""
    path.write_bytes(content)
    try:
        loaded = sc.load(path)
    except sc.CheckpointError:
        return
    assert same(loaded, network("mlp"), "mlp")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "net.spk"


def test_a_truncated_file_is_refused(scratch: Path) -> None:
    size = len(good())
    for length in sorted({*range(32), *range(32, size, size // 150), size - 2, size - 1}):
        scratch.write_bytes(good()[:length])
        with pytest.raises(sc.CheckpointError):
            sc.load(scratch)


def test_a_longer_file_is_refused_or_the_same(scratch: Path) -> None:
    for tail in (b"\x00", b"more", good()):
        check_damaged(good() + tail, scratch)


def test_flipped_bits_are_noticed(scratch: Path) -> None:
    """In the length, the tensors' table, the header, the checksum, and the weights."""

    @given(st.integers(0, len(good()) - 1), st.integers(0, 7))
    def flip(position: int, bit: int) -> None:
        content = bytearray(good())
        content[position] ^= 1 << bit
        check_damaged(bytes(content), scratch)

    flip()


def test_overwritten_pieces_are_noticed(scratch: Path) -> None:
    @given(st.integers(0, len(good()) - 1), st.binary(min_size=1, max_size=200))
    def overwrite(position: int, piece: bytes) -> None:
        check_damaged((good()[:position] + piece + good()[position + len(piece) :])[: len(good())], scratch)

    overwrite()


def test_one_weight_off_by_one_bit_is_told(scratch: Path) -> None:
    content = bytearray(good())
    content[-3] ^= 1
    scratch.write_bytes(content)
    with pytest.raises(sc.CheckpointError, match="altered or damaged: its checksum does not match"):
        sc.load(scratch)


# ---------------------------------------------------------------------- forged headers, with a checksum that fits


def forge(
    path: Path, edit: Callable[[dict[str, Any]], Any], name: str = "mlp", more: dict[str, torch.Tensor] | None = None
) -> None:
    """A file like that of the network, but for an edit of its header or the header that the edit returns."""
    network(name).save(path)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys()} | (more or {})  # noqa: SIM118
    header = json.loads(metadata["header"])
    edited = edit(header)
    metadata["header"] = json.dumps(header if edited is None else edited)
    metadata["sha256"] = checkpoint._digest(metadata["header"], tensors)
    save_file(tensors, path, metadata)


def node(header: dict[str, Any], name: str) -> dict[str, Any]:
    return next(n for n in header["graph"]["nodes"] if n["name"] == name)


def test_a_forged_header_passes_if_it_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    forge(path, lambda h: h.update(T=5))
    assert sc.load(path).T == 5


def test_a_file_from_before_there_was_preprocessing_in_it(tmp_path: Path) -> None:
    forge(tmp_path / "net.spk", lambda h: [h.pop("preprocessing"), None][1])
    assert sc.load(tmp_path / "net.spk").preprocessing == {}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h.update(version=99), "format version 99; this spikecal reads version 1"),
        (lambda h: h.update(T=0), "T is 0"),
        (lambda h: h.update(T="8"), "T is '8'"),
        (lambda h: h.update(T=None), "T is None"),
        (lambda h: h.pop("T"), "T"),
        (lambda h: h.pop("recipe"), "recipe"),
        (lambda h: h.pop("tensors"), "tensors"),
        (lambda h: h.pop("version"), "version"),
        (lambda h: [], "does not describe a spiking network"),
        (lambda h: 3, "does not describe a spiking network"),
        (lambda h: h["recipe"].update(threshold={"kind": "Magic"}), "Magic"),
        (lambda h: node(h, "a").update(op="Magic"), "there is no operation 'Magic'"),
        (lambda h: node(h, "a").update(op="__import__"), "there is no operation"),
        (lambda h: node(h, "a").update(op="Activation", cap=None), "gives shape|cannot run"),
        (lambda h: node(h, "a").update(weight="nothing"), "node 'a' cannot run: 'nothing'"),
        (lambda h: node(h, "a").update(weight=None), "node 'a' cannot run"),
        (lambda h: node(h, "a").update(weight="c.weight"), "node 'a' cannot run"),
        (lambda h: node(h, "a").update(of=[7]), r"node 'a' gives shape \(8,\), not \(7,\)"),
        (lambda h: node(h, "a").update(of=[float("inf")]), "does not describe"),
        (lambda h: node(h, "a").update(inputs=["nowhere"]), "node 'a' cannot run: 'nowhere'"),
        (lambda h: node(h, "a").update(inputs=["a"]), "node 'a' cannot run: 'a'"),
        (lambda h: node(h, "a").update(inputs=[]), "node 'a' cannot run"),
        (lambda h: node(h, "a").pop("weight"), "weight"),
        (lambda h: node(h, "b").update(name="a"), "two nodes are called 'a'"),
        (lambda h: h["graph"]["nodes"].reverse(), "cannot run"),
        (lambda h: h["graph"]["nodes"].pop(), "there is no output"),
        (lambda h: h["graph"].update(nodes=[]), "there is no output"),
        (lambda h: h["graph"].update(structure=1), "does not describe"),
        (lambda h: h["graph"].update(structure={"items": [0, 7], "tuple": True}), "does not describe"),
        (lambda h: h["tensors"]["graph"].popitem(), "cannot run"),
        (lambda h: h["tensors"]["graph"].update({"a.weight": "9999"}), "9999"),
        (lambda h: h["tensors"].pop("source"), "source"),
        (lambda h: h["tensors"].pop("site relu"), "site relu"),
        (lambda h: h["tensors"]["site relu"].pop("v0"), "v0"),
        (lambda h: h["tensors"]["site relu"].pop("threshold"), "does not describe"),
        (lambda h: h["tensors"]["site relu"].update(threshold=h["tensors"]["graph"]["a.weight"]), "does not describe"),
        (lambda h: h["tensors"]["site output"].update(bias=h["tensors"]["site relu"]["threshold"]), "does not"),
        (lambda h: h["statistics"].update(relu={"colour": 1}), "colour"),
        (lambda h: h.update(preprocessing={"colour": 1}), "its preprocessing is {'colour': 1}"),
        (lambda h: h.update(preprocessing={"mean": "grey"}), "its preprocessing is {'mean': 'grey'}"),
        (lambda h: h.update(preprocessing=None), "its preprocessing is None"),
        (lambda h: h.update(starts={"relu": -1}), "'relu' must begin to fire at one of .* steps, not -1"),
        (lambda h: h.update(starts={"relu": h["T"]}), "'relu' must begin to fire at one of"),
        (lambda h: h.update(starts={"relu": True}), "not True"),
        (lambda h: h.update(starts={"relu": "1"}), "not '1'"),
        (lambda h: h.update(starts={"output": 1}), "there are no neurons 'output' to start late"),
        (lambda h: h.update(starts=[1]), "does not describe"),
    ],
)
def test_a_forged_header_is_refused_with_the_reason(edit: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.spk"

    def only_edit(header: dict[str, Any]) -> Any:
        result = edit(header)
        return result if result == [] or result == 3 else None

    forge(path, only_edit)
    with pytest.raises(sc.CheckpointError, match=r"net\.spk.*(" + message + ")"):
        sc.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": [0]},
        {"stride": [-1]},
        {"groups": 0},
        {"padding": [9]},
        {"dilation": [3]},
        {"padding": [1, 1]},
        {"stride": []},
        {"output_padding": [0, 0]},
    ],
)
def test_a_forged_conv_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "net.spk"
    forge(path, lambda h: node(h, "a").update(changes), "conv1d_net")
    with pytest.raises(sc.CheckpointError, match=r"net\.spk does not describe a spiking network: "):
        sc.load(path)


DOUBLE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("site relu", "threshold", DOUBLE.new_zeros(1), "the threshold of 'relu' must be positive and finite"),
        ("site relu", "threshold", -DOUBLE, "must be positive and finite"),
        ("site relu", "threshold", DOUBLE / 0, "must be positive and finite"),
        ("site relu", "threshold", DOUBLE * torch.nan, "must be positive and finite"),
        ("site relu", "v0", DOUBLE * torch.nan, "the v0 of 'relu' must be finite"),
        ("site output", "bias", DOUBLE / 0, "the bias of 'output' must be finite"),
        ("site relu", "threshold", torch.ones(1, dtype=torch.float32), "in torch.float64"),
        ("site relu", "threshold", torch.ones(1, dtype=torch.int64), "in torch.float64"),
        ("graph", "a.bias", torch.zeros(8, dtype=torch.float32), "of several precisions|cannot run"),
        ("source", "a.bias", torch.zeros(8, dtype=torch.float32), "of several precisions|cannot run"),
    ],
)
def test_forged_tensors_are_refused_with_the_reason(
    part: str, name: str, value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.spk"
    forge(path, lambda h: h["tensors"][part].update({name: "forged"}), more={"forged": value})
    with pytest.raises(sc.CheckpointError, match=f"net.spk does not describe a spiking network: .*({message})"):
        sc.load(path)


def places(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside of a JSON value."""
    inside = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [path, *(found for key, value in inside for found in places(value, (*path, key)))]


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 10**6, 2**31, 2**63, 2**70, -(2**63)]),
    st.sampled_from([0.5, -1.0, 1e308, float("inf"), float("nan")]),
    st.sampled_from(["", "a", "x", "relu", "Conv", "Reshape", "Input", "Output", "Activation", "0"]),
    st.lists(st.sampled_from([0, 1, -1, 8, None, "a", 2**63, [1]]), max_size=3),
    st.dictionaries(st.sampled_from(["a", "dict", "items", "tuple"]), st.sampled_from([0, None, [], [[]]]), max_size=2),
)


@pytest.mark.parametrize("name", ["mlp", "conv1d_net"])
def test_any_forged_header_is_a_network_or_refused(name: str, scratch: Path) -> None:
    """Whatever stands in a header, loading it raises nothing but CheckpointError."""
    headers: list[dict[str, Any]] = []
    forge(scratch, lambda h: headers.append(copy.deepcopy(h)), name)
    ways = places(headers[0])[1:]

    @given(st.sampled_from(ways), junk)
    def forged(way: tuple[Any, ...], value: Any) -> None:
        def edit(header: dict[str, Any]) -> None:
            part: Any = header
            for key in way[:-1]:
                part = part[key]
            part[way[-1]] = value

        forge(scratch, edit, name)
        try:
            sc.load(scratch)
        except sc.CheckpointError as error:
            assert str(error).startswith("net.spk")  # noqa: PT017

    forged()
