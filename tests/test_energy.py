"""Operations are counted exactly, spike by spike; energies are sums of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

import spikecal as sc
from helpers import converted, inputs
from spikecal.energy import CONSTANTS, LayerOperations, fan_out
from spikecal.graph import Node
from spikecal.ops import AdaptiveAvgPool, Add, AvgPool, Conv, Linear, Mean
from spikecal.simulation import Neurons, snn_program
from spikecal.values import Value

NETS = (
    "resnet_block",
    "mlp",
    "grouped_and_depthwise",
    "conv1d_net",
    "conv3d_net",
    "dead_channels",
    "maxpool_stem",
    "avg_pools",
    "strides_and_dilations",
    "densenet",
)


def all_values(snn: sc.SpikingNetwork, x: Tensor) -> dict[str, Value]:
    """Every value of the spiking network over time."""
    values: dict[str, Value] = {}
    for step in snn_program(snn.graph, snn.sites):
        inputs = [values[name] for name in step.reads]
        values[step.node.name] = step.run(inputs, snn.T, {}) if inputs else Value(x)
    return values


def terms(node: Node, snn: sc.SpikingNetwork, events: Tensor) -> float:
    """How many terms events, 0 or 1, (B, ...), add to the sums that a node computes: weights of one count them."""
    op, one = node.op, dict[str, Tensor]()
    if isinstance(op, Conv | Linear):
        op, one = replace(op, bias=None), {op.weight: torch.ones_like(snn.graph.tensors[op.weight])}
        return float(op.run(one, events).sum())
    if isinstance(op, AvgPool):
        size = op.kernel[0] if len(op.kernel) == 1 else 1  # which has no divisor to choose
        return size * float(replace(op, divisor=1).run({}, events).sum())
    return float(events.sum())


@pytest.mark.parametrize(
    "recipe",
    [sc.light(), sc.light(pool_to_conv=True), sc.light(delay=2)],
    ids=["pools", "pools with neurons", "firing delay"],
)
@pytest.mark.filterwarnings("ignore:pool_to_conv:spikecal.NoEffectWarning")
@pytest.mark.parametrize("name", NETS)
def test_operations_are_those_of_every_single_spike(name: str, recipe: sc.Recipe) -> None:
    snn, (x,) = converted(name, recipe), inputs(name, 5, seed=3)
    operations = sc.evaluate(snn, [x[:2], x[2:]]).operations
    values = all_values(snn, x)
    assert operations.layers
    for layer in operations.layers:
        node, arriving = snn.graph.by_name[layer.name], values[layer.source]
        if arriving.constant:
            assert (layer.input, layer.spikes, layer.synaptic_operations) == ("constant", 0, 0)
            assert layer.multiply_accumulates == layer.synapses
            continue
        if layer.input == "analog":
            assert layer.multiply_accumulates == layer.synapses * snn.T
            continue
        events = (arriving.data != 0).to(x.dtype)  # (T, B, ...)
        assert layer.spikes == pytest.approx(float(events.sum()) / 5)
        assert layer.synaptic_operations == pytest.approx(terms(node, snn, events.flatten(0, 1)) / 5)
        assert layer.multiply_accumulates == 0
    steps = snn.T + recipe.delay  # from the first input to the last decision
    assert operations.neuron_updates == steps * sum(prod(n.shape) for n in snn.graph.neurons)
    per_image = [sc.evaluate(snn, [x[i : i + 1]]).operations.synaptic_operations for i in range(5)]
    assert operations.synaptic_operations == pytest.approx(sum(per_image) / 5)
    assert operations.synaptic_operations_std == pytest.approx(float(torch.tensor(per_image).double().std()))


def test_every_layer_with_weights_is_there() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 2)
    found = {layer.name for layer in sc.evaluate(snn, [x]).operations.layers}
    assert {n.name for n in snn.graph.nodes if isinstance(n.op, Conv | Linear)} <= found


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [((1, 1), (1, 1), (1, 1), 1), ((2, 1), (0, 2), (1, 2), 2)]
)
def test_the_fan_out_of_a_convolution_is_counted_at_borders_and_strides(
    stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], groups: int
) -> None:
    """Synapse by synapse, in plain loops."""
    conv = nn.Conv2d(4, 6, 3, stride, padding, dilation, groups)
    height, width = conv(torch.zeros(1, 4, 7, 6)).shape[2:]
    expected = torch.zeros(4, 7, 6, dtype=torch.float64)
    for out, inner in itertools.product(range(6), range(4 // groups)):
        channel = out // (6 // groups) * (4 // groups) + inner
        for y, x, i, j in itertools.product(range(height), range(width), range(3), range(3)):
            row = y * stride[0] - padding[0] + i * dilation[0]
            column = x * stride[1] - padding[1] + j * dilation[1]
            if 0 <= row < 7 and 0 <= column < 6:
                expected[channel, row, column] += 1
    graph = sc.convert(nn.Sequential(conv, nn.ReLU()), torch.rand(2, 4, 7, 6), 1).graph
    (node,) = (n for n in graph.nodes if isinstance(n.op, Conv))
    assert torch.equal(fan_out(graph, node, (4, 7, 6)), expected)


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        (AvgPool((2,), (1,), (0,)), (1, 4), [[1, 2, 2, 1]]),
        (AvgPool((2, 1), (2, 1), (0, 0)), (1, 3, 1), [[[1], [1], [0]]]),
        (AdaptiveAvgPool((2,)), (1, 3), [[1, 2, 1]]),
        (Mean((0,)), (2,), [1, 1]),
        (Add(), (1, 1), [[6]]),
    ],
)
def test_the_fan_out_of_pools_and_sums(op: object, shape: tuple[int, ...], expected: list[object]) -> None:
    node = Node("node", op, (), (2, 3))  # type: ignore[arg-type]
    graph = converted("mlp").graph
    assert fan_out(graph, node, shape).tolist() == expected


def by_hand() -> sc.Operations:
    spikes = LayerOperations("b", "a", "spikes", 100, 5.0, 50.0, 0.0, 100)
    image = LayerOperations("a", "x", "constant", 40, 0.0, 0.0, 40.0, 40)
    shortcut = LayerOperations("c", "a", "spikes", 10, 5.0, 5.0, 0.0, 0)
    return sc.Operations([image, spikes, shortcut], 30, 560, 40, 0.0)


def test_energies_are_sums_of_operations() -> None:
    operations = by_hand()
    assert (operations.synaptic_operations, operations.multiply_accumulates) == (55, 40)
    assert operations.spikes_per_synapse == pytest.approx(55 / 110)
    paper, fp32, *_ = sc.estimate(operations, T=8)
    assert paper.spiking == pytest.approx(0.9 * 55 + 4.6 * 40)
    assert fp32.spiking == pytest.approx(0.9 * 55 + 4.6 * 40 + 0.9 * 30)
    assert paper.ann == pytest.approx({"FP32": 4.6 * 140, "INT8": 0.23 * 140, "4-bit": 0.23 / 4 * 140})
    assert paper.ratios["FP32"] == pytest.approx(paper.spiking / (4.6 * 140))
    assert fp32.break_even["FP32"] == pytest.approx((4.6 * 140 - 4.6 * 40 - 0.9 * 30) / 0.9)
    assert fp32.break_even["INT8"] < 0  # multiplying the image alone costs more
    assert [e.constants for e in sc.estimate(operations, 8)] == list(CONSTANTS)


def test_signed_spikes_are_not_counted_as_binary() -> None:
    snn, (x,) = converted("resnet_block", sc.light(signed=True)), inputs("resnet_block", 2)
    assert all(isinstance(s, Neurons) and s.signed for n, s in snn.sites.items() if n != "output")
    kinds = {layer.input for layer in sc.evaluate(snn, [x]).operations.layers}
    assert kinds == {"constant", "analog"}
