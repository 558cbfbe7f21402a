"""How much of the ANN's mean activity survives in each layer, by threshold rule, before any calibration.

    python benchmarks/mean_activity.py

Writes benchmarks/results/mean_activity.csv: mean spikes divided by the ANN's mean activation, for every layer of
resnet20_cifar10 on 100 test images. It explains why thresholds alone do not rank as they do with bias calibration.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor

import shared_data
import spikecal as sc
from spikecal.simulation import run_ann

RESULTS = Path(__file__).parent / "results" / "mean_activity.csv"
NETWORK = "resnet20_cifar10"
RULES = {
    "maximum": sc.MaxActivation(),
    "percentile": sc.Percentile(),
    "MMSE": sc.MMSE(),
    "MMSE*": sc.MMSE(per_channel=True),
}


@torch.no_grad()
def surviving(snn: sc.SpikingNetwork, x: Tensor) -> dict[str, float]:
    """Mean spikes over mean activation, by layer."""
    ann: dict[str, float] = {}
    spiking: dict[str, float] = {node.name: 0.0 for node in (*snn.graph.neurons, *snn.graph.outputs)}

    def add(name: str, train: Tensor) -> None:
        spiking[name] += float(train.sum(0).mean()) / snn.T

    run_ann(snn.source, (x,), lambda node, value: ann.update({node.name: float(value.data.mean())}))
    list(snn.simulate((x,), lambda node, value: add(node.name, value.data)))
    return {node.name: spiking[node.name] / ann[node.name] for node in snn.graph.neurons}


def main() -> None:
    model: object = shared_data.network(NETWORK)
    images, _ = shared_data.images("cifar10", "train", 512, 1, NETWORK)
    x, _ = shared_data.images("cifar10", "test", 100, 0, NETWORK)
    rows = []
    for T in (4, 8, 32):
        for name, rule in RULES.items():
            recipe = sc.Recipe(rule, (sc.BiasShift(),), calibration_images=64)
            snn = sc.convert(model, [images], T, recipe)  # type: ignore[arg-type]
            model = snn
            rows += [(T, name, layer, f"{share:.3f}") for layer, share in surviving(snn, x).items()]
            print(f"T={T:<3} {name:10s} last layer: {float(rows[-1][-1]):.2f}", flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows([("T", "rule", "layer", "mean spikes / mean activation"), *rows])


if __name__ == "__main__":
    main()
