"""The model that the command line names, with its weights."""

from __future__ import annotations

import difflib
import importlib
import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..capture import capture
from ..checkpoint import load
from ..conversion import open_model
from ..errors import CheckpointError, UnsupportedModelError
from ..graph import Graph
from ..network import SpikingNetwork

Found = nn.Module | ExportedProgram | SpikingNetwork
SHOWN_KEYS = 8


def find_model(spec: str, weights: Path | None) -> Found:
    """The model behind `package.module:factory`, or in a .pt2 or .spk file."""
    path = Path(spec)
    if path.suffix in (".spk", ".pt2"):
        if weights is not None:
            raise typer.BadParameter(f"{path.name} holds its own weights", param_hint="'--weights'")
        return load(path) if path.suffix == ".spk" else open_model(path)
    model = _build(spec)
    if weights is not None:
        if not isinstance(model, nn.Module):
            raise typer.BadParameter(f"{spec} gives a program with its own weights", param_hint="'--weights'")
        put_weights(model, read_weights(weights), weights.name)
    return model


def captured(model: Found, shapes: Sequence[tuple[int, ...]]) -> Graph:
    """The graph of a model; only an nn.Module does not know the shapes of its inputs."""
    if isinstance(model, SpikingNetwork):
        return model.graph
    if isinstance(model, ExportedProgram):
        return capture(model)
    if not shapes:
        raise typer.BadParameter(
            "the shape of an image is needed to capture this model; for colour images of 32×32 pixels "
            "give --input 3,32,32",
            param_hint="'--input'",
        )
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return capture(model, [torch.zeros(2, *s, dtype=like.dtype, device=like.device) for s in shapes])


# --- package.module:factory ----------------------------------------------------------------------------------


def _build(spec: str) -> nn.Module | ExportedProgram:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise typer.BadParameter(
            f"{spec!r} is neither package.module:factory nor a .pt2 or .spk file", param_hint="'MODEL'"
        )
    if module_name.endswith(".py") or os.sep in module_name:
        raise typer.BadParameter(
            f"name a module, not a file: from its folder, {Path(module_name).stem}:{name}", param_hint="'MODEL'"
        )
    factory = _member(_module(module_name), name)
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
    close = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("_")])
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UnsupportedModelError(f"module {module.__name__!r} has no {name!r}{hint}")


# --- weights -------------------------------------------------------------------------------------------------


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name. Nothing in the file is executed."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else _load_pth(path)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{path.name} is damaged, or not a .safetensors or .pth file of weights") from e
    state = _unwrap(found)
    if not isinstance(state, Mapping) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{path.name} does not hold tensors by name: save model.state_dict()")
    return _without_prefix(state)


def _load_pth(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on files that are not opened anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        code = re.search(r"GLOBAL ([\w.]+)", str(e))
        if code is None:
            raise
        raise CheckpointError(
            f"{path.name} is a pickle that would run code of {code[1]!r}, so it is not opened: where you trust it, "
            "load it and save only the tensors with torch.save(model.state_dict(), ...)"
        ) from e


def _unwrap(found: Any) -> Any:
    """Training scripts save the weights beside the optimizer; take the weights."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            return _unwrap(found[key])
    return found


def _without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what DataParallel and torch.compile put in front of every name."""
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in state):
            return _without_prefix({name.removeprefix(prefix): t for name, t in state.items()})
    return dict(state)


def put_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load the weights, or say everything that does not fit. The counters of batch norm may be missing."""
    own = model.state_dict()
    odd = [name for name in state if name in own and own[name].shape != state[name].shape]
    result = model.load_state_dict({k: t for k, t in state.items() if k not in odd}, strict=False)
    missing = [k for k in result.missing_keys if k not in odd and not k.endswith("num_batches_tracked")]
    shapes = [f"{k} {tuple(state[k].shape)}, not {tuple(own[k].shape)}" for k in odd]
    problems = [
        *_listed("missing", missing),
        *_listed("unexpected", result.unexpected_keys),
        *_listed("of another shape", shapes),
    ]
    if problems:
        raise CheckpointError(f"the weights in {source} do not fit the model\n" + "\n".join(problems))


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    more = f", and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return [f"  {what} ({len(names)}): {', '.join(names[:SHOWN_KEYS])}{more}"] if names else []
