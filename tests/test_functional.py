"""The maths. Inputs are dyadic numbers (k/16), so every sum is exact and no tie at a threshold is luck."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import helpers  # noqa: F401, it sets up hypothesis
import reference
from spikecal.functional import (
    channel_mean,
    clip_floor,
    clip_floor_error,
    clipped_relu,
    count_spikes,
    increments,
    integrate_and_fire,
    mean_over_time,
    pack_bits,
    unpack_bits,
)


def sixteenths(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda k: k / 16)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


thresholds = sixteenths(1, 48)
trains = st.integers(1, 20).flatmap(
    lambda T: st.lists(st.lists(sixteenths(-48, 48), min_size=3, max_size=3), min_size=T, max_size=T)
)  # (T, 3)
neurons = st.lists(st.tuples(thresholds, sixteenths(-32, 32)), min_size=3, max_size=3)  # θ and v0 of each


@given(z=sixteenths(-64, 64), T=st.integers(1, 40), theta=thresholds, start=st.integers(0, 15))
def test_count_on_a_constant_current_equals_clip_floor(z: float, T: int, theta: float, start: int) -> None:
    v0 = start / 16 * theta  # Eq. 15 holds for 0 <= v0 < θ
    spikes, _ = integrate_and_fire(torch.full((T, 1), z, dtype=torch.float64), tensor(theta), tensor(v0))
    mean = clip_floor(tensor([z]), T, tensor(theta), tensor(v0))
    assert int((spikes > 0).sum()) == round(float(mean * T / theta))
    assert float(mean) == pytest.approx(float(reference.clip_floor(z, T, theta, v0)), abs=1e-12)


def test_count_on_a_varying_current_may_differ_from_clip_floor() -> None:
    """Unevenness: the same mean current, but it comes too late to fire often, or is taken back too late."""
    late, early = tensor([[0.0], [0.0], [0.0], [4.0]]), tensor([[2.0], [0.0], [0.0], [-2.0]])
    for current, fired, expected in ((late, 1, 4), (early, 2, 0)):
        spikes, _ = integrate_and_fire(current, tensor(1.0), tensor(0.0))
        assert int(spikes.sum()) == fired
        assert float(clip_floor(current.mean(0), 4, tensor(1.0)) * 4) == expected


@given(trains, neurons)
def test_what_flows_in_is_fired_or_stays_on_the_membrane(train: list[list[float]], params: list[tuple]) -> None:
    current, (theta, v0) = tensor(train), tensor(params).T
    spikes, v = integrate_and_fire(current, theta, v0)
    assert torch.equal(v0 + current.sum(0), spikes.sum(0) + v)


@given(trains, neurons)
def test_a_spike_is_one_threshold_exactly_when_the_membrane_reaches_it(
    train: list[list[float]], params: list[tuple]
) -> None:
    current, (theta, v0) = tensor(train), tensor(params).T
    spikes, _ = integrate_and_fire(current, theta, v0)
    fired_before = spikes.cumsum(0) - spikes
    membrane = v0 + current.cumsum(0) - fired_before  # at each step, just before the decision
    assert torch.equal(spikes, torch.where(membrane >= theta, theta, 0.0))


@given(trains, neurons)
def test_neurons_equal_the_reference(train: list[list[float]], params: list[tuple]) -> None:
    current, (theta, v0) = tensor(train), tensor(params).T
    spikes, v = integrate_and_fire(current, theta, v0)
    expected, v_expected = reference.integrate_and_fire(current.numpy(), theta.numpy(), v0.numpy())
    np.testing.assert_array_equal(spikes, expected)
    np.testing.assert_array_equal(v, v_expected)


@given(trains, neurons, st.integers(0, 19))
def test_neurons_that_start_late_keep_what_arrives(train: list[list[float]], params: list[tuple], start: int) -> None:
    current, (theta, v0) = tensor(train), tensor(params).T
    start = min(start, len(current) - 1)
    spikes, v = integrate_and_fire(current, theta, v0, start)
    assert not spikes[:start].any()
    expected, v_end = integrate_and_fire(current[start:], theta, v0 + current[:start].sum(0))
    assert torch.equal(spikes[start:], expected)
    assert torch.equal(v, v_end)


@given(trains, neurons, st.integers(0, 19))
def test_a_run_can_be_continued_from_its_potential(train: list[list[float]], params: list[tuple], cut: int) -> None:
    current, (theta, v0) = tensor(train), tensor(params).T
    cut = min(cut, len(current) - 1)
    whole, v_end = integrate_and_fire(current, theta, v0)
    v, parts = v0, []
    for part in (current[:cut], current[cut:]):
        if len(part):
            spikes, v = integrate_and_fire(part, theta, v)
            parts.append(spikes)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(v, v_end)


def test_neurons_keep_nothing_and_change_nothing() -> None:
    current, theta, v0 = torch.rand(5, 2, 3), torch.full((3,), 0.7), torch.rand(3)
    copies = current.clone(), theta.clone(), v0.clone()
    first, second = (integrate_and_fire(current, theta, v0)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((current, theta, v0), copies, strict=True))


def test_parameters_broadcast_over_images_and_space() -> None:
    current = torch.randint(-16, 32, (6, 2, 3, 4, 4)) / 16
    theta, v0 = tensor([0.5, 1.0, 2.0]).view(3, 1, 1).float(), tensor(0.25).view(1, 1, 1).float()
    spikes, _ = integrate_and_fire(current, theta, v0)
    for channel, height in enumerate((0.5, 1.0, 2.0)):
        expected, _ = reference.integrate_and_fire(current[:, :, channel].numpy(), height, 0.25)
        np.testing.assert_array_equal(spikes[:, :, channel], expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layout_of_the_current_does_not_matter(memory_format: torch.memory_format) -> None:
    flat = torch.randint(-16, 32, (6 * 2, 3, 4, 4)) / 16
    current = flat.contiguous(memory_format=memory_format).unflatten(0, (6, 2))
    expected, _ = reference.integrate_and_fire(flat.unflatten(0, (6, 2)).numpy(), 0.75)
    np.testing.assert_array_equal(integrate_and_fire(current, torch.tensor(0.75), torch.tensor(0.0))[0], expected)


@given(
    bits=st.integers(1, 20).flatmap(
        lambda T: st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=T, max_size=T)
    )
)
def test_packed_bits_round_trip(bits: list[list[bool]]) -> None:
    T, height = len(bits), torch.tensor([0.5, 1.0, 3.0, 1e-6])
    spikes = torch.tensor(bits, dtype=torch.float32) * height
    packed = pack_bits(spikes, height)
    assert packed.dtype == torch.uint8
    assert packed.shape == ((T + 7) // 8, 4)
    assert torch.equal(unpack_bits(packed, T, height), spikes)
    assert count_spikes(packed, T).tolist() == [sum(column) for column in zip(*bits, strict=True)]


def test_step_t_is_bit_t_modulo_8() -> None:
    for t in range(19):
        spikes = torch.zeros(19, 1)
        spikes[t] = 2.5
        packed = pack_bits(spikes, torch.tensor(2.5))
        assert packed.flatten().tolist() == [1 << t % 8 if byte == t // 8 else 0 for byte in range(3)]


@pytest.mark.parametrize("T", [1, 7, 8, 9, 32])
@pytest.mark.parametrize("height", [1e-30, 0.1, 1 / 3, 7e8])
def test_bits_survive_heights_that_are_not_exact(T: int, height: float) -> None:
    theta = torch.tensor([height, 1.0]).view(2, 1, 1)
    spikes = (torch.rand(T, 3, 2, 4, 4) < 0.5) * theta
    assert torch.equal(unpack_bits(pack_bits(spikes, theta), T, theta), spikes)
    laid_out = spikes.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (T, 3))
    assert torch.equal(unpack_bits(pack_bits(laid_out, theta), T, theta), spikes)


@given(trains)
def test_mean_over_time(train: list[list[float]]) -> None:
    np.testing.assert_allclose(mean_over_time(tensor(train)), np.mean(train, 0), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 2)])
def test_channel_mean_equals_the_reference(shape: tuple[int, ...]) -> None:
    e = torch.randn(shape, dtype=torch.float64)
    mean = channel_mean(e, 0)
    assert mean.shape == (3, *(1,) * (len(shape) - 2))
    np.testing.assert_allclose(mean.flatten(), reference.channel_mean(e.numpy()), rtol=0, atol=1e-14)
    last = channel_mean(e, -1)  # tokens: the channel is the last axis
    assert last.shape == (*(1,) * (len(shape) - 2), shape[-1])
    np.testing.assert_allclose(last.flatten(), reference.channel_mean(e.movedim(-1, 1).numpy()), rtol=0, atol=1e-14)


values = st.lists(sixteenths(-64, 96), min_size=1, max_size=12)


@given(
    z=values,
    T=st.integers(1, 9),
    theta=thresholds,
    v0=sixteenths(-16, 16),
    aim=sixteenths(-16, 32),
    late=st.integers(0, 8),
)
def test_clip_floor_error_and_its_straight_through_gradient(
    z: list[float], T: int, theta: float, v0: float, aim: float, late: int
) -> None:
    """Eq. 18. The window is on (T z + v0)/θ itself, both ends included, not on its floor."""
    x, target = tensor(z).requires_grad_(), torch.full((len(z),), aim, dtype=torch.float64)
    start = min(late, T - 1)
    error = clip_floor_error(x, target, T, tensor(theta), tensor(v0), start)
    (3 * error).backward()
    difference = clip_floor(x.detach(), T, tensor(theta), tensor(v0), start) - target
    inside = torch.tensor([0 <= (T * value + v0) / theta <= T - start for value in z])
    torch.testing.assert_close(error, difference.square().mean())
    torch.testing.assert_close(x.grad, 6 * difference * inside / len(z))


def test_clipped_relu() -> None:
    z = tensor([-1.0, 0.5, 2.0])
    assert clipped_relu(z).tolist() == [0.0, 0.5, 2.0]
    assert clipped_relu(z, tensor(0.75)).tolist() == [0.0, 0.5, 0.75]


@given(values=trains, split=st.integers(0, 20))
def test_increments_of_a_maximum_have_the_maximum_of_the_mean(values: list[list[float]], split: int) -> None:
    """Whatever the train, and wherever it is cut into two runs."""
    x = tensor(values)  # (T, 3)
    split = min(split, len(x))
    past, parts = None, []
    for part in (x[:split], x[split:]):
        if len(part):
            y, past = increments(lambda total: total.amax(1, keepdim=True), part.unsqueeze(1), past)  # (t, 1, 1)
            parts.append(y)
    assert float(torch.cat(parts).sum()) == float(x.sum(0).max())


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=20))
def test_the_maximum_of_spikes_is_a_spike_or_none(values: list[list[bool]]) -> None:
    y, _ = increments(lambda total: total.amax(1, keepdim=True), tensor(values).unsqueeze(1))
    assert set(y.flatten().tolist()) <= {0.0, 1.0}
