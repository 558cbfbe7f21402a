"""What is said about a network follows from its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import spikecal as sc
from helpers import converted, inputs
from spikecal.judgement import comparison_verdict

X = inputs("resnet_block", 8, seed=7)[0]


@pytest.fixture(scope="module")
def result() -> sc.Evaluation:
    snn = converted("resnet_block")
    return sc.evaluate(snn, [(X, snn.ann(X).argmax(1))])


def with_parts(result: sc.Evaluation, agreement: float = 0.5, **parts: float) -> sc.Evaluation:
    """The last layer makes these errors, the others none."""
    none = sc.ErrorParts(0.0, 0.0, 0.0, 0.0)
    layers = [replace(layer, parts=none) for layer in result.layers]
    layers[-1] = replace(layers[-1], parts=replace(none, **parts))
    answers = {"agreement": agreement, "agreement_over_time": [agreement] * result.T, "accuracy": agreement}
    return replace(result, layers=layers, **answers)


def test_the_verdict_names_the_share_and_the_layer_that_loses_most(result: sc.Evaluation) -> None:
    some = replace(with_parts(result, unevenness=0.2, inherited=0.9), accuracy=0.45, ann_accuracy=0.9)
    name = result.layers[-1].name
    worst = f"Of the layers, {name} adds the most error of its own, by unevenness."
    assert sc.verdict(some) == f"50 % of the ANN's accuracy at T={result.T}. {worst}"
    late = replace(some, accuracy=None, ann_accuracy=None, latency=result.T + 3)
    assert sc.verdict(late).startswith(f"The same answer as the ANN on 50 % of the images at T={result.T} (latency")


def test_too_few_calibration_images_are_noticed(result: sc.Evaluation) -> None:
    def layers(factor: float) -> list[sc.LayerResult]:
        same = [replace(layer, calibration_rate=layer.firing_rate) for layer in result.layers]
        return [replace(layer, calibration_error=layer.error / factor) for layer in same]

    said = " ".join(sc.advice(replace(result, layers=layers(2.0))))
    assert "Errors of the layers are 2.0 times those on the calibration images" in said
    assert "calibrate with more of them" in said
    assert "times those on" not in " ".join(sc.advice(replace(result, layers=layers(1.1))))


def test_a_perfect_network_needs_no_advice(result: sc.Evaluation) -> None:
    perfect = with_parts(result, agreement=1.0)
    perfect = replace(
        perfect,
        layers=[
            replace(n, dead_share=0.0, saturated_share=0.0, calibration_rate=None, calibration_error=None)
            for n in perfect.layers
        ],
    )
    assert sc.advice(replace(perfect, ann_accuracy=0.9)) == []
    assert (
        sc.verdict(replace(perfect, accuracy=0.9, ann_accuracy=0.9)) == f"100 % of the ANN's accuracy at T={result.T}."
    )


@pytest.mark.parametrize(
    ("recipe", "parts", "words"),
    [
        ("light", {"unevenness": 0.2}, 'use recipe "best"'),
        ("best", {"unevenness": 0.2}, 'recipe "pipelined"'),
        ("pipelined", {"unevenness": 0.2}, "raise T"),
        ("light", {"flooring": 0.2, "unevenness": 0.1}, "67 % of the error that layers make is flooring; raise T"),
        ("light", {"clipping": 0.2, "inherited": 0.5}, "100 % of the error that layers make is clipping"),
    ],
)
def test_the_cure_fits_the_error(result: sc.Evaluation, recipe: str, parts: dict[str, float], words: str) -> None:
    assert any(words in line for line in sc.advice(replace(with_parts(result, **parts), recipe=recipe)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ann_accuracy": 0.21, "classes": 10}, None),
        ({"ann_accuracy": 0.12, "classes": 10}, "near chance for 10 classes: check the weights, and the preprocessing"),
        (
            {"agreement": 0.9, "agreement_over_time": [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9]},
            "a larger T brings more",
        ),
    ],
)
def test_advice_on_the_whole(result: sc.Evaluation, changes: dict[str, Any], words: str | None) -> None:
    lines = sc.advice(replace(with_parts(result, flooring=0.1), **changes))
    assert any(words in line for line in lines) if words else not any("near chance" in line for line in lines)


def test_images_unlike_those_of_calibration_are_noticed(result: sc.Evaluation) -> None:
    strange = [replace(layer, calibration_rate=0.1, firing_rate=0.3) for layer in result.layers]
    assert "calibrate with images like these" in sc.advice(replace(result, layers=strange))[0]
    snn = converted("resnet_block")
    same, other = (sc.evaluate(snn, [x]) for x in (X, 10 * X))
    assert not any("calibrate with" in line for line in sc.advice(same))
    assert any("calibrate with" in line for line in sc.advice(other))


def test_silent_and_saturated_layers_are_named(result: sc.Evaluation) -> None:
    layers = [replace(layer, dead_share=0.6, saturated_share=0.7) for layer in result.layers]
    text = "\n".join(sc.advice(replace(result, layers=layers)))
    assert "More than half of the neurons never fire in " in text
    assert f"fire whenever they may in {layers[0].name}" in text


def test_a_comparison_names_the_best_and_the_thrifty(result: sc.Evaluation) -> None:
    half = replace(result.operations, layers=[replace(n, synaptic_operations=1.0) for n in result.operations.layers])
    good = replace(result, accuracy=0.9, hits=[True] * 90 + [False] * 10)
    thrifty = replace(good, accuracy=0.89, hits=[True] * 87 + [False] * 11 + [True] * 2, operations=half)
    poor = replace(good, accuracy=0.5, hits=[True] * 50 + [False] * 50, operations=half)
    text = comparison_verdict({"good": good, "thrifty": thrifty, "poor": poor})
    T = f"T={result.T}"
    close = f"thrifty is within noise of it (89.0 % at {T}) with "
    assert text.startswith(f"good does best, 90.0 % accuracy at {T}; {close}")
    assert comparison_verdict({"good": good, "poor": poor}) == (
        f"good does best, 90.0 % accuracy at {T}, and none within noise of it does less work."
    )


def test_noise_is_that_of_the_images_on_which_one_is_right_and_the_other_wrong(result: sc.Evaluation) -> None:
    half = replace(result.operations, layers=[replace(n, synaptic_operations=1.0) for n in result.operations.layers])
    good = replace(result, accuracy=0.9, hits=[True] * 90 + [False] * 10)
    for lost, close in ((4, True), (5, False)):  # two standard errors of a count: twice its root
        less = replace(
            good, accuracy=0.9 - lost / 100, hits=[True] * (90 - lost) + [False] * (10 + lost), operations=half
        )
        assert ("less is within noise" in comparison_verdict({"good": good, "less": less})) == close
    with pytest.raises(sc.DataError, match=r"on the same images, .* good on 100, less on 50"):
        comparison_verdict({"good": good, "less": replace(good, hits=[True] * 50)})
    with pytest.raises(sc.DataError, match="some of these had labels, and others not"):
        comparison_verdict({"good": good, "less": replace(good, accuracy=None)})


def test_of_equals_the_thriftier_does_best_in_either_order(result: sc.Evaluation) -> None:
    half = replace(result.operations, layers=[replace(n, synaptic_operations=1.0) for n in result.operations.layers])
    waiting = replace(result, accuracy=None, operations=half, latency=result.T + 3)
    nets = {"plain": replace(result, accuracy=None), "waiting": waiting}
    for names in (("plain", "waiting"), ("waiting", "plain")):
        assert comparison_verdict({name: nets[name] for name in names}) == (
            f"waiting does best, {100 * result.agreement:.1f} % agreement with the ANN at T={result.T} (latency "
            f"{result.T + 3}), and none within noise of it does less work."
        )


def test_leagues_are_judged_apart(result: sc.Evaluation) -> None:
    """Spikes of two signs are counted as multiplications, and not as no work at all."""
    layers = [replace(n, synaptic_operations=0.0, multiply_accumulates=1e9) for n in result.operations.layers]
    signed = replace(result, accuracy=0.95, signed=True, operations=replace(result.operations, layers=layers))
    binary, T = replace(result, accuracy=0.9), f"T={result.T}"
    assert comparison_verdict({"signed": signed, "binary": binary}) == (
        f"binary has 90.0 % accuracy at {T}. Of those with spikes of two signs, signed has 95.0 % accuracy at {T}."
    )
    pools = replace(signed, signed=False, accuracy=0.9)
    assert comparison_verdict({"pools": pools, "binary": binary}).startswith("binary does best")
    assert "pool" not in " ".join(sc.advice(signed))
    assert "Spikes of two signs are not binary" in " ".join(sc.advice(signed))


@pytest.mark.parametrize(
    ("classes", "accuracy", "near"), [(2, 0.99, False), (2, 0.52, True), (3, 0.6, False), (10, 0.1, True)]
)
def test_near_chance_depends_on_the_classes(result: sc.Evaluation, classes: int, accuracy: float, near: bool) -> None:
    some = replace(result, classes=classes, ann_accuracy=accuracy, images=500)
    assert ("near chance" in " ".join(sc.advice(some))) == near


def test_recipes_that_calibrate_nothing_are_told_so(result: sc.Evaluation) -> None:
    some = replace(with_parts(result, flooring=0.3), recipe="max_activation")
    assert 'calibrates nothing: use "best"' in sc.advice(some)[0]


def test_networks_that_never_fire_can_be_compared(result: sc.Evaluation) -> None:
    quiet = replace(result.operations, layers=[replace(n, synaptic_operations=0.0) for n in result.operations.layers])
    assert "does best" in comparison_verdict(
        {"a": replace(result, operations=quiet), "b": replace(result, operations=quiet)}
    )


def test_advice_to_take_more_steps_counts_those_that_layers_wait(result: sc.Evaluation) -> None:
    some = replace(with_parts(result, flooring=0.3), recipe="pipelined", latency=result.T + 3, agreement=0.5)
    some = replace(some, agreement_over_time=[0.5] * some.latency)
    assert f"raise T: at T={2 * result.T} (latency {2 * result.T + 3}) a spike" in " ".join(sc.advice(some))


def test_almost_all_is_not_called_all(result: sc.Evaluation) -> None:
    some = replace(result, accuracy=None, agreement=0.9996)
    assert sc.verdict(some).startswith(f"The same answer as the ANN on 99.9 % of the images at T={result.T}.")
    assert sc.verdict(replace(result, accuracy=0.996, ann_accuracy=0.998)).startswith("99.8 % of the ANN's accuracy")
    third = 16 / 96  # of which 100·x/x is not quite 100
    assert sc.verdict(replace(result, accuracy=third, ann_accuracy=third)).startswith("100 % of the ANN's accuracy")


def test_multiplications_behind_pools_are_pointed_out(result: sc.Evaluation) -> None:
    some = [replace(n, input="analog", multiply_accumulates=1e9) for n in result.operations.layers]
    said = " ".join(sc.advice(replace(result, operations=replace(result.operations, layers=some))))
    assert "100 % of the multiply-accumulates are behind pools or sums of spikes" in said


@pytest.mark.parametrize(
    ("accuracy", "lost"),
    [(0.9, False), (0.896, False), (0.89, True), (None, True)],
    ids=["none", "little", "a point", "?"],
)
def test_where_nothing_is_lost_fewer_steps_are_proposed(
    result: sc.Evaluation, accuracy: float | None, lost: bool
) -> None:
    expected = None if accuracy is None else 0.9
    some = replace(with_parts(result, 0.95, flooring=0.1), accuracy=accuracy, ann_accuracy=expected, images=1000)
    said = " ".join(sc.advice(some))
    assert ("a smaller T may do" in said) != lost
    assert ("raise T" in said) == lost


@pytest.mark.parametrize(
    ("agreements", "words"),
    [
        ([0, 0, 0, 0, 0.85, 0.885, 0.89, 0.9], None),  # the first steps do not count
        ([0, 0, 0, 0, 0.5, 0.7, 0.8, 0.9], "Agreement rose by 20 points in the last 2 steps: a larger T brings more."),
        ([0.9], None),
    ],
)
def test_what_still_rises_at_the_end_rises_on(
    result: sc.Evaluation, agreements: list[float], words: str | None
) -> None:
    T = len(agreements)
    some = replace(with_parts(result, 0.9, flooring=0.1), agreement_over_time=agreements, accuracy=None, T=T, latency=T)
    said = [line for line in sc.advice(some) if "a larger T" in line]
    assert said == ([words] if words else [])


def test_steps_before_the_first_output_are_no_reason_for_a_larger_T(result: sc.Evaluation) -> None:
    silent = [0.1] * 12 + [0.9] * result.T
    late = replace(with_parts(result, 0.9, flooring=0.1), agreement_over_time=silent, latency=len(silent))
    assert not any("a larger T" in line for line in sc.advice(late))
