"""Evaluation: every number equals what one computes by hand or by brute force."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

import spikecal as sc
from helpers import Given, converted, inputs, spike_trains, twin_of
from spikecal import layer_results, native
from spikecal.energy import LayerOperations
from spikecal.functional import integrate_and_fire
from spikecal.layer_results import ErrorParts, LayerError, error_steps
from spikecal.simulation import Neurons, run_ann
from spikecal.values import PackedSpikes, spikes_by_step


@pytest.fixture(scope="module")
def tiny() -> sc.SpikingNetwork:
    """Two neurons of threshold 1 that see the image itself, and the two classes see them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    for layer in (model[0], model[2]):
        layer.weight.data, layer.bias.data = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    x = torch.rand(4, 2, dtype=torch.float64)
    return sc.convert(model, x, T=4, recipe=sc.Recipe(Given([1.0]), name="by hand"))


X = torch.tensor([[1.0, 0.25], [0.2, 0.5], [0.0, 0.0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1])


def test_numbers_equal_those_computed_by_hand(tiny: sc.SpikingNetwork) -> None:
    """1.0 fires at every step, 0.25 at the last, 0.5 at every second, 0.2 and 0 never."""
    result = sc.evaluate(tiny, [(X, Y)])
    assert (result.images, result.T, result.recipe) == (3, 4, "by hand")
    assert result.accuracy_over_time == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert result.accuracy == result.ann_accuracy == pytest.approx(2 / 3)
    assert result.agreement_over_time == pytest.approx([2 / 3, 1, 1, 1])
    assert result.agreement == 1
    assert result.standard_error == pytest.approx(sqrt(3 / 5 * 2 / 5 / 3))  # as if of one more hit and one more miss
    (layer,) = result.layers
    assert (layer.name, layer.neurons, layer.dead_share) == ("1", 2, 0)
    assert (layer.threshold, layer.threshold_min, layer.threshold_max) == (1, 1, 1)
    assert layer.firing_rate == pytest.approx(7 / 24)
    assert layer.error == pytest.approx(0.2**2 / (1 + 0.25**2 + 0.2**2 + 0.5**2))


def test_a_neuron_that_never_fires_is_dead(tiny: sc.SpikingNetwork) -> None:
    (layer,) = sc.evaluate(tiny, [X[2:], X[1:2]]).layers
    assert layer.dead_share == 0.5
    (layer,) = sc.evaluate(tiny, [X[2:]]).layers
    assert (layer.dead_share, layer.firing_rate, layer.error) == (1, 0, 0)  # nothing to fire, nothing missed


def test_an_answer_is_final_no_earlier_than_there_is_one(tiny: sc.SpikingNetwork) -> None:
    """Until the first current has arrived, all scores are 0, and the first class would seem to be the answer."""
    recipe = sc.Recipe(Given([1.0]), delay=2)
    x = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.0, 0.0]], dtype=torch.float64)
    late = sc.convert(tiny, x, 4, recipe)
    assert not late.over_time(x)[:2].any()
    result = sc.evaluate(late, [x])
    assert result.final_steps == [3, 3, 6]  # the last image has no answer before it has to have one
    assert result.final_over_time == pytest.approx([0, 0, 2 / 3, 2 / 3, 2 / 3, 1])


RECIPES = {"light": sc.light(), "one threshold for a layer": sc.light(per_channel=False, pool_to_conv=True)}


@pytest.mark.filterwarnings("ignore:pool_to_conv:spikecal.NoEffectWarning")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["resnet_block", "dead_channels", "clipped_spellings", "conv3d_net"])
def test_numbers_equal_brute_force(name: str, recipe: sc.Recipe) -> None:
    snn, (x,) = converted(name, recipe), inputs(name, 11, seed=7)
    y = torch.randint(0, snn.graph.outputs[0].shape[0], (11,))
    result = sc.evaluate(snn, zip(x.split(4), y.split(4), strict=True))

    answers, ann = snn.over_time(x).argmax(-1), snn.ann(x).argmax(-1)  # (T, B), (B,)
    assert result.images == 11
    assert result.accuracy_over_time == pytest.approx([float((a == y).double().mean()) for a in answers])
    assert result.accuracy == result.accuracy_over_time[-1]
    assert result.ann_accuracy == pytest.approx(float((ann == y).double().mean()))
    assert result.agreement_over_time == pytest.approx([float((a == ann).double().mean()) for a in answers])
    assert result.agreement == result.agreement_over_time[-1]

    assert result.final_over_time == pytest.approx(
        [float((answers[t:] == answers[-1]).all(0).double().mean()) for t in range(snn.T)]
    )
    first = [next(t for t in range(snn.T) if len(set(image[t:].tolist())) == 1) + 1 for image in answers.T]
    assert result.final_steps == first
    assert result.hits == (answers[-1] == y).tolist()
    assert sc.evaluate(snn, x.split(4)).hits == (answers[-1] == ann).tolist()
    assert result.confidence == pytest.approx(float(snn(x).softmax(1).amax(1).mean()))
    assert result.ann_confidence == pytest.approx(float(snn.ann(x).softmax(1).amax(1).mean()))
    matrix = np.zeros((snn.graph.outputs[0].shape[0],) * 2, int)
    np.add.at(matrix, (y.numpy(), answers[-1].numpy()), 1)
    assert result.confusion == [[int(i), int(j), int(matrix[i, j])] for i, j in zip(*matrix.nonzero(), strict=True)]

    trains, targets = spike_trains(snn, x), dict[str, Tensor]()
    run_ann(snn.source, [x], lambda node, value: targets.update({node.name: value.data}))
    assert [layer.name for layer in result.layers] == list(trains)
    for layer in result.layers:
        train, target, theta = trains[layer.name], targets[layer.name], snn.sites[layer.name].threshold
        assert layer.neurons == prod(train.shape[2:])
        assert layer.firing_rate == pytest.approx(float((train > 0).double().mean()), abs=1e-12)
        assert layer.dead_share == pytest.approx(float((~(train > 0).any(0).any(0)).double().mean()), abs=1e-6)
        lost = (target - train.mean(0)).square().sum()
        assert layer.error == pytest.approx(float(lost / target.square().sum()) if target.any() else 0.0, rel=1e-9)
        mean, rates = train.mean(0), (train > 0).double().mean(0).mean(0)
        axis = snn.graph.channel_axis(snn.graph.by_name[layer.name]) % (train.ndim - 2)
        by_channel = rates.movedim(axis, 0).reshape(rates.shape[axis], -1).mean(1)
        assert layer.channel_rates == pytest.approx(np.quantile(by_channel, (0, 0.25, 0.5, 0.75, 1)).tolist(), abs=1e-9)
        assert layer.saturated_share == pytest.approx(float((train > 0).all(0).double().mean()))
        pair = np.corrcoef(target.flatten(), mean.flatten())
        assert layer.correlation == pytest.approx(0.0 if np.isnan(pair[0, 1]) else pair[0, 1], abs=1e-6)
        thresholds = (layer.threshold, layer.threshold_min, layer.threshold_max)
        assert thresholds == pytest.approx((float(theta.mean()), float(theta.min()), float(theta.max())))


def numbers(result: sc.LayerResult | LayerError | sc.Operations) -> list[float]:
    """All of them, those inside others as well."""
    return [x for x in tree_leaves(dataclasses.asdict(result)) if not isinstance(x, str)]


@pytest.mark.parametrize(
    "recipe", [sc.light(), sc.pipelined(), sc.best(signed=True)], ids=["light", "delayed", "signed"]
)
def test_rates_and_operations_step_by_step(recipe: sc.Recipe) -> None:
    snn, x = converted("resnet_block", recipe), inputs("resnet_block", 8, seed=7)[0]
    result, trains = sc.evaluate(snn, [x[:5], x[5:]]), spike_trains(snn, x)
    targets: dict[str, Tensor] = {}
    run_ann(snn.source, (x,), lambda node, value: targets.update({node.name: value.data}))
    for layer in result.layers:
        by_step = (trains[layer.name] != 0).flatten(1).double().mean(1)  # (T,)
        np.testing.assert_allclose(layer.rates_over_time, by_step, rtol=1e-9)
        assert np.mean(layer.rates_over_time) == pytest.approx(layer.firing_rate)
        target, train = targets[layer.name], trains[layer.name]
        for after in layer.error_over_time:
            mean = train[: after.steps].mean(0)
            wrong = (target - mean).square().sum() / target.square().sum()
            assert after.error == pytest.approx(float(wrong), rel=1e-6)
            pair = np.corrcoef(target.flatten(), mean.flatten())[0, 1] if mean.any() else 0.0
            assert after.correlation == pytest.approx(pair, abs=1e-6)
            now = train[: after.steps]
            net = (now.sign().double().mean(0)).mean(0)  # (C, ...)
            assert after.firing_rate == pytest.approx(float(net.mean()))
            axis = snn.graph.channel_axis(snn.graph.by_name[layer.name]) % net.ndim
            channels = net.movedim(axis, 0).flatten(1).mean(1)
            assert after.channel_rates == pytest.approx(np.quantile(channels, (0, 0.25, 0.5, 0.75, 1)).tolist())
            assert after.dead_share == pytest.approx(float((~(mean > 0).any(0)).double().mean()), abs=1e-6)
            start = snn.sites[layer.name].start
            always = (now[start:] > 0).all(0) if after.steps > start else torch.zeros(1, dtype=torch.bool)
            assert after.saturated_share == pytest.approx(float(always.double().mean()))
        assert [after.steps for after in layer.error_over_time] == [1, 2, 4, 8]
        last = layer.error_over_time[-1]
        assert (last.error, last.parts, last.correlation) == (layer.error, layer.parts, layer.correlation)
        assert (last.dead_share, last.saturated_share) == (layer.dead_share, layer.saturated_share)
    assert len(result.operations_over_time) == snn.latency
    assert result.operations_over_time[-1] == pytest.approx(result.operations.synaptic_operations)
    assert np.all(np.diff(result.operations_over_time) >= 0)
    if snn.latency > snn.T:
        assert result.operations_over_time[0] == 0  # nobody has fired yet


def test_the_numbers_are_the_golden_ones() -> None:
    """Whoever changes a number on purpose writes the file anew: SPIKECAL_GOLDEN=1 pytest -k golden."""
    x = inputs("resnet_block", 12, seed=7)[0]
    labels = torch.arange(12) % 5
    found = sc.evaluate(converted("resnet_block", sc.best(), T=4), [(x, labels)]).to_dict()
    path = Path(__file__).parent / "golden" / "evaluation.json"
    if os.environ.get("SPIKECAL_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert tree_map(type, found) == tree_map(type, golden)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(golden), strict=True):
        assert ours == (pytest.approx(theirs, rel=1e-6, abs=1e-9) if isinstance(theirs, float) else theirs)
    edges = found["operations"]["layers"]
    total = sum(edge["synaptic_operations"] for edge in edges)
    assert found["operations_over_time"][-1] == pytest.approx(total)
    assert sum(n for _, _, n in found["confusion"]) == found["images"]


def test_spikes_are_counted_by_step_in_bits_as_in_floats() -> None:
    spikes = (torch.rand(4, 2, 3, 3, 70, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    packed = PackedSpikes(native.pack_spikes(spikes), torch.full((70,), 0.3), (70, 3, 3))
    assert torch.equal(spikes_by_step(packed), spikes.double().sum((1, 2, 3, 4)))


def test_batches_and_memory_do_not_matter() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 11, seed=7)
    y = torch.randint(0, 5, (11,))
    frugal = twin_of(snn)
    frugal.memory = 1
    first = sc.evaluate(snn, [(x, y)])
    for other in (sc.evaluate(snn, DataLoader(TensorDataset(x, y), batch_size=2)), sc.evaluate(frugal, [(x, y)])):
        assert dataclasses.replace(other, layers=first.layers, operations=first.operations) == first
        assert numbers(other.operations) == pytest.approx(numbers(first.operations), rel=1e-9)
        for a, b in zip(other.layers, first.layers, strict=True):
            assert numbers(a) == pytest.approx(numbers(b), rel=1e-9)


def test_a_file_is_evaluated(tmp_path: Path) -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    snn.save(tmp_path / "net.spk")
    for path in (tmp_path / "net.spk", str(tmp_path / "net.spk")):
        assert sc.evaluate(path, [x]) == sc.evaluate(snn, [x])


@pytest.mark.parametrize("model", [nn.ReLU(), None])
def test_something_that_is_no_spiking_network_is_refused(model: Any) -> None:
    text = f"takes a SpikingNetwork or a .spk file, not {type(model).__name__}; convert"
    with pytest.raises(sc.UnsupportedModelError, match=text):
        sc.evaluate(model, [torch.zeros(2, 3)])


def test_evaluation_is_deterministic() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    assert sc.evaluate(snn, [x]) == sc.evaluate(snn, [x])


def test_without_labels_there_is_agreement_but_no_accuracy() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    for batches in ([x], x, [(x,)], [[x]]):
        result = sc.evaluate(snn, batches)
        assert result.accuracy is result.ann_accuracy is result.standard_error is None
        assert result.accuracy_over_time == []
        assert len(result.agreement_over_time) == 8
    labelled = sc.evaluate(snn, [(x, torch.zeros(6, dtype=torch.long))])
    assert labelled.agreement_over_time == result.agreement_over_time
    assert labelled.layers == result.layers


def test_a_network_with_two_inputs() -> None:
    snn, (x, y) = converted("siamese"), inputs("siamese", 6, seed=7)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    flat, nested = sc.evaluate(snn, [(x, y, labels)]), sc.evaluate(snn, [((x, y), labels)])
    assert flat == nested
    assert flat.accuracy == float((snn(x, y).argmax(1) == labels).double().mean())


def layer_from(data: dict[str, Any]) -> sc.LayerResult:
    parts = ErrorParts(**data["parts"])
    errors = [LayerError(**e | {"parts": ErrorParts(**e["parts"])}) for e in data["error_over_time"]]
    return sc.LayerResult(**data | {"parts": parts, "error_over_time": errors})


@pytest.mark.parametrize("labels", [True, False])
def test_results_are_plain_numbers(labels: bool) -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    result = sc.evaluate(snn, [(x, torch.zeros(6, dtype=torch.long)) if labels else x])
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data == result.to_dict()
    assert data["standard_error"] == result.standard_error
    assert data["layers"][0]["name"] == "relu"
    layers = [layer_from(layer) for layer in data.pop("layers")]
    operations = data.pop("operations")
    operations["layers"] = [LayerOperations(**layer) for layer in operations["layers"]]
    assert data["totals"]["synaptic_operations"] == result.operations.synaptic_operations
    del data["standard_error"], data["energy"], data["totals"], data["recipe_title"]
    assert sc.Evaluation(**data, layers=layers, operations=sc.Operations(**operations)) == result


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3), r"labels must be 3 whole numbers, one an image, not torch.float32 of shape \(3,\)"),
        (torch.zeros(2, dtype=torch.long), r"labels must be 3 whole numbers, .* of shape \(2,\)"),
        (torch.zeros(3, 2, dtype=torch.long), r"of shape \(3, 2\)"),
        (torch.tensor([0, 1, 2]), r"labels must lie in 0..1, but go from 0 to 2"),
        (torch.tensor([0, -1, 1]), r"labels must lie in 0..1, but go from -1 to 1"),
    ],
)
def test_labels_without_meaning_are_refused(tiny: sc.SpikingNetwork, labels: Tensor, message: str) -> None:
    with pytest.raises(sc.DataError, match=message):
        sc.evaluate(tiny, [(X, labels)])


def test_labels_may_be_a_list(tiny: sc.SpikingNetwork) -> None:
    assert sc.evaluate(tiny, [(X, Y.tolist())]) == sc.evaluate(tiny, [(X, Y)])


def test_labels_in_some_batches_only_are_refused(tiny: sc.SpikingNetwork) -> None:
    with pytest.raises(sc.DataError, match="some batches have labels and some have none"):
        sc.evaluate(tiny, [(X, Y), X])


@pytest.mark.parametrize("batches", [[], iter(()), torch.zeros(0, 2)])
def test_no_images_are_refused(tiny: sc.SpikingNetwork, batches: Any) -> None:
    with pytest.raises(sc.DataError, match="no images to evaluate"):
        sc.evaluate(tiny, batches)


def test_images_that_do_not_fit_are_refused(tiny: sc.SpikingNetwork) -> None:
    with pytest.raises(sc.DataError, match=r"must have shape \(batch, 2\), not \(3, 5\)"):
        sc.evaluate(tiny, [torch.zeros(3, 5)])
    with pytest.raises(sc.DataError, match="a batch must be a tensor"):
        sc.evaluate(tiny, [3])


@pytest.mark.parametrize("name", ["dict_output", "two_inputs_two_outputs", "unet", "scalar_output"])
def test_a_network_that_is_no_classifier_is_refused(name: str) -> None:
    with pytest.raises(sc.DataError, match="scores of two or more classes"):
        sc.evaluate(converted(name), [inputs(name, 2)])


def test_the_parts_of_the_error_are_those_of_the_paper() -> None:
    """One neuron of threshold 1, T = 4, no correction of its own, on currents made by hand."""
    current = torch.tensor([[0.6, 0.6, 0.6, 0.6], [2.0, 0.5, 0.5, 2.0], [1.5, 0.0, -0.5, -1.0]]).double().T  # (T, B)
    site = Neurons(*(torch.tensor([v], dtype=torch.float64) for v in (1.0, 0.0, 0.0)))
    s = integrate_and_fire(current.unsqueeze(2), site.threshold, site.v0)[0].mean(0)  # (B, 1)
    x = torch.tensor([[0.7], [1.25], [0.0]], dtype=torch.float64)
    steps = error_steps(current.mean(0).unsqueeze(1), x, s, 4, site, torch.relu)
    assert torch.cat(steps, 1).tolist() == [
        pytest.approx([0.7, 0.6, 0.6, 0.5, 0.5]),  # inherited 0.1, floored 0.1
        pytest.approx([1.25, 1.25, 1.0, 1.0, 1.0]),  # clipped
        pytest.approx([0.0, 0.0, 0.0, 0.0, 0.25]),  # uneven: it fires before the current is taken back
    ]


def test_neurons_that_start_late_clip_sooner() -> None:
    """One neuron of threshold 1, T = 4, that fires from its third step on: at most twice."""
    site = dataclasses.replace(Neurons(*(torch.tensor([v], dtype=torch.float64) for v in (1.0, 0.0, 0.0))), start=2)
    x = torch.tensor([[0.9], [0.3]], dtype=torch.float64)
    s = integrate_and_fire(x.expand(4, 2, 1), site.threshold, site.v0, site.start)[0].mean(0)
    steps = error_steps(x, x, s, 4, site, torch.relu)
    assert torch.cat(steps, 1).tolist() == [
        pytest.approx([0.9, 0.9, 0.5, 0.5, 0.5]),
        pytest.approx([0.3, 0.3, 0.3, 0.25, 0.25]),
    ]
    assert error_steps(x, x, 0 * s, 2, site, torch.relu)[2:] == [pytest.approx(0 * x)] * 3


@pytest.mark.parametrize("recipe", [sc.light(), sc.best(), sc.pipelined()], ids=lambda recipe: recipe.name)
def test_the_parts_of_the_error_hang_together(recipe: sc.Recipe) -> None:
    """The mean current that arrives is what the neurons have integrated, by charge conservation."""
    snn, (x,) = converted("resnet_block", recipe), inputs("resnet_block", 6, seed=7)
    for layer in sc.evaluate(snn, [x]).layers:
        parts = dataclasses.astuple(layer.parts)
        assert layer.error <= sum(p**0.5 for p in parts) ** 2 * (1 + 1e-9)  # triangle inequality
        assert all(p >= 0 for p in parts)
    first = sc.evaluate(snn, [x]).layers[0]
    assert first.parts.unevenness < 1e-12  # the first layer sees the image, the same at every step


@pytest.mark.parametrize("recipe", [sc.light(), sc.best(), sc.pipelined()], ids=lambda recipe: recipe.name)
def test_parts_of_the_error_after_some_steps_by_hand(recipe: sc.Recipe) -> None:
    """Of a plain chain, every step of the way written out from the spikes in front of each layer."""
    snn, (x,) = converted("resnet_block", recipe), inputs("resnet_block", 5, seed=3)
    trains, targets = spike_trains(snn, x), dict[str, Tensor]()
    run_ann(snn.source, (x,), lambda node, value: targets.update({node.name: value.data}))
    for layer in sc.evaluate(snn, [x[:2], x[2:]]).layers:
        site, target = snn.sites[layer.name], targets[layer.name]
        assert isinstance(site, Neurons)
        for after in layer.error_over_time:
            k, theta = after.steps, site.threshold
            means = {name: train[:k].mean(0) for name, train in trains.items()}
            seen_steps = min(k + site.delay, snn.T)  # of input
            own = site.bias * seen_steps / k + site.v0 / k
            own = own + (0 if site.temporal is None else site.temporal[:k].mean(0))
            inputs_so_far = {name: train[:seen_steps].mean(0) for name, train in trains.items()}
            arriving = current_at(snn, layer.name, x, inputs_so_far) * seen_steps / k + own
            spare = own.clamp(min=0).minimum(theta / (2 * k))
            seen = (arriving - spare).clamp(min=0)
            most = theta * max(0, k - site.start) / k
            whole = (torch.floor(k * arriving / theta) * theta / k).clamp(min=torch.zeros(()), max=most)
            way = [target, seen, seen.minimum(most), whole, means[layer.name]]
            wanted = [float((a - b).square().sum() / target.square().sum()) for a, b in itertools.pairwise(way)]
            if layer.name == next(iter(trains)):
                assert wanted[-1] < 1e-12  # the image is the same at every step: nothing is uneven
            assert dataclasses.astuple(after.parts) == pytest.approx(tuple(wanted), rel=1e-6, abs=1e-12)


def current_at(snn: sc.SpikingNetwork, name: str, x: Tensor, means: dict[str, Tensor]) -> Tensor:
    """The current in front of a layer, if the neurons before it give these means."""
    values = {node.name: x for node in snn.graph.inputs}
    for node in snn.graph.nodes:
        if node.name == name:
            return values[node.inputs[0]]
        if node.name not in values:
            inputs = [values[i] for i in node.inputs]
            values[node.name] = means[node.name] if node.name in means else node.op.run(snn.graph.tensors, *inputs)
    raise AssertionError(name)


def test_errors_over_time_are_of_the_first_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_results, "PROFILED", 2)
    snn, (x,) = converted("resnet_block", sc.light()), inputs("resnet_block", 6, seed=3)
    whole, parts, first = (sc.evaluate(snn, batches) for batches in ([x], [x[:1], x[1:]], [x[:2]]))
    assert (whole.profiled, parts.profiled, first.profiled) == (2, 2, 2)
    for layers in zip(whole.layers, parts.layers, first.layers, strict=True):
        found = [[n for e in layer.error_over_time for n in numbers(e)] for layer in layers]
        assert found[0] == pytest.approx(found[2], rel=1e-9)
        assert found[1] == pytest.approx(found[2], rel=1e-9)
        assert layers[0].error != layers[2].error


# ------------------------------------------------------------ networks that do not classify, notebooks, figures


def squared(result: Any, wanted: Any) -> Tensor:
    return sum((a - b).square().mean() for a, b in zip(tree_leaves(result), tree_leaves(wanted), strict=True))


@pytest.mark.parametrize("name", ["dict_output", "scalar_output"])
def test_any_metric_can_be_measured(name: str) -> None:
    snn, (x,) = converted(name), inputs(name, 6, seed=7)
    wanted = tree_map(lambda t: t + 1, snn.ann(x))
    result = sc.evaluate(snn, [(x, wanted)], metric=squared)
    assert result.metric == pytest.approx(float(squared(snn(x), wanted)))
    assert result.ann_metric == pytest.approx(float(squared(snn.ann(x), wanted)))
    over_time = snn.over_time(x)
    for t in range(snn.T):
        assert result.metric_over_time[t] == pytest.approx(
            float(squared(tree_map(lambda y, t=t: y[t], over_time), wanted))
        )
    assert (result.accuracy, result.agreement, result.classes) == (None, None, 0)
    assert result.layers
    alone = sc.evaluate(snn, [x[:2], x[2:]], metric=squared)
    assert alone.ann_metric == 0
    assert alone.metric == pytest.approx(float(squared(snn(x), snn.ann(x))))
    assert sc.verdict(result).startswith(f"The metric is {result.metric:.4g} at T={snn.T}, and ")
    assert sc.advice(alone) is not None


def test_notebooks_show_escaped_tables() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    result = sc.evaluate(snn, [x])
    evil = dataclasses.replace(result, layers=[dataclasses.replace(result.layers[0], name="<script>")])
    assert "<td>&lt;script&gt;</td>" in evil._repr_html_()
    assert "<script>" not in evil._repr_html_()
    assert "<table><tr><th>site</th>" in snn._repr_html_()
    assert "SpikingNetwork(T=" in snn._repr_html_()


def test_figures_show_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from spikecal import figures

    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 6, seed=7)
    result = sc.evaluate(snn, [(x, torch.zeros(6, dtype=torch.long))])
    (axes,) = figures.accuracy_over_time(result).axes
    assert list(axes.lines[0].get_ydata()) == result.accuracy_over_time
    (axes,) = figures.firing_rates(result).axes
    assert [bar.get_height() for bar in axes.patches] == [layer.firing_rate for layer in result.layers]
    figure = figures.layer_errors(result)
    assert len(figure.axes[0].patches) == 4 * len(result.layers)
    figure.savefig(tmp_path / "errors.svg")
    assert (tmp_path / "errors.svg").read_text().startswith("<?xml")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(sc.DataError, match=r"pip install 'spikecal\[figures\]'"):
        figures.firing_rates(result)
