"""What was tried to make `best` better, whether it helped or not.

    python benchmarks/trials.py                        # everything that is not in the results yet
    python benchmarks/trials.py --T 4 --networks resnet20_cifar10
    python benchmarks/trials.py --table                # only write the tables into docs/diagnosis.md

Each row changes one thing in the first, which is `best` without late start and without what it does for outputs.
Accuracy on 1000 images has a standard error of a point, so the error of the class scores is measured beside it,
‖y − z‖² / ‖z‖² with the mean over the classes taken off: it tells smaller differences.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import records
import shared_data
import spikecal as sc
from grid import Converter
from spikecal.calibration import Step
from spikecal.replay import Layer
from spikecal.simulation import Neurons

ROOT = Path(__file__).parent
FOLDER, PAGE = ROOT / "results" / "trials", ROOT.parent / "docs" / "diagnosis.md"
MARKS = ("<!-- tables of benchmarks/trials.py -->", "<!-- end of benchmarks/trials.py -->")
NETWORKS, TIMES, SEEDS = ("resnet20_cifar10", "resnet20_cifar100"), (4, 8), (0, 1, 2)
FIELDS = ("network", "trial", "T", "seed", "images", "accuracy", "ann_accuracy", "score_error")


@dataclass(frozen=True)
class Dither:
    """Initial potentials that differ from neuron to neuron, evenly over width·θ, in the first `layers` layers."""

    width: float = 1.0
    layers: int = 1_000

    def apply(self, layer: Layer) -> None:
        index = layer.graph.neurons.index(layer.segment.site) if isinstance(layer.site, Neurons) else self.layers
        if isinstance(layer.site, Neurons) and index < self.layers:
            shift = (low_discrepancy(layer.segment.site.shape) - 0.5) * self.width * layer.site.threshold
            layer.site = replace(layer.site, v0=layer.site.v0 + shift)


@dataclass(frozen=True)
class Tracking:
    """A current of its own at every step: each channel fires where that brings the spikes so far nearest to t·x.

    Step after step, the potential τ from which on firing lowers the squared error, summed over some images; the current
    that shifts the threshold θ there. Unlike `EvenCurrent` it does not keep the mean: where little is known, it waits.
    """

    images: int = 64
    candidates: int = 61  # τ between −0.5·θ and 2.5·θ

    def apply(self, layer: Layer) -> None:
        site = layer.site
        if not isinstance(site, Neurons):
            return
        (part, values), *_ = layer.chunks()
        current, x = layer.arriving(values)[:, : self.images], layer.target(part)[: self.images]
        axis, theta = layer.channel_axis + 1, site.threshold
        others = [d for d in range(x.ndim) if d != axis]
        tau = torch.linspace(-0.5, 2.5, self.candidates)
        v, fired, before, temporal = site.v0 + torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(theta), []
        for t in range(layer.T):
            v = v + current[t]  # (B, C, ...)
            gain = 2 * ((t + 1) * x / theta - fired) - 1  # of the squared error, if it fires
            gains = torch.stack([((v / theta >= c) * gain).sum(others, keepdim=True)[0] for c in tau])
            shift = (1 - tau[gains.argmax(0)]) * theta  # (C, 1, ...)
            temporal.append(shift - before)
            spikes = v + shift >= theta
            v, fired, before = v - spikes * theta, fired + spikes, shift
        layer.site = replace(site, temporal=torch.stack(temporal))


@dataclass(frozen=True)
class Inside:
    """A step for layers of neurons; outputs have their biases calibrated."""

    step: Step

    def apply(self, layer: Layer) -> None:
        (self.step if isinstance(layer.site, Neurons) else sc.BiasCalibration()).apply(layer)


def low_discrepancy(shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) such that neighbours along every axis differ (Roberts' sequence in three dimensions)."""
    total = torch.zeros(shape)
    for axis, slope in enumerate((0.8191725134, 0.6710436067, 0.5497004779)[: len(shape)]):
        total = total + slope * torch.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1))
    return total % 1


LATE, THETA, SHIFT, WEIGHTS, EVEN, PC, READOUT = sc.best().steps


def changed(*steps: object, threshold: object = sc.MMSE(per_channel=True), images: int = 512) -> sc.Recipe:
    return sc.Recipe(threshold, steps, calibration_images=images)  # type: ignore[arg-type]


def weights(**options: object) -> sc.Recipe:
    return changed(SHIFT, sc.ClosedFormWeights(**options), EVEN, PC)  # type: ignore[arg-type]


BASE = "best on time, with a plain readout"

TRIALS = {
    BASE: changed(SHIFT, WEIGHTS, EVEN, PC),
    "weighted readout": changed(SHIFT, WEIGHTS, EVEN, PC, READOUT),
    "threshold for the output": changed(THETA, SHIFT, WEIGHTS, EVEN, PC),
    "late start": changed(LATE, SHIFT, WEIGHTS, EVEN, PC),
    "all three: best": sc.best(),
    "all three, late start to the half": changed(sc.LateStart(0.5), THETA, SHIFT, WEIGHTS, EVEN, PC, READOUT),
    "all three, late start in proportion to depth": changed(
        sc.LateStart(power=1.0), THETA, SHIFT, WEIGHTS, EVEN, PC, READOUT
    ),
    "all three, thresholds for rounded spikes": changed(*sc.best().steps, threshold=sc.MMSE(100, True, 0.5)),
    "all three, thresholds 10 % higher": changed(sc.TunedThreshold((1.1,)), *sc.best().steps),
    "all three, initial potential, no bias shift": changed(
        LATE, THETA, sc.InitialPotential(), WEIGHTS, EVEN, PC, READOUT
    ),
    "weights not asked for even currents": weights(even=0.0),
    "no current that makes channels even": changed(SHIFT, WEIGHTS, PC),
    "neither": changed(SHIFT, sc.ClosedFormWeights(even=0.0), PC),
    "rows for even currents weigh half": weights(even=0.5),
    "rows for even currents weigh twice": weights(even=2.0),
    "ridge 0.03": weights(ridge=0.03),
    "ridge 0.3": weights(ridge=0.3),
    "ridge 1": weights(ridge=1.0),
    "not masked": weights(masked=False),
    "classifier not fitted": changed(SHIFT, Inside(WEIGHTS), EVEN, PC),
    "256 images": changed(SHIFT, WEIGHTS, EVEN, PC, images=256),
    "1024 images": changed(SHIFT, WEIGHTS, EVEN, PC, images=1024),
    "fitted twice": changed(SHIFT, WEIGHTS, EVEN, PC, WEIGHTS, EVEN, PC),
    "fitted to what fires as well": changed(SHIFT, WEIGHTS, EVEN, PC, sc.ClosedFormWeights(fired=True), PC),
    "potential calibrated by half, channels too": changed(SHIFT, WEIGHTS, EVEN, sc.PotentialCalibration(0.5, 128)),
    "potential calibrated in full": changed(SHIFT, WEIGHTS, EVEN, sc.PotentialCalibration(1.0, 128)),
    "potential calibrated in full, on all images": changed(SHIFT, WEIGHTS, EVEN, sc.PotentialCalibration()),
    "bias calibrated instead": changed(SHIFT, WEIGHTS, EVEN, sc.BiasCalibration()),
    "initial potential, no bias shift": changed(sc.InitialPotential(), WEIGHTS, EVEN, PC),
    "spikes that follow t·x": changed(SHIFT, WEIGHTS, Tracking(), PC),
    "hesitation": changed(SHIFT, WEIGHTS, EVEN, sc.Hesitation(0.25, 0.0), PC),
    "late readout": changed(SHIFT, WEIGHTS, EVEN, PC, sc.LateReadout()),
    "tuned thresholds": changed(SHIFT, WEIGHTS, sc.TunedThreshold(), EVEN, PC),
    "dithered potentials": changed(SHIFT, Dither(0.5), WEIGHTS, EVEN, PC),
    "dithered potentials, first layer": changed(SHIFT, Dither(1.0, layers=1), WEIGHTS, EVEN, PC),
    "temporal bias instead": changed(SHIFT, WEIGHTS, sc.TemporalBias()),
    "temporal bias afterwards": changed(SHIFT, WEIGHTS, EVEN, PC, sc.TemporalBias()),
}


def measure(networks: list[str], times: list[int], seeds: list[int], trials: list[str]) -> None:
    about = {"test": "1000 test images drawn with seed 0", "calibration": "training images drawn with seed + 1"}
    records.write_environment(FOLDER, "python benchmarks/trials.py", **about)
    known = {(r["network"], r["trial"], int(r["T"]), int(r["seed"])) for r in records.read(FOLDER / "trials.csv")}
    for network in networks:
        dataset = "cifar100" if network.endswith("cifar100") else "cifar10"
        model, (x, y) = shared_data.network(network), shared_data.images(dataset, "test", 1000, 0, network)
        for seed in seeds:
            converter = Converter(model, shared_data.images(dataset, "train", 1024, seed + 1, network)[0], seed)
            for T in times:
                for trial in trials:
                    if (network, trial, T, seed) not in known:
                        snn = converter(TRIALS[trial], T)
                        scores, ann = snn(x), snn.ann(x)
                        shares = [float((s.argmax(1) == y).double().mean()) for s in (scores, ann)]
                        row = (network, trial, T, seed, len(x), *(f"{s:.4f}" for s in (*shares, error(scores, ann))))
                        records.append(FOLDER / "trials.csv", FIELDS, row)
                        print(*row, flush=True)


def error(scores: Tensor, ann: Tensor) -> float:
    y, z = (s - s.mean(1, keepdim=True) for s in (scores, ann))
    return float((y - z).square().sum() / z.square().sum())


def table() -> str:
    found = defaultdict[tuple[str, str, int], list[tuple[float, float]]](list)
    for row in records.read(FOLDER / "trials.csv"):
        key = row["network"], row["trial"], int(row["T"])
        found[key].append((100 * float(row["accuracy"]), float(row["score_error"])))
    columns = [(n, T) for n in NETWORKS for T in TIMES if (n, BASE, T) in found]
    titles = " | ".join(f"{n}, T={T}" for n, T in columns)
    lines = [f"| trial | {titles} |", "|---|" + "---:|" * len(columns)]
    for trial in (t for t in TRIALS if any((n, t, T) in found for n, T in columns)):
        cells = [cell(found.get((n, trial, T), [])) for n, T in columns]
        lines.append(f"| {trial} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(values: list[tuple[float, float]]) -> str:
    """Accuracy, and the error of the scores."""
    if not values:
        return ""
    accuracy, error = (statistics.mean(part) for part in zip(*values, strict=True))
    few = f" ({len(values)} seed{'s' * (len(values) > 1)})" if len(values) < len(SEEDS) else ""
    return f"{accuracy:.1f} / {error:.3f}{few}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--T", nargs="+", type=int, default=TIMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS), metavar="TRIAL")
    parser.add_argument("--table", action="store_true", help="only write the tables of what is known")
    options = parser.parse_args()
    if not options.table:
        measure(options.networks, options.T, options.seeds, options.trials)
    records.write_between(PAGE, MARKS, table())


if __name__ == "__main__":
    main()
