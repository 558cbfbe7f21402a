"""Charts of an evaluation as matplotlib figures: `accuracy_over_time(result).savefig("accuracy.svg")`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .errors import DataError
from .evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"clipping": "#b35900", "flooring": "#6f7d1c", "unevenness": "#0b6e99", "inherited": "#9aa3ad"}


def accuracy_over_time(result: Evaluation) -> Figure:
    """Accuracy and agreement with the ANN, or the metric, after every step."""
    figure, axes = _figure()
    steps = range(1, result.latency + 1)
    if result.metric_over_time:
        axes.plot(steps, result.metric_over_time, marker=".", label="SNN")
        axes.axhline(result.ann_metric or 0.0, linestyle="--", color=COLORS["clipping"], label="ANN")
    if result.accuracy_over_time and result.ann_accuracy is not None:
        axes.plot(steps, result.accuracy_over_time, marker=".", label="accuracy of the SNN")
        axes.axhline(result.ann_accuracy, linestyle="--", color=COLORS["clipping"], label="accuracy of the ANN")
    if result.agreement_over_time:
        axes.plot(steps, result.agreement_over_time, linestyle=":", color="grey", label="same answer as the ANN")
    axes.set_xlabel("steps")
    axes.legend()
    return figure


def layer_errors(result: Evaluation) -> Figure:
    """The parts of every layer's error, side by side."""
    figure, axes = _figure()
    parts = list(COLORS)
    for i, part in enumerate(parts):
        places = [layer + (i - 1.5) * 0.2 for layer in range(len(result.layers))]
        axes.bar(places, [asdict(n.parts)[part] for n in result.layers], 0.2, color=COLORS[part], label=part)
    axes.set_ylabel("squared error / power of the ANN")
    _name_layers(axes, result)
    axes.legend()
    return figure


def firing_rates(result: Evaluation) -> Figure:
    """Spikes per neuron and step, with the range of the channels."""
    figure, axes = _figure()
    rates = [layer.firing_rate for layer in result.layers]
    below = [layer.firing_rate - layer.channel_rates[0] for layer in result.layers]
    above = [layer.channel_rates[-1] - layer.firing_rate for layer in result.layers]
    axes.bar(range(len(rates)), rates, yerr=[below, above], color=COLORS["unevenness"], ecolor="grey")
    axes.set_ylabel("firing rate")
    _name_layers(axes, result)
    return figure


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise DataError(f"figures need matplotlib: pip install 'spikecal[figures]' ({e})") from e
    figure = Figure(figsize=(8, 4), layout="constrained")
    return figure, figure.subplots()


def _name_layers(axes: Axes, result: Evaluation) -> None:
    names = [layer.name for layer in result.layers]
    rotation, ha = (60, "right") if len(names) > 6 else (0, "center")
    axes.set_xticks(range(len(names)), names, rotation=rotation, ha=ha)
