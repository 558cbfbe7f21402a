"""The command line as its users meet it: what it prints where, what it writes, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import spikecal
from spikecal.cli import app
from spikecal.cli.description import operation
from spikecal.cli.tables import powers_of_two
from spikecal.data import load_data
from spikecal.graph import Graph, Node
from spikecal.ops import OPS, Activation, AdaptiveAvgPool, Add, AvgPool, Conv, Linear, Scale, Slice

COMMANDS = ("inspect", "convert", "evaluate", "report", "compare", "bench", "demo")

MODELS = '''
import torch
import torch.nn.functional as F
from torch import nn

class Small(nn.Module):
    """A residual block around a convolution, so that a segment ends in an addition."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)) + x)
        return self.head(self.pool(x).mean((2, 3)))

class Gated(nn.Module):
    """Two places that have no spiking meaning."""
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.last(F.gelu(self.first(x)).mean((2, 3))).softmax(1)

class Choosing(nn.Module):
    """What it does depends on the images."""
    def forward(self, x):
        return F.relu(x) if x.sum() > 0 else x

class Twice(nn.Module):
    """One layer called twice, and a second input."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
    def forward(self, a, b):
        return F.relu(self.layer(F.relu(self.layer(a)))) + b

class Wrapped(nn.Module):
    """All names of its weights begin with what DataParallel would put there."""
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(5, 5)
    def forward(self, x):
        return F.relu(self.module(x))

def signals():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3))

small_instance = Small()
number = 3

def broken():
    raise ValueError("no such width")

def nothing():
    return None

def with_nan():
    model = Small()
    model.head.weight.data[0, 0] = float("nan")
    return model
'''


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": None})  # as in a pipe
    return Result(result.exit_code, result.stdout, result.stderr)


def flat(text: str) -> str:
    """Text without the line breaks and frames that typer puts around it."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models and data, in which all commands run; nothing of it stays importable."""
    folder, path = tmp_path_factory.mktemp("cli"), list(sys.path)
    (folder / "cli_models.py").write_text(MODELS)
    (folder / "cli_broken.py").write_text("import a_package_that_is_not_there")
    rng = np.random.default_rng(0)
    x = rng.random((40, 1, 8, 8), dtype=np.float32)
    np.savez(folder / "data.npz", x=x, y=rng.integers(0, 3, 40))
    np.savez(folder / "unlabelled.npz", x=x)
    np.savez(folder / "signals.npz", x=rng.random((40, 2, 12), dtype=np.float32), y=rng.integers(0, 3, 40))
    np.savez(folder / "large.npz", x=rng.random((4, 1, 9, 9), dtype=np.float32))
    (folder / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    sys.path[:] = path
    for name in ("cli_models", "cli_broken"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    result = run("convert", "cli_models:Small", "--data", "data.npz", "-T", 6, "-o", "small.spk")
    assert result.code == 0, result.err
    return folder / "small.spk"


# --- help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"Example: spikecal {command} " in flat(result.out)


def test_help_lists_commands_and_exit_codes() -> None:
    text = flat(run("--help").out)
    assert all(command in text for command in COMMANDS)
    assert "3 unsupported model" in text
    assert "5 checkpoint problem" in text


def test_help_names_every_recipe() -> None:
    text = flat(run("convert", "--help").out)
    assert [name for name in spikecal.RECIPES if name not in text] == []


def test_version() -> None:
    assert run("--version").out.strip() == spikecal.__version__


def test_help_does_not_import_torch() -> None:
    """Measured without the package's own __init__, which is not the command line's to decide."""
    package = Path(spikecal.__file__).parent
    code = (
        "import sys, types; package = types.ModuleType('spikecal'); package.__path__ = [sys.argv.pop()];"
        "sys.modules['spikecal'] = package; from spikecal.cli import app; app(standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help", str(package)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# --- inspect -------------------------------------------------------------------------------------------------


def test_inspect_shows_rules_and_totals(folder: Path) -> None:
    result = run("inspect", "cli_models:Small", "--input", "1,8,8")
    assert result.code == 0
    assert "conv 3×3, 1→4, padding 1" in result.out
    assert "affine, batch norm norm folded in" in result.out
    assert "neuron (IF, soft reset)" in result.out
    assert "readout (averaged over time)" in result.out
    assert "256 neurons in 1 layer, 2 segments, 55 parameters, input 1×8×8, output 3" in result.out
    assert "--pool-to-conv" in result.out


def test_inspect_json_is_pure_and_adds_up(folder: Path) -> None:
    found = run("inspect", "cli_models:Small", "--input", "1,8,8", "--json").json
    assert found["parameters"] == sum(node["parameters"] or 0 for node in found["nodes"])
    assert found["segments"] == len({node["segment"] for node in found["nodes"]} - {None})
    assert found["inputs"] == {"x": [1, 8, 8]}
    sites = [node["name"] for node in found["nodes"] if node["name"] == node["site"]]
    assert len(sites) == found["neuron_layers"] + len(found["outputs"])


def test_inspect_counts_shared_weights_once_and_takes_several_inputs(folder: Path) -> None:
    found = run("inspect", "cli_models:Twice", "--input", "5", "--input", "5", "--json").json
    layers = [node["parameters"] for node in found["nodes"] if node["operation"] == "linear 5→5"]
    assert layers == [30, None]
    assert found["parameters"] == 30
    assert list(found["inputs"]) == ["a", "b"]


def test_inspect_can_give_pools_neurons(folder: Path) -> None:
    found = run("inspect", "cli_models:Small", "--input", "1,8,8", "--pool-to-conv", "--json").json
    assert found["neuron_layers"] == 3
    assert any(node["operation"].startswith("depthwise conv 2×2") for node in found["nodes"])


def test_inspect_accepts_a_module_that_is_already_built(folder: Path) -> None:
    assert run("inspect", "cli_models:small_instance", "--input", "1,8,8").code == 0


def test_inspect_reads_spk_and_pt2(folder: Path, converted: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU())
    program = torch.export.export(model, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, folder / "net.pt2")
    assert "linear 64→3" in run("inspect", "net.pt2").out
    assert "small.spk, converted for T = 6 with recipe best" in run("inspect", converted.name).out
    found = run("inspect", converted.name, "--json").json
    assert (found["T"], found["recipe"], found["neurons"]) == (6, "best", 256)
    refused = run("inspect", converted.name, "--input", "3,4,4")
    assert refused.code == 2
    assert "a .spk file knows the shape of its images" in flat(refused.err)


def test_a_latency_beyond_T_is_shown_beside_it(folder: Path) -> None:
    given = ("--data", "data.npz", "--recipe", "pipelined")
    assert "T = 4, latency 5" in run("convert", "cli_models:Small", *given, "-T", 4, "-o", "late.spk").out
    assert "converted for T = 4, latency 5 with recipe pipelined" in run("inspect", "late.spk").out
    assert "converted for" not in run("inspect", "late.spk", "--pool-to-conv").out  # which has more neurons
    assert "SNN (T = 4, latency 5, recipe pipelined)" in flat(
        run("evaluate", "late.spk", "--data", "unlabelled.npz").out
    )
    assert "Times at T = 4, latency 5" in run("bench", "late.spk", "--data", "data.npz", "--rounds", 1).out
    searched = run("convert", "late.spk", *given, "--auto-T", 100.0, "-o", "short.spk").out
    assert re.search(r"\b1 +2 .*chosen", searched)
    assert "T = 1, latency 2, recipe pipelined, 30 images" in searched  # a quarter is held out
    assert "Images that the ANN was trained on agree more than new ones" in searched


def test_signals_are_converted_evaluated_and_reported(folder: Path) -> None:
    """Samples need not be images."""
    converted = run("convert", "cli_models:signals", "--data", "signals.npz", "--mean", "0.5,0.4", "-o", "signals.spk")
    assert converted.code == 0, converted.err
    given = ("--data", "signals.npz")
    assert run("evaluate", "signals.spk", *given, "--json").json["agreement"] > 0.9
    assert run("bench", "signals.spk", *given, "--rounds", 1).code == 0
    assert run("report", "signals.spk", *given, "-o", "signals.html").code == 0
    assert (folder / "signals.html").stat().st_size > 1e5


def test_spikes_of_two_signs_are_said_wherever_the_recipe_is(folder: Path) -> None:
    (folder / "signed.json").write_text(spikecal.light(signed=True).to_json())
    given, title = ("--data", "data.npz"), "recipe light, spikes of two signs"
    assert (
        title in run("convert", "cli_models:Small", *given, "--recipe", "signed.json", "-T", 4, "-o", "signed.spk").out
    )
    assert title in run("inspect", "signed.spk").out
    assert title in flat(run("evaluate", "signed.spk", *given).out)
    assert "two signs" in run("compare", "signed.spk", *given).out


def test_inspect_shows_the_whole_network_and_lists_everything_it_refuses(folder: Path) -> None:
    result = run("inspect", "cli_models:Gated", "--input", "1,8,8")
    assert result.code == 3
    assert "2 places" in result.err
    assert re.search(r"gelu at gelu \(cli_models.py:\d+\): GELU is not a ReLU; train", result.err)
    assert re.search(r"softmax at softmax \(cli_models.py:\d+\): .* apply it outside the model", result.err)
    assert re.search(r"^ softmax +softmax .* refused +1 *$", result.out, re.MULTILINE)
    assert "2 places refused" in result.out
    assert re.search(r"\d neurons in \d layers?, \d segments?, \d+ parameters", result.out)


def test_inspect_gives_a_refused_network_as_json(folder: Path) -> None:
    result = run("inspect", "cli_models:Gated", "--input", "1,8,8", "--json")
    found = json.loads(result.out)
    assert result.code == 3
    assert [(r["what"], r["where"].partition(" ")[0]) for r in found["refused"]] == [
        ("gelu", "gelu"),
        ("softmax", "softmax"),
    ]
    assert all(set(r) == {"what", "where", "why"} for r in found["refused"])
    nodes = {node["name"]: node for node in found["nodes"]}
    assert nodes["gelu"]["rule"].startswith("refused: GELU is not a ReLU")
    assert nodes["gelu"]["inputs"]
    assert list(nodes)[-1] == "output"
    assert found["message"] in result.err


def test_inspect_gives_json_of_a_model_that_decides_by_its_images(folder: Path) -> None:
    result = run("inspect", "cli_models:Choosing", "--input", "1,8,8", "--json")
    found = json.loads(result.out)
    assert result.code == 3
    assert [node["name"] for node in found["nodes"]] == ["x", "relu", "output"]
    assert found["refused"][0]["what"] == "control flow"
    assert re.fullmatch(r"forward \(cli_models.py:\d+\)", found["refused"][0]["where"])


def test_inspect_of_a_wrong_shape_says_so(folder: Path) -> None:
    result = run("inspect", "cli_models:Small", "--input", "3,8,8")
    assert result.code == 4
    assert "the model cannot run on images of shape (3, 8, 8); check their channels and size" in result.err
    assert "torch.export" not in result.err


def test_inspect_needs_the_shape_of_an_image(folder: Path) -> None:
    result = run("inspect", "cli_models:Small")
    assert result.code == 2
    assert "--input 3,32,32" in flat(result.err)


OPERATIONS = [
    (Conv("w", stride=(2, 2), groups=2), "conv 3×1, 4→6, stride 2, groups 2"),
    (Conv("w", padding=(1, 0), dilation=(2, 2)), "conv 3×1, 2→6, padding 1×0, dilation 2"),
    (Conv("w", transposed=True), "transposed conv 3×1, 6→2"),
    (Linear("m"), "linear 7→5"),
    (Activation(), "ReLU"),
    (Activation("six"), "ReLU, clipped at 6"),
    (Scale("six", None), "scale"),
    (Scale("six", "six"), "scale and shift"),
    (Add(), "add"),
    (Add(-1.0), "subtract"),
    (AvgPool((2, 2), (1, 1), (0, 0)), "average pool 2×2, stride 1"),
    (AdaptiveAvgPool((1, 1)), "average pool to 1×1"),
    (Slice(0, 2, 6, 2), "slice 2:6:2, axis 0"),
]


@pytest.mark.parametrize(("op", "text"), OPERATIONS, ids=[text for _, text in OPERATIONS])
def test_operations_in_words(op: Any, text: str) -> None:
    tensors = {"w": torch.zeros(6, 2, 3, 1), "m": torch.zeros(5, 7), "six": torch.tensor([6.0])}
    assert operation(Graph((), tensors), Node("n", op, (), ())) == text


def test_an_operation_without_words_of_its_own_is_still_named() -> None:
    op = OPS["Permute"](axes=(1, 0))
    assert operation(Graph((), {}), Node("n", op, (), ())) == "permute, axes (1, 0)"


# --- finding the model ---------------------------------------------------------------------------------------


def test_the_current_folder_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_here.py").write_text(
        "from torch import nn\n\ndef net(): return nn.Sequential(nn.Linear(2, 2), nn.ReLU())"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    result = run("inspect", "cli_here:net", "--input", "2")
    assert result.code == 0, result.err
    del sys.modules["cli_here"]


WRONG_MODELS = [
    ("cli_models", 2, "is neither package.module:factory nor a .pt2, .onnx or .spk file"),
    ("cli_models.py:Small", 2, "name a module, not a file: from its folder, cli_models:Small"),
    ("cli_nowhere:Small", 3, "there is no module 'cli_nowhere'"),
    ("cli_models.inner:Small", 3, "there is no module 'cli_models.inner'"),
    ("cli_broken:Small", 3, "module 'cli_broken' cannot be imported: No module named 'a_package_that_is_not_there'"),
    ("cli_models:Smal", 3, "module 'cli_models' has no 'Smal'; did you mean Small"),
    ("cli_models:number", 3, "of type int, not a function or class"),
    ("cli_models:nothing", 3, "gives an object of type NoneType, not an nn.Module"),
    ("cli_models:broken", 3, "cli_models:broken() failed with ValueError: no such width"),
    ("cli_models:with_nan", 3, "NaN or infinite values"),
    ("nowhere.pt2", 3, "there is no file nowhere.pt2"),
    ("nowhere.spk", 5, "there is no file nowhere.spk"),
]


@pytest.mark.parametrize(("model", "code", "message"), WRONG_MODELS, ids=[case[0] for case in WRONG_MODELS])
def test_a_wrong_model_is_explained(folder: Path, model: str, code: int, message: str) -> None:
    result = run("inspect", model, "--input", "1,8,8")
    assert (result.code, result.out) == (code, "")
    assert message in flat(result.err)
    assert "Traceback" not in result.err


# --- weights -------------------------------------------------------------------------------------------------


def small_state() -> dict[str, torch.Tensor]:
    from cli_models import Small

    state = {name: t.clone() for name, t in Small().state_dict().items()}
    state["head.bias"] = torch.tensor([7.0, 8.0, 9.0])
    return state


@pytest.mark.parametrize(
    "layout",
    ["safetensors", "plain", "state_dict", "net", "module", "nested", "lightning", "old", "averaged", "ema", "beside"],
)
def test_weights_arrive_in_the_network(folder: Path, layout: str) -> None:
    state = small_state()
    prefixed = {f"module.{name}": t for name, t in state.items()}
    path = folder / ("w.safetensors" if layout == "safetensors" else "w.pth")
    if layout == "safetensors":
        save_file(state, path)
    else:
        wrapped = {
            "plain": state,
            "state_dict": {"epoch": 3, "state_dict": state},
            "net": {"net": state},
            "module": prefixed,
            "nested": {"model": {"state_dict": prefixed}},
            "lightning": {"state_dict": {f"model.{name}": t for name, t in state.items()}, "epoch": 3},
            "old": {name: t for name, t in state.items() if "num_batches" not in name},
            "averaged": {"n_averaged": torch.tensor(3), **prefixed},
            "ema": {"state_dict_ema": state, "args": [1]},
            "beside": {**state, "version": 2},
        }
        torch.save(wrapped[layout], path)
    options = ("--data", "data.npz", "-T", 1, "--recipe", "max_activation", "-o", "weighted.spk")
    result = run("convert", "cli_models:Small", "--weights", path.name, *options)
    assert result.code == 0, result.err
    source = spikecal.load(folder / "weighted.spk").source
    assert any(torch.equal(t, state["head.bias"]) for t in source.tensors.values())


def test_a_prefix_that_is_the_models_own_stays(folder: Path) -> None:
    from cli_models import Wrapped

    torch.save(Wrapped().state_dict(), folder / "wrapped.pth")
    assert run("inspect", "cli_models:Wrapped", "--input", "5", "--weights", "wrapped.pth").code == 0


def test_weights_that_do_not_fit_are_listed_all_at_once(folder: Path) -> None:
    state = small_state()
    del state["conv.weight"]
    state["extra.weight"] = torch.zeros(1)
    state["head.bias"] = torch.zeros(5)
    torch.save(state, folder / "other.pth")
    result = run("inspect", "cli_models:Small", "--input", "1,8,8", "--weights", "other.pth")
    assert result.code == 5
    assert "missing (1): conv.weight" in result.err
    assert "unexpected (1): extra.weight" in result.err
    assert "of another shape (1): head.bias (5,), not (3,)" in result.err


def test_lists_of_weights_are_complete(folder: Path) -> None:
    save_file({f"layer{i}": torch.zeros(1) for i in range(30)}, folder / "many.safetensors")
    result = run("inspect", "cli_models:Small", "--input", "1,8,8", "--weights", "many.safetensors")
    assert "unexpected (30): layer0, " in result.err
    assert "layer29" in result.err


def test_weights_never_run_code(folder: Path) -> None:
    torch.save(nn.Linear(2, 2), folder / "whole.pth")
    result = run("inspect", "cli_models:Small", "--input", "1,8,8", "--weights", "whole.pth")
    assert result.code == 5
    assert "would run code of 'torch.nn.modules.linear.Linear'" in result.err
    assert "torch.save(model.state_dict(), ...)" in result.err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.pth", None, "there is no file absent.pth"),
        ("text.pth", b"no weights", "text.pth is damaged, or not"),
        ("cut.safetensors", b"\x10\0\0\0", "cut.safetensors is damaged, or not"),
    ],
)
def test_unreadable_weights(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    result = run("inspect", "cli_models:Small", "--input", "1,8,8", "--weights", name)
    assert result.code == 5
    assert message in result.err
    assert "weights_only" not in result.err  # torch's advice to load it unsafely


def test_a_file_with_its_own_weights_takes_no_others(converted: Path) -> None:
    result = run("inspect", converted.name, "--weights", "w.pth")
    assert result.code == 2
    assert "small.spk holds its own weights" in flat(result.err)


# --- convert -------------------------------------------------------------------------------------------------


def test_convert_does_what_the_library_does(folder: Path) -> None:
    options = ("--data", "data.npz", "-T", 6, "--seed", 3, "--json")
    result = run("convert", "cli_models:Small", *options, "-o", "json.spk")
    assert result.code == 0
    data = load_data(folder / "data.npz", limit=1024, seed=3)
    from cli_models import Small

    expected = spikecal.convert(Small(), data.batches(), 6, seed=3)
    snn = spikecal.load(folder / "json.spk")
    assert torch.equal(snn(data.x), expected(data.x))
    assert result.json["file"] == "json.spk"
    assert result.json["images"] == 40
    assert [site["name"] for site in result.json["sites"]] == list(snn.statistics)
    assert [site["error"] for site in result.json["sites"]] == [s.error for s in snn.statistics.values()]


def test_convert_shows_sites_on_stdout_and_messages_on_stderr(folder: Path) -> None:
    result = run("convert", "cli_models:Small", "--data", "data.npz", "-T", 2, "-o", "shown.spk", "--images", 99)
    assert "firing rate" in result.out
    assert result.out.splitlines()[0].strip() == "T = 2, recipe best, 40 images"
    assert "Wrote shown.spk in " in result.out
    assert "there are only 40 images" in result.err
    assert "are few" not in result.err
    assert "no --weights given: cli_models:Small keeps those it is built with, perhaps random ones" in result.err
    assert "converting cli_models:Small for T = 2 with recipe best and 40 images" in result.err


def test_convert_takes_a_recipe_file_and_changes_to_it(folder: Path) -> None:
    (folder / "mine.json").write_text(spikecal.plain().to_json())
    options = ("--data", "data.npz", "-T", 2, "--recipe", "mine.json", "--pool-to-conv", "--images", 16)
    assert run("convert", "cli_models:Small", *options, "-o", "recipe.spk").code == 0
    recipe = spikecal.load(folder / "recipe.spk").recipe
    assert recipe == spikecal.plain(pool_to_conv=True, threshold_images=16, calibration_images=16)


def test_images_of_the_steps_are_told_apart_where_they_are_fewer(folder: Path) -> None:
    (folder / "few.json").write_text(spikecal.light(calibration_images=9).to_json())
    options = ("--data", "data.npz", "-T", 2, "--recipe", "few.json", "-o", "few.spk")
    result = run("convert", "cli_models:Small", *options)
    assert result.out.splitlines()[0].strip() == "T = 2, recipe light, 40 images, 9 of them for the steps"


def test_few_images_are_told(folder: Path) -> None:
    result = run("convert", "cli_models:Small", "--data", "data.npz", "-T", 2, "-o", "few.spk", "--images", 31)
    assert "31 images are few: thresholds and corrections are better with a hundred or more" in result.err


def test_preprocessing_travels_with_the_network(folder: Path) -> None:
    """To evaluation, and to another conversion; any option of it on the command line replaces all of it."""
    options = ("--data", "data.npz", "-T", 2)
    convert = ("convert", "cli_models:Small", *options, "-o", "normal.spk", "--mean", "0.5", "--std", "0.25")
    assert run(*convert).code == 0
    snn = spikecal.load(folder / "normal.spk")
    assert snn.preprocessing == snn.binary().preprocessing == {"mean": [0.5], "std": [0.25]}
    data = load_data(folder / "data.npz", **snn.preprocessing)
    result = run("evaluate", "normal.spk", "--data", "data.npz", "--json")
    assert "preprocessing as in its conversion: mean [0.5], std [0.25]" in result.err
    assert result.json["accuracy"] == spikecal.evaluate(snn, data.batches()).accuracy
    assert result.json["layers"] == spikecal.evaluate(snn, data.batches()).to_dict()["layers"]
    raw = run("evaluate", "normal.spk", "--data", "data.npz", "--json", "--mean", "0")
    plain = spikecal.evaluate(snn, load_data(folder / "data.npz").batches()).to_dict()
    assert raw.json["layers"] == plain["layers"] != result.json["layers"]
    again = run("convert", "normal.spk", *options, "-o", "again.spk")
    assert "preprocessing as in its conversion" in again.err
    assert "no --weights" not in again.err
    assert spikecal.load(folder / "again.spk").preprocessing == snn.preprocessing


def test_convert_calibrates_a_spk_anew_and_overwrites_it(folder: Path, converted: Path) -> None:
    again = folder / "again.spk"
    again.write_bytes(converted.read_bytes())
    assert run("convert", "again.spk", "--data", "data.npz", "-T", 3, "-o", "again.spk").code == 0
    assert spikecal.load(again).T == 3


def test_convert_reads_mean_and_std(folder: Path) -> None:
    options = ("--data", "data.npz", "-T", 1, "--recipe", "max_activation", "-o", "normal.spk")
    assert run("convert", "cli_models:Small", *options, "--mean", "0.5", "--std", "0.25").code == 0
    result = run("convert", "cli_models:Small", *options, "--mean", "0.5,0.5")
    assert result.code == 4
    assert "give one number, or one per channel" in result.err


WRONG_CONVERSIONS = [
    ({"-o": "nowhere/net.spk"}, 2, "there is no folder nowhere to write net.spk into"),
    ({"-o": "empty"}, 2, "'empty' must end in .spk"),
    ({"-o": "net.pth"}, 2, "'net.pth' must end in .spk"),
    ({"-T": "0"}, 2, "Invalid value for '-T'"),
    ({"--auto-T": "101"}, 2, "Invalid value for '--auto-T'"),
    ({"--mean": "a,b"}, 2, "'a,b' is not a list of numbers such as"),
    ({"--recipe": "heavy"}, 2, "there is no recipe 'heavy'; choose one of"),
    ({"--recipe": "nowhere.json"}, 2, "cannot read the recipe nowhere.json"),
    ({"--recipe": "bad.json"}, 2, "bad.json: a threshold rule must be an object"),
    ({"--memory": "much"}, 2, "cannot read the memory budget 'much'"),
    ({"--data": "nowhere"}, 4, "there is no file or folder 'nowhere'"),
    ({"--data": "empty"}, 4, "there are no images in 'empty'"),
    ({"--split": "valid"}, 4, "has no array 'x_valid'"),
    ({"MODEL": "cut.spk"}, 5, "cut.spk is truncated, or not a spikecal file"),
    ({"MODEL": "cli_models:Gated"}, 3, "2 places"),
    ({"MODEL": "cli_models:with_nan"}, 3, "NaN or infinite values"),
    ({"MODEL": "small.spk", "--data": "large.npz"}, 4, "must have shape (batch, 1, 8, 8)"),
]


@pytest.mark.parametrize(
    ("changes", "code", "message"), WRONG_CONVERSIONS, ids=[" ".join(case[0].values()) for case in WRONG_CONVERSIONS]
)
def test_a_wrong_conversion_is_explained_and_leaves_nothing(
    folder: Path, converted: Path, changes: dict[str, str], code: int, message: str
) -> None:
    (folder / "bad.json").write_text('{"version": 1, "threshold": 3}')
    (folder / "cut.spk").write_bytes(converted.read_bytes()[:-10])
    options = {"--data": "data.npz", "-o": "failed.spk", "-T": "2", **changes}
    model = options.pop("MODEL", "cli_models:Small")
    before = sorted(folder.rglob("*.spk*"))
    result = run("convert", model, *(part for pair in options.items() for part in pair))
    assert (result.code, result.out) == (code, "")
    assert message in flat(result.err)
    assert "Traceback" not in result.err
    assert sorted(folder.rglob("*.spk*")) == before


# --- evaluate ------------------------------------------------------------------------------------------------


def test_evaluate_shows_accuracies_and_layers(converted: Path) -> None:
    result = run("evaluate", converted.name, "--data", "data.npz")
    assert result.code == 0
    text = flat(result.out)
    assert "(T = 6, recipe best), ANN" in text
    assert "40 images (± standard error)" in text
    assert "after step 1 2 4 6" in text
    assert "layer neurons threshold firing rate error mostly silent" in text
    assert "energy of one image, estimated" in text
    assert "% of the ANN's accuracy at T=6." in text


def test_evaluate_json_is_what_the_library_says(folder: Path, converted: Path) -> None:
    result = run("evaluate", converted.name, "--data", "data.npz", "--json", "-o", "results.json")
    expected = spikecal.evaluate(spikecal.load(converted), load_data(folder / "data.npz").batches()).to_dict()
    assert {key: result.json[key] for key in expected} == expected
    assert json.loads((folder / "results.json").read_text()) == result.json
    assert not list(folder.glob(".results*"))


def test_bench_times_every_engine(converted: Path) -> None:
    options = ("bench", converted, "--data", "digits", "--batch", 2, "--batch", 1, "--rounds", 1)
    shown = run(*options)
    assert shown.code == 0, shown.err
    assert "ratio to T passes" in flat(shown.out)
    found = json.loads(run(*options, "--json").out)
    assert {t["batch"] for t in found["timings"]} == {1, 2}
    assert all(t["ratio"] > 0 and t["difference"] < 1e-4 for t in found["timings"])


def test_evaluate_limits_the_images(converted: Path) -> None:
    assert run("evaluate", converted.name, "--data", "data.npz", "--limit", 7, "--json").json["images"] == 7


def test_evaluate_without_labels_tells_agreement(converted: Path) -> None:
    result = run("evaluate", converted.name, "--data", "unlabelled.npz")
    assert result.code == 0
    assert "No labels, so no accuracy. SNN (T = 6, recipe best) and ANN agree on" in flat(result.out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere.spk", "--data", "data.npz"), 5, "there is no file nowhere.spk"),
        (("small.spk",), 2, "Missing option '--data'"),
        (("small.spk", "--data", "large.npz"), 4, "must have shape (batch, 1, 8, 8)"),
        (("small.spk", "--data", "data.npz", "-o", "nowhere/r.json"), 2, "there is no folder nowhere"),
        (("data.npz", "--data", "data.npz"), 5, "data.npz is not a spiking network"),
    ],
)
def test_a_wrong_evaluation_is_explained(converted: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run("evaluate", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in flat(result.err)


def test_powers_of_two_end_with_the_last_step() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(12) == [1, 2, 4, 8, 12]


# --- failures ------------------------------------------------------------------------------------------------


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def load(path: Path) -> None:
        raise error

    monkeypatch.setattr("spikecal.checkpoint.load", load)


def test_an_unexpected_failure_points_to_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("by [zero]"))
    result = run("evaluate", "a.spk", "--data", "d")
    assert result.code == 1
    assert result.err.splitlines() == [
        "unexpected failure: ZeroDivisionError: by [zero]",
        "`spikecal --debug ...` shows the traceback",
    ]


def test_debug_shows_the_traceback_and_keeps_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, spikecal.CheckpointError("bad file"))
    result = run("--debug", "evaluate", "a.spk", "--data", "d")
    assert result.code == 5
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1] == "error: bad file"


def test_a_note_says_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    error = spikecal.CalibrationError("no memory")
    error.add_note("while calibrating 'relu', site 1 of 2")
    fail_with(monkeypatch, error)
    result = run("evaluate", "a.spk", "--data", "d")
    assert result.code == 4
    assert result.err.splitlines() == ["error: no memory", "(while calibrating 'relu', site 1 of 2)"]


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    result = run("evaluate", "a.spk", "--data", "d")
    assert (result.code, result.err) == (130, "interrupted\n")


def test_every_error_of_the_library_has_an_exit_code() -> None:
    from spikecal.cli.failures import CODES

    assert set(CODES) == set(spikecal.SpikecalError.__subclasses__())


def test_warnings_are_messages(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    import warnings

    warnings.simplefilter("default")
    recipe = spikecal.advanced(iterations=5, lr=1e6)
    (folder / "wild.json").write_text(recipe.to_json())
    options = ("--data", "data.npz", "-T", 2, "--recipe", "wild.json", "-o", "wild.spk", "--json")
    result = run("convert", "cli_models:Small", *options)
    assert result.code == 0
    assert result.json["T"] == 2
    assert "warning: weights calibration at" in result.err
    assert "UserWarning" not in result.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_failure(options: list[str]) -> None:
    """As in `spikecal inspect ... | head`, with nothing left to read what is printed."""
    command = [sys.executable, "-m", "spikecal", "inspect", "spikecal.models:digits_net", "--input", "1,8,8", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
