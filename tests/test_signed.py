"""Signed neurons with memory: a spike may be taken back, but never more of them than were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

import spikecal as sc
from spikecal.data import load_data
from spikecal.functional import integrate_and_fire, signed_integrate_and_fire
from spikecal.models import digits_net
from spikecal.simulation import Neurons

SIGNED = sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.PotentialCalibration()), "signed", signed=True)


def reference(current: np.ndarray, theta: float, v0: float) -> np.ndarray:
    """One neuron after the other, one step after the other: (T, N) -> spikes."""
    spikes = np.zeros_like(current)
    for n in range(current.shape[1]):
        v, up, down = v0, 0, 0
        for t in range(len(current)):
            v += current[t, n]
            if v >= theta:
                spikes[t, n], v, up = theta, v - theta, up + 1
            elif v <= -theta and up > down:
                spikes[t, n], v, down = -theta, v + theta, down + 1
    return spikes


currents = hnp.arrays(np.int64, st.tuples(st.integers(1, 12), st.integers(1, 5)), elements=st.integers(-40, 40))
quarters = st.integers(1, 12).map(lambda k: k / 4)


@given(sixteenths=currents, theta=quarters, v0=st.integers(-8, 8).map(lambda k: k / 16))
def test_signed_neurons_equal_the_reference(sixteenths: np.ndarray, theta: float, v0: float) -> None:
    current = torch.from_numpy(sixteenths / 16)
    spikes, v = signed_integrate_and_fire(current, torch.tensor(theta).double(), torch.tensor(v0).double())
    np.testing.assert_array_equal(spikes.numpy(), reference(sixteenths / 16, theta, v0))
    torch.testing.assert_close(v, v0 + current.sum(0) - spikes.sum(0))
    assert (spikes.cumsum(0) >= 0).all()  # never less than nothing


@given(sixteenths=currents, theta=quarters)
def test_without_a_reason_to_take_back_they_are_ordinary(sixteenths: np.ndarray, theta: float) -> None:
    current = torch.from_numpy(np.abs(sixteenths) / 16)
    zero, theta = torch.tensor(0.0).double(), torch.tensor(theta).double()
    assert torch.equal(signed_integrate_and_fire(current, theta, zero)[0], integrate_and_fire(current, theta, zero)[0])


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.cat([x for x, _ in load_data("digits", split="train", limit=200).batches()])


@pytest.fixture(scope="module")
def snn(images: Tensor) -> sc.SpikingNetwork:
    return sc.convert(digits_net(), [images], 8, SIGNED)


def test_spikes_are_of_two_signs_and_their_sum_is_not(snn: sc.SpikingNetwork, images: Tensor) -> None:
    trains: dict[str, list[Tensor]] = {}
    snn.currents([images[:20]], lambda node, value: trains.setdefault(node.name, []).append(value.data))
    signs = set()
    for node in snn.graph.neurons:
        site, train = snn.sites[node.name], torch.cat(trains[node.name])
        assert isinstance(site, Neurons)
        assert site.signed
        levels = train / site.threshold
        torch.testing.assert_close(levels, levels.round())
        signs.update(levels.round().unique().tolist())
        assert (train.sum(0) > -1e-5).all()
    assert signs == {-1.0, 0.0, 1.0}


def test_taking_back_lowers_the_error_of_the_last_layer(snn: sc.SpikingNetwork, images: Tensor) -> None:
    binary = sc.convert(digits_net(), [images], 8, sc.Recipe(SIGNED.threshold, SIGNED.steps))
    last = snn.graph.neurons[-1].name
    assert snn.statistics[last].error < binary.statistics[last].error


def test_the_rate_counts_spikes_of_both_signs(snn: sc.SpikingNetwork, images: Tensor) -> None:
    result = sc.evaluate(snn, [images[:20]])
    trains: dict[str, Tensor] = {}
    snn.currents([images[:20]], lambda node, value: trains.setdefault(node.name, value.data))
    for layer in result.layers:
        assert layer.firing_rate == pytest.approx(float((trains[layer.name] != 0).double().mean()), rel=1e-4)


def test_the_file_and_the_binary_form_keep_the_signs(snn: sc.SpikingNetwork, images: Tensor, tmp_path: Path) -> None:
    snn.save(tmp_path / "signed.spk")
    again = sc.load(tmp_path / "signed.spk")
    assert again.recipe == SIGNED
    assert torch.equal(again(images[:20]), snn(images[:20]))
    torch.testing.assert_close(snn.binary()(images[:20]), snn(images[:20]), rtol=1e-3, atol=1e-3)


def test_max_pools_and_delays_go_with_signed_neurons() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)).eval()
    x = torch.randn(16, 1, 8, 8)
    errors = []
    for T in (4, 64):
        snn = sc.convert(net, [x], T, sc.Recipe(sc.MMSE(), (sc.BiasShift(),), signed=True, delay=1))
        errors.append(float((snn(x) - snn.ann(x)).square().mean()))
    assert errors[1] < errors[0] / 4


def test_a_network_of_this_league_says_so(snn: sc.SpikingNetwork, images: Tensor) -> None:
    title = "signed, spikes of two signs"
    assert f"recipe={title!r}" in repr(snn)
    result = sc.evaluate(snn, [images[:20]])
    assert (result.signed, result.recipe, result.recipe_title) == (True, "signed", title)
    assert result.to_dict()["recipe_title"] == title
    assert list(sc.compare([snn], [images[:20]])) == [f"{title}, T=8"]
    assert sc.light().title == "light"
