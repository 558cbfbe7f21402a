"""Models by name: `package.module:factory`, or a model of a package that knows its models by name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer
from torch import nn
from torch.export import ExportedProgram

from ..conversion import WEIGHT_FILES
from ..errors import UnsupportedModelError, did_you_mean


@dataclass(frozen=True)
class Zoo:
    """A package that builds its models by name; always without trained weights, so that nothing is downloaded."""

    module: str
    names: Callable[[Any], Iterable[str]]
    build: Callable[[Any, str], Any]
    shape: Callable[[Any], Sequence[int]]  # of the images that a model of it is made for


def _torchvision(models: Any, name: str) -> Any:
    """Segmentation and detection models would fetch a trained backbone unless told otherwise."""
    builder = models.get_model_builder(name)
    options = {"weights", "weights_backbone"} & inspect.signature(builder).parameters.keys()
    return builder(**dict.fromkeys(options))


ZOOS = {
    "torchvision": Zoo(
        "torchvision.models", lambda models: models.list_models(), _torchvision, lambda _: (3, 224, 224)
    ),
    "timm": Zoo(
        "timm",
        lambda timm: timm.list_models(),
        lambda timm, name: timm.create_model(name, pretrained=False, exportable=True),
        lambda model: model.pretrained_cfg["input_size"],
    ),
    "pytorchcv": Zoo(
        "pytorchcv.model_provider",
        lambda provider: provider._models,
        lambda provider, name: provider.get_model(name, pretrained=False),
        lambda model: (model.in_channels if hasattr(model, "in_channels") else 3, *model.in_size),
    ),
}


def build_model(spec: str) -> nn.Module | ExportedProgram:
    """The model that `package.module:factory` gives, or that a package knows by name: `torchvision:resnet34`."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        weights = spec.endswith(WEIGHT_FILES)
        hint = f"; it seems to hold weights: name the factory, and give it as --weights {spec}" if weights else ""
        raise typer.BadParameter(
            f"{spec!r} is neither package.module:factory nor a .pt2, .onnx or .spk file{hint}", param_hint="'MODEL'"
        )
    if module_name.endswith(".py") or os.sep in module_name:
        raise typer.BadParameter(
            f"name a module, not a file: from its folder, {Path(module_name).stem}:{name}", param_hint="'MODEL'"
        )
    factory = _zoo_factory(module_name, name) if module_name in ZOOS else _member(_module(module_name), name)
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise UnsupportedModelError(
            f"{spec} is of type {type(factory).__name__}, not a function or class that gives a model"
        )
    try:
        model = factory()
    except (Exception, SystemExit) as e:
        raise UnsupportedModelError(f"{spec}() failed with {type(e).__name__}: {e}") from e
    if not isinstance(model, nn.Module | ExportedProgram):
        raise UnsupportedModelError(f"{spec}() gives an object of type {type(model).__name__}, not an nn.Module")
    return model


def usual_shape(spec: str, model: object) -> tuple[int, ...] | None:
    """The shape of one image for a model that a package knows by name, if it tells."""
    zoo = ZOOS.get(spec.partition(":")[0])
    try:
        return None if zoo is None else tuple(zoo.shape(model))
    except (AttributeError, KeyError, TypeError):
        return None


def _zoo_factory(package: str, name: str) -> Callable[[], Any]:
    zoo = ZOOS[package]
    try:
        module = _module(zoo.module)
    except UnsupportedModelError as e:
        hint = f"install {package}, and what it needs, to fit torch {torch.__version__}"
        raise UnsupportedModelError(f"{e}; {hint}") from e
    names = list(zoo.names(module))
    if name.partition(".")[0] not in names:  # timm puts the name of a training run behind a dot
        raise UnsupportedModelError(f"{package} has no model {name!r}{did_you_mean(name, names)}")
    return lambda: zoo.build(module, name)


def _module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and f"{name}.".startswith(f"{e.name}."):
            raise UnsupportedModelError(
                f"there is no module {e.name!r}, neither in the current folder nor among the installed packages"
            ) from None
        raise UnsupportedModelError(f"module {name!r} cannot be imported: {e}") from e
    except (Exception, SystemExit) as e:
        raise UnsupportedModelError(f"module {name!r} cannot be imported: {type(e).__name__}: {e}") from e


def _member(module: ModuleType, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    hint = did_you_mean(name, [n for n in dir(module) if not n.startswith("_")])
    raise UnsupportedModelError(f"module {module.__name__!r} has no {name!r}{hint}")
