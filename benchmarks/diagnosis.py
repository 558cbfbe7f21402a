"""Where the error of a spiking network comes from, layer by layer, before and after each step of calibration.

    python benchmarks/diagnosis.py              # measures what is missing, then figures and tables of docs/diagnosis.md
    python benchmarks/diagnosis.py --table      # only writes them, from the results

The yardstick is a delay of T steps: every layer has seen all of its input before it fires, so nothing is uneven.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import records
import shared_data
import spikecal as sc
from grid import Converter

ROOT = Path(__file__).parent
FOLDER, PAGE = ROOT / "results" / "diagnosis", ROOT.parent / "docs" / "diagnosis.md"
RESULTS = FOLDER / "layers.csv"
FIGURES = PAGE.parent / "figures"
MARKS = ("<!-- tables of benchmarks/diagnosis.py -->", "<!-- end of benchmarks/diagnosis.py -->")
NETWORK, TIMES, IMAGES, SEED = "resnet20_cifar10", (4, 8), 500, 0
PARTS = ("inherited", "clipping", "flooring", "unevenness")
FIELDS = ("recipe", "T", "layer", "accuracy", "ann_accuracy", "images", "firing_rate", "correlation", "error", *PARTS)


def recipes(T: int) -> dict[str, sc.Recipe]:
    best = sc.best()
    late, _, shift, weights, even, gently, _ = best.steps

    def ours(*steps: object, rule: sc.MMSE | None = None) -> sc.Recipe:
        return replace(best, name="custom", threshold=rule or sc.MMSE(per_channel=True), steps=steps)

    return {
        "plain": sc.plain(),
        "light": sc.light(),
        "potential calibration": sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.PotentialCalibration())),
        "least squares for the mean": ours(shift, sc.ClosedFormWeights(even=0.0), gently),
        "and for even currents": ours(shift, weights, gently),
        "and even current": ours(shift, weights, even, gently),
        "and late start": ours(late, shift, weights, even, gently),
        "and thresholds for rounded spikes": ours(late, shift, weights, even, gently, rule=best.threshold),
        "best (and for the output)": best,
        "firing delay": at_once(sc.pipelined()),
        "pipelined (and hesitation)": sc.pipelined(),
        "nothing uneven": at_once(sc.pipelined(delay=T)),
    }


def at_once(recipe: sc.Recipe) -> sc.Recipe:
    """The same without hesitation."""
    return replace(recipe, steps=[step for step in recipe.steps if not isinstance(step, sc.Hesitation)])


def measure() -> None:
    model = shared_data.network(NETWORK)
    x, y = shared_data.images("cifar10", "test", IMAGES, 0, NETWORK)
    converter = Converter(model, shared_data.images("cifar10", "train", 1024, SEED + 1, NETWORK)[0], SEED)
    records.write_environment(
        FOLDER,
        "python benchmarks/diagnosis.py",
        network=NETWORK,
        test=f"{IMAGES} test images drawn with seed 0",
        calibration=f"1024 training images drawn with seed {SEED + 1}; the recipe says how many its steps see",
    )
    known = {(row["recipe"], int(row["T"])) for row in records.read(RESULTS)}
    for T in TIMES:
        for name, recipe in recipes(T).items():
            if (name, T) in known:
                continue
            result = sc.evaluate(converter(recipe, T), zip(x.split(100), y.split(100), strict=True))
            print(f"T={T}  {name:24s} {100 * (result.accuracy or 0):.1f} %", flush=True)
            for layer in result.layers:
                numbers = {**asdict(layer), **asdict(layer.parts)}
                shown = {k: f"{numbers[k]:.6g}" for k in ("firing_rate", "correlation", "error", *PARTS)}
                shares = {"accuracy": result.accuracy, "ann_accuracy": result.ann_accuracy, "images": result.images}
                records.append(RESULTS, FIELDS, {"recipe": name, "T": T, "layer": layer.name, **shares, **shown})


def latency(name: str, T: int, layers: int) -> int:
    """All layers of neurons of this network stand on its longest way."""
    return T + recipes(T)[name].delay * layers


def table(rows: list[dict[str, str]]) -> str:
    """The parts of the error, averaged over the layers; and the error of the last one."""
    lines = []
    for T in TIMES:
        lines += [
            f"### T={T}",
            "",
            "| recipe | latency | accuracy % | " + " | ".join(PARTS) + " | error of the last layer |",
            "|---|---:|---:|" + "---:|" * (len(PARTS) + 1),
        ]
        for name in recipes(T):
            some = [r for r in rows if r["recipe"] == name and r["T"] == str(T)]
            if some:
                means = [sum(float(r[part]) for r in some) / len(some) for part in PARTS]
                cells = [f"{100 * float(some[0]['accuracy']):.1f}", *(f"{m:.3f}" for m in means)]
                cells = [str(latency(name, T, len(some))), *cells, f"{float(some[-1]['error']):.3f}"]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += ["", f"![Parts of the error at T={T}](figures/diagnosis_T{T}.svg)", ""]
    return "\n".join(lines)


def draw(rows: list[dict[str, str]]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from spikecal.figures import COLORS

    mpl.rcParams.update({"svg.hashsalt": "spikecal", "svg.fonttype": "none"})
    FIGURES.mkdir(exist_ok=True)
    for T in TIMES:
        figure = Figure(figsize=(17, 6), layout="constrained")
        panels = list(figure.subplots(2, 6, sharex=True, sharey=True).flat)
        for axes, name in zip(panels, recipes(T), strict=True):
            some = [r for r in rows if r["recipe"] == name and r["T"] == str(T)]
            for part in PARTS:
                values = [float(r[part]) for r in some]
                axes.plot(range(1, len(some) + 1), values, marker=".", color=COLORS[part], label=part)
            title = f"{name}, {100 * float(some[0]['accuracy']):.1f} %" if some else name
            steps = latency(name, T, len(some))
            axes.set_title(title + (f"\nlatency {steps}" if steps > T else ""), fontsize=10)
            axes.set_ylim(0, 0.6)
        figure.supxlabel(f"layer of neurons, T={T}")
        figure.supylabel("squared error / power of the ANN")
        figure.axes[0].legend(fontsize=8)
        figure.savefig(FIGURES / f"diagnosis_T{T}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write figures and tables from the results")
    if not parser.parse_args().table:
        measure()
    rows = records.read(RESULTS)
    draw(rows)
    records.write_between(PAGE, MARKS, table(rows))


if __name__ == "__main__":
    main()
