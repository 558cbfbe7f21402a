"""The cost of a conversion grows with the depth of a network as simulating it once does: O(L·T), not O(L²·T)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import spikecal as sc
from helpers import captured, inputs, least_memory, shell
from spikecal.capture import capture
from spikecal.graph import Graph
from spikecal.preparation import prepare
from spikecal.replay import Replay, initial_site
from spikecal.simulation import run_snn, snn_program
from spikecal.work import count_work

WIDTH, T = 6, 16


class Plain(nn.Module):
    """layer ReLU layer ReLU ..."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class PreActivation(nn.Module):
    """x ← x + layer(ReLU(norm(x))): every segment reads the signed stream that the one before it leaves."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x).relu())
        return x


class Dense(nn.Module):
    """x ← [x, layer(ReLU(norm(x)))]: every segment reads all earlier ones."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [WIDTH + i for i in range(depth)]
        self.layers = nn.ModuleList(nn.Linear(width, 1) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return x


@cache
def chain(net: type[nn.Module], depth: int) -> Graph:
    return prepare(capture(net(depth), [torch.zeros(2, WIDTH)]))


def converting(graph: Graph, recipe: sc.Recipe) -> int:
    with count_work() as work:
        sc.convert(shell(graph), torch.randn(8, WIDTH), T, recipe)
    return work.node_steps


def naively(graph: Graph, recipe: sc.Recipe) -> int:
    """The paper's own code: the whole network is simulated for every layer that is calibrated."""
    snn, x = sc.convert(shell(graph), torch.randn(8, WIDTH), T, recipe), [torch.randn(8, WIDTH)]
    with count_work() as work:
        for _ in snn.sites:
            list(run_snn(snn_program(snn.graph, snn.sites), snn.sites, x, T))
    return work.node_steps


def growth(work: Callable[[Graph, sc.Recipe], int], net: type[nn.Module], recipe: sc.Recipe) -> float:
    return work(chain(net, 12), recipe) / work(chain(net, 6), recipe)


RECIPES = {
    "light": sc.light(),
    "potential": sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.PotentialCalibration())),
    "percentile": sc.percentile(),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("net", [Plain, PreActivation, Dense])
def test_twice_the_depth_is_twice_the_work(net: type[nn.Module], recipe: sc.Recipe) -> None:
    assert growth(converting, net, recipe) < 2.3


@pytest.mark.parametrize("net", [Plain, PreActivation, Dense])
def test_the_yardstick_would_notice_quadratic_work(net: type[nn.Module]) -> None:
    assert growth(naively, net, sc.light()) > 3


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("net", [Plain, PreActivation, Dense])
def test_twice_the_depth_is_twice_the_work_of_weights_calibration(net: type[nn.Module]) -> None:
    assert growth(converting, net, sc.advanced(iterations=5)) < 2.3


@pytest.mark.parametrize("recipe", [sc.light(), sc.plain(), sc.max_activation()], ids=lambda r: r.name)
@pytest.mark.parametrize("name", ["resnet_block", "densenet", "preactivation", "unet"])
@pytest.mark.parametrize("ample", [True, False])
def test_a_conversion_costs_little_more_than_simulating_its_images(name: str, recipe: sc.Recipe, ample: bool) -> None:
    """The ANN runs a few times, without time steps; the spiking network once, or once more if memory is short."""
    graph, x = captured(name), inputs(name, 8)
    memory = 10**9 if ample else least_memory(graph, x, 32, recipe)
    with count_work() as converted:
        snn = sc.convert(shell(graph), [x], 32, recipe, memory=memory)
    with count_work() as simulated:
        snn(*x)
    assert converted.node_steps < (1.5 if ample else 3) * simulated.node_steps


@torch.no_grad()
def most_kept(graph: Graph) -> int:
    """The most bytes that wait for later segments at any time of a calibration."""
    replay, most = Replay(graph, [torch.randn(8, WIDTH)], T, 10**9), 0
    for segment in replay.segments:
        threshold = torch.ones(1) if segment.site in graph.neurons else None
        layer = replay.layer(segment, initial_site(segment.site, threshold, graph))
        most = max(most, replay.cached_bytes(segment))
        replay.finish(layer)
    return most


@pytest.mark.parametrize("net", [Plain, PreActivation])
def test_what_nobody_reads_any_more_is_dropped(net: type[nn.Module]) -> None:
    assert most_kept(chain(net, 12)) == most_kept(chain(net, 6))


def test_neurons_fire_a_fixed_number_of_times() -> None:
    """Once for every calibration step that looks at errors, and once for what comes behind."""
    for recipe, passes in ((sc.max_activation(), 1), (sc.plain(), 1), (sc.light(), 2)):
        with count_work() as work:
            sc.convert(shell(chain(Plain, 6)), torch.randn(8, WIDTH), T, recipe)
        assert work.neuron_steps == passes * 8 * T * 6
