"""The smallest T that is good enough, found on images that calibration does not see, and without labels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import spikecal as sc
from spikecal.data import load_data
from spikecal.models import digits_net
from spikecal.time_steps import _smallest


@given(first=st.integers(1, 200), largest=st.integers(1, 200))
def test_the_search_finds_the_smallest_T_in_few_trials(first: int, largest: int) -> None:
    tried: list[int] = []

    def enough(T: int) -> bool:
        tried.append(T)
        return first <= T

    found = _smallest(enough, largest)
    assert found == min(first, largest)
    assert found == next((T for T in reversed(tried) if first <= T), largest)  # the last one that was enough
    assert len(set(tried)) == len(tried) <= 2 * largest.bit_length()
    assert all(1 <= T < max(2, largest) for T in tried)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.cat([x for x, _ in load_data("digits", split="train", limit=400).batches()])


@pytest.fixture(scope="module")
def search(images: Tensor) -> sc.Search:
    return sc.find_T(digits_net(), [images], 1.0, "light", largest=32)


def test_the_chosen_T_is_enough_and_the_largest_was_tried(search: sc.Search) -> None:
    needed = search.agreement[32] - 0.01
    assert search.held_out == 100
    assert search.agreement[search.T] >= needed
    assert min(T for T, share in search.agreement.items() if share >= needed) == search.T
    assert search.T - 1 in search.agreement or search.T == 1
    assert search.snn.recipe.name == "light"
    assert search.latencies == {T: T for T in search.agreement}


def test_one_network_is_kept_at_a_time(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[sc.SpikingNetwork]] = []
    alive: list[int] = []

    def counted(*arguments: Any, **options: Any) -> sc.SpikingNetwork:
        alive.append(sum(known() is not None for known in made))
        snn = sc.convert(*arguments, **options)
        made.append(weakref.ref(snn))
        return snn

    monkeypatch.setattr("spikecal.time_steps.convert", counted)
    found = sc.find_T(sc.convert(digits_net(), [images[:2]], 1), [images], 1.0, "light", largest=16)
    assert len(made) >= 3
    assert max(alive) == 1
    assert found.snn is next(known() for known in made if known() is not None)


def test_more_loss_allowed_never_needs_more_steps(images: Tensor, search: sc.Search) -> None:
    assert sc.find_T(digits_net(), [images], 20.0, largest=32).T <= search.T
    assert sc.find_T(digits_net(), [images], 100.0, largest=32).T == 1


@pytest.mark.parametrize(("points", "wanted"), [(10.0, 5), (9.0, 6)])
def test_points_are_hundredths_of_the_images(points: float, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 images that are held out, a network is wrong on two for every step below 10: exactly 10 points at T=5."""

    class Agreeing:
        def __init__(self, T: int) -> None:
            self.T = T

        def __call__(self, *x: Tensor) -> Tensor:
            right = torch.arange(len(x[0])) >= 2 * max(0, 10 - self.T)
            return nn.functional.one_hot(right.long(), 2)

    source = sc.convert(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 2, 2), 1, "plain")
    source.ann = lambda *x: nn.functional.one_hot(torch.ones(len(x[0])).long(), 2)  # type: ignore[method-assign]
    monkeypatch.setattr("spikecal.time_steps.convert", lambda source, images, T, *_, **__: Agreeing(T))
    chosen = sc.find_T(source, [torch.randn(400, 2, 2)], points, largest=32).snn.T
    assert chosen == wanted


def test_the_network_is_calibrated_without_the_held_out_images(images: Tensor, search: sc.Search) -> None:
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    again = sc.convert(digits_net(), [images[order[100:]]], search.T, "light")
    assert torch.equal(again(images[:8]), search.snn(images[:8]))


def test_a_stream_and_a_spiking_network_will_do(images: Tensor, search: sc.Search) -> None:
    def stream() -> Iterator[Tensor]:
        yield from images.split(50)

    assert sc.find_T(digits_net(), stream(), 1.0, search.snn.recipe, largest=32).agreement == search.agreement
    assert sc.find_T(search.snn, [images], 1.0, largest=32).agreement == search.agreement


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": -1.0}, "must be between 0 and 100, not -1.0"),
        ({"points": 101}, "must be between 0 and 100, not 101"),
        ({"points": float("nan")}, "must be between 0 and 100"),
        ({"points": "1"}, "must be between 0 and 100, not '1'"),
        ({"largest": 0}, "at least 1, not 0"),
        ({"largest": "8"}, "must be a whole number of at least 1, not '8'"),
        ({"batches": []}, "there are no calibration images"),
        ({"batches": [torch.zeros(3, 1, 8, 8)]}, "3 images are too few to keep some"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments: dict, message: str, images: Tensor) -> None:
    with pytest.raises(sc.SpikecalError, match=message):
        sc.find_T(**{"model": digits_net(), "batches": [images], **arguments})


@pytest.mark.parametrize("outputs", [1, 2])
def test_without_class_scores_there_is_no_agreement(outputs: int) -> None:
    """A map of scores has no answer, and of a single score every answer agrees."""
    head = nn.Conv2d(2, 1, 1) if outputs == 2 else nn.Sequential(nn.Flatten(), nn.Linear(32, 1))
    pixels = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), head)
    with pytest.raises(sc.CalibrationError, match="one output, scores of two or more classes"):
        sc.find_T(pixels, [torch.randn(8, 1, 6, 6)])
