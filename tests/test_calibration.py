"""Calibration steps: equal to the paper's equations on dense nets, and of use on all others."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
import spikecal as sc
from helpers import Given, captured, converted, dense_graph, dense_net, distance, inputs, leaves, potentials_of, shell
from spikecal.ops import Conv, Linear, Output
from spikecal.replay import Replay, initial_site
from spikecal.simulation import Readout
from zoo import make

SIZES, THETAS, T = (6, 9, 7, 4), (1.3, 0.9), 6


@pytest.fixture(scope="module")
def layers() -> list[tuple[Any, Any]]:
    return dense_net(SIZES)[1]


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def calibrated(x: Tensor, *steps: Any, thetas: Any = THETAS) -> sc.SpikingNetwork:
    """The dense net with given thresholds, so that no current ties with one, after these steps."""
    return sc.convert(shell(dense_graph(SIZES)), x, T, sc.Recipe(Given(thetas), steps))


# ---------------------------------------------------------------------- against the reference


def test_bias_calibration_equals_the_reference(layers: Any, x: Tensor) -> None:
    snn = calibrated(x, sc.BiasCalibration())
    expected = reference.bias_calibration(layers, x.numpy(), T, THETAS, [0.0, 0.0])
    for site, bias in zip(snn.sites.values(), expected, strict=True):
        np.testing.assert_allclose(site.bias, bias, rtol=0, atol=1e-12)


def test_bias_calibration_behind_an_initial_potential_equals_the_reference(layers: Any, x: Tensor) -> None:
    snn = calibrated(x, sc.InitialPotential(0.25), sc.BiasCalibration())
    expected = reference.bias_calibration(layers, x.numpy(), T, THETAS, [0.25 * theta for theta in THETAS])
    for site, bias in zip(snn.sites.values(), expected, strict=True):
        np.testing.assert_allclose(site.bias, bias, rtol=0, atol=1e-12)


def test_bias_calibration_with_thresholds_of_their_own_for_channels(layers: Any, x: Tensor) -> None:
    thetas = [np.linspace(0.7, 1.6, 9), np.linspace(1.1, 0.4, 7)]
    snn = calibrated(x, sc.BiasCalibration(), thetas=thetas)
    expected = reference.bias_calibration(layers, x.numpy(), T, thetas, [0.0, 0.0])
    for site, bias in zip(snn.sites.values(), expected, strict=True):
        np.testing.assert_allclose(site.bias, bias, rtol=0, atol=1e-12)


def test_potential_calibration_equals_the_reference(layers: Any, x: Tensor) -> None:
    snn = calibrated(x, sc.InitialPotential(), sc.PotentialCalibration())
    expected = reference.potential_calibration(layers, x.numpy(), T, THETAS, [0.5 * theta for theta in THETAS])
    for site, v0 in zip(potentials_of(snn), expected, strict=True):
        np.testing.assert_allclose(site.v0, v0, rtol=0, atol=1e-12)


def test_potential_calibration_behind_a_bias_shift_equals_the_reference(layers: Any, x: Tensor) -> None:
    snn = calibrated(x, sc.BiasShift(), sc.PotentialCalibration())
    biases = [reference.bias_shift(theta, T) for theta in THETAS]
    expected = reference.potential_calibration(layers, x.numpy(), T, THETAS, [0.0, 0.0], biases)
    for site, v0, bias in zip(potentials_of(snn), expected, biases, strict=True):
        np.testing.assert_allclose(site.v0, v0, rtol=0, atol=1e-12)
        np.testing.assert_allclose(site.bias, bias)


def test_potential_calibration_gives_an_output_the_error_as_bias(x: Tensor) -> None:
    snn = calibrated(x, sc.PotentialCalibration())
    plain = calibrated(x, sc.PotentialCalibration())
    plain.sites["output"] = Readout(torch.zeros(1, dtype=torch.float64))
    expected = (plain.ann(x) - plain(x)).mean(0)
    torch.testing.assert_close(snn.sites["output"].bias, expected, rtol=0, atol=1e-12)


def linear_sgd(W: Any, b: Any, s: Any, target: Any, step: sc.WeightCalibration) -> Any:
    """Eq. 17 where no neuron stands: least squares by SGD."""
    W, buffer = W.copy(), np.zeros_like(W)
    for k, batch in enumerate(step.batches(len(s))):
        error = s[batch] @ W.T + b - target[batch]
        buffer = step.momentum * buffer + 2 / len(batch) * error.T @ s[batch]
        W = W - step.lr * (1 + math.cos(math.pi * k / step.iterations)) / 2 * buffer
    return W


@pytest.mark.parametrize("batch_size", [8, 64])  # 64: all images at once
@pytest.mark.parametrize("v0", [0.0, 0.2])
@torch.no_grad()
def test_weights_calibration_equals_the_reference(layers: Any, x: Tensor, batch_size: int, v0: float) -> None:
    """Layer by layer, each on the mean spikes of the calibrated layers in front; the readout too."""
    step = sc.WeightCalibration(iterations=40, lr=5e-3, momentum=0.8, batch_size=batch_size, seed=2)
    graph = dense_graph(SIZES)
    replay = Replay(graph, [x], T, 10**9)
    for segment, theta in zip(replay.segments, (*THETAS, None), strict=True):
        threshold = None if theta is None else torch.tensor([theta], dtype=torch.float64)
        layer = replay.layer(segment, initial_site(segment.site, threshold, graph))
        sc.InitialPotential(v0).apply(layer)
        step.apply(layer)
        replay.finish(layer)
    ours = [replay.graph.tensors[n.op.weight].numpy() for n in graph.nodes if isinstance(n.op, Linear)]

    images, ann = x.numpy(), reference.ann_forward(layers, x.numpy())
    neurons = [{"threshold": theta, "v0": v0 * theta} for theta in THETAS]
    batches = [batch.numpy() for batch in step.batches(len(x))]
    done = list(layers)
    for i, (W, b) in enumerate(layers):
        trains, _ = reference.snn_forward(done, neurons, images, T)
        s = images if i == 0 else trains[i - 1].mean(0)
        if i < len(THETAS):
            W = reference.weight_calibration_sgd(
                W, b, s, ann[i], T, THETAS[i], v0 * THETAS[i], step.lr, step.momentum, step.iterations, batches
            )
        else:
            W = linear_sgd(W, b, s, ann[i], step)
        assert not np.allclose(W, layers[i][0], atol=1e-4)
        np.testing.assert_allclose(ours[i], W, rtol=0, atol=1e-9)
        done[i] = (W, b)


def test_bias_shift_and_initial_potential_are_shares_of_the_threshold(x: Tensor) -> None:
    for fraction in (0.5, 0.25):
        shifted = calibrated(x, sc.BiasShift(fraction))
        started = calibrated(x, sc.InitialPotential(fraction))
        for theta, a, b in zip(THETAS, potentials_of(shifted), potentials_of(started), strict=True):
            np.testing.assert_allclose(a.bias, fraction * theta / T)
            assert float(a.v0.abs().max()) == float(b.bias.abs().max()) == 0
            np.testing.assert_allclose(b.v0, fraction * theta)
        assert float(shifted.sites["output"].bias.abs().max()) == 0
    np.testing.assert_allclose(potentials_of(calibrated(x, sc.BiasShift()))[0].bias, reference.bias_shift(THETAS[0], T))


def test_steps_add_up_in_their_order(x: Tensor) -> None:
    twice = calibrated(x, sc.BiasShift(), sc.BiasShift(0.25))
    np.testing.assert_allclose(potentials_of(twice)[0].bias, 0.75 * THETAS[0] / T)


# ---------------------------------------------------------------------- on other nets


OUTPUTS = ["mlp", "resnet_block", "unet", "tokens", "two_inputs_two_outputs", "dict_output", "relu_output"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_bias_calibration_leaves_no_mean_error_at_outputs(name: str) -> None:
    snn, images = converted(name), inputs(name, 16)  # the images of the calibration
    for y, z in zip(leaves(snn(*images)), leaves(snn.ann(*images)), strict=True):
        error = (z - y).transpose(0, 1).flatten(1).mean(1)  # of each channel
        assert float(error.abs().max()) < 1e-9


def test_channels_behind_a_linear_layer_are_on_the_last_axis() -> None:
    """The output is 2 tokens of 3 channels: bias calibration corrects channels, not tokens."""
    snn, images = converted("mlp_of_matrices"), inputs("mlp_of_matrices", 16)
    assert snn.sites["output"].bias.shape == (1, 3)
    error = snn.ann(*images) - snn(*images)  # (B, 2, 3)
    assert float(error.mean((0, 1)).abs().max()) < 1e-9
    assert float(error.mean((0, 2)).abs().max()) > 1e-3


@pytest.mark.parametrize("name", OUTPUTS)
def test_potential_calibration_leaves_no_mean_error_at_outputs(name: str) -> None:
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (sc.PotentialCalibration(),))
    snn, images = converted(name, recipe), inputs(name, 16)
    for y, z in zip(leaves(snn(*images)), leaves(snn.ann(*images)), strict=True):
        assert float((z - y).mean(0).abs().max()) < 1e-9  # of each element


ADVANCED = sc.Recipe(sc.MMSE(per_channel=True), (sc.WeightCalibration(iterations=60, lr=3e-3),))


def test_calibrated_weights_are_the_ones_that_run() -> None:
    """Also of layers with no activation behind them: the downsample conv and the classifier."""
    snn, images = converted("resnet_block", ADVANCED), inputs("resnet_block", 4, seed=7)
    before = snn(*images)
    for name in ("down", "fc"):
        weight = snn.graph.by_name[name].op.weight
        assert not torch.equal(snn.graph.tensors[weight], snn.source.tensors[weight])
        original = {weight: snn.source.tensors[weight]}
        undone = sc.SpikingNetwork(snn.graph.with_tensors(original), snn.source, snn.sites, snn.T, snn.recipe, {})
        assert distance([undone(*images)], [before]) > 1e-4


@pytest.mark.parametrize("name", ["resnet_block", "linear_bottleneck", "preactivation"])
def test_twin_keeps_the_original_weights(name: str) -> None:
    snn, images = converted(name, ADVANCED), inputs(name, 3, seed=7)
    changed = [k for k, t in snn.graph.tensors.items() if not torch.equal(t, snn.source.tensors[k])]
    assert len(changed) >= 2
    assert distance(leaves(snn.ann(*images)), leaves(make(name).double()(*images))) < 1e-9


@pytest.mark.parametrize("name", ["mlp", "resnet_block", "linear_bottleneck"])
def test_weights_calibration_lowers_the_error(name: str) -> None:
    without = converted(name, sc.Recipe(ADVANCED.threshold))
    output = without.graph.outputs[0].name
    assert converted(name, ADVANCED).statistics[output].error < without.statistics[output].error


def test_a_shared_conv_is_calibrated_at_each_call_by_itself() -> None:
    graph = converted("shared_conv", ADVANCED).graph
    first, second = (n.op.weight for n in graph.nodes if isinstance(n.op, Conv) and n.name.startswith("shared"))
    assert not torch.equal(graph.tensors[first], graph.tensors[second])
    source = converted("shared_conv", ADVANCED).source
    assert torch.equal(source.tensors[first], source.tensors[second])


def test_a_learning_rate_far_too_high_changes_nothing_and_says_so() -> None:
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (sc.WeightCalibration(iterations=20, lr=1e6),))
    with pytest.warns(sc.NoEffectWarning, match=r"change it by .* try a smaller lr than 1e\+06") as caught:
        snn = sc.convert(shell(captured("mlp")), [inputs("mlp", 16)], 4, recipe)
    assert [str(w.message).split("'")[1] for w in caught] == ["relu", "relu@2", "output"]
    assert all(torch.equal(t, snn.source.tensors[key]) for key, t in snn.graph.tensors.items())


def test_a_change_too_small_to_show_in_the_error_is_still_told() -> None:
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (sc.WeightCalibration(iterations=1, lr=1e-30),))
    with pytest.warns(sc.NoEffectWarning, match=r"would not lower the error of \S+, but change it by \+?0 %, so"):
        sc.convert(shell(captured("mlp")), [inputs("mlp", 16)], 4, recipe)


def test_no_iterations_change_nothing() -> None:
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (sc.WeightCalibration(iterations=0),))
    snn = sc.convert(shell(captured("mlp")), [inputs("mlp", 16)], 4, recipe)
    assert all(torch.equal(t, snn.source.tensors[key]) for key, t in snn.graph.tensors.items())


@pytest.mark.parametrize(("images", "size"), [(40, 8), (40, 7), (5, 8), (1, 32)])
def test_batches_go_through_all_images_before_any_comes_again(images: int, size: int) -> None:
    step = sc.WeightCalibration(iterations=30, batch_size=size, seed=3)
    batches = [batch.tolist() for batch in step.batches(images)]
    assert [b.tolist() for b in step.batches(images)] == batches
    assert len(batches) == 30
    assert all(len(batch) == min(size, images) for batch in batches)
    epoch = images // min(size, images)
    for start in range(0, 30, epoch):
        seen = [i for batch in batches[start : start + epoch] for i in batch]
        assert len(set(seen)) == len(seen)
    if images > 8:
        other = sc.WeightCalibration(iterations=30, batch_size=size, seed=4)
        assert [b.tolist() for b in other.batches(images)] != batches


def test_calibration_sees_the_calibrated_layers_in_front(x: Tensor) -> None:
    """Algorithm 1: a correction of the first layer changes that of the second."""
    together = calibrated(x, sc.BiasCalibration()).sites

    class OnlySecond:
        def apply(self, layer: Any) -> None:
            if layer.segment.site.name != layer.graph.neurons[0].name:
                sc.BiasCalibration().apply(layer)

    alone = calibrated(x, OnlySecond()).sites
    second = list(together)[1]
    assert not torch.allclose(together[second].bias, alone[second].bias, atol=1e-3)


# ---------------------------------------------------------------------- the contract of every step, rule and recipe


def exported(method: str) -> list[type]:
    return [
        value
        for name in sc.__all__
        if inspect.isclass(value := getattr(sc, name)) and callable(getattr(value, method, None))
    ]


def brief(factory: Any) -> Any:
    """Made with its defaults, but of few iterations."""
    return factory(**({"iterations": 6} if "iterations" in inspect.signature(factory).parameters else {}))


CONTRACT = {
    **{step.__name__: sc.Recipe(sc.MMSE(per_channel=True), (brief(step),)) for step in exported("apply")},
    **{rule.__name__: sc.Recipe(rule()) for rule in exported("accumulator")},
    **{f"{rule.__name__} per channel": sc.Recipe(rule(per_channel=True)) for rule in exported("accumulator")},
    **{f"recipe {name}": brief(recipe) for name, recipe in sc.RECIPES.items()},
}


def test_the_contract_covers_what_there_is() -> None:
    assert {"BiasCalibration", "WeightCalibration", "MMSE", "Percentile", "recipe light", "recipe opt"} <= set(CONTRACT)
    assert len(exported("apply")) >= 5
    assert len(exported("accumulator")) >= 3


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("recipe", CONTRACT.values(), ids=CONTRACT)
@pytest.mark.parametrize("name", ["mlp", "resnet_block", "tokens", "two_inputs_two_outputs", "clipped_spellings"])
def test_contract_of_every_step_rule_and_recipe(name: str, recipe: sc.Recipe) -> None:
    """It converts, without NaN, deterministically, is written down and read back, and leaves the twin alone."""
    images, other = inputs(name, 12), inputs(name, 3, seed=7)
    read = sc.Recipe.from_json(recipe.to_json())
    assert read == recipe
    first = sc.convert(shell(captured(name)), [images], 5, recipe, seed=1)
    again = sc.convert(shell(captured(name)), [images], 5, read, seed=1)
    for y, z in zip(leaves(first.over_time(*other)), leaves(again.over_time(*other)), strict=True):
        assert bool(torch.isfinite(y).all())
        assert torch.equal(y, z)
    for node in first.graph.nodes:
        if node.is_site:
            site = first.sites[node.name]
            assert isinstance(site, Readout) == isinstance(node.op, Output)
            assert all(t.dtype == torch.float64 for t in site.tensors().values())
            assert all(
                torch.broadcast_shapes(t.shape[-len(node.shape) or None :], node.shape) == node.shape
                for t in site.tensors().values()
            )
    assert distance(leaves(first.ann(*other)), leaves(make(name).double()(*other))) < 1e-9
