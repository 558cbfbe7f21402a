"""How long the engines and other libraries take, beside T passes of the ANN, in one run on the same threads.

    python benchmarks/speed.py                           # everything; writes benchmarks/results/speed/
    python benchmarks/speed.py --parts networks peers
    python benchmarks/speed.py --table                   # only the tables of docs/speed.md and its figures

Each figure is the best of several rounds, and the rounds of all candidates take turns, so that a slow moment of the
machine hits all of them. Ratios can be compared between machines, seconds cannot. On one thread it is processor time.
The ANN is the network with batch norms folded, in eager torch, all images at once; our own ANN twin, which takes some
images at a time and lays them out channels-last, has a row of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import networks
import peers
import records
import shared_data
import spikecal as sc
from spikecal import native
from spikecal.bench import race
from spikecal.engine import lowered
from spikecal.memory import CACHE_OF_BITS
from spikecal.replay import LayerStatistics
from spikecal.simulation import Instruction, Neurons, run_ann
from spikecal.values import PackedSpikes, Value

ROOT = Path(__file__).parent
RESULTS, PAGE = ROOT / "results" / "speed", ROOT.parent / "docs" / "speed.md"
FIGURES = ROOT.parent / "docs" / "figures"
MARKS = ("<!-- tables of benchmarks/speed.py -->", "<!-- end of benchmarks/speed.py -->")
ENGINES, TWIN = ("dense", "event", "auto"), "ANN twin"
WIDTHS = ((16, 32), (32, 16), (64, 16), (128, 8), (256, 8), (512, 4))  # channels, height and width
RATES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)

Row = tuple[object, ...]
Candidates = dict[str, Callable[[], object]]


def best_of(candidates: Candidates, rounds: int) -> dict[str, float]:
    """Seconds; the first call of each, which packs weights, does not count."""
    for run in candidates.values():
        run()
    return race(candidates, rounds, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)


# ------------------------------------------------------------ whole networks


def trained(name: str, T: int, batch: int) -> tuple[sc.SpikingNetwork, Tensor]:
    """A trained network converted by `light`, and images it has not seen."""
    images = shared_data.images("cifar10", "train", 128 + batch, 1, name)[0]
    return sc.convert(shared_data.network(name), [images[:128]], T, "light"), images[128:]


def of_random_weights(model: nn.Module, T: int, batch: int, rate: float = 0.1) -> tuple[sc.SpikingNetwork, Tensor]:
    """A network of random weights whose layers all fire about this often, on noise."""
    x = torch.randn(32, 3, 32, 32)
    model.train()(x)  # running means of batch norms, so that signals neither vanish nor explode
    snn = sc.convert(model.eval(), [x], T, sc.Recipe(sc.MaxActivation()))
    found: dict[str, Tensor] = {}
    run_ann(snn.source, (x,), lambda node, value: found.update({node.name: value.data}))
    for node in snn.graph.neurons:
        site = snn.sites[node.name]
        assert isinstance(site, Neurons)
        snn.sites[node.name] = replace(
            site, threshold=torch.full_like(site.threshold, height_for(found[node.name], rate))
        )
        snn.statistics[node.name] = LayerStatistics(rate, 0.0)
    return snn, torch.randn(batch, 3, 32, 32)


def height_for(x: Tensor, rate: float) -> float:
    """θ such that neurons which get the currents x fire this often: mean(min(x, θ)) = rate·θ."""
    low, high = 0.0, float(x.max()) / rate
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(x.clamp(max=middle).mean()) > rate * middle else (low, middle)
    return high


def firing_rate(snn: sc.SpikingNetwork, x: Tensor) -> float:
    """Spikes per neuron and step, over all layers."""
    result = sc.evaluate(snn, [x])
    return sum(n.firing_rate * n.neurons for n in result.layers) / sum(n.neurons for n in result.layers)


def engines(snn: sc.SpikingNetwork, x: Tensor) -> Candidates:
    def run(engine: str) -> object:
        snn.engine = engine
        return snn(x)

    found: Candidates = {
        TWIN: lambda: snn.ann(x),
        "ANN": lambda: peers.one_step(snn.source, x, lambda node, current: node.op.run(snn.source.tensors, current)),
    }
    return found | {engine: lambda e=engine: run(e) for engine in ENGINES}  # type: ignore[misc]


NETWORK_FIELDS = ("network", "T", "batch", "engine", "firing_rate", "seconds", "ann_seconds", "ratio_to_T_ann")


def measure(name: str, snn: sc.SpikingNetwork, x: Tensor, rounds: int) -> Iterator[Row]:
    rate, best = firing_rate(snn, x), best_of(engines(snn, x), rounds)
    for engine in (*ENGINES, TWIN):
        seconds = best[engine] * (snn.T if engine == TWIN else 1)
        ratio = seconds / (snn.T * best["ANN"])
        print(f"{name}  T={snn.T}  batch {len(x)}  {engine:8s}  {ratio:.2f} × T × ANN  (rate {rate:.3f})", flush=True)
        yield name, snn.T, len(x), engine, f"{rate:.4f}", f"{seconds:.5f}", f"{best['ANN']:.5f}", f"{ratio:.3f}"


def whole_networks(rounds: int) -> Iterator[Row]:
    for name in ("resnet20_cifar10", "vgg16w50_cifar10"):
        for T in (4, 8, 16, 32, 64):
            snn, images = trained(name, T, 32)
            for batch in (1, 32):
                yield from measure(name, snn, images[:batch], rounds if batch > 1 else 3 * rounds)
    network = of_random_weights(vgg16(), 32, 8, rate=0.062)  # by the ANN's activations: spikes come to 5 %
    yield from measure("VGG-16, random weights at 5 %", *network, rounds)


def vgg16() -> nn.Module:
    """At its full width."""
    layers: list[nn.Module] = []
    width = 3
    for outputs, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            width = outputs
        layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


GROWTH_FIELDS = ("what", "value", *NETWORK_FIELDS)


def growth(rounds: int) -> Iterator[Row]:
    """Seconds by T, depth, width and batch: one of them at a time."""
    for T in (2, 4, 8, 16, 32, 64, 128):
        yield from tagged("T", T, measure("ResNet-20", *of_random_weights(networks.CifarResNet(3), T, 8), rounds))
    for blocks in (1, 3, 5, 9):
        depth = 6 * blocks + 2
        snn = of_random_weights(networks.CifarResNet(blocks), 16, 8)
        yield from tagged("depth", depth, measure(f"ResNet-{depth}", *snn, rounds))
    for width in (16, 32, 64, 128):
        yield from tagged("width", width, measure(f"{width} channels", *of_random_weights(plain(width), 16, 8), rounds))
    snn, images = of_random_weights(networks.CifarResNet(3), 16, 64)
    for batch in (1, 2, 4, 8, 16, 32, 64):
        yield from tagged("batch", batch, measure("ResNet-20", snn, images[:batch], rounds))


def tagged(what: str, value: int, rows: Iterator[Row]) -> Iterator[Row]:
    yield from ((what, value, *row) for row in rows)


def plain(width: int) -> nn.Module:
    """Six convolutions of one width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


# ------------------------------------------------------------ single layers


LAYER_FIELDS = ("channels", "size", "rate", "dense_seconds", "event_seconds", "speedup")


def in_parts(layer: Instruction, parts: Sequence[Value], steps: int) -> None:
    for value in parts:
        layer.run([value], steps, {})


def single_layers(rounds: int) -> Iterator[Row]:
    """A 3×3 convolution of random spikes, as bits, and the neurons behind it: the dense engine, and events.

    Each takes as many images at a time as it would in a network.
    """
    steps, images = 8, 32
    for channels, size in WIDTHS:
        model = nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.ReLU())
        x = torch.rand(2, channels, size, size)
        snn = sc.convert(model.eval(), [x], steps, sc.Recipe(sc.MaxActivation()))
        first, second = snn.graph.neurons
        at_once = max(1, CACHE_OF_BITS // (4 * steps * channels * size * size))
        layers = {
            engine: next(step for step in lowered(snn.graph, snn.sites, {}, engine) if step.node == second)
            for engine in ("dense", "event")
        }
        for rate in RATES:
            spikes = (torch.rand(steps, images, size, size, channels) < rate).float()
            bits = native.pack_spikes(spikes).split(at_once, dim=1)
            parts = [PackedSpikes(part.contiguous(), torch.ones(channels), first.shape) for part in bits]
            best = best_of({e: partial(in_parts, layer, parts, steps) for e, layer in layers.items()}, rounds)
            speedup = best["dense"] / best["event"]
            print(f"{channels} channels, {size}×{size}, rate {rate}: {speedup:.1f} × as fast as dense", flush=True)
            yield channels, size, rate, f"{best['dense']:.6f}", f"{best['event']:.6f}", f"{speedup:.2f}"


# ------------------------------------------------------------ other libraries, memory


PEER_FIELDS = (
    *("library", "version", "network", "T", "batch", "seconds", "ann_seconds", "ratio_to_T_ann"),
    *("largest_difference", "images_off", "same_answers"),
)


def other_libraries(rounds: int) -> Iterator[Row]:
    """The same binary network on all of them, and how far their scores are from those of our dense engine.

    images_off: the share of images with a score off by more than 1e-3 of the largest one; where a potential is within
    rounding of its threshold, a spike more or less decides.
    """
    name, versions = "resnet20_cifar10", {**dict(peers.installed())}
    for T in (4, 8, 16, 32, 64):
        snn, images = trained(name, T, 32)
        graph = peers.folded(snn)
        for batch in (1, 32):
            x = images[:batch]
            candidates = engines(snn, x)
            runs = {peer: peers.PEERS[peer][1](graph, T) for peer in versions}
            candidates |= {peer: lambda r=run, x=x: r(x) for peer, run in runs.items()}  # type: ignore[misc]
            snn.engine = "dense"
            wanted = snn(x)
            best = best_of(candidates, rounds)
            for library in (*ENGINES, *versions):
                found = candidates[library]()
                assert isinstance(found, Tensor)
                ratio, off = best[library] / (T * best["ANN"]), (found - wanted).abs().amax(1)  # (B,)
                share = float((off > 1e-3 * wanted.abs().max()).double().mean())
                same = float((found.argmax(1) == wanted.argmax(1)).double().mean())
                if same < 0.9 and "hard reset" not in library:
                    raise RuntimeError(f"{library} computes something else: only {same:.0%} of the answers are alike")
                print(f"T={T}  batch {batch}  {library:26s} {ratio:.2f} × T × ANN, {share:.2f} off", flush=True)
                times = (f"{best[library]:.5f}", f"{best['ANN']:.5f}", f"{ratio:.3f}")
                row = (*times, f"{float(off.max()):.2g}", f"{share:.3f}", f"{same:.3f}")
                yield library, versions.get(library, f"spikecal {sc.__version__}"), name, T, batch, *row


MEMORY_FIELDS = ("library", "network", "T", "batch", "peak_bytes")


def memory(rounds: int) -> Iterator[Row]:
    """What a process that loads the network and runs one batch has at its peak, above one that only loads it."""
    del rounds
    name, T, batch = "resnet20_cifar10", 32, 32
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.spk"
        trained(name, T, 1)[0].save(path)
        for library in ("ANN", *ENGINES, *dict(peers.installed())):
            peak = peak_of(path, library, "run") - peak_of(path, library, "load")
            print(f"{library:26s} {peak / 2**20:.0f} MiB", flush=True)
            yield library, name, T, batch, peak


def peak_of(path: Path, library: str, what: str) -> int:
    command = [sys.executable, __file__, "--peak", str(path), library, what]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def print_peak(path: str, library: str, what: str) -> None:
    snn, x = sc.load(path), torch.randn(32, 3, 32, 32)
    candidates = engines(snn, x)
    if library in peers.PEERS:  # also imports it
        run = peers.PEERS[library][1](peers.folded(snn), snn.T)
        candidates[library] = lambda: run(x)
    if what == "run":
        with torch.no_grad():
            candidates[library]()
    status = Path("/proc/self/status").read_text()  # what getrusage tells includes the parent
    print(1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]))


# ------------------------------------------------------------ tables and figures


PARTS: dict[str, tuple[Sequence[str], Callable[[int], Iterator[Row]]]] = {
    "layers": (LAYER_FIELDS, single_layers),
    "networks": (NETWORK_FIELDS, whole_networks),
    "peers": (PEER_FIELDS, other_libraries),
    "memory": (MEMORY_FIELDS, memory),
    "growth": (GROWTH_FIELDS, growth),
}


def rows_of(part: str) -> list[dict[str, str]]:
    return records.read(RESULTS / part / f"{part}.csv")


def grid(rows: list[dict[str, str]], line: str, column: str, cell: str) -> list[str]:
    """A Markdown table of one value of the rows, by two others, in the order in which they come."""
    lines, columns = (list(dict.fromkeys(row[key] for row in rows)) for key in (line, column))
    found = {(row[line], row[column]): f"{float(row[cell]):.2f}" for row in rows}
    title = "" if column == "library" else f"{column}="
    return [
        f"| {line} | " + " | ".join(title + c for c in columns) + " |",
        "|---|" + "---:|" * len(columns),
        *(f"| {name} | " + " | ".join(found.get((name, c), "") for c in columns) + " |" for name in lines),
        "",
    ]


def tables() -> str:
    lines = ["### Engines, by T", ""]
    for network in dict.fromkeys(row["network"] for row in rows_of("networks")):
        for batch in ("1", "8", "32"):
            rows = [r for r in rows_of("networks") if (r["network"], r["batch"]) == (network, batch)]
            if rows:
                rates = " / ".join(f"{float(r['firing_rate']):.3f}" for r in rows if r["engine"] == "auto")
                lines += [f"{network}, batch {batch}; spikes per neuron and step: {rates}.", ""]
                lines += grid(rows, "engine", "T", "ratio_to_T_ann")
    lines += ["### Other libraries", ""]
    for batch in ("1", "32"):
        rows = [r for r in rows_of("peers") if r["batch"] == batch]
        if rows:
            lines += [f"{rows[0]['network']}, batch {batch}.", ""]
            lines += grid(rows, "library", "T", "ratio_to_T_ann")
    used = {row["library"]: float(row["peak_bytes"]) / 2**20 for row in rows_of("memory")}
    if used:
        lines += ["Memory above the loaded network, resnet20_cifar10, T=32, batch 32, in MiB:", ""]
        lines += ["| " + " | ".join(used) + " |", "|" + "---:|" * len(used)]
        lines += ["| " + " | ".join(f"{m:.0f}" for m in used.values()) + " |", ""]
    lines += ["### One layer", "", "How many times as fast as the dense engine, by firing rate:", ""]
    layers = [{**row, "channels": f"{row['channels']}, {row['size']}×{row['size']}"} for row in rows_of("layers")]
    lines += grid(layers, "channels", "rate", "speedup")
    return "\n".join(lines)


def draw() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "spikecal", "svg.fonttype": "none"})
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    chosen = ("64", "128", "256")
    for axes, channels in zip(figure.subplots(1, 3), chosen, strict=True):
        rows = [r for r in rows_of("layers") if r["channels"] == channels]
        rates = [float(r["rate"]) for r in rows]
        for engine in ("dense", "event"):
            milliseconds = [1000 * float(r[f"{engine}_seconds"]) for r in rows]
            axes.plot(rates, milliseconds, marker=".", label=engine)
        axes.set(title=f"{channels} channels", xlabel="spikes per neuron and step", xlim=0, ylim=0)
    figure.axes[0].set_ylabel("milliseconds of one layer")
    figure.axes[0].legend()
    figure.savefig(FIGURES / "speed_rate.svg", metadata={"Date": None})
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, what in zip(figure.subplots(1, 4), ("T", "depth", "width", "batch"), strict=True):
        rows = [r for r in rows_of("growth") if r["what"] == what]
        for engine in ENGINES:
            some = [r for r in rows if r["engine"] == engine]
            axes.loglog([int(r["value"]) for r in some], [float(r["seconds"]) for r in some], marker=".", label=engine)
        values = [int(r["value"]) for r in rows if r["engine"] == "dense"]
        passes = [int(r["T"]) * float(r["ann_seconds"]) for r in rows if r["engine"] == "dense"]
        axes.loglog(values, passes, "--", color="gray", label="T × ANN")
        axes.set(xlabel=what, xticks=values, xticklabels=values)
        axes.minorticks_off()
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend()
    figure.savefig(FIGURES / "speed_growth.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="only write tables and figures of what is known")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        print_peak(*options.peak)
        return
    if not options.table:
        for part in options.parts:
            command = f"python benchmarks/speed.py --parts {part} --threads {options.threads} --rounds {options.rounds}"
            facts = {"lanes": native.lanes(), "seed": 0, "peers": dict(peers.installed())}
            records.write_environment(RESULTS / part, command, **facts)
            fields, run = PARTS[part]
            with torch.no_grad():
                records.write(RESULTS / part / f"{part}.csv", fields, run(options.rounds))
    draw()
    records.write_between(PAGE, MARKS, tables())


if __name__ == "__main__":
    main()
