"""The coverage benchmark: its check of non-linearities, its verdicts and its table, on small networks of our own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from nonlinearities import nonlinear_calls

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    """By its path, because a well-known package has its name."""
    spec = importlib.util.spec_from_file_location("coverage_of_models", BENCHMARKS / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def operations(name: str) -> set[str]:
    return {call.operation for call in nonlinear_calls(zoo.make(name), zoo.example(name, 1))[0]}


#: ReLUs in spellings that no library uses; the independent check does not know them.
SPELT_OUT = {"relu_as_a_choice", "bounds_by_other_means"}


@pytest.mark.parametrize("name", sorted({*zoo.ZOO} - SPELT_OUT))
def test_networks_that_must_convert_have_no_other_nonlinearity(name: str) -> None:
    assert operations(name) == set()


#: What the zoo refuses for another reason than a non-linearity.
AFFINE = {
    "no_activation",
    "no_activation_but_of_a_constant",
    "mean_over_batch",
    "mean_over_everything",
    "flipped_batch",
    "rolled_batch",
    "half_precision_inside",
    "relu_of_a_slice",
}


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_the_nonlinearities_of_other_networks_are_found(name: str) -> None:
    assert bool(operations(name)) == (name not in AFFINE)


@pytest.mark.parametrize("name", ["silu", "gelu", "leaky_relu", "elu", "layer_norm", "group_norm", "two_offenders"])
def test_nonlinearities_have_the_names_that_refusals_have(name: str) -> None:
    assert operations(name) == set(zoo.OFFENDS[name])


def test_nonlinearities_are_found_with_the_module_that_calls_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.SiLU(inplace=True)), nn.Sigmoid())
    calls, rectifiers = nonlinear_calls(model, [torch.randn(1, 3)])
    assert [(call.operation, call.module) for call in calls] == [("silu", "1.1"), ("sigmoid", "2")]
    assert rectifiers == 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.gate = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return (x * self.gate(x).sigmoid()).mean((2, 3))


class Plain(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.gate(F.relu(self.norm(self.conv(x))))).mean((2, 3))


class Choosing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x.mean((2, 3))


def row(coverage: ModuleType, model: nn.Module, **facts: Any) -> dict[str, str]:
    x = torch.randn(4, 3, 8, 8)
    coverage.randomise(model.eval(), x)
    found = {"library": "timm", "family": "tests", "network": type(model).__name__, **coverage.judge(model, x)}
    return {key: str({**found, **facts}.get(key, "")) for key in coverage.FIELDS}


def test_verdicts(coverage: ModuleType) -> None:
    plain, gated, choosing = (row(coverage, model()) for model in (Plain, Gated, Choosing))
    assert (plain["outcome"], plain["nonlinear"], plain["rectifiers"]) == ("converted", "", "2")
    assert float(plain["twin_error"]) < 1e-4
    assert (gated["outcome"], gated["nonlinear"], gated["refused"]) == (
        "refused",
        "sigmoid 1, mul 1",
        "sigmoid 1, mul 1",
    )
    assert (gated["places"], gated["unlisted"]) == ("2", "0")
    assert choosing["refused"] == "control flow 1"
    assert [coverage.is_right(r) for r in (plain, gated, choosing)] == [True, True, True]
    assert not coverage.is_right({**plain, "outcome": "refused"})
    assert not coverage.is_right({**gated, "outcome": "converted"})
    assert not coverage.is_right({**gated, "unlisted": "1"})


def test_padding_for_a_maximum_is_no_non_linearity(coverage: ModuleType) -> None:
    class Padded(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=float("-inf")), 3, 2))

    found = row(coverage, Padded())
    assert (found["outcome"], found["nonlinear"]) == ("converted", "")


def test_what_leaves_torch_is_noticed(coverage: ModuleType) -> None:
    class Leaving(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.numpy().max())

    found = row(coverage, Leaving())
    assert (found["outcome"], found["nonlinear"], found["unlisted"]) == ("refused", "numpy 1", "0")


def test_a_module_of_two_names_is_listed_under_either(coverage: ModuleType) -> None:
    class Shared(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.GELU()
            self.b = nn.ModuleList([self.a])

        def forward(self, x: Tensor) -> Tensor:
            return self.b[0](self.conv(x)).mean((2, 3))

    found = row(coverage, Shared())
    assert (found["refused"], found["unlisted"]) == ("gelu 1", "0")


def test_a_crash_is_told_apart_from_a_refusal(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise KeyError("nodes")

    monkeypatch.setattr(coverage.sc, "convert", crash)
    found = row(coverage, Plain())
    assert found["outcome"] == "failed"
    assert found["note"].startswith("KeyError: 'nodes' at test_coverage_benchmark.py:")
    assert not coverage.is_right(found)


def test_batch_norm_is_made_random_without_upsetting_the_activations(coverage: ModuleType) -> None:
    model, x = Plain().eval(), torch.randn(4, 3, 8, 8)
    coverage.randomise(model, x)
    assert not model.norm.training
    assert model.norm.weight.std() > 0.05
    values = model.norm(model.conv(x))
    assert not torch.allclose(values.mean((0, 2, 3)), model.norm.bias, atol=1e-2)
    assert 0.2 < values.std() < 5


def test_tables(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(coverage, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(coverage, "DOCS", tmp_path / "coverage.md")
    (tmp_path / "coverage.md").write_text("# Head\n\n" + "\nold\n".join(coverage.MARKS) + "\n\nTail\n")
    empty = dict.fromkeys(coverage.FIELDS, "")
    known = {"library": "timm", "family": "resnet"}
    coverage.append({**empty, **known, "network": "b", "outcome": "failed", "note": "old"})
    coverage.append({**empty, **known, "network": "b", "outcome": "converted", "twin_error": "2.0e-06"})
    gates = {"nonlinear": "sigmoid 2, mul 2", "refused": "sigmoid 2, mul 2", "unlisted": "0"}
    coverage.append({**empty, **known, "network": "a", "outcome": "refused", **gates})
    coverage.append({**empty, **known, "library": "pytorchcv", "network": "c", "outcome": "does not run"})
    coverage.append({**empty, **known, "library": "pytorchcv", "network": "d", "outcome": "failed", "note": "Oops"})
    coverage.write_tables()
    text = (tmp_path / "coverage.md").read_text()
    assert "| timm | 2 | 1 | 1 | 1 | 1 | 2e-06 |" in text
    assert "| timm | resnet | 2 | 1 | 1 | mul, sigmoid |" in text
    assert "| pytorchcv | 1 | 1 | 0 | 0 | 0 |  |" in text
    assert "pytorchcv:d has only ReLU, clamps and maxima, but: failed Oops" in text
    assert text.startswith("# Head")
    assert text.endswith("Tail\n")
    assert "old" not in text
    lines = (tmp_path / "results" / "coverage.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["a", "b", "c", "d"]


def test_the_list_of_networks_names_each_once(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.list_models = lambda module: ["resnet18"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    found = list(coverage.networks())
    assert len(set(found)) == len(found) > 300
    assert {library for library, _ in found} == set(coverage.LIBRARIES)
