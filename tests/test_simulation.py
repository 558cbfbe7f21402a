"""The spiking network over time equals simulators that a reader can check by eye, spike for spike."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
import spikecal as sc
import zoo
from helpers import converted, dense_graph, distance, inputs, neuron_dict, shell, spike_trains
from spikecal import simulation
from spikecal.capture import capture
from spikecal.graph import Graph, Node
from spikecal.ops import Activation, Conv, Input, Linear, Output, Peak
from spikecal.simulation import Neurons, run_ann, run_snn, snn_program
from spikecal.values import Value
from spikecal.work import count_work

STEPS: dict[str, tuple[Any, ...]] = {
    "thresholds only": (),
    "bias shift": (sc.BiasShift(),),
    "initial potential": (sc.InitialPotential(),),
    "light": (sc.BiasShift(), sc.BiasCalibration()),
    "advanced": (sc.BiasShift(), sc.PotentialCalibration(), sc.WeightCalibration(iterations=30, lr=1e-3)),
}


def weights(graph: Graph, node: Node) -> tuple[Any, Any]:
    bias = None if node.op.bias is None else graph.tensors[node.op.bias].numpy()
    return graph.tensors[node.op.weight].numpy(), bias


# ---------------------------------------------------------------------- against the reference of the paper


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("T", [1, 5, 16])
def test_dense_net_equals_the_reference(T: int, steps: tuple[Any, ...]) -> None:
    images = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
    recipe = sc.Recipe(sc.MMSE(per_channel=True), steps)
    snn = sc.convert(shell(dense_graph((6, 9, 7, 4))), images, T, recipe)
    x = torch.randn(5, 6, dtype=torch.float64)  # others: no current ties with a threshold

    layers = [weights(snn.graph, n) for n in snn.graph.nodes if isinstance(n.op, Linear)]
    neurons = [neuron_dict(site) for site in snn.sites.values()]
    trains, out = reference.snn_forward(layers, neurons, x.numpy(), T)

    for ours, theirs in zip(spike_trains(snn, x).values(), trains, strict=True):
        np.testing.assert_array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    running = np.cumsum(out, 0) / np.arange(1, T + 1)[:, None, None]
    np.testing.assert_allclose(snn.over_time(x), running, rtol=0, atol=1e-9)
    np.testing.assert_allclose(snn(x), out.mean(0), rtol=0, atol=1e-9)


class Residual(nn.Module):
    """The net of `reference.residual_net_snn`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.conv1 = nn.Conv2d(2, 4, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=2)
            self.fc = nn.Linear(4 * 2 * 2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.conv1(x))
        r = F.relu(self.conv2(a) + a)
        return self.fc(F.avg_pool2d(r, 2).flatten(1))


@cache
def residual_graph() -> Graph:
    return capture(Residual(), [torch.zeros(2, 2, 8, 8, dtype=torch.float64)])


def residual_params(graph: Graph) -> dict[str, dict[str, Any]]:
    params: dict[str, dict[str, Any]] = {}
    for name in ("conv1", "conv2", "fc"):
        op = graph.by_name[name].op
        params[name] = dict(zip("wb", weights(graph, graph.by_name[name]), strict=True))
        if isinstance(op, Conv):
            params[name] |= {"stride": op.stride, "padding": op.padding, "groups": op.groups}
    return params


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize(
    ("steps", "pool_to_conv"),
    [(name, pool) for name in STEPS for pool in (False, True) if (name, pool) != ("advanced", True)],
)  # weights calibration would change the pool's own weights, which the reference has fixed
def test_residual_net_equals_the_reference(steps: str, pool_to_conv: bool) -> None:
    T, images = 7, torch.randn(16, 2, 8, 8, dtype=torch.float64)
    recipe = sc.Recipe(sc.MMSE(per_channel=True), STEPS[steps], pool_to_conv=pool_to_conv)
    snn = sc.convert(shell(residual_graph()), images, T, recipe)
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)

    places = ["conv1", "conv2", *(["pool"] if pool_to_conv else []), "fc"]
    neurons = {place: neuron_dict(site) for place, site in zip(places, snn.sites.values(), strict=True)}
    expected = reference.residual_net_snn(residual_params(snn.graph), neurons, x.numpy(), T)
    ann = reference.residual_net_ann(residual_params(snn.source), x.numpy())

    for place, ours in zip(places[:-1], spike_trains(snn, x).values(), strict=True):
        np.testing.assert_array_equal(ours > 0, expected[place] > 0)
    running = np.cumsum(expected["out"], 0) / np.arange(1, T + 1)[:, None, None]
    np.testing.assert_allclose(snn.over_time(x), running, rtol=0, atol=1e-9)
    np.testing.assert_allclose(snn(x), expected["out"].mean(0), rtol=0, atol=1e-9)
    np.testing.assert_allclose(snn.ann(x), ann["out"], rtol=0, atol=1e-9)


# ---------------------------------------------------------------------- every net, one step after the other


def step_by_step(snn: sc.SpikingNetwork, x: tuple[Tensor, ...]) -> list[Tensor]:
    """The network at one step after the other, node by node: the currents at every output, [(T, B, ...)]."""
    v = {name: site.v0 for name, site in snn.sites.items() if isinstance(site, Neurons)}
    outputs: dict[str, list[Tensor]] = {}
    sums: dict[str, Any] = {}
    for _ in range(snn.T):
        values: dict[str, Tensor] = {}
        images = iter(x)
        for node in snn.graph.nodes:
            args = [values[i] for i in node.inputs]
            if isinstance(node.op, Input):
                values[node.name] = next(images)
            elif isinstance(node.op, Activation):
                site = snn.sites[node.name]
                potential = v[node.name] + args[0] + site.bias
                values[node.name] = torch.where(potential >= site.threshold, site.threshold, 0.0)
                v[node.name] = potential - values[node.name]
            elif isinstance(node.op, Output):
                values[node.name] = args[0] + snn.sites[node.name].bias
                outputs.setdefault(node.name, []).append(values[node.name])
            elif isinstance(node.op, Peak):  # how much the maximum of the sums up to now has grown
                before = torch.tensor(0.0) if node.name not in sums else node.op.run({}, sums[node.name])
                sums[node.name] = sums.get(node.name, 0.0) + args[0]
                values[node.name] = node.op.run({}, sums[node.name]) - before
            else:
                values[node.name] = node.op.run(snn.graph.tensors, *args)
    return [torch.stack(steps) for steps in outputs.values()]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_net_equals_a_simulation_step_by_step(name: str) -> None:
    """All steps at once, and in blocks of one and of three."""
    snn, x = converted(name), inputs(name, 3, seed=7)
    expected = step_by_step(snn, x)
    for block in (None, 1, 3):
        parts = list(run_snn(snn_program(snn.graph, snn.sites), snn.sites, x, snn.T, block=block))
        assert [len(part[0]) for part in parts] == {None: [8], 1: [1] * 8, 3: [3, 3, 2]}[block]
        assert distance([torch.cat(steps) for steps in zip(*parts, strict=True)], expected) < 1e-9


@pytest.mark.parametrize("name", ["avg_pools", "adaptive_pools", "means", "resnet_block", "conv1d_net", "conv3d_net"])
def test_spiking_pools_equal_a_simulation_step_by_step(name: str) -> None:
    snn, x = converted(name, sc.light(pool_to_conv=True)), inputs(name, 3, seed=7)
    assert distance(snn.currents(x), step_by_step(snn, x)) < 1e-9


@pytest.mark.parametrize("name", ["mlp", "resnet_block", "densenet", "clipped_spellings"])
def test_with_many_steps_the_spiking_network_becomes_the_ann(name: str) -> None:
    """Thresholds that clip nothing leave an error of the order 1/T."""
    x, errors = inputs(name, 8), {}
    for T in (32, 512):
        recipe = sc.Recipe(sc.MaxActivation(per_channel=True), (sc.InitialPotential(),))
        snn = converted(name, recipe, T, 8)
        errors[T] = distance([snn(*x)], [snn.ann(*x)])
    assert errors[512] < 0.02
    assert errors[512] < errors[32] / 4


# ---------------------------------------------------------------------- taps and work


def test_taps_see_every_site_of_ann_and_snn() -> None:
    snn, x = converted("resnet_block"), inputs("resnet_block", 3)
    sites = [n.name for n in snn.graph.nodes if n.is_site]
    seen: list[tuple[str, Value]] = []
    (y,) = run_ann(snn.source, x, lambda node, value: seen.append((node.name, value)))
    assert [name for name, _ in seen] == sites
    assert all(value.data.shape == (3, *snn.graph.by_name[name].shape) for name, value in seen)
    assert torch.equal(seen[-1][1].data, y)
    seen.clear()
    list(
        run_snn(
            snn_program(snn.graph, snn.sites), snn.sites, x, snn.T, lambda node, value: seen.append((node.name, value))
        )
    )
    assert [name for name, _ in seen] == sites
    for name, value in seen[:-1]:
        assert value.data.shape == (snn.T, 3, *snn.graph.by_name[name].shape)
        assert value.height is snn.sites[name].threshold
        assert bool(((value.data == 0) | (value.data == value.height)).all())


@pytest.mark.parametrize("name", ["mlp", "input_skip", "resnet_block", "two_inputs_two_outputs"])
@pytest.mark.parametrize("block", [None, 1, 3])
def test_what_is_constant_in_time_is_computed_once(name: str, block: int | None) -> None:
    """An affine node behind a neuron runs at every step, one that sees only the image runs once."""
    snn, x = converted(name), inputs(name, 3)
    changes: set[str] = set()
    for node in snn.graph.nodes:
        if isinstance(node.op, Activation) or changes & set(node.inputs):
            changes.add(node.name)
    program = snn_program(snn.graph, snn.sites)
    affine = [step.node.name for step in program if not isinstance(step.node.op, Activation | Input)]
    with count_work() as work:
        list(run_snn(program, snn.sites, x, snn.T, block=block))
    assert work.node_steps == 3 * sum(snn.T if name in changes else 1 for name in affine)
    assert work.neuron_steps == 3 * snn.T * len(snn.graph.neurons)


def test_work_is_counted_only_inside_the_block() -> None:
    snn, x = converted("mlp"), inputs("mlp", 3)
    with count_work() as outer:
        snn(*x)
        once = outer.node_steps
        with count_work() as inner:
            snn(*x)
    snn(*x)
    assert inner.node_steps == outer.node_steps == once > 0


# ---------------------------------------------------------------------- maxima behind what only moves spikes


class Moved(nn.Module):
    def __init__(self, move: Any) -> None:
        super().__init__()
        self.a, self.b, self.move = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1), move

    def forward(self, x: Tensor) -> Tensor:
        moved = self.move(self.a(x).relu(), self.b(x).relu())
        return F.max_pool2d(moved, 3, 2, 1).mean((2, 3))


@pytest.mark.parametrize(
    "move",
    [
        lambda a, b: a,
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: F.pad(a, (1, 1, 1, 1)),
        lambda a, b: a[:, 1:3],
        lambda a, b: F.channel_shuffle(a, 2),
        lambda a, b: F.interpolate(a, scale_factor=2),
        lambda a, b: F.max_pool2d(torch.cat([b, a], 1), 2),
    ],
    ids=["plain", "concat", "pad", "slice", "shuffle", "upsample", "pool of pool"],
)
def test_a_max_pool_of_spikes_gives_spikes(move: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pooled: list[Value] = []
    peak = simulation._peak
    monkeypatch.setattr(simulation, "_peak", lambda *arguments: pooled.append(peak(*arguments)) or pooled[-1])
    x = torch.randn(6, 3, 8, 8)
    snn = sc.convert(Moved(move).eval(), [x], 16)
    pooled.clear()
    snn(x)
    assert pooled
    for value in pooled:
        for channel in value.data.unbind(2):
            assert channel.unique().numel() <= 2  # 0 and the threshold, to the last bit
