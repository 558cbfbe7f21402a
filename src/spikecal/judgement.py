"""From the numbers of an evaluation to words: how good the network is, where it loses, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import sqrt

from .errors import DataError
from .evaluation import Evaluation
from .layer_results import LayerResult

NOT_CALIBRATED = ("plain", "max_activation", "percentile", "opt")  # recipes
MADE_HERE = ("clipping", "flooring", "unevenness")  # in distinction to what a layer inherits


def verdict(result: Evaluation) -> str:
    """One or two sentences."""
    steps = _time(result)
    if result.metric is not None:
        text = f"The metric is {result.metric:.4g} at {steps}, and {result.ann_metric:.4g} for the ANN."
    elif result.accuracy is None or not result.ann_accuracy:
        text = f"The same answer as the ANN on {_percent(result.agreement or 0)} of the images at {steps}."
    else:
        text = f"{_percent(result.accuracy / result.ann_accuracy)} of the ANN's accuracy at {steps}."
    if result.agreement == 1 or (worst := worst_layer(result)) is None:
        return text
    return f"{text} Of the layers, {worst[0].name} adds the most error of its own, by {worst[1]}."


def _time(result: Evaluation, factor: int = 1) -> str:
    """The firing window, perhaps a multiple of it, and how long the answer takes where layers wait."""
    T, waiting = factor * result.T, result.latency - result.T
    return f"T={T}" + (f" (latency {T + waiting})" if waiting else "")


def _percent(share: float) -> str:
    """In whole numbers, but what is nearly 100 % does not become it."""
    return f"{min(100 * share, 99.9):.1f} %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def comparison_verdict(results: Mapping[str, Evaluation]) -> str:
    """Which network is the most accurate, and which does the least work for nearly the same; by league."""
    if any(result.metric is not None for result in results.values()):
        raise DataError("only networks that classify are compared, and these were evaluated by a metric")
    if len({result.accuracy is None for result in results.values()}) > 1:
        raise DataError("networks are compared on the same images, but some of these had labels, and others not")
    if len({len(result.hits) for result in results.values()}) > 1:
        numbers = ", ".join(f"{name} on {len(result.hits)}" for name, result in results.items())
        raise DataError(f"networks are compared on the same images, but these were evaluated on others: {numbers}")
    binary, signed = ({k: r for k, r in results.items() if r.signed == kind} for kind in (False, True))
    if not binary or not signed:
        return _league_verdict(results)
    return f"{_league_verdict(binary)} Of those with spikes of two signs, {_league_verdict(signed)}"


def _league_verdict(results: Mapping[str, Evaluation]) -> str:
    """The same for networks with spikes of one kind."""

    def quality(name: str) -> float:
        found = results[name].accuracy
        return (results[name].agreement or 0.0) if found is None else found

    def work(name: str) -> float:
        return results[name].operations.synaptic_operations + results[name].operations.multiply_accumulates

    first = max(results, key=lambda name: (quality(name), -work(name)))
    share = quality(first)
    noise = {name: 2 * _error_of_difference(results[first], result) for name, result in results.items()}
    enough = [name for name in results if quality(name) >= share - noise[name]]
    least = min(enough, key=work)
    what = "accuracy" if results[first].accuracy is not None else "agreement with the ANN"
    reached = f"{100 * share:.1f} % {what} at {_time(results[first])}"
    if len(results) == 1:
        return f"{first} has {reached}."
    text = f"{first} does best, {reached}"
    saved = round(100 * (1 - work(least) / work(first))) if work(first) else 0
    if not saved:
        return f"{text}, and none within noise of it does less work."
    close = f"{least} is within noise of it ({100 * quality(least):.1f} % at {_time(results[least])})"
    return f"{text}; {close} with {saved} % fewer operations."


def _error_of_difference(one: Evaluation, other: Evaluation) -> float:
    """Standard error of a difference on the same images: only those count on which one is right and the other wrong."""
    return sqrt(sum(a != b for a, b in zip(one.hits, other.hits, strict=True))) / len(one.hits)


def worst_layer(result: Evaluation) -> tuple[LayerResult, str] | None:
    """The layer that makes the largest error of its own, and its kind; None if no layer makes any."""
    found = [(value, layer, kind) for layer in result.layers for kind, value in own_parts(layer).items() if value > 0]
    if not found:
        return None
    _, layer, kind = max(found, key=lambda entry: entry[0])
    return layer, kind


def own_parts(layer: LayerResult) -> dict[str, float]:
    """The parts of a layer's error that are made in it."""
    return {kind: value for kind, value in asdict(layer.parts).items() if kind in MADE_HERE}


def advice(result: Evaluation) -> list[str]:
    """What to do next, most urgent first; nothing where all is well."""
    return [*_about_data(result), *_about_loss(result), *_about_layers(result), *_about_energy(result)]


def _about_data(result: Evaluation) -> list[str]:
    found = []
    if result.ann_accuracy is not None and result.ann_accuracy < _near_chance(result):
        found.append(
            f"The ANN itself is right on only {100 * result.ann_accuracy:.1f} % of {result.images} images, near chance "
            f"for {result.classes} classes: check the weights, and the preprocessing and order of labels of the data."
        )
    shifted = [layer for layer in result.layers if _differs(layer)]
    if shifted and (shifted[0] is result.layers[0] or len(shifted) > len(result.layers) / 2):
        found.append(
            f"In {len(shifted)} of {len(result.layers)} layers neurons fire at least 1.5 times as often, or as seldom, "
            "as on the calibration images: calibrate with images like these, in the same preprocessing."
        )
    elif (excess := _excess(result)) > 1.3:
        found.append(
            f"Errors of the layers are {excess:.1f} times those on the calibration images: perhaps these were too few "
            "for this recipe; calibrate with more of them."
        )
    return found


def _near_chance(result: Evaluation) -> float:
    """What guessing seldom reaches: twice its share of right answers, or three standard errors more than that share."""
    chance = 1 / result.classes
    return min(2 * chance, chance + 3 * sqrt(chance * (1 - chance) / result.images))


def _excess(result: Evaluation) -> float:
    """Errors of all layers, in relation to those on the calibration images; 0 if these are unknown."""
    known = [(layer.error, layer.calibration_error) for layer in result.layers if layer.calibration_error]
    return sum(error for error, _ in known) / sum(before for _, before in known if before) if known else 0.0


def _differs(layer: LayerResult) -> bool:
    before, now = layer.calibration_rate, layer.firing_rate
    return before is not None and max(before, now) > 1.5 * min(before, now) and max(before, now) > 1e-3


def _about_loss(result: Evaluation) -> list[str]:
    """If the answers differ from the ANN's: what dominates, and what helps against it."""
    if result.agreement is None or result.agreement > 0.99:
        return []
    if _loses_nothing(result):
        return ["In accuracy next to nothing is lost: a smaller T may do, which find_T (--auto-T) finds."]
    sums = {kind: sum(own_parts(layer)[kind] for layer in result.layers) for kind in MADE_HERE}
    if not any(sums.values()):
        return []
    most, found = max(sums, key=lambda kind: sums[kind]), []
    if result.recipe in NOT_CALIBRATED:
        found.append(f'Recipe "{result.recipe}" calibrates nothing: use "best", or "light" to be quick.')
    share = 100 * sums[most] / sum(sums.values())
    if most == "unevenness":
        cure = {
            "best": 'let layers wait: recipe "pipelined" has about as many spikes and more latency, or raise T',
            "pipelined": "raise T",
        }.get(result.recipe, 'use recipe "best", or "pipelined" where latency does not matter')
    elif most == "flooring":
        cure = f"raise T: at {_time(result, 2)} a spike counts half as much"
    else:
        cure = "thresholds are low: give more images to find them, or raise T"
    found.append(f"{share:.0f} % of the error that layers make is {most}; {cure}.")
    quarter = max(1, result.T // 4)  # in the first steps outputs may not count, or nothing has arrived at them
    points = 100 * (result.agreement - result.agreement_over_time[-1 - quarter]) if quarter < result.T else 0
    if points > 2:
        steps = "step" if quarter == 1 else f"{quarter} steps"
        found.append(f"Agreement rose by {points:.0f} points in the last {steps}: a larger T brings more.")
    return found


def _loses_nothing(result: Evaluation) -> bool:
    """Whether the network is as often right as an ANN that is worth something, within half a point."""
    if result.accuracy is None or result.ann_accuracy is None or result.T == 1:
        return False
    return result.accuracy >= result.ann_accuracy - 0.005 and result.ann_accuracy >= _near_chance(result)


def _about_layers(result: Evaluation) -> list[str]:
    found = []
    for what, share, remedy in (
        ("never fire", "dead_share", "if they do in the ANN, their thresholds are too high for so few steps"),
        ("fire whenever they may", "saturated_share", "their thresholds are too low for these images"),
    ):
        names = [layer.name for layer in result.layers if getattr(layer, share) > 0.5]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found.append(f"More than half of the neurons {what} in {', '.join(names[:3])}{more}: {remedy}.")
    return found


def _about_energy(result: Evaluation) -> list[str]:
    work = result.operations
    analog = sum(layer.multiply_accumulates for layer in work.layers if layer.input == "analog")
    if analog <= 0.1 * work.ann_multiply_accumulates:
        return []
    if result.signed:
        return ["Spikes of two signs are not binary: what reads them is counted as multiply-accumulates at every step."]
    return [
        f"{100 * analog / work.multiply_accumulates:.0f} % of the multiply-accumulates are behind pools or sums of "
        "spikes, which are not binary: pool_to_conv=True (--pool-to-conv) gives pools neurons of their own."
    ]
