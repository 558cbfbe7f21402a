"""Plain numbers as tables for a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich import box
from rich.bar import Bar
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..bench import Benchmark
    from ..demo import DemoResult
    from ..evaluation import Evaluation
    from .description import NetworkDescription, NodeRow

BAR = 10


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """Numbers to the right. Where it is narrow, text and bars give way, names and numbers do not."""
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=i == 0 or name in right, overflow="fold")
    return table


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _number(value: float | None, digits: str = ".3f") -> str:
    return "" if value is None else format(value, digits)


def _bar(value: float | None, largest: float) -> RenderableType:
    return Bar(largest, 0, value, width=BAR) if value and largest else ""


def _time(T: int, latency: int) -> str:
    """The firing window, and how long the answer takes where layers wait."""
    return f"T = {T}" + (f", latency {latency}" if latency > T else "")


# --- inspect -------------------------------------------------------------------------------------------------


def network_table(title: str, calibrated: dict[str, Any], network: NetworkDescription) -> Iterator[RenderableType]:
    if calibrated:
        title += f", converted for {_time(calibrated['T'], calibrated['latency'])} with recipe {calibrated['recipe']}"
    columns = ("node", "operation", "output", "parameters", "rule", "segment")
    table = _table(title, *columns, right=("output", "parameters", "segment"))
    for row in network.nodes:
        style = "red" if row.rule.startswith("refused") else "bold" if row.name == row.site else ""
        table.add_row(*map(Text, _cells(row)), style=style)
    yield table
    if network.refused:
        yield Text(f"{_count(len(network.nodes), 'node')}, {_count(len(network.refused), 'place')} refused")
    yield Text(
        f"{network.neurons:,} neurons in {_count(network.neuron_layers, 'layer')}, "
        f"{_count(network.segments, 'segment')}, {network.parameters:,} parameters, "
        f"{_ends('input', network.inputs)}, {_ends('output', network.outputs)}"
    )
    if network.dropped:
        yield Text(f"dropped, because they change nothing: {', '.join(network.dropped)}")
    if network.pooled_spikes:
        yield Text("Pooled spikes are fractions; --pool-to-conv gives pools neurons of their own instead.")


def _cells(row: NodeRow) -> tuple[str, ...]:
    parameters = "shared" if row.parameters is None else f"{row.parameters:,}" if row.parameters else ""
    segment = "" if row.segment is None else str(row.segment)
    rule = row.rule.partition(":")[0]  # why something is refused follows, on a line of its own
    return row.name, row.operation, _sizes(row.shape), parameters, rule, segment


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _ends(what: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"{what if len(shapes) == 1 else what + 's'} {', '.join(map(_sizes, shapes.values()))}"


# --- convert -------------------------------------------------------------------------------------------------


def conversion_tables(summary: dict[str, Any]) -> Iterator[RenderableType]:
    columns = ("site", "neurons", "threshold", "firing rate", "", "error", " ")
    time = _time(summary["T"], summary["latency"])
    title = f"{time}, recipe {_recipe(summary)}, {_images(summary)}"
    table = _table(title, *columns, right=("neurons", "threshold", "firing rate", "error"))
    sites = summary["sites"]
    top_rate = max((s["firing_rate"] or 0 for s in sites), default=0)
    top_error = max((s["error"] for s in sites), default=0)
    for s in sites:
        table.add_row(
            Text(s["name"]),
            f"{s['neurons']:,}" if s["neurons"] else s["kind"],
            _range(s["threshold_min"], s["threshold_max"]),
            _number(s["firing_rate"]),
            _bar(s["firing_rate"], top_rate),
            _number(s["error"], ".4f"),
            _bar(s["error"], top_error),
        )
    yield table
    yield Text(f"{EXPLAIN} Both on the calibration images.")
    if "tried" in summary:
        yield _tried(summary)
        yield Text("Images that the ANN was trained on agree more than new ones: evaluate the file on others.")
    yield Text(f"Wrote {summary['file']} in {summary['seconds']:.1f} seconds.")


def _recipe(summary: dict[str, Any]) -> str:
    from ..recipes import titled

    return titled(summary["recipe"]["name"], summary["recipe"]["signed"])


def _images(summary: dict[str, Any]) -> str:
    """Those that were seen, and how many of them the steps look at."""
    seen, steps = summary["images"], summary["calibration_images"]
    return f"{seen} images" + (
        f", {steps} of them for the steps" if summary["recipe"]["steps"] and steps < seen else ""
    )


def _tried(summary: dict[str, Any]) -> Table:
    """The search for the smallest T."""
    title = f"agreement with the ANN on {summary['held_out']} held-out images, by T, with its standard error"
    table = _table(title, "T", "latency", "agreement", "", right=("T", "latency", "agreement"))
    tried: dict[int, float] = summary["tried"]
    needed = tried[max(tried)] - summary["points"] / 100
    for T, share in tried.items():
        note = "chosen" if summary["T"] == T else "" if share >= needed else "too little"
        table.add_row(str(T), str(summary["latencies"][T]), _with_error(share, summary["held_out"]), note)
    return table


EXPLAIN = (
    "firing rate: spikes per neuron and step; error: squared difference to the ANN, as a share of its power; "
    "bars: compared to the largest in the column."
)


PARTS = (
    "Mostly: the largest part of the error, inherited from the layers in front of it, or made here by clipping at the "
    "threshold, by flooring to whole spikes, or by unevenness of the current over time. "
)


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


# --- evaluate ------------------------------------------------------------------------------------------------


def evaluation_tables(result: Evaluation) -> Iterator[RenderableType]:
    from ..judgement import advice, verdict  # with torch behind it, which --help does not wait for

    n = f"{result.images:,} images"
    assert result.agreement is not None  # no metric was given
    how = f"({_time(result.T, result.latency)}, recipe {result.recipe_title})"
    if result.accuracy is None or result.ann_accuracy is None:
        yield Text(f"No labels, so no accuracy. SNN {how} and ANN agree on {_percent(result.agreement)} of {n}.")
    else:
        snn, ann = (_with_error(share, result.images) for share in (result.accuracy, result.ann_accuracy))
        yield Text.assemble(
            (f"SNN {snn}", "bold"), f" {how}, ANN {ann}, {n} (± standard error); "
            f"same answer on {_percent(result.agreement)}"
        )  # fmt: skip
    yield _time_table(result)
    yield _layer_table(result)
    yield Text(f"{EXPLAIN} {PARTS}Silent: neurons that never fired.")
    yield from _energy_table(result)
    yield Text.assemble(("\n" + verdict(result), "bold"))
    for line in advice(result):
        yield Text(f"• {line}")


def _energy_table(result: Evaluation) -> Iterator[RenderableType]:
    o = result.operations
    baselines = [f"of {name} ANN" for name in result.energy[0].ann]
    columns = ("constants", "nanojoule", *baselines)
    table = _table("energy of one image, estimated", *columns, right=columns[1:])
    for e in result.energy:
        table.add_row(Text(e.constants.name), f"{e.spiking / 1000:,.1f}", *(f"{r:.2f} ×" for r in e.ratios.values()))
    yield table
    yield Text(
        f"Counted for one image: {o.synaptic_operations:,.0f} ± {o.synaptic_operations_std:,.0f} synaptic operations "
        f"({o.spikes_per_synapse:.2f} per synapse; published break-even points lie at 0.15 to 1.38), "
        f"{o.multiply_accumulates:,.0f} multiply-accumulates where the input is not binary, {o.neuron_updates:,} "
        f"neuron updates; the ANN has {o.ann_multiply_accumulates:,} multiply-accumulates. Memory traffic is not in "
        "the estimates."
    )


def comparison_table(results: dict[str, Evaluation]) -> RenderableType:
    columns = (
        "network",
        "recipe",
        "T",
        "latency",
        "accuracy",
        "agreement",
        "operations",  # synaptic ones, and multiply-accumulates
        "of FP32\nenergy",
    )
    table = _table("", *columns, right=columns[2:])
    for name, result in results.items():
        energy = next(e for e in result.energy if e.constants.name == "45 nm, FP32")
        table.add_row(
            Text(name),
            Text(result.recipe_title),
            str(result.T),
            str(result.latency),
            "" if result.accuracy is None else _with_error(result.accuracy, result.images),
            "" if result.agreement is None else _percent(result.agreement),
            f"{result.operations.synaptic_operations + result.operations.multiply_accumulates:,.0f}",
            f"{energy.ratios['FP32']:.2f} ×",
        )
    return table


def _with_error(share: float, images: int) -> str:
    from ..evaluation import standard_error

    return f"{_percent(share)} ± {100 * standard_error(share, images):.1f}"


def powers_of_two(T: int) -> list[int]:
    """1, 2, 4, ... up to T, and T itself."""
    return sorted({T, *(2**i for i in range(T.bit_length()))})


def _time_table(result: Evaluation) -> Table:
    steps = [str(t) for t in powers_of_two(result.latency)]
    table = _table("", "after step", *steps, right=steps)
    for name, shares in (("accuracy", result.accuracy_over_time), ("agreement", result.agreement_over_time)):
        if shares:
            table.add_row(name, *(_percent(shares[int(t) - 1]) for t in steps))
    return table


def _layer_table(result: Evaluation) -> Table:
    columns = ("layer", "neurons", "threshold", "firing rate", "", "error", " ", "mostly", "silent")
    table = _table("", *columns, right=("neurons", "threshold", "firing rate", "error", "silent"))
    top_rate = max((layer.firing_rate for layer in result.layers), default=0)
    top_error = max((layer.error for layer in result.layers), default=0)
    for layer in result.layers:
        table.add_row(
            Text(layer.name),
            f"{layer.neurons:,}",
            _range(layer.threshold_min, layer.threshold_max),
            _number(layer.firing_rate),
            _bar(layer.firing_rate, top_rate),
            _number(layer.error, ".4f"),
            _bar(layer.error, top_error),
            layer.parts.largest,
            _percent(layer.dead_share),
        )
    return table


# --- bench ---------------------------------------------------------------------------------------------------


def bench_tables(result: Benchmark) -> Iterator[RenderableType]:
    columns = ("engine", "batch", "seconds a batch", "ANN, one pass", "ratio to T passes", "", "differs by")
    time = _time(result.T, result.latency)
    table = _table(f"Times at {time}, {result.threads} thread(s)", *columns, right=columns[1:])
    top = max(t.ratio for t in result.timings)
    for t in result.timings:
        numbers = (str(t.batch), f"{t.seconds:.4f}", f"{t.ann_seconds:.5f}", f"{t.ratio:.2f}")
        table.add_row(t.engine, *numbers, _bar(t.ratio, top), f"{t.difference:.0e}" if t.difference else "0")
    yield table
    yield Text(
        f"Best of {result.rounds} rounds that took turns, on these images; on a busy machine take more --rounds. "
        "Ratio: to T passes of the ANN, one a step. Differs by: outputs from those of the dense engine. "
        f"Peak memory {result.peak_bytes / 2**20:,.0f} MiB."
    )
    if not result.kernels:
        yield Text("The native kernels are not installed: only the dense engine runs.")


# --- demo ----------------------------------------------------------------------------------------------------


def demo_tables(result: DemoResult) -> Iterator[RenderableType]:
    steps = [f"T = {T}" for T in result.steps]
    table = _table("Accuracy on handwritten digits, percent", "recipe", *steps, "ANN", right=(*steps, "ANN"))
    ann = f"{100 * result.ann_accuracy:.1f}"
    for recipe, shares in result.accuracy.items():
        table.add_row(Text(recipe), *(f"{100 * share:.1f}" for share in shares), ann)
    yield table
    low, high = result.standard_errors
    yield Text(
        f"{result.images} test images that were not used for training or calibration; standard errors "
        f"{100 * low:.1f} to {100 * high:.1f}. Each number is a conversion of its own, for that T."
    )
    yield Text(
        "The paper's advanced recipe takes 5000 small steps of SGD a layer, on 1024 images; here it is 200 large ones, "
        "on 512."
    )
    yield Text(
        f"{result.seconds:.0f} seconds. Wrote {result.results} and {result.network}: the recipe best is the "
        "default, and few steps suffice here."
    )
    yield Text("\nTry next:")
    for command in next_commands(result):
        yield Text(f"  {command}", style="bold")


def next_commands(result: DemoResult) -> list[str]:
    """Commands that work as they stand, also where the environment is not activated."""
    own = Path(sys.executable).with_name("spikecal")
    run = quote(os.path.relpath(own)) if shutil.which("spikecal") is None and own.is_file() else "spikecal"
    net = quote(str(result.network))
    mine, page = (quote(str(result.network.with_name(name))) for name in ("mine.spk", "report.html"))
    return [
        f"{run} evaluate {net} --data digits --split test",
        f"{run} report {net} --data digits --split test -o {page}",
        f"{run} inspect {net}",
        f"{run} convert spikecal.models:digits_net --data digits --split train -T 4 -o {mine}",
    ]
