"""The same spiking network on other libraries: our weights and thresholds, their neurons, run as their documents do.

What is run is `SpikingNetwork.binary()`: spikes of height 1, every threshold 1, biases folded into the convolutions.
Between the neurons all of them use the same torch operations. Libraries that are not installed are left out:

    pip install -r benchmarks/peers.txt --no-deps      # so that none of them brings another torch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
from torch import Tensor

import spikecal as sc
from spikecal.graph import Graph, Node
from spikecal.ops import Activation, Add, Conv, Input, Linear, Pad, Scale, Slice
from spikecal.simulation import Neurons as OurNeurons

Run = Callable[[Tensor], Tensor]


class Neurons(Protocol):
    """A layer of another library; `reset` makes it forget the last batch."""

    def __call__(self, current: Tensor) -> Tensor: ...

    def reset(self) -> None: ...


def folded(snn: sc.SpikingNetwork) -> Graph:
    """The graph of a binary network: constant currents in the biases of convolutions, scales in their weights.

    Scales stay where there is no weight for them: on shortcuts.
    """
    binary = snn.binary()
    graph, tensors, gone = binary.graph, dict(binary.graph.tensors), set[str]()
    for node in graph.neurons:
        site = binary.sites[node.name]
        assert isinstance(site, OurNeurons)
        if site.v0.any() or not torch.allclose(site.threshold, torch.ones(())):
            raise ValueError("peers get a network without initial potentials, with thresholds of 1")
        current = graph.by_name[node.inputs[0]]
        if isinstance(current.op, Scale) and _can_scale(graph, current.inputs[0]):
            _scale(graph, tensors, current.inputs[0], tensors[current.op.scale])
            gone.add(current.name)
        elif isinstance(current.op, Scale):
            raise ValueError(f"the scale in front of {node.name!r} cannot be folded")
        name = next(_biases(graph, node.inputs[0]))
        tensors[name] = tensors[name] + site.bias.reshape(-1)
    for node in graph.outputs:
        name = next(_biases(graph, node.inputs[0]))
        tensors[name] = tensors[name] + binary.sites[node.name].bias
    nodes = [replace(node, op=Scale()) if node.name in gone else node for node in graph.nodes]
    return replace(graph, nodes=nodes, tensors=tensors)


def _can_scale(graph: Graph, name: str) -> bool:
    """Whether what is added up there takes a scale into a tensor of its own."""
    node = graph.by_name[name]
    if isinstance(node.op, Add):
        return all(_can_scale(graph, i) for i in node.inputs)
    if isinstance(node.op, Pad | Slice):
        return _can_scale(graph, node.inputs[0])
    return isinstance(node.op, Conv | Scale) and len(graph.readers[name]) == 1


def _scale(graph: Graph, tensors: dict[str, Tensor], name: str, scale: Tensor) -> None:
    op, inputs = graph.by_name[name].op, graph.by_name[name].inputs
    if isinstance(op, Add):
        for i in inputs:
            _scale(graph, tensors, i, scale)
    elif isinstance(op, Pad):  # of channels: the scale of what is not padding
        before, channels = op.widths[-2] if len(op.widths) > 4 else 0, graph.by_name[inputs[0]].shape[0]
        _scale(graph, tensors, inputs[0], scale[before : before + channels])
    elif isinstance(op, Slice):
        _scale(graph, tensors, inputs[0], scale)
    elif isinstance(op, Scale):
        tensors[op.scale] = tensors[op.scale] * scale
    elif isinstance(op, Conv):
        tensors[op.weight] = tensors[op.weight] * scale.reshape(-1, 1, 1, 1)
        if op.bias is not None:
            tensors[op.bias] = tensors[op.bias] * scale.reshape(-1)


def _biases(graph: Graph, name: str) -> Iterator[str]:
    """Of the convolutions that a sum is made of."""
    node = graph.by_name[name]
    if isinstance(node.op, Add | Scale):
        for i in node.inputs:
            yield from _biases(graph, i)
    elif isinstance(node.op, Conv | Linear) and node.op.bias is not None:
        yield node.op.bias


def one_step(graph: Graph, x: Tensor, fire: Callable[[Node, Tensor], Tensor]) -> Tensor:
    """The network on a batch, with something else in place of its activations. What nobody reads any more is freed."""
    values: dict[str, Tensor] = {}
    waiting = {node.name: len(graph.readers[node.name]) for node in graph.nodes}
    for node in graph.nodes:
        inputs = [values[name] for name in node.inputs]
        if isinstance(node.op, Input):
            values[node.name] = x
        elif isinstance(node.op, Activation):
            values[node.name] = fire(node, inputs[0])
        else:
            values[node.name] = node.op.run(graph.tensors, *inputs)
        for name in node.inputs:
            waiting[name] -= 1
            if not waiting[name]:
                del values[name]
        inputs.clear()
    return values[graph.outputs[0].name]


def step_by_step(graph: Graph, T: int, make: Callable[[], Neurons]) -> Run:
    """All layers at every step, one step after the other."""
    layers = {node.name: make() for node in graph.neurons}

    def run(x: Tensor) -> Tensor:
        for layer in layers.values():
            layer.reset()
        total = torch.zeros(())
        for _ in range(T):
            total = total + one_step(graph, x, lambda node, current: layers[node.name](current))
        return total / T

    return run


def all_steps_at_once(graph: Graph, T: int, make: Callable[[], Neurons], batch_first: bool = False) -> Run:
    """Every layer over all steps, which are part of the batch between the neurons: (T, B) or (B, T)."""
    layers = {node.name: make() for node in graph.neurons}

    def run(x: Tensor) -> Tensor:
        for layer in layers.values():
            layer.reset()
        shape = (len(x), T) if batch_first else (T, len(x))
        together = x.repeat_interleave(T, 0) if batch_first else x.repeat(T, *(1,) * (x.ndim - 1))

        def fire(node: Node, current: Tensor) -> Tensor:
            return layers[node.name](current.unflatten(0, shape)).flatten(0, 1)

        return one_step(graph, together, fire).unflatten(0, shape).mean(1 if batch_first else 0)

    return run


class Torch:
    """What everybody writes first."""

    def reset(self) -> None:
        self.v = torch.zeros(())

    def __call__(self, current: Tensor) -> Tensor:
        self.v = self.v + current
        spikes = (self.v >= 1).to(current.dtype)
        self.v = self.v - spikes
        return spikes


class SpikingJelly:
    def __init__(self, step_mode: str) -> None:
        neuron = import_module("spikingjelly.activation_based.neuron")
        self.node = neuron.IFNode(v_threshold=1.0, v_reset=None, step_mode=step_mode).eval()

    def reset(self) -> None:
        self.node.reset()

    def __call__(self, current: Tensor) -> Tensor:
        return self.node(current)  # type: ignore[no-any-return]


class Norse:
    """Resets to zero: Norse's IF neurons cannot subtract the threshold."""

    def __init__(self) -> None:
        self.cell = import_module("norse.torch").IAFCell()

    def reset(self) -> None:
        self.state = None

    def __call__(self, current: Tensor) -> Tensor:
        spikes, self.state = self.cell(current, self.state)
        return spikes  # type: ignore[no-any-return]


class Sinabs:
    def __init__(self) -> None:
        layers, activation = import_module("sinabs.layers"), import_module("sinabs.activation")
        self.layer = layers.IAF(spike_fn=activation.SingleSpike).eval()

    def reset(self) -> None:
        self.layer.reset_states()

    def __call__(self, current: Tensor) -> Tensor:
        return self.layer(current)  # type: ignore[no-any-return]


class SnnTorch:
    def __init__(self) -> None:
        leaky = import_module("snntorch").Leaky
        self.cell = leaky(beta=1.0, threshold=1.0, reset_mechanism="subtract")

    def reset(self) -> None:
        self.potential: Tensor | None = None

    def __call__(self, current: Tensor) -> Tensor:
        before = torch.zeros_like(current) if self.potential is None else self.potential
        spikes, self.potential = self.cell(current, before)
        return spikes  # type: ignore[no-any-return]


#: By name: the package, and how it runs a folded graph over T steps.
PEERS: dict[str, tuple[str, Callable[[Graph, int], Run]]] = {
    "plain torch loop": ("torch", lambda graph, T: step_by_step(graph, T, Torch)),
    "SpikingJelly, single-step": (
        "spikingjelly",
        lambda graph, T: step_by_step(graph, T, lambda: SpikingJelly("s")),
    ),
    "SpikingJelly, multi-step": (
        "spikingjelly",
        lambda graph, T: all_steps_at_once(graph, T, lambda: SpikingJelly("m")),
    ),
    "Norse (hard reset)": ("norse", lambda graph, T: step_by_step(graph, T, Norse)),
    "sinabs": ("sinabs", lambda graph, T: all_steps_at_once(graph, T, Sinabs, batch_first=True)),
    "snnTorch": ("snntorch", lambda graph, T: step_by_step(graph, T, SnnTorch)),
}


def installed() -> Iterator[tuple[str, str]]:
    """Names of those that are there, with the version of their package."""
    for name, (package, _) in PEERS.items():
        try:
            yield name, f"{package} {version(package)}"
        except PackageNotFoundError:
            print(f"{name} is left out: {package} is not installed (pip install -r benchmarks/peers.txt --no-deps)")
