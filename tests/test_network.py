"""What a conversion gives: results, precision, memory, binary spikes, and errors for inputs that do not fit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikecal as sc
import zoo
from helpers import captured, converted, distance, inputs, leaves, shell, spike_trains, twin_of
from spikecal.capture import capture
from spikecal.ops import Scale
from spikecal.simulation import Neurons
from zoo import example, make

SOME = ["mlp", "resnet_block", "densenet", "tokens", "input_skip", "unet", "conv1d_net", "clipped_spellings"]


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("name", zoo.ZOO)
def test_result_has_the_structure_of_the_models(name: str) -> None:
    snn, x = converted(name), inputs(name, 3, seed=7)
    theirs = make(name).double()(*x)
    for ours in (snn(*x), snn.ann(*x)):
        assert _skeleton(ours) == _skeleton(theirs)
    over_time = snn.over_time(*x)
    assert _skeleton(over_time, skip=1) == _skeleton(theirs)
    assert all(len(y) == snn.T for y in leaves(over_time))


def _skeleton(result: Any, skip: int = 0) -> Any:
    """Nesting, keys and shapes."""
    if isinstance(result, dict):
        return {key: _skeleton(value, skip) for key, value in result.items()}
    if isinstance(result, tuple | list):
        return type(result)(_skeleton(value, skip) for value in result)
    return tuple(result.shape)[skip:]


@pytest.mark.parametrize("name", SOME)
def test_result_is_the_last_of_the_running_means(name: str) -> None:
    snn, x = converted(name), inputs(name, 3, seed=7)
    assert distance(leaves(snn(*x)), [y[-1] for y in leaves(snn.over_time(*x))]) < 1e-12


@pytest.mark.parametrize("name", SOME)
def test_running_mean_is_what_fewer_steps_would_give(name: str) -> None:
    snn, x = converted(name), inputs(name, 3, seed=7)
    short = sc.SpikingNetwork(snn.graph, snn.source, snn.sites, 3, snn.recipe, snn.statistics)
    assert distance(leaves(short(*x)), [y[2] for y in leaves(snn.over_time(*x))]) < 1e-12


@pytest.mark.parametrize("name", [*SOME, "two_inputs_two_outputs", "dict_output", "repeated_output"])
def test_neither_chunks_nor_blocks_nor_memory_change_the_result(name: str) -> None:
    snn, x = converted(name), inputs(name, 5, seed=7)
    frugal, generous = twin_of(snn), twin_of(snn)
    frugal.memory, generous.memory = 1, "64GiB"
    assert frugal.chunk_size(5) == 1
    whole = leaves(generous(*x))
    one_by_one = zip(*(leaves(snn(*(t[i : i + 1] for t in x))) for i in range(5)), strict=True)
    assert distance(leaves(frugal(*x)), whole) < 1e-12
    assert distance([torch.cat(parts) for parts in one_by_one], whole) < 1e-12
    assert distance(leaves(frugal.over_time(*x)), leaves(generous.over_time(*x))) < 1e-12
    assert distance(leaves(frugal.ann(*x)), leaves(generous.ann(*x))) < 1e-12


def test_little_memory_means_few_steps_at_a_time() -> None:
    snn, x = twin_of(converted("resnet_block")), inputs("resnet_block", 3)
    for memory, blocks in ((1, [1] * 8), ("1GiB", [8])):
        snn.memory = memory
        assert [len(ys[0]) for ys in snn.simulate(x)] == blocks


@pytest.mark.parametrize(
    "options",
    [{"signed": True}, {"delay": 1}, {"steps": (sc.TemporalBias(),)}, {"steps": (sc.LateStart(),)}],
    ids=["signed", "delay", "temporal", "late"],
)
def test_neurons_that_remember_more_than_a_potential_get_all_steps_at_once(options: dict[str, Any]) -> None:
    x = inputs("resnet_block", 3)
    snn = sc.convert(shell(captured("resnet_block")), [inputs("resnet_block", 16)], 8, sc.Recipe(sc.MMSE(), **options))
    found = [snn(*x) for snn.memory in ("1GiB", 1)]
    assert torch.equal(*found)
    assert [len(ys[0]) for ys in snn.simulate(x)] == [8]


def test_calls_leave_nothing_behind() -> None:
    snn, x = converted("resnet_block"), inputs("resnet_block", 3)
    kept, rng = x[0].clone(), torch.get_rng_state()
    first = snn(*x)
    snn.over_time(*inputs("resnet_block", 2, seed=9))
    assert torch.equal(snn(*x), first)
    assert torch.equal(x[0], kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not first.requires_grad


def test_images_that_want_gradients_are_fine() -> None:
    snn, (x,) = converted("mlp"), inputs("mlp", 3)
    assert torch.equal(snn(x.clone().requires_grad_()), snn(x))


@pytest.mark.parametrize("name", ["mlp", "resnet_block"])
def test_layout_of_the_images_does_not_matter(name: str) -> None:
    snn, (x,) = converted(name), inputs(name, 3)
    strided = torch.stack([x, x + 1], -1)[..., 0]  # every second number in memory
    assert not strided.is_contiguous()
    assert distance([snn(strided)], [snn(x)]) < 1e-12


def test_an_empty_batch_gives_an_empty_result() -> None:
    snn, (x,) = converted("resnet_block"), inputs("resnet_block", 2)
    assert snn.ann(x[:0]).shape == (0, 5)
    assert snn(x[:0]).shape == (0, 5)
    assert snn.over_time(x[:0]).shape == (8, 0, 5)


# ---------------------------------------------------------------------- precision


def test_precision_can_be_changed() -> None:
    snn, x = twin_of(converted("resnet_block")), inputs("resnet_block", 4, seed=7)
    exact, twin = snn(*x), snn.ann(*x)
    assert snn.graph.dtype == exact.dtype == torch.float64
    assert snn.float() is snn
    assert all(t.dtype == torch.float32 for g in (snn.graph, snn.source) for t in g.tensors.values())
    assert all(t.dtype == torch.float32 for site in snn.sites.values() for t in site.tensors().values())
    assert snn(*x).dtype == torch.float32  # images of another precision are cast
    assert distance([snn.ann(*x).double()], [twin]) < 1e-5
    snn.double()
    assert snn(*x).dtype == torch.float64
    assert distance([snn.ann(*x)], [twin]) < 1e-5  # the weights were rounded on the way


def test_moving_keeps_shared_tensors_shared_and_leaves_other_networks_alone() -> None:
    original = converted("mlp")
    snn = twin_of(original).to("cpu", torch.float32)
    assert all(snn.graph.tensors[key] is snn.source.tensors[key] for key in snn.graph.tensors)
    assert original.graph.dtype == torch.float64
    assert twin_of(original).to("cpu").graph.dtype == torch.float64


def test_float32_equals_float64_but_for_rounding() -> None:
    """On images where no current comes near a threshold, the spikes are the same ones."""
    snn, x = converted("mlp"), inputs("mlp", 8, seed=7)
    single = twin_of(snn).float()
    assert distance([single(*x).double()], [snn(*x)]) < 1e-5


# ---------------------------------------------------------------------- inputs that do not fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([torch.zeros(2, 9)], r"input 'x' must have shape \(batch, 10\), not \(2, 9\)"),
        ([torch.zeros(10)], r"input 'x' must have shape \(batch, 10\), not \(10,\)"),
        ([torch.zeros(())], r"input 'x' must have shape \(batch, 10\), not \(\)"),
        ([torch.zeros(2, 10, dtype=torch.uint8)], "must be floating point, scaled as in training, not torch.uint8"),
        ([[0.0] * 10], "input 'x' must be a tensor, not list"),
        ([], r"the network takes 1 input\(s\), not 0"),
        ([torch.zeros(2, 10)] * 2, r"the network takes 1 input\(s\), not 2"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arguments: list[Any], message: str) -> None:
    snn = converted("mlp")
    for call in (snn, snn.over_time, snn.ann):
        with pytest.raises(sc.DataError, match=message):
            call(*arguments)


def test_inputs_with_different_numbers_of_images_are_refused() -> None:
    x, y = inputs("siamese", 3)
    with pytest.raises(sc.DataError, match="different numbers of images"):
        converted("siamese")(x, y[:2])


def test_the_number_of_steps_is_fixed() -> None:
    with pytest.raises(AttributeError, match="property 'T' of 'SpikingNetwork' object has no setter"):
        converted("mlp").T = 3  # type: ignore[misc]


def test_repr_says_what_it_is() -> None:
    assert repr(converted("mlp")) == (
        "SpikingNetwork(T=8, recipe='light', 2 layers of neurons, 16 neurons, 1 output(s))"
    )


# ---------------------------------------------------------------------- binary spikes


@pytest.mark.parametrize("name", zoo.ZOO)
def test_binary_spikes_give_the_same_network(name: str) -> None:
    snn, x = converted(name), inputs(name, 3, seed=7)
    binary = snn.binary()
    binary.graph.check()
    for site in binary.sites.values():
        assert not isinstance(site, Neurons) or bool((site.threshold == 1).all())
    for train in spike_trains(binary, *x).values():
        assert set(train.unique().tolist()) <= {0.0, 1.0}
    assert distance(leaves(binary(*x)), leaves(snn(*x))) < 1e-9
    assert distance(leaves(binary.ann(*x)), leaves(snn.ann(*x))) < 1e-9


@pytest.mark.filterwarnings("ignore:pool_to_conv:spikecal.NoEffectWarning")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["mlp", "conv_bn", "resnet_block", "avg_pools"])
def test_binary_spikes_give_the_same_network_in_float32(name: str, per_channel: bool) -> None:
    snn = twin_of(converted(name, sc.light(per_channel=per_channel, pool_to_conv=True))).float()
    x = [t.float() for t in inputs(name, 3, seed=7)]
    assert distance([snn.binary()(*x)], [snn(*x)]) < 1e-4
    assert distance([snn.binary().ann(*x)], [snn.ann(*x)]) < 1e-4


EVERY = {
    **{name: make(**({"iterations": 3} if name == "advanced" else {})) for name, make in sc.RECIPES.items()},
    "no steps": sc.Recipe(sc.MMSE(per_channel=True)),
    "temporal": sc.Recipe(sc.MMSE(), (sc.TemporalBias(),)),
}


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("name", ["mlp", "mlp_bn", "conv_bn", "resnet_block", "densenet", "tokens", "maxpool_stem"])
def test_binary_spikes_are_the_same_on_the_images_that_gave_the_thresholds(name: str, recipe: sc.Recipe) -> None:
    """Where a threshold was an activation itself, rounding would decide over the spikes of that very image."""
    x = tuple(t.float() for t in inputs(name, 16))
    snn = sc.convert(shell(captured(name).map_tensors(Tensor.float)), [x], 8, recipe)
    assert distance([snn.binary()(*x)], [snn(*x)]) < 1e-4


class Turned(nn.Module):
    """Pools, means and padding of values whose thresholds do not lie along the channels any more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(8, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).permute(0, 3, 1, 2)  # (B, 8, 4, 8): the width becomes the channel
        pooled = F.avg_pool2d(x, 2).mean((2, 3)) + F.pad(x, (1, 0)).mean((2, 3))
        return self.fc(pooled)


def test_binary_spikes_behind_a_permutation() -> None:
    x = torch.randn(12, 3, 8, 8, dtype=torch.float64)
    snn = sc.convert(Turned(), x[:8], T=4)
    assert distance([snn.binary()(x[8:])], [snn(x[8:])]) < 1e-9
    assert distance([snn.binary().ann(x[8:])], [snn.ann(x[8:])]) < 1e-9


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
def test_binary_spikes_keep_calibrated_weights_and_potentials() -> None:
    snn, x = converted("resnet_block", sc.advanced(iterations=20, lr=1e-3)), inputs("resnet_block", 3, seed=7)
    assert distance([snn.binary()(*x)], [snn(*x)]) < 1e-9
    assert distance([snn.binary().ann(*x)], [snn.ann(*x)]) < 1e-9


@pytest.mark.parametrize("name", ["mlp", "conv_bn", "mlp_bn", "conv1d_net", "adaptive_pools"])
def test_thresholds_vanish_into_the_weights_where_there_are_any(name: str) -> None:
    """Through pools and reshapes too: no factor is left on any connection."""
    layerwise = converted(name, sc.light(per_channel=False)).binary()
    extra = {n.name for n in layerwise.graph.nodes if isinstance(n.op, Scale)}
    assert extra <= {n.name for n in converted(name).graph.nodes}


def test_an_identity_shortcut_keeps_its_threshold_as_a_factor() -> None:
    graph = converted("one_relu_five_times").binary().graph
    assert any(isinstance(n.op, Scale) for n in graph.nodes)


def test_binary_leaves_the_network_alone() -> None:
    snn, x = converted("resnet_block"), inputs("resnet_block", 3)
    before = snn(*x)
    snn.binary()
    assert torch.equal(snn(*x), before)


@pytest.mark.parametrize("name", ["mlp", "resnet_block", "tokens"])
def test_a_binary_network_made_binary_again_is_the_same(name: str) -> None:
    snn, x = converted(name).binary(), inputs(name, 3, seed=7)
    again = snn.binary()
    assert distance(leaves(again(*x)), leaves(snn(*x))) < 1e-9


# ---------------------------------------------------------------------- dead neurons


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("name", ["dead_channels", "dead_layer"])
@pytest.mark.parametrize("recipe", sc.RECIPES)
def test_dead_channels_have_a_threshold_and_no_nan(name: str, recipe: str) -> None:
    options = {"iterations": 5} if recipe == "advanced" else {}
    snn, x = converted(name, sc.RECIPES[recipe](**options)), inputs(name, 4, seed=7)
    for network in (snn, snn.binary()):
        assert all(bool(torch.isfinite(y).all()) for y in leaves(network.over_time(*x)))
    for site in snn.sites.values():
        assert all(bool(torch.isfinite(t).all()) for t in site.tensors().values())
        assert not isinstance(site, Neurons) or bool((site.threshold > 0).all())
    first = snn.graph.neurons[0]
    dead = [0, 2] if name == "dead_channels" else [0, 1, 2, 3]
    assert float(spike_trains(snn, *x)[first.name][:, :, dead].abs().max()) == 0
    site = snn.sites[first.name]
    assert isinstance(site, Neurons)
    threshold = site.threshold.flatten()
    if len(threshold) > 1:
        assert threshold[dead].tolist() == [snn.T / (snn.T - site.start)] * len(dead)  # 1, grown by a late start


# ---------------------------------------------------------------------- two inputs


def test_two_inputs_are_told_apart() -> None:
    snn, (left, right) = converted("siamese"), inputs("siamese", 3, seed=7)
    assert distance([snn.ann(right, left)], [make("siamese").double()(right, left)]) < 1e-9
    assert distance([snn(left, right)], [snn(right, left)]) > 0.01


def test_a_network_from_a_float32_model_runs_in_float32() -> None:
    graph = capture(make("mlp"), example("mlp"))
    snn = sc.convert(shell(graph), [example("mlp", 16)], T=4)
    (y,) = (snn(*inputs("mlp", 2)),)
    assert isinstance(y, Tensor)
    assert y.dtype == torch.float32


def test_a_network_that_has_run_can_be_copied_and_pickled() -> None:
    snn, x = copy.deepcopy(converted("resnet_block")).float(), [t.float() for t in inputs("resnet_block", 3)]
    expected = snn(*x)
    assert torch.equal(copy.deepcopy(snn)(*x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(snn))(*x), expected)


def test_an_engine_that_does_not_exist_is_refused_at_once() -> None:
    snn = copy.copy(converted("mlp"))
    with pytest.raises(sc.CalibrationError, match="there is no engine 'fast'; choose one of auto, dense, event"):
        snn.engine = "fast"
    assert snn.engine == "auto"
