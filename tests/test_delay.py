"""Firing delay: layer by layer it is a shift of the input; here everything runs on one clock, with delay lines."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

import spikecal as sc
import zoo
from helpers import captured, inputs, shell, spike_trains, twin_of
from spikecal.ops import Activation, Constant, Input, Output, Peak
from spikecal.simulation import Neurons

NETS = ["resnet_block", "densenet", "unet", "linear_bottleneck", "mlp", "two_inputs_two_outputs", "maxpool_stem"]


def delayed(name: str, delay: int, T: int = 6, recipe: sc.Recipe | None = None) -> sc.SpikingNetwork:
    steps = (sc.InitialPotential(), sc.BiasCalibration())
    recipe = recipe or sc.Recipe(sc.MMSE(per_channel=True), steps, delay=delay)
    return sc.convert(shell(captured(name)), [inputs(name, 16)], T, recipe)


def on_one_clock(snn: sc.SpikingNetwork, x: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Every layer lives on the same clock. What a node reads from an early layer waits in a line for the late ones.

    A neuron gets input from tick `begin`, fires from tick begin + delay, T times. Returns spikes and output currents.
    """
    graph, T = snn.graph, snn.T
    begin: dict[str, int] = {}  # the tick at which a node's value begins
    for node in graph.nodes:
        site = snn.sites.get(node.name)
        own = site.delay if isinstance(site, Neurons) else 0
        begin[node.name] = max((begin[i] for i in node.inputs), default=0) + own
    emitted: dict[str, dict[int, Tensor]] = defaultdict(dict)  # by node and tick
    potential: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}
    for tick in range(snn.latency):
        images = iter(x)
        for node in graph.nodes:
            site = snn.sites.get(node.name)
            image = next(images) if isinstance(node.op, Input) else None
            starts = max((begin[i] for i in node.inputs), default=0)
            arrived = starts <= tick < starts + T
            # a value that began `starts - begin` ticks earlier than this node's input has waited that long
            read = [emitted[i][tick - (starts - begin[i])] for i in node.inputs] if arrived else []
            if image is not None:
                if tick < T:
                    emitted[node.name][tick] = image
            elif isinstance(site, Neurons):
                if tick == starts:
                    potential[node.name] = site.v0.expand(read[0].shape).clone()
                if arrived:
                    potential[node.name] += read[0] + site.bias
                own = tick - begin[node.name]  # its own step
                if 0 <= own < T:
                    if site.temporal is not None:
                        potential[node.name] += site.temporal[own]
                    fires = (potential[node.name] >= site.threshold) & (own >= site.start)
                    potential[node.name] = potential[node.name] - fires * site.threshold
                    emitted[node.name][tick] = fires * site.threshold
            elif arrived and isinstance(node.op, Peak):
                before = total.get(node.name)
                now = read[0] if before is None else before + read[0]
                value = node.op.run(graph.tensors, now)
                emitted[node.name][tick] = value - (0 if before is None else node.op.run(graph.tensors, before))
                total[node.name] = now
            elif arrived:
                bias = site.bias if isinstance(node.op, Output) else 0
                emitted[node.name][tick] = node.op.run(graph.tensors, *read) + bias
    spikes = {n.name: torch.stack(list(emitted[n.name].values())) for n in graph.neurons}
    return spikes, [torch.stack(list(emitted[n.name].values())) for n in graph.outputs]


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("name", NETS)
def test_layers_fire_as_they_do_on_one_clock(name: str, delay: int) -> None:
    snn = delayed(name, delay)
    x = inputs(name, 3, seed=5)
    spikes, currents = on_one_clock(snn, x)
    for site, train in spike_trains(snn, *x).items():
        torch.testing.assert_close(train, spikes[site], rtol=0, atol=1e-12)
    for ours, theirs in zip(snn.currents(x), currents, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("recipe", [sc.pipelined(), sc.pipelined(delay=3), sc.pipelined(delay=7), sc.best(delay=1)])
@pytest.mark.parametrize("name", NETS)
def test_recipes_with_currents_of_their_own_fire_as_they_do_on_one_clock(name: str, recipe: sc.Recipe) -> None:
    """Hesitation, even currents and late starts are counted in the steps of the neurons; a delay may exceed T."""
    snn = delayed(name, recipe.delay, recipe=recipe)
    x = inputs(name, 3, seed=5)
    spikes, _ = on_one_clock(snn, x)
    for site, train in spike_trains(snn, *x).items():
        torch.testing.assert_close(train, spikes[site], rtol=0, atol=1e-9)


MIXED = sc.Recipe(
    sc.MMSE(per_channel=True),
    (sc.FiringDelay(2, behind=0.5), sc.InitialPotential(), sc.ClosedFormWeights(), sc.EvenCurrent(), sc.Hesitation()),
)


@pytest.mark.parametrize("name", NETS)
def test_layers_of_different_delays_fire_as_they_do_on_one_clock(name: str) -> None:
    snn = delayed(name, 0, recipe=MIXED)
    x = inputs(name, 3, seed=5)
    spikes, _ = on_one_clock(snn, x)
    for site, train in spike_trains(snn, *x).items():
        torch.testing.assert_close(train, spikes[site], rtol=0, atol=1e-9)


def test_a_layer_at_the_very_depth_does_not_wait() -> None:
    plain = delayed("resnet_block", 0)
    depths = {n.name: plain.graph.relative_depth(n.name) for n in plain.graph.neurons}
    for behind in {0.0, *depths.values()}:
        snn = delayed("resnet_block", 0, recipe=sc.Recipe(sc.MMSE(), (sc.FiringDelay(behind=behind),)))
        assert {n: snn.sites[n].delay for n in depths} == {n: int(depth > behind) for n, depth in depths.items()}


def test_layers_behind_a_depth_wait(tmp_path) -> None:
    snn = delayed("resnet_block", 0, recipe=MIXED)
    depths = {n.name: snn.graph.relative_depth(n.name) for n in snn.graph.neurons}
    delays = {name: site.delay for name, site in snn.sites.items() if isinstance(site, Neurons)}
    assert delays == {name: 2 * (depth > 0.5) for name, depth in depths.items()}
    assert snn.latency == snn.T + sum(delays.values())  # they stand in a row
    assert set(delays.values()) == {0, 2}
    snn.save(tmp_path / "net.spk")
    again, x = sc.load(tmp_path / "net.spk"), inputs("resnet_block", 4, seed=5)
    assert (again.latency, again.recipe) == (snn.latency, snn.recipe)
    assert torch.equal(again(*x), snn(*x))


@pytest.mark.parametrize("bad", [{"steps": -1}, {"behind": 1.5}, {"behind": float("nan")}])
def test_delays_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(sc.CalibrationError, match=r"steps of 0 or more and a depth in \[0, 1\] are wanted"):
        sc.FiringDelay(**bad)  # type: ignore[arg-type]


def test_the_nets_hold_what_this_test_needs() -> None:
    assert any(isinstance(n.op, Peak) for n in captured("maxpool_stem").nodes)
    assert {*NETS} <= {*zoo.ZOO, *zoo.MAXPOOL}
    assert not any(isinstance(n.op, Constant) for name in NETS for n in captured(name).nodes)


def test_latency_is_the_longest_way() -> None:
    snn = delayed("resnet_block", 2)
    neurons = [n.name for n in snn.graph.nodes if isinstance(n.op, Activation)]
    assert snn.latency == snn.T + 2 * len(neurons)  # they stand in a row; the shortcut does not shorten the way
    assert f"T=6, latency={snn.latency}" in repr(snn)
    assert delayed("resnet_block", 0).latency == 6


def test_over_time_covers_the_latency_and_ends_with_the_answer() -> None:
    snn = delayed("resnet_block", 1)
    x = inputs("resnet_block", 3, seed=5)
    ys = snn.over_time(*x)
    assert len(ys) == snn.latency
    waiting = snn.latency - snn.T
    assert not ys[:waiting].any()
    assert ys[waiting].any()
    torch.testing.assert_close(ys[-1], snn(*x))


def test_a_delayed_network_is_saved_and_evaluated(tmp_path) -> None:
    snn = delayed("resnet_block", 1)
    snn.save(tmp_path / "net.spk")
    again = sc.load(tmp_path / "net.spk")
    x = inputs("resnet_block", 4, seed=5)
    assert torch.equal(again(*x), snn(*x))
    assert again.latency == snn.latency
    result = sc.evaluate(again, [x])
    assert (result.T, result.latency, len(result.agreement_over_time)) == (6, snn.latency, snn.latency)


@pytest.mark.parametrize("engine", ["dense", "event", "auto"])
def test_engines_agree_on_delayed_networks(engine: str) -> None:
    snn = twin_of(delayed("resnet_block", 1)).float()
    x = [t.float() for t in inputs("resnet_block", 3, seed=5)]
    snn.engine = "dense"
    expected = spike_trains(snn, *x)
    snn.engine = engine
    assert all(
        torch.equal(a > 0, b > 0) for a, b in zip(expected.values(), spike_trains(snn, *x).values(), strict=True)
    )


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(sc.CalibrationError, match="firing delay must be 0 or more steps, not -1"):
        sc.Recipe(sc.MMSE(), delay=-1)
