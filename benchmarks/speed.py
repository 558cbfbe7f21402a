"""How long the engines take, beside T passes of the ANN, in one run on the same threads.

    python benchmarks/speed.py                 # networks and layers; writes benchmarks/results/speed/
    python benchmarks/speed.py --threads 2

Each figure is the best of several rounds, and the rounds of all candidates take turns, so that a slow moment of the
machine hits all of them. Ratios can be compared between machines, seconds cannot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import records
import shared_data
import spikecal as sc
from spikecal import native
from spikecal.bench import race
from spikecal.kernels import convolve
from spikecal.ops import Conv
from spikecal.values import PackedSpikes

RESULTS = Path(__file__).parent / "results" / "speed"
NETWORKS = ("resnet20_cifar10", "vgg16w50_cifar10")
WIDTHS = ((16, 32), (32, 16), (64, 16), (128, 8), (256, 8), (512, 4))  # channels, height and width
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


def networks(T: int, batch: int, rounds: int) -> list[tuple[object, ...]]:
    """Seconds and ratio to T passes of the ANN twin, per engine."""
    rows: list[tuple[object, ...]] = []
    for name in NETWORKS:
        images = shared_data.images("cifar10", "train", 128 + batch, 1, name)[0]
        snn = sc.convert(shared_data.network(name), [images[:128]], T, "light")
        x = images[128:]
        rate = sum(s.firing_rate or 0.0 for s in snn.statistics.values()) / len(snn.graph.neurons)

        def run(engine: str, snn: sc.SpikingNetwork = snn, x: torch.Tensor = x) -> object:
            snn.engine = engine
            return snn(x)

        candidates: dict[str, Callable[[], object]] = {"ann": lambda snn=snn, x=x: snn.ann(x)}  # type: ignore[misc]
        candidates |= {engine: lambda e=engine: run(e) for engine in ("dense", "event", "auto")}  # type: ignore[misc]
        for engine in ("dense", "event", "auto"):
            run(engine)  # weights are packed once
        best = race(candidates, rounds)
        for engine in ("dense", "event", "auto"):
            ratio = best[engine] / (T * best["ann"])
            rows.append(
                (name, T, batch, engine, f"{rate:.3f}", f"{best[engine]:.4f}", f"{best['ann']:.5f}", f"{ratio:.3f}")
            )
            print(
                f"{name}  T={T}  batch {batch}  {engine:5s}  {ratio:.2f} × T × ANN  (mean rate {rate:.3f})", flush=True
            )
    return rows


def layers(steps: int, images: int, rounds: int) -> list[tuple[object, ...]]:
    """A 3×3 convolution of random spikes: torch, and the kernels as they choose by the rate."""
    rows: list[tuple[object, ...]] = []
    for channels, size in WIDTHS:
        weight = torch.randn(channels, channels, 3, 3) * 0.1
        op = Conv("w", padding=(1, 1))
        last = weight.contiguous(memory_format=torch.channels_last)
        for rate in RATES:
            spikes = (torch.rand(steps, images, size, size, channels) < rate).float()
            packed = PackedSpikes(native.pack_spikes(spikes), torch.ones(channels), (channels, size, size), rate)
            dense = spikes.permute(0, 1, 4, 2, 3).flatten(0, 1)
            best = race(
                {
                    "torch": lambda d=dense, w=last: F.conv2d(d, w, None, 1, 1),  # type: ignore[misc]
                    "native": lambda p=packed, o=op, w=weight: convolve(o, {"w": w}, p, p.shape),  # type: ignore[misc]
                },
                rounds,
            )
            speedup = best["torch"] / best["native"]
            rows.append((channels, size, rate, f"{best['torch']:.5f}", f"{best['native']:.5f}", f"{speedup:.2f}"))
            print(f"{channels} channels, {size}×{size}, rate {rate}: {speedup:.1f} × as fast as torch", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--T", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    command = f"python benchmarks/speed.py --threads {options.threads}"
    records.write_environment(RESULTS, command, lanes=native.lanes(), **vars(options))
    with torch.no_grad():
        fields = ("channels", "size", "rate", "torch_s", "native_s", "speedup")
        records.write(RESULTS / "layers.csv", fields, layers(8, 4, options.rounds))
        fields = ("network", "T", "batch", "engine", "mean_rate", "snn_s", "ann_s", "ratio_to_T_ann")
        records.write(RESULTS / "networks.csv", fields, networks(options.T, options.batch, options.rounds))


if __name__ == "__main__":
    main()
