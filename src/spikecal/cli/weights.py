"""Weights from a file, into the model they fit."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import CheckpointError

#: Under which names training scripts save the weights. Averaged ones are taken where there are no others.
WRAPPERS = (
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "params", "weights"),
    *("ema_state_dict", "state_dict_ema", "model_ema", "ema", "teacher", "student"),
)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name. Nothing in the file is executed."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else _load_pth(path)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{path.name} is damaged, or not a .safetensors or .pth file of weights") from e
    state = _unwrap(found)
    tensors = {k: t for k, t in state.items() if isinstance(t, Tensor)} if isinstance(state, Mapping) else {}
    if not tensors:
        has = f", only {', '.join(map(str, state))}" if isinstance(state, Mapping) and state else ""
        raise CheckpointError(f"{path.name} does not hold tensors by name{has}: save model.state_dict()")
    return tensors


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
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            return _unwrap(found[key])
    return found


def _without_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Without what DataParallel, torch.compile and Lightning put in front of every name, unless it is the model's."""
    for prefix in ("module.", "_orig_mod.", "model.", "net.", "backbone."):
        behind = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        if behind and own.keys().isdisjoint(state):  # what stands beside them is the wrapper's: a counter, a loss
            return _without_prefix(behind, own)
    return state


def put_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load the weights, or say everything that does not fit. The counters of batch norm may be missing."""
    own = model.state_dict()
    state = _without_prefix(state, own)
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
    return [f"  {what} ({len(names)}): {', '.join(names)}"] if names else []
