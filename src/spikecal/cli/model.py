"""The model that the command line names, with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from torch import nn
from torch.export import ExportedProgram

from ..capture import survey
from ..checkpoint import load
from ..conversion import MODEL_FILES, open_model, result_of
from ..errors import Refusal
from ..graph import Graph
from ..network import SpikingNetwork
from ..onnx import OnnxNetwork
from .factories import build_model
from .weights import put_weights, read_weights

Found = nn.Module | ExportedProgram | SpikingNetwork


def find_model(spec: str, weights: Path | None) -> Found:
    """The model in a file, or that a package builds; with the weights, if a file of them is given."""
    path = Path(spec)
    if path.suffix in MODEL_FILES:
        if weights is not None:
            raise typer.BadParameter(f"{path.name} holds its own weights", param_hint="'--weights'")
        return load(path) if path.suffix == ".spk" else open_model(path)
    model = build_model(spec)
    if weights is not None:
        if not isinstance(model, nn.Module):
            raise typer.BadParameter(f"{spec} gives a program with its own weights", param_hint="'--weights'")
        put_weights(model, read_weights(weights), weights.name)
    return model


def surveyed(model: Found, shapes: Sequence[tuple[int, ...]]) -> tuple[Graph, tuple[Refusal, ...]]:
    """The graph of a model, and what in it is refused; a module of torch does not know the shapes of its inputs."""
    if isinstance(model, SpikingNetwork):
        return model.graph, ()
    if isinstance(model, ExportedProgram):
        return survey(model)
    if not shapes and isinstance(model, OnnxNetwork) and None not in model.input_shapes.values():
        shapes = [shape for shape in model.input_shapes.values() if shape is not None]
    if not shapes:
        raise typer.BadParameter(
            "the shape of an image is needed to capture this model; for colour images of 32×32 pixels "
            "give --input 3,32,32",
            param_hint="'--input'",
        )
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    example = [torch.rand(2, *s, dtype=like.dtype, device=like.device) for s in shapes]
    if not isinstance(model, OnnxNetwork):  # which has operators, perhaps, that do not run
        result_of(model, example)
    return survey(model, example)
