"""Closed-form weights calibration equals the textbook solution, and lowers the error it is meant to lower."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spikecal as sc
import zoo
from helpers import captured, inputs, shell, spike_trains
from spikecal import closed_form
from spikecal.capture import capture
from spikecal.functional import integrate_and_fire
from spikecal.graph import Graph
from spikecal.ops import Conv, Linear
from spikecal.replay import Layer
from spikecal.simulation import run_ann

T, RIDGE = 5, 0.03
HALF = sc.InitialPotential()


def two_layers(second: nn.Module, tail: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), second, nn.ReLU(), tail).double().eval()


SECOND = {
    "dense": lambda: nn.Conv2d(6, 4, 3, padding=1),
    "strided, asymmetric": lambda: nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(2, 1)),
    "dilated": lambda: nn.Conv2d(6, 4, 3, dilation=2),
    "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "pointwise": lambda: nn.Conv2d(6, 5, 1),
}


def windows(x: np.ndarray, op: Any, kernel: tuple[int, ...]) -> np.ndarray:
    """Inputs under the kernel at every position, by plain loops: (B, positions, C, kh, kw), say."""
    axes = list(zip(kernel, op.stride, op.dilation, strict=True))
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in op.padding)))
    places = [range((n - d * (k - 1) - 1) // s + 1) for n, (k, s, d) in zip(x.shape[2:], axes, strict=True)]
    found = [
        x[:, :, *(slice(i * s, i * s + d * k, d) for i, (k, s, d) in zip(place, axes, strict=True))]
        for place in itertools.product(*places)
    ]
    return np.stack(found, 1)


Rows = list[tuple[np.ndarray, np.ndarray]]


def ridge(P: np.ndarray, D: np.ndarray, more: Rows | None = None) -> tuple[np.ndarray, np.ndarray]:
    """min ‖D − P·w − b‖² + λ·mean power·n·‖w‖², as an ordinary least-squares problem with more rows."""
    strength = np.sqrt(RIDGE * (1 + 30 * P.shape[1] / len(P)) * ((P - P.mean(0)) ** 2).sum(0).mean())
    blocks = [(p - p.mean(0), d - d.mean(0)) for p, d in [(P, D), *(more or [])]]
    blocks.append((strength * np.eye(P.shape[1]), np.zeros((P.shape[1], D.shape[1]))))
    rows, wanted = (np.concatenate(part) for part in zip(*blocks, strict=True))
    w = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return w, D.mean(0) - P.mean(0) @ w


@pytest.mark.parametrize(("masked", "even", "start"), [(False, 0.0, 0), (True, 0.0, 0), (True, 0.7, 0), (True, 0.7, 2)])
@pytest.mark.parametrize("kind", SECOND)
def test_a_convolution_gets_the_textbook_solution(kind: str, masked: bool, even: float, start: int) -> None:
    model = two_layers(SECOND[kind](), nn.Flatten())
    x = torch.randn(7, 2, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    graph = shell(capture(model, (x[:2],)))
    step = sc.ClosedFormWeights(ridge=RIDGE, masked=masked, even=even)
    rule = sc.MMSE(per_channel=True)
    late = sc.LateStart(start / T, 9.0)  # of the second layer
    plain = sc.convert(graph, [x], T, sc.Recipe(rule, (late, HALF)))
    fitted = sc.convert(graph, [x], T, sc.Recipe(rule, (late, HALF, step)))
    first, second = (n.name for n in plain.graph.neurons)
    conv = next(n for n in fitted.graph.nodes if n.name == fitted.graph.by_name[second].inputs[0])
    assert isinstance(conv.op, Conv)

    # the first layer gets the images as they are, so nothing is left to correct there but nothing must change
    site = fitted.sites[first]
    torch.testing.assert_close(site.bias, torch.zeros_like(site.bias).expand_as(site.bias), rtol=0, atol=1e-9)

    trains = spike_trains(plain, x)[first].numpy()  # (T, B, C, H, W)
    spikes = trains.mean(0)
    assert (plain.sites[first].start, plain.sites[second].start) == (0, start)
    times = (3, 4) if start else (2, 3)
    early = [trains[:t].sum(0) / T - (t - start) / (T - start) * spikes for t in times]
    weight, bias = (plain.graph.tensors[k].numpy() for k in (conv.op.weight, conv.op.bias))
    z = model[:3](x).detach().numpy()
    P, *too_early = (windows(s, conv.op, weight.shape[2:]) for s in (spikes, *early))  # (B, positions, C, kh, kw)
    places = [np.arange(P.shape[1]).reshape(z.shape[2:])[t % 2 :: 2, t % 2 :: 2].ravel() for t in times]
    too_early = [p[:, some] for p, some in zip(too_early, places, strict=True)]  # at every second position
    outputs, groups = len(weight) // conv.op.groups, conv.op.groups
    for g in range(groups):
        own = slice(g * weight.shape[1], (g + 1) * weight.shape[1])
        mine, *uneven = (p[:, :, own].reshape(-1, weight[0].size) for p in (P, *too_early))
        w = weight[g * outputs : (g + 1) * outputs].reshape(outputs, -1).T
        channels = slice(g * outputs, (g + 1) * outputs)
        target = z[:, channels].reshape(len(z), outputs, -1).transpose(0, 2, 1).reshape(-1, outputs)
        current = mine @ w + bias[channels]
        theta = plain.sites[second].threshold.reshape(-1).numpy()[channels] * (T - start) / T  # the most they can fire
        D = target - current
        if masked:
            D = np.where(target < 0, np.minimum(-current, 0), D)
            D = np.where((target > theta) & (current > theta), 0, D)
        share = np.sqrt(even * len(mine) / sum(map(len, uneven)))
        delta, shift = ridge(mine, D, [(share * p, -share * p @ w) for p in uneven])
        found = fitted.graph.tensors[conv.op.weight].numpy()[channels].reshape(outputs, -1).T - w
        np.testing.assert_allclose(found, delta, rtol=1e-6, atol=1e-9)
        moved = fitted.sites[second].bias.reshape(-1).numpy()[channels]
        np.testing.assert_allclose(moved, shift, rtol=1e-6, atol=1e-9)


class Residual(nn.Module):
    """Two layers of neurons; a shortcut around the second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return (self.second(y) + y).relu().flatten(1)


def textbook(op: Conv | Linear, weight: Tensor, x: Tensor, lacking: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """ΔW, as (inputs, outputs), and Δb, for mean inputs x and what the ANN has more behind the layer."""
    if isinstance(op, Linear):
        return ridge(x.numpy(), lacking.numpy())
    P = windows(x.numpy(), op, weight.shape[2:]).reshape(-1, weight[0].numel())
    return ridge(P, lacking.flatten(2).transpose(1, 2).flatten(0, 1).numpy())


def fitted_to_the_mean(model: nn.Module, x: Tensor) -> tuple[sc.SpikingNetwork, list[Tensor], list[Conv | Linear]]:
    """The network, the mean spikes of its layers, and what has weights in it, in order."""
    step = sc.ClosedFormWeights(ridge=RIDGE, masked=False, even=0.0)
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (HALF, step))
    snn = sc.convert(shell(capture(model, (x[:2],))), [x], T, recipe)
    spikes = [train.mean(0) for train in spike_trains(snn, x).values()]
    return snn, spikes, [n.op for n in snn.graph.nodes if isinstance(n.op, Conv | Linear)]


def assert_fitted(snn: sc.SpikingNetwork, op: Conv | Linear, layer: Any, delta: np.ndarray) -> None:
    found = (snn.graph.tensors[op.weight] - layer.weight.detach()).flatten(1).T
    assert found.abs().max() > 1e-4
    np.testing.assert_allclose(found, delta, rtol=1e-6, atol=1e-9)


def test_linear_layers_and_the_classifier_get_the_textbook_solution() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)).double()
    x = torch.randn(40, 6).double()
    snn, spikes, (_, *ops) = fitted_to_the_mean(model, x)
    for op, layer, s, site in zip(ops, (model[2], model[4]), spikes, list(snn.sites.values())[1:], strict=True):
        z = model[: list(model).index(layer) + 1](x)
        delta, shift = textbook(op, layer.weight, s, (z - layer(s)).detach())
        assert_fitted(snn, op, layer, delta)
        np.testing.assert_allclose(site.bias, shift, rtol=1e-6, atol=1e-9)


def test_a_layer_without_neurons_behind_it_gets_the_textbook_solution_and_keeps_its_own_bias() -> None:
    """A linear bottleneck: its own output is its target, and the next layer is fitted to what it then gives."""
    torch.manual_seed(5)
    layers = (nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten()).double()
    x = torch.randn(7, 2, 8, 7).double()
    snn, (s, _), (_, narrow, wide) = fitted_to_the_mean(model, x)
    delta, shift = textbook(narrow, model[2].weight, s, (model[:3](x) - model[2](s)).detach())
    assert_fitted(snn, narrow, model[2], delta)
    own = snn.graph.tensors[narrow.bias] - model[2].bias.detach()
    np.testing.assert_allclose(own, shift, rtol=1e-6, atol=1e-9)
    weight = model[2].weight.detach() + torch.from_numpy(delta.T).reshape_as(model[2].weight)
    between = torch.nn.functional.conv2d(s, weight, model[2].bias.detach() + torch.from_numpy(shift))
    delta, shift = textbook(wide, model[3].weight, between, (model[:4](x) - model[3](between)).detach())
    assert_fitted(snn, wide, model[3], delta)
    np.testing.assert_allclose(list(snn.sites.values())[1].bias.flatten(), shift, rtol=1e-6, atol=1e-9)


def test_a_convolution_beside_a_shortcut_makes_good_for_both() -> None:
    """Its target lies behind the sum: what lacks in the shortcut is its to correct as well."""
    torch.manual_seed(6)
    model, x = Residual().double(), torch.randn(7, 2, 8, 7).double()
    snn, (s, _), (_, second) = fitted_to_the_mean(model, x)
    y = model.first(x).relu()
    lacking = (model.second(y) + y) - (model.second(s) + s)
    delta, shift = textbook(second, model.second.weight, s, lacking.detach())
    assert_fitted(snn, second, model.second, delta)
    np.testing.assert_allclose(list(snn.sites.values())[1].bias.flatten(), shift, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (nn.Conv1d(2, 6, 3), nn.Conv1d(6, 4, 3, stride=2, padding=1), (11,)),
        (nn.Conv1d(2, 6, 3), nn.Conv1d(6, 4, 2, dilation=3), (11,)),
        (nn.Conv3d(2, 3, 3), nn.Conv3d(3, 4, (2, 1, 3), padding=(1, 0, 0), stride=(1, 2, 1)), (4, 5, 6)),
    ],
    ids=["strided, 1-D", "dilated, 1-D", "3-D"],
)
def test_convolutions_in_one_and_three_dimensions_get_the_textbook_solution(
    first: nn.Module, second: nn.Module, size: tuple[int, ...]
) -> None:
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten()).double()
    x = torch.randn(30, 2, *size, generator=torch.Generator().manual_seed(1)).double()
    snn, (s, _), (_, op) = fitted_to_the_mean(model, x)
    delta, shift = textbook(op, second.weight, s, (model[:3](x) - second(s)).detach())
    assert_fitted(snn, op, second, delta)
    np.testing.assert_allclose(list(snn.sites.values())[1].bias.flatten(), shift, rtol=1e-6, atol=1e-9)


class Mixer(nn.Module):
    """A sum of a convolution, whose channels are the first axis, and of a linear layer, whose are the last."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.across, self.last = nn.Conv1d(tokens, tokens, 1), nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last((self.across(y) + self.second(y)).relu().mean(1))


@pytest.mark.parametrize(("tokens", "features"), [(6, 10), (8, 8)])
def test_each_layer_of_a_sum_moves_its_own_channels(tokens: int, features: int, tmp_path: Any) -> None:
    torch.manual_seed(7)
    model, x = Mixer(tokens, features).double(), torch.randn(40, tokens, features).double()
    snn, (s, _), (_, *ops, _) = fitted_to_the_mean(model, x)
    y = model.first(x).relu()
    lacking = (model.across(y) + model.second(y) - model.across(s) - model.second(s)).detach()
    total = torch.zeros(tokens, features).double()
    for op in ops:
        layer, axis = (model.across, 0) if isinstance(op, Conv) else (model.second, 1)
        places = (lambda v: v.transpose(1, 2).flatten(0, 1)) if axis == 0 else (lambda v: v.flatten(0, 1))
        delta, shift = ridge(places(s).numpy(), places(lacking).numpy())
        assert_fitted(snn, op, layer, delta)
        more = places(s) @ torch.from_numpy(delta) + torch.from_numpy(shift)
        lacking = lacking - (more.unflatten(0, (40, -1)).transpose(1, 2) if axis == 0 else more.unflatten(0, (40, -1)))
        total += torch.from_numpy(shift).unsqueeze(1 - axis)
    site = list(snn.sites.values())[1]
    torch.testing.assert_close(site.bias.expand_as(total), total, rtol=1e-6, atol=1e-9)
    snn.save(tmp_path / "net.spk")
    assert torch.equal(sc.load(tmp_path / "net.spk")(x), snn(x))
    snn.float()
    found = [snn(x.float()) for snn.engine in ("dense", "event", "auto")]
    torch.testing.assert_close(found, [found[0]] * 3, rtol=1e-4, atol=1e-4)


def test_what_is_taken_off_a_shortcut_answers_for_itself_alone() -> None:
    """In y − conv(y) a correction of the convolution has the wrong sign behind the sum, so it is fitted in front."""
    torch.manual_seed(6)
    model, x = Residual().double(), torch.randn(7, 2, 8, 7).double()
    model.forward = lambda x: (
        (  # type: ignore[method-assign]
            (y := model.first(x).relu()) - model.second(y)
        )
        .relu()
        .flatten(1)
    )
    snn, (s, _), (_, second) = fitted_to_the_mean(model, x)
    lacking = (model.second(model.first(x).relu()) - model.second(s)).detach()
    delta, shift = textbook(second, model.second.weight, s, lacking)
    assert_fitted(snn, second, model.second, delta)
    moved = snn.graph.tensors[second.bias] - model.second.bias.detach()
    np.testing.assert_allclose(moved, shift, rtol=1e-6, atol=1e-9)


def test_weights_that_serve_two_nodes_stay() -> None:
    """A captured layer that is called twice has weights for each call; a file may hold a graph in which it has not."""
    x = inputs("shared_conv", 12)
    graph = captured("shared_conv")
    first, second = [n for n in graph.nodes if isinstance(n.op, Conv)][1:3]
    both = Graph([replace(n, op=first.op) if n is second else n for n in graph.nodes], graph.tensors)
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (HALF, sc.ClosedFormWeights()))
    for known, changes in ((graph, True), (both, False)):
        snn = sc.convert(shell(known), [x], 4, recipe)
        same = torch.equal(snn.graph.tensors[first.op.weight], known.tensors[first.op.weight])
        assert same != changes


def test_rows_for_even_currents_are_of_every_second_chunk_and_of_no_layer_with_a_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spikecal.replay.chunk_of_images", lambda *_, **__: 10)
    seen: list[tuple[str, int, int]] = []
    means_until = Layer.means_until

    def watched(layer: Layer, step: int, part: slice) -> dict[str, Tensor]:
        if step < layer.T:
            seen.append((layer.name, step, part.start))
        return means_until(layer, step, part)

    monkeypatch.setattr(Layer, "means_until", watched)
    graph, x = shell(captured("resnet_block")), inputs("resnet_block", 40)
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (HALF, sc.ClosedFormWeights()))
    snn = sc.convert(graph, [x], 6, recipe)
    assert {(step, start) for _, step, start in seen} == {(2, 0), (2, 20), (4, 0), (4, 20)}
    assert {name for name, _, _ in seen} == {node.name for node in snn.graph.neurons}
    seen.clear()
    sc.convert(graph, [x], 6, replace(recipe, delay=1))
    assert not seen


def mean_currents(snn: sc.SpikingNetwork, x: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([y.mean(0).reshape(y.shape[1], -1) for y in snn.currents(x)], 1)


def test_the_classifier_is_fitted_too() -> None:
    """A linear layer with no neurons behind it: the error of the output falls, the more the smaller the ridge."""
    x = inputs("mlp", 64)
    exact = torch.cat([y.flatten(1) for y in run_ann(captured("mlp"), x)], 1)

    def error(*steps: Any) -> float:
        snn = sc.convert(shell(captured("mlp")), [x], 4, sc.Recipe(sc.MMSE(per_channel=True), (HALF, *steps)))
        return float((mean_currents(snn, x) - exact).square().mean())

    assert error(sc.ClosedFormWeights(ridge=1e-4)) < error(sc.ClosedFormWeights(ridge=1.0)) < error()


@pytest.mark.parametrize("name", [*zoo.ZOO, *zoo.MAXPOOL])
def test_every_net_stays_finite(name: str) -> None:
    """Dead channels, fewer samples than unknowns, shared weights, residual streams: whatever the zoo holds."""
    x = inputs(name, 12)
    steps = (HALF, sc.ClosedFormWeights(), sc.PotentialCalibration())
    snn = sc.convert(shell(captured(name)), [x], 4, sc.Recipe(sc.MMSE(per_channel=True), steps))
    assert all(torch.isfinite(t).all() for t in snn.graph.tensors.values())
    assert torch.isfinite(mean_currents(snn, x)).all()


def test_dead_inputs_get_no_weights() -> None:
    model = two_layers(nn.Conv2d(6, 4, 3), nn.Flatten())
    model[0].weight.data.zero_()
    model[0].bias.data.fill_(-1.0)  # nobody in the first layer ever fires
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    snn = sc.convert(shell(capture(model, (x[:2],))), [x], T, sc.Recipe(sc.MMSE(), (HALF, sc.ClosedFormWeights())))
    weights = [snn.graph.tensors[n.op.weight] for n in snn.graph.nodes if isinstance(n.op, Conv)]
    assert torch.equal(weights[1], model[2].weight.data)


@pytest.mark.filterwarnings("ignore:all 64 calibration images are the same")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", ["best", "pipelined"])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_images_that_do_not_differ_explain_nothing(scale: float, recipe: str, dtype: torch.dtype) -> None:
    """What is left of variances then is rounding, which no weights should be fitted to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 5)).to(dtype)
    x = (scale * torch.rand(1, 20, dtype=dtype)).repeat(64, 1)
    snn = sc.convert(model, [x], 4, recipe)
    weights = [snn.graph.tensors[n.op.weight] for n in snn.graph.nodes if isinstance(n.op, Linear)]
    assert all(torch.equal(w, model[2 * i].weight) for i, w in enumerate(weights))


def test_the_chunks_of_images_do_not_matter() -> None:
    x = inputs("resnet_block", 24)
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (HALF, sc.ClosedFormWeights()))
    whole, parts = (sc.convert(shell(captured("resnet_block")), [x], 4, recipe, memory=m) for m in ("1GiB", "2MB"))
    names = [n.op.weight for n in whole.graph.nodes if isinstance(n.op, Conv | Linear)]
    for name in names:
        torch.testing.assert_close(whole.graph.tensors[name], parts.graph.tensors[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 400), (400, 1), (2, 200), (20, 20)])
def test_maps_are_thinned_along_their_long_axes(shape: tuple[int, int]) -> None:
    """At about as many positions as wanted, in every turn, and never at none."""
    torch.manual_seed(0)
    model, counts = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU()).double(), []
    solve = closed_form._Moments.solve

    def watch(moments: closed_form._Moments, *args: Any) -> Any:
        counts.append(moments.sums[0][0])
        return solve(moments, *args)

    x = torch.randn(40, 1, *shape).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closed_form._Moments, "solve", watch)
        patch.setattr("spikecal.replay.chunk_of_images", lambda *_, **__: 4)
        sc.convert(model, [x], T, sc.Recipe(sc.MMSE(), (sc.ClosedFormWeights(rows=2000),)))
    assert len(counts) == 2
    assert all(1600 <= n <= 2800 for n in counts)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("taps", [5, 191, 192, 700])
def test_of_a_symmetric_matrix_half_is_summed_and_all_is_there(taps: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    moments = closed_form._Moments(torch.zeros(3 * groups, taps, dtype=torch.float64), groups)
    parts = [
        (torch.randn(4, groups, taps, 50, generator=generator), torch.randn(4, groups, 3, 50, generator=generator))
        for _ in range(2)
    ]
    for p, d in parts:
        moments.add(p.double(), d.double())
    moments.centre()
    assert (len(moments.bands) > 1) == (taps > 191)
    for g in range(groups):
        P, D = (torch.cat([part[k][:, g].transpose(1, 2).flatten(0, 1) for part in parts]).numpy() for k in (0, 1))
        P, D = (a.astype(float) - a.astype(float).mean(0) for a in (P, D))
        np.testing.assert_allclose(moments.gram[g].numpy(), P.T @ P / len(P), atol=1e-12)
        np.testing.assert_allclose(moments.cross[g].numpy(), P.T @ D / len(P), atol=1e-12)


def test_of_several_ridges_the_one_that_is_right_for_the_other_half_is_taken() -> None:
    """By plain loops: fitted on one half of the samples, judged on the other, both in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    x = torch.randn(40, 6).double()
    ridges = (0.001, 0.3, 100.0)
    graph = shell(capture(model, (x[:2],)))

    def fitted(*steps: sc.ClosedFormWeights) -> sc.SpikingNetwork:
        return sc.convert(graph, [x], T, sc.Recipe(sc.MMSE(per_channel=True), (HALF, *steps), calibration_images=40))

    plain = fitted()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    spikes = spike_trains(plain, x[order])[plain.graph.neurons[0].name].mean(0).numpy()  # (B, 12)
    D = (model(x[order]) - model[2](torch.from_numpy(spikes))).detach().numpy()
    errors = {}
    for ridge_ in ridges:
        errors[ridge_] = 0.0
        for here, there in ((slice(0, 20), slice(20, 40)), (slice(20, 40), slice(0, 20))):
            P, d = (a[here] - a[here].mean(0) for a in (spikes, D))
            strength = ridge_ * (1 + 30 * 12 / 40) * (P**2).mean(0).mean() * len(P)
            w = np.linalg.solve(P.T @ P + strength * np.eye(12), P.T @ d)
            P, d = (a[there] - a[there].mean(0) for a in (spikes, D))
            errors[ridge_] += ((d - P @ w) ** 2).sum()
    best = min(ridges, key=errors.__getitem__)
    chosen, alone = fitted(sc.ClosedFormWeights(ridge=ridges)), fitted(sc.ClosedFormWeights(ridge=best))
    others = [fitted(sc.ClosedFormWeights(ridge=r)) for r in ridges if r != best]
    torch.testing.assert_close(chosen(x), alone(x))
    assert not any(torch.allclose(chosen(x), other(x)) for other in others)


def test_one_image_has_no_other_half() -> None:
    x = torch.randn(1, 2, 8, 7).double()
    graph = shell(capture(two_layers(nn.Conv2d(6, 4, 3), nn.Flatten()), (x.repeat(2, 1, 1, 1),)))
    found, alone = (
        sc.convert(graph, [x], T, sc.Recipe(sc.MMSE(), (HALF, sc.ClosedFormWeights(ridge=ridge))))(x)
        for ridge in ((0.1, 1.0), 0.1)
    )
    torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_ridges_are_judged_with_the_rows_for_even_currents(share: float) -> None:
    """On numbers for which either half alone, or leaving those rows out, would choose otherwise now and then."""
    rng, chosen = np.random.default_rng(0), []
    for _ in range(30):
        P, D, R = (rng.standard_normal((20, n)) for n in (4, 3, 4))
        true = rng.standard_normal((4, 3)) * rng.uniform(0, 0.6)
        D, wanted = D + P @ true, R @ (true + 0.2 * rng.standard_normal((4, 3)))
        ridges = (0.01, 0.3, 10.0)
        errors = dict.fromkeys(ridges, 0.0)
        for here, there in ((slice(0, 10), slice(10, 20)), (slice(10, 20), slice(0, 10))):
            p, d, r, e = (a - a.mean(0) for a in (P[here], D[here], R, wanted))
            q, f = (a[there] - a[there].mean(0) for a in (P, D))
            for ridge_ in ridges:
                gram = p.T @ p / 10 + share * r.T @ r / 20 + ridge_ * (p**2).mean() * np.eye(4)
                w = np.linalg.solve(gram, p.T @ d / 10 + share * r.T @ e / 20)
                errors[ridge_] += ((f - q @ w) ** 2).sum()
        weight = torch.zeros(3, 4, dtype=torch.float64)
        folds, uneven = [closed_form._Moments(weight, 1) for _ in range(2)], closed_form._Moments(weight, 1)
        for moments, p, d in ((folds[0], P[:10], D[:10]), (folds[1], P[10:], D[10:]), (uneven, R, wanted)):
            moments.add(torch.from_numpy(p.T.copy())[None, None], torch.from_numpy(d.T.copy())[None, None])
        before = uneven.gram.clone()
        chosen.append(closed_form._best_ridge(folds, ridges, uneven if share else None, share))
        assert chosen[-1] == min(ridges, key=errors.__getitem__)
        torch.testing.assert_close(uneven.gram, before, rtol=0, atol=0)  # they are used once more
    assert len(set(chosen)) == 3


@pytest.mark.parametrize(
    "bad", [{"ridge": 0.0}, {"ridge": ()}, {"ridge": (0.1, -1.0)}, {"ridge": float("nan")}, {"even": -1.0}, {"rows": 0}]
)
def test_values_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(sc.CalibrationError, match="a ridge above 0"):
        sc.ClosedFormWeights(**bad)


def test_what_fires_is_fitted_by_the_textbook_too() -> None:
    """With `fired` the residual is that of the spikes: x − s̄, as the neurons fire before the step."""
    model = two_layers(nn.Conv2d(6, 4, 3), nn.Flatten())
    x = torch.randn(7, 2, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    steps = (HALF, sc.ClosedFormWeights(ridge=RIDGE, fired=True, even=0.0))
    snn = sc.convert(shell(capture(model, (x[:2],))), [x], T, sc.Recipe(sc.MMSE(per_channel=True), steps))
    first, second = (n.name for n in snn.graph.neurons)
    spikes, site = spike_trains(snn, x)[first], snn.sites[second]  # (T, B, C, H, W)
    current = model[2](spikes.flatten(0, 1)).detach().unflatten(0, (T, -1))
    fired = integrate_and_fire(current, site.threshold, site.v0)[0].mean(0)
    D = (model[:4](x).detach() - fired).flatten(2).transpose(1, 2).flatten(0, 1).numpy()
    conv = next(n.op for n in snn.graph.nodes if n.name == snn.graph.by_name[second].inputs[0])
    P = windows(spikes.mean(0).numpy(), conv, (3, 3)).reshape(len(D), -1)
    delta, shift = ridge(P, D)
    found = (snn.graph.tensors[conv.weight] - model[2].weight).detach().flatten(1).T
    np.testing.assert_allclose(found, delta, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(site.bias.flatten(), shift, rtol=1e-6, atol=1e-9)


def test_a_layer_whose_gram_matrix_has_no_room_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 5)).eval()
    x = torch.rand(16, 8)
    with pytest.warns(sc.NoEffectWarning, match=r"the weights of '3' stay as they are: .* 400 inputs needs 10 MiB"):
        snn = sc.convert(model, x, 4, sc.best(), memory="8MB")
    weights = [snn.graph.tensors[n.op.weight] for n in snn.graph.nodes if isinstance(n.op, Linear)]
    assert torch.equal(weights[1], model[3].weight)


def test_large_maps_are_fitted_on_some_positions_of_some_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many as `rows`, whatever memory there is."""
    samples: list[int] = []
    solve = closed_form._Moments.solve

    def watch(moments: closed_form._Moments, *args: object) -> object:
        samples.append(moments.sums[0][0])
        return solve(moments, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(closed_form._Moments, "solve", watch)
    model = two_layers(nn.Conv2d(6, 4, 3, padding=1), nn.Flatten())
    x = torch.randn(40, 2, 16, 16, dtype=torch.float64)
    for memory in ("200MB", "12MB"):
        sc.convert(model, [x], T, sc.Recipe(sc.MMSE(), (sc.ClosedFormWeights(rows=256),)), memory=memory)
    assert samples[: len(samples) // 2] == samples[len(samples) // 2 :]
    assert max(samples) <= 2 * 256
    samples.clear()
    tokens = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Flatten()).double()
    for memory in ("200MB", "1MB"):
        x = torch.randn(40, 64, 6).double()
        sc.convert(tokens, [x], T, sc.Recipe(sc.MMSE(), (sc.ClosedFormWeights(rows=256),)), memory=memory)
    assert len(samples) == 4
    assert all(200 < n < 300 for n in samples)
