"""One file for a spiking network: safetensors with a JSON header. Nothing in it is ever executed or unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError, SpikecalError
from .files import replacing
from .graph import Graph, Node
from .network import SpikingNetwork
from .recipes import Recipe
from .replay import LayerStatistics
from .simulation import Neurons, Readout, Site

FORMAT, VERSION = "spikecal", 1


def save(snn: SpikingNetwork, path: str | os.PathLike[str]) -> None:
    """Write the network atomically: the file is there whole, or not at all."""
    names, tensors = _store(
        {
            "graph": snn.graph.tensors,
            "source": snn.source.tensors,
            **{f"site {name}": site.tensors() for name, site in snn.sites.items()},
        }
    )
    header = {
        "version": VERSION,
        "T": snn.T,
        "recipe": snn.recipe.to_dict(),
        "graph": snn.graph.to_dict(),
        "statistics": {name: asdict(s) for name, s in snn.statistics.items()},
        "preprocessing": snn.preprocessing,
        "delays": {name: site.delay for name, site in snn.sites.items() if isinstance(site, Neurons)},
        "starts": {name: site.start for name, site in snn.sites.items() if isinstance(site, Neurons) and site.start},
        "signed": [name for name, site in snn.sites.items() if isinstance(site, Neurons) and site.signed],
        "tensors": names,
    }
    text = json.dumps(header)
    metadata = {"format": FORMAT, "header": text, "sha256": _digest(text, tensors)}
    path = Path(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent} to write {path.name} into")
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot write {path}: {e}") from e


def load(path: str | os.PathLike[str]) -> SpikingNetwork:
    """Read a network that `SpikingNetwork.save` wrote."""
    path = Path(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (SafetensorError, OSError, ValueError) as e:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; name the .spk file in it") from e
        if path.suffix != ".spk":
            raise CheckpointError(
                f"{path.name} is not a spiking network, a .spk file: a model must be converted to one first"
            ) from e
        raise CheckpointError(
            f"{path.name} is truncated, or not a spikecal file; copy it again, or convert the model again ({e})"
        ) from e
    if metadata.get("format") != FORMAT or "header" not in metadata:
        raise CheckpointError(f"{path.name} is a safetensors file, but not a spiking network of spikecal")
    if metadata.get("sha256") != _digest(metadata["header"], tensors):
        raise CheckpointError(f"{path.name} was altered or damaged: its checksum does not match its contents")
    try:
        return _network(json.loads(metadata["header"]), tensors)
    except CheckpointError as e:
        raise CheckpointError(f"{path.name}: {e}") from e
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, SpikecalError) as e:
        raise CheckpointError(f"{path.name} does not describe a spiking network: {e}") from e


def _network(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SpikingNetwork:
    if header["version"] != VERSION:
        raise CheckpointError(f"it has format version {header['version']}; this spikecal reads version {VERSION}")
    parts = {part: {k: tensors[stored] for k, stored in names.items()} for part, names in header["tensors"].items()}
    graph = Graph.from_dict(header["graph"], parts["graph"])
    source = Graph.from_dict(header["graph"], parts["source"])
    if not isinstance(header["T"], int) or header["T"] < 1:
        raise ValueError(f"T is {header['T']!r}")
    if len(graph.precisions | source.precisions) > 1:
        raise ValueError("its tensors are of several precisions")
    signed, starts = set(header.get("signed", [])), header.get("starts", {})
    if unknown := starts.keys() - {node.name for node in graph.neurons}:
        raise ValueError(f"there are no neurons {', '.join(map(repr, sorted(unknown)))} to start late")
    sites = {
        n.name: _site(parts[f"site {n.name}"], header["delays"].get(n.name), n.name in signed, starts.get(n.name, 0))
        for n in graph.nodes
        if n.is_site
    }
    for node in (n for n in graph.nodes if n.is_site):
        if isinstance(sites[node.name], Readout) == (node in graph.neurons):
            raise ValueError(f"the parameters of {node.name!r} do not fit its kind")
        _check_site(sites[node.name], node, graph.dtype, header["T"])
    statistics = {name: LayerStatistics(**s) for name, s in header["statistics"].items()}
    recipe, preprocessing = Recipe.from_dict(header["recipe"]), header.get("preprocessing", {})
    _check_preprocessing(preprocessing)
    return SpikingNetwork(graph, source, sites, header["T"], recipe, statistics, preprocessing=preprocessing)


def _check_preprocessing(found: Any) -> None:
    """Numbers under the names that `load_data` knows."""
    known = isinstance(found, dict) and found.keys() <= {"size", "crop", "mean", "std"}
    values = [v for value in found.values() for v in (value if isinstance(value, list) else [value])] if known else []
    if not known or not all(isinstance(v, int | float) for v in values):
        raise ValueError(f"its preprocessing is {found!r}")


def _site(parts: dict[str, Tensor], delay: Any, signed: bool, start: Any) -> Site:
    if "threshold" not in parts:
        return Readout(**parts)
    if not isinstance(delay, int) or delay < 0:
        raise ValueError(f"a firing delay is {delay!r}")
    return replace(Neurons(**parts), delay=delay, signed=signed, start=start)  # type: ignore[arg-type]


def _check_site(site: Site, node: Node, dtype: torch.dtype, T: int) -> None:
    if isinstance(site, Neurons) and not (type(site.start) is int and 0 <= site.start < T):
        raise ValueError(f"{node.name!r} must begin to fire at one of {T} steps, not {site.start!r}")
    for name, t in site.tensors().items():
        over_time = name in ("temporal", "weights")
        torch.broadcast_to(t.to("meta"), (T, *node.shape) if over_time else node.shape)
        if over_time and len(t) != T:
            raise ValueError(f"the {name} of {node.name!r} must have a value for each of {T} steps, not {len(t)}")
        if t.dtype != dtype or not torch.isfinite(t).all() or (name == "threshold" and not (t > 0).all()):
            must = "positive and finite" if name == "threshold" else "finite"
            raise ValueError(f"the {name} of {node.name!r} must be {must}, in {dtype}")


def _store(parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, dict[str, str]], dict[str, Tensor]]:
    """Every tensor once, under a short name; and which part calls it what."""
    stored: dict[str, Tensor] = {}
    by_id: dict[int, str] = {}
    names: dict[str, dict[str, str]] = {}
    for part, tensors in parts.items():
        names[part] = {}
        for key, t in tensors.items():
            if id(t) not in by_id:
                by_id[id(t)] = str(len(stored))
                stored[by_id[id(t)]] = t.detach().cpu().contiguous().clone()
            names[part][key] = by_id[id(t)]
    return names, stored


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.contiguous().view(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return digest.hexdigest()
