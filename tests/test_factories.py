"""Models by the names that torchvision, timm and pytorchcv have for them; stand-ins take the place of the packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import spikecal
from spikecal.cli import app
from spikecal.cli.factories import build_model, usual_shape


def net(**options: Any) -> nn.Module:
    """A model that remembers how it was asked for."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model.options = options  # type: ignore[assignment]
    return model


def resnet34(*, weights: Any = "ask", progress: bool = True, **kwargs: Any) -> nn.Module:
    return net(weights=weights, **kwargs)


def fcn_resnet50(*, weights: Any = "ask", weights_backbone: Any = "downloaded") -> nn.Module:
    return net(weights=weights, weights_backbone=weights_backbone)


def failing(**options: Any) -> nn.Module:
    raise ValueError("needs an image size")


MODELS = {"resnet34": resnet34, "fcn_resnet50": fcn_resnet50, "failing": failing}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = {
        "torchvision": {},
        "torchvision.models": {"list_models": lambda: list(MODELS), "get_model_builder": MODELS.__getitem__},
        "timm": {
            "list_models": lambda: ["resnet18"],
            "create_model": lambda name, **options: net(name=name, **options),
        },
        "pytorchcv": {},
        "pytorchcv.model_provider": {
            "_models": {"resnet20_cifar10": None},
            "get_model": lambda name, **options: net(name=name, **options),
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("torchvision:resnet34", {"weights": None}),
        ("torchvision:fcn_resnet50", {"weights": None, "weights_backbone": None}),
        ("timm:resnet18", {"name": "resnet18", "pretrained": False, "exportable": True}),
        ("timm:resnet18.a1_in1k", {"name": "resnet18.a1_in1k", "pretrained": False, "exportable": True}),
        ("pytorchcv:resnet20_cifar10", {"name": "resnet20_cifar10", "pretrained": False}),
    ],
)
def test_models_are_built_without_downloads(packages: None, spec: str, options: dict[str, Any]) -> None:
    assert build_model(spec).options == options  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torchvision:resnet35", "torchvision has no model 'resnet35'; did you mean resnet34"),
        ("torchvision:zzz", "torchvision has no model 'zzz'$"),
        ("timm:resnet81", "timm has no model 'resnet81'; did you mean resnet18"),
        ("timm:hf-hub:someone/model", "timm has no model 'hf-hub:someone/model'"),
        ("pytorchcv:resnet20_cifar100", "did you mean resnet20_cifar10"),
        ("torchvision:failing", r"torchvision:failing\(\) failed with ValueError: needs an image size"),
    ],
)
def test_wrong_names_are_explained(packages: None, spec: str, message: str) -> None:
    with pytest.raises(spikecal.UnsupportedModelError, match=message):
        build_model(spec)


@pytest.mark.parametrize("package", ["torchvision", "timm", "pytorchcv"])
def test_an_absent_package_is_explained(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotThere:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [NotThere(), *sys.meta_path])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(spikecal.UnsupportedModelError, match=rf"no module '{package}'.*; install {package}, and what"):
        build_model(f"{package}:resnet18")


def test_a_package_that_does_not_load_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        spikecal.UnsupportedModelError, match="RuntimeError: operator torchvision::nms does not exist; "
    ) as e:
        build_model("torchvision:resnet18")
    assert f"to fit torch {torch.__version__}" in str(e.value)


def test_weights_go_into_a_model_by_name(packages: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {f"module.{name}": t for name, t in net().state_dict().items()}}, "w.pth")
    arguments = ["inspect", "torchvision:resnet34", "--weights", "w.pth", "--input", "4"]
    result: Any = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "linear 4→3" in result.stdout
    torch.save({"0.weight": torch.zeros(3, 4), "head": torch.zeros(1)}, "other.pth")
    result = CliRunner().invoke(app, [*arguments[:3], "other.pth", "--input", "4"])
    assert result.exit_code == 5
    assert "missing (1): 0.bias" in result.stderr
    assert "unexpected (1): head" in result.stderr


def test_a_model_by_name_tells_the_shape_of_its_images(packages: None) -> None:
    model = nn.Sequential()
    assert usual_shape("torchvision:resnet34", model) == (3, 224, 224)
    assert usual_shape("timm:resnet18", model) is None
    model.pretrained_cfg = {"input_size": (3, 160, 160)}  # type: ignore[assignment]
    assert usual_shape("timm:resnet18", model) == (3, 160, 160)
    model.in_size = (32, 32)  # type: ignore[assignment]
    assert usual_shape("pytorchcv:resnet20_cifar10", model) == (3, 32, 32)
    assert usual_shape("package.module:factory", model) is None
