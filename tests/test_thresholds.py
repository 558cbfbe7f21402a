"""Threshold rules are exact statistics of all activations, whatever their order and however they are batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import reference
import spikecal as sc
from helpers import captured, inputs, prepared, shell
from spikecal.conversion import find_thresholds
from spikecal.graph import Graph
from spikecal.simulation import run_ann
from spikecal.thresholds import Accumulator
from spikecal.values import Value

DTYPES = st.sampled_from([torch.float32, torch.float64])


def watched(rule: Any, x: Tensor, T: int, cuts: tuple[int, ...] = ()) -> tuple[Tensor, Accumulator]:
    """The thresholds for activations (rows, n), shown in parts."""
    accumulator = rule.accumulator(T)
    for _ in range(20):
        for part in torch.tensor_split(x, list(cuts), 1):
            if part.shape[1]:
                accumulator.update(part[None])
        found = accumulator.end_pass()
        if found is not None:
            return found, accumulator
    raise AssertionError("it never ends")


@st.composite
def activations(draw: st.DrawFn) -> np.ndarray:
    """Some rows of dyadic numbers, some of them never positive."""
    rows, n = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    sixteenths = draw(hnp.arrays(np.int64, (rows, n), elements=st.integers(-40, 100)))
    return sixteenths / 16


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.lists(st.integers(0, 40), max_size=4))))


def untied(thresholds: list[float], x: np.ndarray, dtype: torch.dtype) -> list[float]:
    """What a rule gives for the thresholds of the reference, activations or 1 where all of x is dead."""
    theta, alive = torch.tensor(thresholds, dtype=dtype), torch.tensor(x.max(-1) > 0)
    return torch.where(alive, theta * (1 - 1e-5), theta).tolist()


# ---------------------------------------------------------------------- maximum and percentile


@given(x=activations(), parts=cuts(), dtype=DTYPES)
def test_maximum_equals_the_reference(x: np.ndarray, parts: tuple[int, ...], dtype: torch.dtype) -> None:
    found, _ = watched(sc.MaxActivation(), torch.tensor(x, dtype=dtype), 8, parts)
    assert found.tolist() == untied([reference.max_threshold(row) for row in x], x, dtype)
    assert found.dtype == dtype


@given(x=activations(), parts=cuts(), q=st.floats(0.01, 1.0), dtype=DTYPES)
def test_percentile_equals_the_reference(x: np.ndarray, parts: tuple[int, ...], q: float, dtype: torch.dtype) -> None:
    found, _ = watched(sc.Percentile(q), torch.tensor(x, dtype=dtype), 8, parts)
    assert found.tolist() == untied([reference.percentile_threshold(row, q) for row in x], x, dtype)
    assert found.dtype == dtype


@given(
    x=hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    q=st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]),
)
def test_percentile_is_exact_for_any_numbers(x: np.ndarray, q: float) -> None:
    """Also for subnormal ones and for those that agree in all bits but the last."""
    found, _ = watched(sc.Percentile(q), torch.tensor(x)[None], 8)
    assert found.tolist() == untied([reference.percentile_threshold(x, q)], x[None], torch.float32)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, float("nan")])
def test_a_percentile_outside_of_0_to_1_is_refused(q: float) -> None:
    with pytest.raises(sc.CalibrationError, match="q must be in"):
        sc.Percentile(q)


# ---------------------------------------------------------------------- least squared error


@st.composite
def scaled_activations(draw: st.DrawFn) -> np.ndarray:
    """As `activations`, the largest of each row a power of two: with a grid of a power of two, ties are exact."""
    x = np.minimum(draw(activations()), 4.0)
    top = draw(hnp.arrays(np.int64, (len(x), 1), elements=st.integers(0, 3)))
    return np.concatenate([np.minimum(x, 2.0**top / 2), 2.0**top / 2], 1)


@given(
    x=scaled_activations(),
    T=st.integers(1, 12),
    grid=st.sampled_from([1, 8, 64]),
    shift=st.sampled_from([0.0, 0.25, 0.5, 1 / 3, 0.7, 5 / 64]),
    parts=cuts(),
)
def test_errors_equal_those_of_brute_force(
    x: np.ndarray, T: int, grid: int, shift: float, parts: tuple[int, ...]
) -> None:
    rule = sc.MMSE(grid=grid, shift=shift)
    found, accumulator = watched(rule, torch.tensor(x, dtype=torch.float32), T, parts)
    expected, errors = reference.mmse_threshold_per_channel(x.T, T, grid, shift)
    constant = (np.maximum(x, 0) ** 2).sum(1, keepdims=True)
    np.testing.assert_allclose(accumulator.errors(*accumulator.by_row()).numpy() + constant, errors, rtol=0, atol=1e-9)
    for row, theta in enumerate(found.tolist()):  # the best one, or one that is as good
        error = errors[row][round(theta / x[row].max() * grid) - 1]
        assert theta == pytest.approx(expected[row], rel=2e-5) or error <= errors[row].min() + 1e-9


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(15))
def test_least_error_equals_the_reference(seed: int, dtype: torch.dtype, shift: float) -> None:
    """Random numbers, so only the largest activation of a channel lies on the edge of a level."""
    rng = np.random.default_rng(seed)
    T, x = int(rng.integers(1, 33)), rng.standard_normal((3, int(rng.integers(2, 200)))).astype(np.float32)
    found, _ = watched(sc.MMSE(shift=shift), torch.tensor(x).to(dtype), T)
    expected, _ = reference.mmse_threshold_per_channel(x.T, T, shift=shift)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("T", [3, 9, 32])
def test_the_largest_activation_reaches_the_highest_level(T: int) -> None:
    """T·max/max is T, however the maximum is rounded: one step below, it would be the error of a whole level."""
    x = np.random.default_rng(T).uniform(0.1, 1.0, (100, 3)).astype(np.float32)
    _, accumulator = watched(sc.MMSE(grid=10), torch.tensor(x), T)
    _, errors = reference.mmse_threshold_per_channel(x.T, T, grid=10)
    constant = (x.astype(np.float64) ** 2).sum(1, keepdims=True)
    np.testing.assert_allclose(accumulator.errors(*accumulator.by_row()).numpy() + constant, errors, rtol=0, atol=1e-9)


@given(x=activations(), T=st.integers(1, 32))
def test_least_error_is_never_0_and_at_most_the_maximum(x: np.ndarray, T: int) -> None:
    found, _ = watched(sc.MMSE(), torch.tensor(x), T)
    for theta, top in zip(found.tolist(), x.max(1), strict=True):
        assert theta == 1.0 if top <= 0 else 0 < theta <= top * (1 + 1e-12)


@pytest.mark.parametrize("T", [1, 2, 32])
def test_one_tiny_activation_among_zeros_is_a_threshold(T: int) -> None:
    x = torch.zeros(1, 1000)
    x[0, 500] = 1e-30
    for rule in (sc.MMSE(), sc.Percentile(0.5), sc.MaxActivation(), sc.LTB()):
        assert 0 < float(watched(rule, x, T)[0]) <= 1.001e-30


@pytest.mark.parametrize("rule", [sc.MMSE(), sc.MMSE(shift=0.5), sc.Percentile(), sc.MaxActivation(), sc.LTB()])
def test_a_dead_row_gets_1(rule: Any) -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [-1.0, -2.0, -0.5], [-1.0, 0.0, 0.5]])
    found = watched(rule, x, 8)[0].tolist()
    assert found[:2] == [1.0, 1.0]
    assert 0 < found[2] <= 0.5


@pytest.mark.parametrize(
    ("T", "shift"), [(1, 0), (4, 0), (6, 0), (8, 0.125), (12, 0.25), (16, 0.375), (32, 0.375), (48, 0.5), (999, 0.5)]
)
def test_of_the_shift_the_more_is_left_the_more_steps_there_are(T: int, shift: float) -> None:
    """½ − 3/T, to the nearest eighth, and not below 0."""
    x = torch.rand(3, 50, generator=torch.Generator().manual_seed(T))
    found, accumulator = watched(sc.MMSE(shift=0.5, lost=3.0), x, T)
    assert accumulator.shift == shift
    assert found.tolist() == watched(sc.MMSE(shift=shift), x, T)[0].tolist()
    assert sc.MMSE(shift=0.95, lost=0.01).accumulator(T).shift <= 0.95


@pytest.mark.parametrize(
    ("T", "depth", "shift"),
    [(4, 0.1, 0), (4, 0.7, 0.125), (4, 1, 0.25), (8, 0.1, 0.125), (8, 0.5, 0.25), (8, 1, 0.375), (64, 0.1, 0.5)],
)
def test_of_the_shift_more_is_left_in_deep_layers(T: int, depth: float, shift: float) -> None:
    """½ − (3 − 2·depth)/T, to the nearest eighth, and not below 0."""
    assert sc.MMSE(shift=0.5, lost=3.0, regained=2.0).accumulator(T, depth).shift == shift


@pytest.mark.parametrize("name", ["densenet", "resnet_block"])
def test_each_layer_gets_the_threshold_for_its_depth(name: str) -> None:
    """With the whole shift regained at the end, and nothing left of it elsewhere, only the last layer rounds."""
    graph, x = prepared(name), inputs(name, 20)
    found = find_thresholds(graph, x, sc.MMSE(per_channel=True, shift=0.5, lost=400, regained=400), 4, 10**9)
    floored, rounded = (find_thresholds(graph, x, sc.MMSE(per_channel=True, shift=s), 4, 10**9) for s in (0, 0.5))
    last = max(graph.depths.values())
    for node in (n.name for n in graph.neurons):
        torch.testing.assert_close(found[node], (rounded if graph.depths[node] == last else floored)[node])
    assert any(not torch.equal(floored[node], rounded[node]) for node in floored)


@pytest.mark.parametrize("shift", [0.0, 0.125, 0.375, 0.5, 5 / 64])
def test_memory_does_not_depend_on_the_shift(shift: float) -> None:
    accumulator = sc.MMSE(shift=shift).accumulator(32)
    assert accumulator.columns <= 100 * 32 + 1


@pytest.mark.parametrize(
    "bad",
    [
        *({"grid": 0}, {"grid": -1}, {"shift": 1.0}, {"shift": -0.1}, {"shift": 0.123}, {"lost": -1.0}),
        *({"lost": math.nan}, {"regained": 0.5}, {"lost": 1, "regained": -0.1}, {"lost": 1, "regained": math.nan}),
    ],
)
def test_a_grid_or_shift_without_meaning_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(sc.CalibrationError, match="must"):
        sc.MMSE(**bad)


# ---------------------------------------------------------------------- local threshold balancing


@given(x=activations(), parts=cuts(), iterations=st.integers(1, 60))
def test_balanced_thresholds_equal_the_reference(x: np.ndarray, parts: tuple[int, ...], iterations: int) -> None:
    found, _ = watched(sc.LTB(iterations), torch.tensor(x), 8, parts)
    for theta, row in zip(found.tolist(), x, strict=True):
        top = row.max()
        expected = min(reference.balanced_threshold(row, iterations), top) if top > 0 else 1.0
        assert theta == pytest.approx(expected, abs=2e-5 * max(1.0, top))


def test_balanced_thresholds_of_many_activations_are_close_to_the_reference() -> None:
    x = np.random.default_rng(0).exponential(size=20_000) - 0.5
    found, _ = watched(sc.LTB(300), torch.tensor(x[None]), 8)
    assert float(found) == pytest.approx(reference.balanced_threshold(x, 300), rel=1e-4)  # a cell is 1/4096 of the top


def test_more_balancing_clips_less() -> None:
    x = torch.tensor(np.random.default_rng(0).exponential(size=(1, 5000)))
    few, more, many = (float(watched(sc.LTB(n), x, 8)[0]) for n in (10, 100, 1000))
    assert 0 < few < more < many <= float(x.max())


def test_balancing_without_iterations_is_refused() -> None:
    with pytest.raises(sc.CalibrationError, match="at least one iteration"):
        sc.LTB(0)


# ---------------------------------------------------------------------- over a network


RULES = [
    sc.MaxActivation(),
    sc.MaxActivation(per_channel=True),
    sc.Percentile(0.97),
    sc.Percentile(0.97, per_channel=True),
    sc.MMSE(),
    sc.MMSE(per_channel=True),
    sc.MMSE(per_channel=True, shift=0.5),
]
ids = [repr(rule) for rule in RULES]


def channels_first(graph: Graph, name: str, x: Tensor) -> np.ndarray:
    """(C, values)."""
    return x.movedim(graph.channel_axis(graph.by_name[name]) + 1, 0).flatten(1).numpy()


def by_reference(rule: Any, x: np.ndarray, T: int) -> float:
    if isinstance(rule, sc.MaxActivation):
        return reference.max_threshold(x)
    if isinstance(rule, sc.Percentile):
        return reference.percentile_threshold(x, rule.q)
    return reference.mmse_threshold(x, T, rule.grid, rule.shift)[0]


@pytest.mark.parametrize("rule", RULES, ids=ids)
@pytest.mark.parametrize("name", ["mlp", "tokens", "resnet_block", "clipped_spellings", "dead_channels"])
def test_thresholds_of_a_network_equal_the_reference(name: str, rule: Any) -> None:
    graph, x, T = prepared(name).map_tensors(Tensor.float), [t.float() for t in inputs(name, 12)], 8
    seen: dict[str, Tensor] = {}

    def tap(node: Any, value: Value) -> None:
        seen[node.name] = value.data

    found = find_thresholds(graph, x, rule, T, 10**9)
    run_ann(graph, x, tap)
    assert list(found) == [n.name for n in graph.neurons]
    for node in graph.neurons:
        values = channels_first(graph, node.name, seen[node.name])
        rows = values if rule.per_channel else values.reshape(1, -1)
        expected = [by_reference(rule, row, T) for row in rows]
        np.testing.assert_allclose(found[node.name].flatten(), expected, rtol=2e-5)
        assert found[node.name].ndim == len(node.shape)
        found[node.name].expand(node.shape)  # broadcasts against a sample


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_order_and_batches_do_not_matter(rule: Any) -> None:
    """Weights and images are dyadic, so that the ANN itself is exact and the thresholds must be identical."""
    graph = prepared("conv_bn").map_tensors(lambda t: (t * 8).round() / 8)
    (x,) = inputs("conv_bn", 24)
    x = (x * 8).round() / 8
    recipe, shuffled = sc.Recipe(rule), x[torch.randperm(24)]
    single = [(part, None) for part in x.flip(0)[:, None]]
    ways = [[x], [x[:5], x[5:6], x[6:]], [shuffled], list(shuffled.split(7)), single]
    found = [sc.convert(shell(graph), batches, 8, recipe).sites for batches in ways]
    for other in found[1:]:
        for name in (n.name for n in graph.neurons):
            assert torch.equal(other[name].threshold, found[0][name].threshold)


@pytest.mark.parametrize("rule", RULES, ids=ids)
@pytest.mark.parametrize("name", ["densenet", "clipped_spellings"])
def test_a_small_memory_gives_the_same_thresholds(name: str, rule: Any) -> None:
    """Sites then watch the images one group after the other, a few images at a time."""
    graph, x = prepared(name), inputs(name, 6)
    large = find_thresholds(graph, x, rule, 8, 10**9)
    small = find_thresholds(graph, x, rule, 8, _enough_for_one_site(graph, rule))
    assert large.keys() == small.keys()
    for key in large:
        torch.testing.assert_close(small[key], large[key], rtol=1e-12, atol=0)


def _enough_for_one_site(graph: Graph, rule: Any) -> int:
    accumulator = rule.accumulator(8)
    accumulator.update(torch.ones(1, 1, 3))
    accumulator.end_pass()
    channels = max(max(n.shape) for n in graph.neurons) if rule.per_channel else 1
    return accumulator.nbytes * channels + 1000


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_a_cap_bounds_the_threshold(rule: Any) -> None:
    graph, x = prepared("clipped_spellings"), inputs("clipped_spellings", 200)
    found = find_thresholds(graph, x, rule, 8, 10**9)
    reached = 0
    for node in graph.neurons:
        cap = float(graph.tensors[node.op.cap])
        assert float(found[node.name].max()) <= cap * (1 + 1e-12)
        reached += float(found[node.name].max()) >= 0.8 * cap
    assert reached >= 5


def test_thresholds_that_fit_no_memory_are_refused() -> None:
    with pytest.raises(sc.CalibrationError, match=r"thresholds of 'relu' at T=8 need .* more than the memory budget"):
        find_thresholds(prepared("mlp"), inputs("mlp", 4), sc.MMSE(per_channel=True), 8, 2000)


def test_only_the_images_for_thresholds_are_watched() -> None:
    (x,) = inputs("mlp", 10)
    x = torch.cat([x, 100 * x])
    recipe = sc.Recipe(sc.MaxActivation(), threshold_images=10, calibration_images=20)
    few = sc.convert(shell(captured("mlp")), x, 4, recipe)
    expected = find_thresholds(few.source, [x[:10]], sc.MaxActivation(), 4, 10**9)
    assert all(torch.equal(few.sites[name].threshold, theta) for name, theta in expected.items())
