"""What several test files share: captured and converted nets, made once a session; nobody may change them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spikecal as sc
from spikecal.capture import capture
from spikecal.graph import Graph, Node
from spikecal.ops import Activation
from spikecal.preparation import prepare
from spikecal.simulation import Neurons
from spikecal.values import Value
from zoo import example, make

State = dict[str, Any]


@cache
def captured(name: str) -> Graph:
    """The graph of a net of the zoo in float64, before any pass."""
    return capture_watched(name)[0]


@cache
def capture_watched(name: str) -> tuple[Graph, State, State]:
    """The graph, and the state of the model before and after it was captured: a model in use, in training mode."""
    model = in_use(make(name).double())
    before = state_of(model)
    graph = capture(model, example(name, dtype=torch.float64))
    return graph, before, state_of(model)


def in_use(model: nn.Module) -> nn.Module:
    """The model as it may be in the midst of a user's work: trained in part, with gradients and a hook."""
    model.train()
    first, *_ = model.children()
    first.eval()
    first.register_forward_hook(lambda *_: None)
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    parameters[-1].grad = torch.full_like(parameters[-1], 0.25)
    return model


def state_of(model: nn.Module) -> State:
    """Everything about a model that must not change, and the random numbers to come."""
    state: State = {k: t.numpy().tobytes() for k, t in model.state_dict().items()}
    for path, p in model.named_parameters():
        grad = None if p.grad is None else p.grad.numpy().tobytes()
        state[f"parameter {path}"] = (id(p), p.requires_grad, grad)
    for path, module in model.named_modules():
        hooks = {k: dict(v) for k, v in vars(module).items() if "hooks" in k and isinstance(v, dict)}
        state[f"module {path}"] = (module.training, sorted(vars(module)), hooks)
    legacy = np.random.get_state()[1]  # noqa: NPY002, the one that somebody could disturb
    state["random"] = (torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy.tobytes())
    state["modes"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    return state


@cache
def prepared(name: str, pool_to_conv: bool = False) -> Graph:
    return prepare(captured(name), pool_to_conv=pool_to_conv)


def shell(graph: Graph) -> sc.SpikingNetwork:
    """A graph in a form that `convert` takes: the whole pipeline without torch.export, which is slow."""
    return sc.SpikingNetwork(graph, graph, {}, 1, sc.plain(), {})


@cache
def converted(name: str, recipe: sc.Recipe | str = "light", T: int = 8, images: int = 16) -> sc.SpikingNetwork:
    """A net of the zoo as a spiking network in float64."""
    return sc.convert(shell(captured(name)), [inputs(name, images)], T, recipe)


def least_memory(graph: Graph, x: tuple[Tensor, ...], T: int, recipe: sc.Recipe) -> int:
    """The smallest power of two, in bytes, that suffices for a conversion."""
    for exponent in range(12, 40):
        try:
            sc.convert(shell(graph), [x], T, recipe, memory=2**exponent)
        except sc.CalibrationError:
            continue
        assert exponent > 12, "this is no small budget"
        return 2**exponent
    raise AssertionError("nothing suffices")


def inputs(name: str, batch: int, seed: int = 1) -> tuple[Tensor, ...]:
    """Images for a net of the zoo in float64; another seed gives other images."""
    return example(name, batch, seed, torch.float64)


def twin_of(snn: sc.SpikingNetwork) -> sc.SpikingNetwork:
    """A network that may be moved or given another budget without touching the first."""
    return sc.SpikingNetwork(snn.graph, snn.source, snn.sites, snn.T, snn.recipe, snn.statistics, snn.memory)


def leaves(result: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(result))


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of each output; shapes must agree."""
    assert [y.shape for y in ours] == [z.shape for z in theirs]
    pairs = [(y.detach(), z.detach()) for y, z in zip(ours, theirs, strict=True)]
    return max(float((y - z).abs().max() / z.abs().max().clamp(min=1e-12)) for y, z in pairs)


def spike_trains(snn: sc.SpikingNetwork, *x: Tensor) -> dict[str, Tensor]:
    """What every neuron site fires, (T, B, ...), by name."""
    parts: dict[str, list[Tensor]] = {}

    def tap(node: Node, value: Value) -> None:
        if isinstance(node.op, Activation):
            parts.setdefault(node.name, []).append(value.data.clone())

    snn.currents(x, tap)
    return {name: torch.cat(blocks) for name, blocks in parts.items()}


def neuron_dict(site: Any) -> dict[str, Any]:
    """A site's parameters as the reference wants them: scalar, (C,) or (C, H, W)."""

    def trimmed(t: Tensor) -> Any:
        if t.numel() == 1:
            return t.item()
        return (t.flatten() if t.numel() == t.shape[0] else t).numpy()

    return {key: trimmed(t) for key, t in site.tensors().items()}


@dataclass
class Given:
    """A threshold rule for tests: these values, one entry a site; each a number or a list over the channels."""

    values: Sequence[Any]
    per_channel: bool = True
    given: int = 0

    def accumulator(self, T: int, depth: float = 1.0) -> Given._Fixed:
        self.given += 1
        return Given._Fixed(self.values[self.given - 1])

    @dataclass
    class _Fixed:
        value: Any
        rows: int = 0
        dtype: torch.dtype = torch.float64
        nbytes: int = 8

        def update(self, x: Tensor) -> None:
            self.rows, self.dtype = x.shape[1], x.dtype

        def end_pass(self) -> Tensor:
            return torch.as_tensor(self.value, dtype=self.dtype).expand(self.rows).clone()


def dense_net(sizes: Sequence[int], seed: int = 0) -> tuple[nn.Sequential, list[tuple[Any, Any]]]:
    """A float64 ReLU net, and its layers as (W, b) in numpy for the reference."""
    rng = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(i, o, dtype=torch.float64) for i, o in pairwise(sizes)]
    for layer in layers:
        layer.weight.data.normal_(0, (2 / layer.in_features) ** 0.5, generator=rng)
        layer.bias.data.normal_(0, 0.3, generator=rng)
    modules = [part for layer in layers for part in (layer, nn.ReLU())][:-1]
    return nn.Sequential(*modules), [(la.weight.detach().numpy(), la.bias.detach().numpy()) for la in layers]


@cache
def dense_graph(sizes: tuple[int, ...], seed: int = 0) -> Graph:
    return prepare(capture(dense_net(sizes, seed)[0], [torch.zeros(2, sizes[0], dtype=torch.float64)]))


def potentials_of(snn: sc.SpikingNetwork) -> list[Neurons]:
    """The neuron sites in order."""
    return [site for site in snn.sites.values() if isinstance(site, Neurons)]
