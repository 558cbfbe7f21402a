"""What was tried to make `best` better, whether it helped or not: how its parts and their strengths were chosen.

    python benchmarks/trials.py                        # everything that is not in the results yet
    python benchmarks/trials.py --T 8 --networks resnet20_cifar10
    python benchmarks/trials.py --table                # only write the tables into docs/diagnosis.md

Each row changes one thing in the base, which is `best` with 512 images at every T and thresholds that count on the
same rounding in all layers; rows with delays have steps of `pipelined` as well. A row is judged without labels and
without test images: by the error of the class scores against the ANN's, ‖y − z‖² / ‖z‖² with the mean over the images
taken off, on training images that calibration did not see. That tells smaller differences than accuracy does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import records
import shared_data
import spikecal as sc
from ablation import changed
from grid import Converter
from spikecal import closed_form, network as spiking, replay, simulation
from spikecal.calibration import Step
from spikecal.functional import delayed
from spikecal.graph import Graph, Node
from spikecal.ops import Activation, Add
from spikecal.replay import Layer
from spikecal.simulation import Neurons
from spikecal.values import Value

ROOT = Path(__file__).parent
FOLDER, PAGE = ROOT / "results" / "trials", ROOT.parent / "docs" / "diagnosis.md"
MARKS = ("<!-- tables of benchmarks/trials.py -->", "<!-- end of benchmarks/trials.py -->")
NETWORKS, TIMES, SEEDS = ("resnet32_cifar10", "resnet20_cifar100", "mobilenet_cifar10"), (4, 8, 16, 32), (0, 1)
FIELDS = ("network", "trial", "T", "seed", "images", "score_error", "agreement")


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


@dataclass(frozen=True)
class SomeDelay:
    """One step of firing delay for some layers; the others start late as they do in `best`."""

    first: float = 0.0  # beyond this depth, 1 being that of the last layer
    last: float = 1.0
    every: int = 1

    def apply(self, layer: Layer) -> None:
        if not isinstance(layer.site, Neurons):
            return
        index = layer.graph.neurons.index(layer.segment.site)
        if self.first < layer.depth <= self.last and index % self.every == 0:
            layer.site = replace(layer.site, delay=1)
        else:
            LATE.apply(layer)


@dataclass(frozen=True)
class Either:
    """A step for layers that fire with a delay, and another one for the others."""

    delayed: Step
    other: Step

    def apply(self, layer: Layer) -> None:
        delayed = isinstance(layer.site, Neurons) and layer.site.delay > 0
        (self.delayed if delayed else self.other).apply(layer)


@dataclass(frozen=True)
class BlockEnds:
    """Least squares only where a branch of a block meets its shortcut: the target is what the whole block gives."""

    step: Step

    def apply(self, layer: Layer) -> None:
        if any(isinstance(node.op, Add) for node in layer.segment.nodes) or not isinstance(layer.site, Neurons):
            self.step.apply(layer)


@dataclass(frozen=True)
class Unattenuated:
    """Least squares on the ANN's inputs; with the spiking network's own, noise in them makes coefficients smaller."""

    step: Step

    def apply(self, layer: Layer) -> None:
        means = layer.means

        def clean(images: int) -> Iterator[tuple[slice, dict[str, Tensor], dict[str, Tensor]]]:
            for part, ann, snn in means(images):
                yield part, ann, snn | {name: ann[name] for name in layer.segment.frontier}

        layer.means = clean  # type: ignore[method-assign]
        self.step.apply(layer)
        del layer.means  # type: ignore[method-assign]


class SinglePrecision(closed_form._Moments):
    """Sums in float32."""

    def __init__(self, weight: Tensor, groups: int) -> None:
        super().__init__(weight, groups)
        self.new = partial(torch.zeros, dtype=torch.float32, device=weight.device)
        self.gram, self.cross = self.gram.float(), self.cross.float()


@dataclass(frozen=True)
class InSinglePrecision:
    """A fit whose sums and solution are in float32, not float64."""

    step: sc.ClosedFormWeights

    def apply(self, layer: Layer) -> None:
        with mock.patch.object(closed_form, "_Moments", SinglePrecision):
            self.step.apply(layer)


@contextmanager
def impatient(delay: int) -> Iterator[None]:
    """Shortcuts do not wait: at a sum, what comes by the shorter way arrives earlier, and neurons behind keep it.

    Without native kernels, which have shortcuts that wait.
    """
    wait = simulation.run_node

    def run_node(graph: Graph, node: Node, inputs: Sequence[Value], steps: int, state: simulation.State) -> Value:
        if isinstance(node.op, Add) and not any(value.constant for value in inputs):
            layers = layers_before(graph)
            begins = [delay * layers[name] for name in node.inputs]
            trains = [delayed(v.data, max(begins) - own) for v, own in zip(inputs, begins, strict=True)]
            inputs = [Value(train, constant=False) for train in trains]
        return wait(graph, node, inputs, steps, state)

    def plain(graph: Graph, sites: Mapping[str, simulation.Site], *_: object) -> list[simulation.Instruction]:
        return simulation.snn_program(graph, sites)

    with (
        mock.patch.object(simulation, "run_node", run_node),
        mock.patch.object(replay, "fused", return_value=None),
        mock.patch.object(spiking, "lowered", plain),
    ):
        yield


def layers_before(graph: Graph) -> dict[str, int]:
    """Layers of neurons on the longest way to each node, itself included."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        found[node.name] = max((found[i] for i in node.inputs), default=0) + isinstance(node.op, Activation)
    return found


def low_discrepancy(shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) such that neighbours along every axis differ (Roberts' sequence in three dimensions)."""
    total = torch.zeros(shape)
    for axis, slope in enumerate((0.8191725134, 0.6710436067, 0.5497004779)[: len(shape)]):
        total = total + slope * torch.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1))
    return total % 1


LATE, THETA, SHIFT, WEIGHTS, EVEN, PC, READOUT = sc.best().steps


BASE = replace(sc.best(calibration_images=512), name="custom", threshold=sc.MMSE(per_channel=True, shift=0.5, lost=3.0))


def with_thresholds(rule: sc.MMSE) -> sc.Recipe:
    return replace(BASE, threshold=rule)


def changed_base(change: Mapping[object, Sequence[object]]) -> sc.Recipe:
    return changed(change, BASE)


def hesitating(share: float, back: float) -> sc.Recipe:
    """`pipelined` with another hesitation."""
    return changed({sc.Hesitation(): [sc.Hesitation(share, back)]}, sc.pipelined())


DELAYED = hesitating(0.25, 0.25)


def with_delays(chosen: SomeDelay) -> sc.Recipe:
    """The steps of `DELAYED` for the chosen layers, of `best` for the others; the thresholds of `pipelined`."""
    *_, shift, _, hesitation, potentials, _ = DELAYED.steps
    steps = (Either(shift, SHIFT), WEIGHTS, Either(hesitation, EVEN), Either(potentials, PC), READOUT)
    return replace(BASE, threshold=sc.pipelined().threshold, steps=(chosen, THETA, *steps))


SHORTCUTS = "the same, shortcuts that do not wait"

TRIALS = {
    "base": BASE,
    "deep layers count on more rounding (best)": with_thresholds(sc.best().threshold),
    "thresholds as if spikes were floored": with_thresholds(sc.MMSE(per_channel=True)),
    "thresholds as if they were rounded": with_thresholds(sc.MMSE(per_channel=True, shift=0.5)),
    "bias shift of a half": changed_base({SHIFT: [sc.BiasShift()]}),
    "bias shift of a fifth": changed_base({SHIFT: [sc.BiasShift(0.2)]}),
    "initial potential, no bias shift": changed_base({SHIFT: [sc.InitialPotential()]}),
    "late start always by a quarter": changed_base({LATE: [sc.LateStart()]}),
    "nobody starts late": changed_base({LATE: []}),
    "ridge a tenth as strong": changed_base({WEIGHTS: [sc.ClosedFormWeights(ridge=0.01)]}),
    "ridge ten times as strong": changed_base({WEIGHTS: [sc.ClosedFormWeights(ridge=1.0)]}),
    "ridge by cross-validation": changed_base({WEIGHTS: [sc.ClosedFormWeights(ridge=(0.03, 0.1, 0.3, 1.0, 3.0))]}),
    "rows for even currents weigh as much as others": changed_base({WEIGHTS: [sc.ClosedFormWeights(even=1.0)]}),
    "no rows for even currents": changed_base({WEIGHTS: [sc.ClosedFormWeights(even=0.0)]}),
    "not masked": changed_base({WEIGHTS: [sc.ClosedFormWeights(masked=False)]}),
    "sums in float32": changed_base({WEIGHTS: [InSinglePrecision(WEIGHTS)]}),
    "no care for the threshold in front of the output": changed_base({THETA: []}),
    "readout not weighted": changed_base({READOUT: [sc.BiasCalibration()]}),
    "classifier not fitted": changed_base({WEIGHTS: [Inside(WEIGHTS)]}),
    "classifier not fitted, no rows for even currents": changed_base(
        {WEIGHTS: [Inside(sc.ClosedFormWeights(even=0.0))]}
    ),
    "fitted twice": changed_base({PC: [PC, WEIGHTS, EVEN, PC]}),
    "fitted to what fires as well": changed_base({PC: [PC, sc.ClosedFormWeights(fired=True), PC]}),
    "256 images": replace(BASE, calibration_images=256),
    "tuned thresholds": changed_base({WEIGHTS: [WEIGHTS, sc.TunedThreshold()]}),
    "temporal bias afterwards": changed_base({PC: [PC, sc.TemporalBias()]}),
    "hesitation": changed_base({EVEN: [EVEN, sc.Hesitation(0.25, 0.25)]}),
    "spikes that follow t·x": changed_base({EVEN: [Tracking()]}),
    "fitted at the ends of blocks only": changed_base({WEIGHTS: [BlockEnds(WEIGHTS)]}),
    "no rows for even currents, not attenuated": changed_base(
        {WEIGHTS: [Unattenuated(sc.ClosedFormWeights(even=0.0))]}
    ),
    "a step of delay in the first half": with_delays(SomeDelay(last=0.5)),
    "a step of delay in the second half": with_delays(SomeDelay(first=0.5)),
    "a step of delay in every other layer": with_delays(SomeDelay(every=2)),
    "a step of delay in every layer": DELAYED,
    SHORTCUTS: DELAYED,
    "the same without hesitation": changed({sc.Hesitation(): []}, sc.pipelined()),
    "the same, half the hesitation": hesitating(0.125, 0.25),
    "the same, twice the hesitation": hesitating(0.5, 0.25),
    "the same, hesitation paid back at once (pipelined)": sc.pipelined(),
    "the same, hesitation paid back over all steps": hesitating(0.25, 1.0),
    "dithered potentials": changed_base({SHIFT: [SHIFT, Dither(0.5)]}),
}


def measure(networks: list[str], times: list[int], seeds: list[int], trials: list[str]) -> None:
    drawn = "1024 training images drawn with seed + 1 (CIFAR-100: all 1000)"
    records.write_environment(
        FOLDER,
        "python benchmarks/trials.py",
        images=f"{drawn}: 512 for thresholds and calibration, the others to judge by",
    )
    known = {(r["network"], r["trial"], int(r["T"]), int(r["seed"])) for r in records.read(FOLDER / "trials.csv")}
    for network, seed in itertools.product(networks, seeds):
        dataset = "cifar100" if network.endswith("cifar100") else "cifar10"
        images, x = shared_data.images(dataset, "train", 1024, seed + 1, network)[0].split(512)
        converter = Converter(shared_data.network(network), images, seed)
        for T, trial in itertools.product(times, trials):
            if (network, trial, T, seed) in known:
                continue
            with impatient(TRIALS[trial].delay) if trial == SHORTCUTS else nullcontext():
                snn = converter(TRIALS[trial], T)
                scores, ann = snn(x), snn.ann(x)
            agreement = float((scores.argmax(1) == ann.argmax(1)).double().mean())
            row = (network, trial, T, seed, len(x), f"{error(scores, ann):.5f}", f"{agreement:.4f}")
            records.append(FOLDER / "trials.csv", FIELDS, row)
            print(*row, flush=True)


def error(scores: Tensor, ann: Tensor) -> float:
    """Of the scores, with their means over the images taken off."""
    wrong, z = (s - s.mean(0) for s in (scores - ann, ann))
    return float(wrong.square().sum() / z.square().sum())


def table() -> str:
    found = defaultdict[tuple[str, str, int], list[dict[str, str]]](list)
    for row in records.read(FOLDER / "trials.csv"):
        found[row["network"], row["trial"], int(row["T"])].append(row)
    columns = [(n, T) for n in NETWORKS for T in TIMES if (n, "base", T) in found]
    titles = " | ".join(f"{n}, T={T}" for n, T in columns)
    lines = [f"| trial | {titles} |", "|---|" + "---:|" * len(columns)]
    for trial in (t for t in TRIALS if any((n, t, T) in found for n, T in columns)):
        cells = [cell(found.get((n, trial, T), []), waiting(n, trial), T) for n, T in columns]
        lines.append(f"| {trial} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@cache
def waiting(network: str, trial: str) -> int:
    """Steps of latency beyond T."""
    recipe = replace(TRIALS[trial], threshold_images=2, calibration_images=2, image_steps=0)
    if not recipe.delay and not any(isinstance(step, SomeDelay) for step in recipe.steps):
        return 0
    with warnings.catch_warnings(action="ignore"):
        return sc.convert(shared_data.network(network), torch.rand(2, 3, 32, 32), 1, recipe).latency - 1


def cell(rows: list[dict[str, str]], more_steps: int, T: int) -> str:
    """The mean error, and the agreement in percent."""
    if not rows:
        return ""
    notes = [f"latency {T + more_steps}"] if more_steps else []
    if len(rows) < len(SEEDS):
        notes.append(f"{len(rows)} seed{'s' * (len(rows) > 1)}")
    wrong, same = (statistics.mean(float(row[key]) for row in rows) for key in ("score_error", "agreement"))
    return f"{wrong:.4f}, {100 * same:.1f}" + (f" ({', '.join(notes)})" if notes else "")


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
