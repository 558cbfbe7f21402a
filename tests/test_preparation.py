"""Passes rewrite the graph and leave the function alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
import zoo
from helpers import captured, distance, inputs, prepared
from spikecal.capture import capture
from spikecal.graph import Graph, Node, rewired
from spikecal.ops import Activation, AvgPool, Conv, Linear, Scale
from spikecal.preparation import PASSES, prepare, spiking_pools
from spikecal.simulation import run_ann
from zoo import make


@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize("rewrite", [*PASSES, spiking_pools], ids=lambda f: f.__name__)
def test_pass_preserves_the_function(rewrite: Callable[[Graph], Graph], name: str) -> None:
    before, x = captured(name), inputs(name, 3, seed=7)
    after = rewrite(before)
    after.check()
    assert distance(run_ann(after, x), run_ann(before, x)) < 1e-9


@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize("pool_to_conv", [False, True])
def test_preparation_preserves_the_function(name: str, pool_to_conv: bool) -> None:
    before, after, x = captured(name), prepared(name, pool_to_conv), inputs(name, 3, seed=7)
    after.check()
    assert distance(run_ann(after, x), run_ann(before, x)) < 1e-9


@pytest.mark.parametrize("name", zoo.ZOO)
def test_preparation_leaves_the_captured_graph_alone(name: str) -> None:
    graph = captured(name)
    nodes, tensors = graph.nodes, {key: (id(t), t._version) for key, t in graph.tensors.items()}
    prepare(graph, pool_to_conv=True)
    assert graph.nodes is nodes
    assert {key: (id(t), t._version) for key, t in graph.tensors.items()} == tensors


@pytest.mark.parametrize("name", zoo.ZOO)
def test_preparing_twice_changes_nothing_more(name: str) -> None:
    """A converted network may be calibrated anew, from the graph that was prepared for it."""
    for pool_to_conv in (False, True):
        once = prepared(name, pool_to_conv)
        assert prepare(once, pool_to_conv=pool_to_conv).nodes == once.nodes


# ---------------------------------------------------------------------- batch norm


def layer(graph: Graph, name: str) -> tuple[np.ndarray, np.ndarray]:
    op = graph.by_name[name].op
    assert isinstance(op, Conv | Linear)
    assert op.bias is not None
    return graph.tensors[op.weight].numpy(), graph.tensors[op.bias].numpy()


@pytest.mark.parametrize(
    ("net", "weights", "norm"),
    [
        ("conv_bn", "a", "na"),
        ("conv_bn", "b", "nb"),
        ("mlp_bn", "layers.0", "layers.1"),
        ("mlp_bn", "layers.3", "layers.4"),
        ("conv1d_net", "a", "na"),
        ("conv3d_net", "a", "na"),
        ("linear_bottleneck", "dw", "n2"),
    ],
)
def test_batch_norm_folds_as_in_the_paper(net: str, weights: str, norm: str) -> None:
    model = make(net).double()
    w, n = model.get_submodule(weights), model.get_submodule(norm)
    bias = 0.0 if w.bias is None else w.bias.detach().numpy()
    parameters = (n.running_mean, n.running_var, n.weight, n.bias)
    expected = reference.fold_batchnorm(
        w.weight.detach().numpy(), bias, *(p.detach().numpy() for p in parameters), eps=n.eps
    )
    for ours, theirs in zip(layer(prepared(net), weights), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_batch_norm_folds_into_a_grouped_transposed_conv() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6), nn.ReLU()).double()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
        model[1].weight.normal_()
        model[1].bias.normal_()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    graph = prepare(capture(model.eval(), [x]))
    assert [type(n.op) for n in graph.nodes[1:3]] == [Conv, Activation]
    assert distance(run_ann(graph, [x]), [model(x)]) < 1e-12


def per_channel(graph: Graph, node: Node, before: Node) -> bool:
    """Whether a scale is one number for each output channel of the layer in front of it."""
    axis = len(before.shape) - 1 if isinstance(before.op, Linear) else 0
    for key in (node.op.scale, node.op.shift):
        shape = () if key is None else tuple(graph.tensors[key].shape)
        padded = (1,) * (len(before.shape) - len(shape)) + shape
        if any(size != 1 for i, size in enumerate(padded) if i != axis):
            return False
    return node.shape == before.shape


@pytest.mark.parametrize("name", zoo.ZOO)
def test_no_scale_is_left_that_could_be_folded(name: str) -> None:
    graph = prepared(name)
    for node in graph.nodes:
        before = graph.by_name[node.inputs[0]] if node.inputs else node
        if isinstance(node.op, Scale) and isinstance(before.op, Conv | Linear):
            assert len(graph.readers[before.name]) > 1 or not per_channel(graph, node, before)


@pytest.mark.parametrize(("name", "scales"), [("conv_bn", 0), ("resnet_block", 0), ("bn_on_input", 1), ("densenet", 3)])
def test_a_norm_without_a_layer_in_front_stays_a_scale(name: str, scales: int) -> None:
    assert sum(isinstance(n.op, Scale) for n in prepared(name).nodes) == scales


def test_a_norm_of_a_shared_conv_leaves_the_other_call_alone() -> None:
    graph = prepared("shared_conv_two_norms")
    convs = [n.op.weight for n in graph.nodes if isinstance(n.op, Conv)]
    assert len(set(convs)) == 2
    assert not torch.equal(graph.tensors[convs[0]], graph.tensors[convs[1]])


# ---------------------------------------------------------------------- average pools


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("avg_pools", 1),  # the others: padding that does not count, ceil mode with a rest
        ("avg_pool_corners", 2),  # the others: a signed value, padding that does not count
        ("adaptive_pools", 2),  # the other: bins of different size
        ("means", 3),  # the other: over one of two spatial axes
        ("resnet_block", 1),
        ("conv1d_net", 2),
        ("conv3d_net", 2),
        ("linear_bottleneck", 0),  # its last block is linear, so the mean is of signed values
        ("mlp", 0),
    ],
)
def test_pools_become_neurons_if_asked(name: str, more: int) -> None:
    off, on = prepared(name), prepared(name, pool_to_conv=True)
    assert len(on.neurons) == len(off.neurons) + more


class SignedPools(nn.Module):
    """Pools of a current, of the image, of a difference, and of a value padded with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, z = self.conv(x), F.relu(self.conv(x))
        signed = (y, x, z - F.relu(x), F.pad(z, (1, 1, 1, 1), value=-2.0), torch.cat([y, z], 1))
        return tuple(F.avg_pool2d(s, 2) for s in signed)


def test_a_pool_of_signed_values_gets_no_neuron() -> None:
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    graph = prepare(capture(SignedPools(), [x]), pool_to_conv=True)
    assert sum(isinstance(n.op, AvgPool) for n in graph.nodes) == 5
    assert len(graph.neurons) == 2


def test_a_spiking_pool_is_a_depthwise_conv_with_equal_weights() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.avg_pool2d(F.relu(x), 2)

    x = torch.randn(2, 3, 6, 6)
    graph = prepare(capture(Net(), [x]), pool_to_conv=True)
    conv, neuron = graph.nodes[2:4]
    assert isinstance(conv.op, Conv)
    assert conv.op.groups == 3
    assert graph.tensors[conv.op.weight].unique().tolist() == [0.25]
    assert isinstance(neuron.op, Activation)
    expected = reference.avg_pool2d(reference.relu(x.numpy()), 2)
    np.testing.assert_allclose(run_ann(graph, [x])[0], expected, rtol=1e-5)


def test_the_names_of_a_spiking_pool_are_new() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.ModuleDict({"conv": nn.Conv2d(3, 3, 1), "neuron": nn.ReLU()})

        def forward(self, x: Tensor) -> Tensor:
            return self.pool["conv"](F.avg_pool2d(self.pool["neuron"](x), 2))

    x = torch.randn(2, 3, 6, 6)
    graph = capture(Net(), [x])
    (pool,) = (n for n in graph.nodes if isinstance(n.op, AvgPool))
    taken = {"pool.conv": f"{pool.name}.conv", "pool.neuron": f"{pool.name}.neuron"}
    nodes = tuple(replace(n, name=taken.get(n.name, n.name)) for n in rewired(graph.nodes, taken))
    tensors = {**graph.tensors, f"{pool.name}.weight": torch.zeros(1)}
    clashing = replace(graph, nodes=nodes, tensors=tensors)
    after = spiking_pools(clashing)
    after.check()
    assert distance(run_ann(after, [x]), run_ann(graph, [x])) < 1e-6
    assert torch.equal(after.tensors[f"{pool.name}.weight"], torch.zeros(1))


def test_pools_stay_pools_unless_asked() -> None:
    assert any(isinstance(n.op, AvgPool) for n in prepared("avg_pools").nodes)
    assert prepared("avg_pools").neurons == prepare(captured("avg_pools")).neurons


# ---------------------------------------------------------------------- activations that do nothing


def test_a_relu_of_something_nonnegative_is_dropped() -> None:
    assert len(captured("relu_of_nonnegative").neurons) == 5
    left = prepared("relu_of_nonnegative").neurons
    assert [n.op.cap is not None for n in left] == [False, True]


@pytest.mark.parametrize("name", ["relu_at_input", "crelu", "inplace_add", "one_relu_five_times", "relu_spellings"])
def test_a_relu_that_does_something_stays(name: str) -> None:
    assert len(prepared(name).neurons) == len(captured(name).neurons)


class TwoReaders(nn.Module):
    """A ReLU in front of a clipped one does nothing for it, but something for the other reader."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x)
        return y.clamp(0, 1) + 2 * y


class Subtraction(nn.Module):
    """The difference of two nonnegative values may be negative, their weighted sum is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = F.relu(x), F.relu(-x)
        return F.relu(y - z), F.relu(torch.add(y, z, alpha=0.5))


class Padded(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(x)
        return F.relu(F.pad(y, (1, 1))), F.relu(F.pad(y, (1, 1), value=-1.0) + 0.5)


@pytest.mark.parametrize(("net", "neurons"), [(TwoReaders, 2), (Subtraction, 3), (Padded, 2)])
def test_activations_are_dropped_only_where_that_is_safe(net: type[nn.Module], neurons: int) -> None:
    x = torch.randn(8, 5, dtype=torch.float64)
    graph = prepare(capture(net(), [x]))
    assert len(graph.neurons) == neurons
    theirs = net()(x)
    assert distance(run_ann(graph, [x]), [theirs] if isinstance(theirs, Tensor) else list(theirs)) == 0


class Doubling(nn.Module):
    """Every value is read twice by the next one: 2^14 paths through 14 sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        for _ in range(14):
            x = x + x.view(x.size(0), 4)
        return F.relu(x)


def test_the_sign_of_a_value_is_found_without_walking_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Doubling(), [torch.randn(2, 4)])
    calls, ask = [], Graph.is_nonnegative
    monkeypatch.setattr(Graph, "is_nonnegative", lambda self, name: calls.append(name) or ask(self, name))
    assert len(prepare(graph).neurons) == 1
    assert len(calls) < 10 * len(graph.nodes)


# ---------------------------------------------------------------------- what nothing needs


@pytest.mark.parametrize("name", zoo.ZOO)
def test_nothing_unused_is_left(name: str) -> None:
    graph = prepared(name)
    named = {v for n in graph.nodes for v in vars(n.op).values() if isinstance(v, str)}
    assert set(graph.tensors) <= named
    assert all(graph.readers[n.name] or n in graph.outputs or n in graph.inputs for n in graph.nodes)
