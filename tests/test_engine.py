"""The native kernels do what torch does, whatever the geometry, on every instruction set of this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import spikecal as sc
import zoo
from helpers import converted, inputs, shell, spike_trains, twin_of
from spikecal import native
from spikecal.bench import bench, use_threads
from spikecal.engine import lowered, with_channels_last
from spikecal.functional import increments, integrate_and_fire
from spikecal.graph import Node
from spikecal.kernels import choose, conv_form, move_spikes, moves_bits, pool_spikes
from spikecal.ops import AdaptiveMaxPool, Conv, MaxPool, Op, Pad, Reshape, Slice, Tensors
from spikecal.simulation import Neurons
from spikecal.thresholds import add_cells
from spikecal.values import PackedSpikes, Value, image_shape
from spikecal.work import count_work

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
NETS = [*zoo.ZOO, *zoo.MAXPOOL]


@pytest.fixture(params=[4, 8, 16])
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels for registers of this many floats, if the processor has them."""
    before = native.lanes()
    if native.library().spikecal_lanes(request.param) != request.param:
        native.library().spikecal_lanes(before)
        pytest.skip(f"no registers of {request.param} floats")
    yield request.param
    native.library().spikecal_lanes(before)


def in_float32(name: str) -> sc.SpikingNetwork:
    return twin_of(converted(name)).float()


def images(name: str) -> list[Tensor]:
    return [t.float() for t in inputs(name, 3, seed=5)]


def currents(spikes: Tensor, weight: Tensor, tables: bool, window: int = 1, **options: int) -> Tensor:
    """What the kernels make of spikes (T, B, C, H, W): the current (T, B, C', H', W')."""
    T, N, channels, height, width = spikes.shape
    out = conv(spikes, weight, window, **options)
    o = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    map_h, map_w = height // window, width // window
    form = native.Conv(0, 0, channels, height, width, window, window, window, window, map_h, map_w, *weight.shape[2:])
    form.stride_h = form.stride_w = o["stride"]
    form.pad_h = form.pad_w = o["padding"]
    form.dilation_h = form.dilation_w = o["dilation"]
    form.groups, form.tables = o["groups"], tables
    bits = native.pack_spikes(spikes.permute(0, 1, 3, 4, 2))
    packed = native.pack_weights(form, len(weight), weight, torch.full((channels,), 1 / window**2))
    with use_threads(2):
        found, _ = native.run((len(weight), *out.shape[3:]), [(form, bits, packed)], T, N)
    return found[..., : len(weight)].permute(0, 1, 4, 2, 3)


def conv(spikes: Tensor, weight: Tensor, window: int = 1, **options: int) -> Tensor:
    pooled = F.avg_pool2d(spikes.flatten(0, 1), window)
    return F.conv2d(pooled, weight, None, **options).unflatten(0, spikes.shape[:2])


def random_spikes(*shape: int, rate: float = 0.2, seed: int = 0) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < rate).float()


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.usefixtures("lanes")
def test_a_convolution_equals_torch(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    groups = data.draw(st.sampled_from([1, 1, 1, 2]))
    channels, outputs = groups * draw(1, 40), groups * (16 * draw(1, 5) if groups > 1 else draw(1, 150))
    kernel_h, kernel_w, dilation = draw(1, 4), draw(1, 5), draw(1, 2)
    window = draw(1, 2)
    size = draw(dilation * 4 + 1, 13) * window
    options = {"stride": draw(1, 3), "padding": draw(0, 3), "dilation": dilation, "groups": groups}
    tables = window == 1 and data.draw(st.booleans()) and (groups == 1 or channels // groups in (4, 8, 16, 32))
    spikes = random_spikes(draw(1, 3), draw(1, 3), channels, size, size + window, rate=data.draw(st.floats(0, 1)))
    weight = torch.randn(outputs, channels // groups, kernel_h, kernel_w, generator=torch.Generator().manual_seed(1))
    found = currents(spikes, weight, tables, window, **options)
    torch.testing.assert_close(found, conv(spikes, weight, window, **options), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(("channels", "kernel", "stride"), [(5, 3, 1), (32, 3, 2), (70, 5, 1), (130, 2, 3)])
def test_a_depthwise_convolution_equals_torch(channels: int, kernel: int, stride: int) -> None:
    spikes = random_spikes(3, 2, channels, 11, 9)
    weight = torch.randn(channels, 1, kernel, kernel, generator=torch.Generator().manual_seed(1))
    options = {"stride": stride, "padding": kernel // 2, "groups": channels}
    found = currents(spikes, weight, False, **options)
    torch.testing.assert_close(found, conv(spikes, weight, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(("delay", "start"), [(0, 0), (1, 0), (3, 0), (9, 0), (0, 2), (1, 3), (0, 6)])
def test_neurons_equal_the_scan(delay: int, start: int) -> None:
    """Constant, addend, shortcut and bias over time, all at once, on dyadic numbers: no sum is rounded."""
    T, N, C, H = 6, 3, 19, 5
    generator = torch.Generator().manual_seed(delay)

    def dyadic(*shape: int) -> Tensor:
        return torch.randint(-8, 16, shape, generator=generator).float() / 8

    constant, addend, bias = dyadic(N, H, H, C), dyadic(T, N, H, H, C), dyadic(T, C)
    height, v0, threshold = dyadic(C), dyadic(N, H, H, C), torch.randint(1, 12, (C,), generator=generator).float() / 4
    shortcut = random_spikes(T, N, H, H, C)
    arriving = constant + addend + shortcut * height
    current = torch.zeros_like(arriving)
    current[0] = arriving[: delay + 1].sum(0)
    if delay + 1 < T:
        current[1 : T - delay] = arriving[delay + 1 :]
    spikes, v = integrate_and_fire(current + bias[:, None, None, None], threshold, v0, start)

    def pad(x: Tensor, value: float = 0.0) -> Tensor:
        return F.pad(x, (0, native.padded(C) - C), value=value).contiguous()

    buffers = {
        "constant": pad(constant),
        "addend": pad(addend),
        "shortcut": native.pack_spikes(shortcut),
        "height": pad(height),
        "bias": pad(bias),
        "threshold": pad(threshold, torch.inf),
        "v": pad(v0),
    }
    fired, _ = native.run((C, H, H), (), T, N, delay=delay, start=start, **buffers)  # type: ignore[arg-type]
    assert torch.equal(native.unpack(fired, torch.ones(C)), (spikes > 0).float())
    assert torch.equal(buffers["v"][..., :C], v)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_max_pooling_of_bits_is_that_of_torch(data: st.DataObject) -> None:
    small = st.integers(1, 3)
    dims = data.draw(st.sampled_from([1, 2]))
    sizes = data.draw(st.lists(st.integers(5, 9), min_size=dims, max_size=dims))
    channels, T, N = data.draw(st.sampled_from([1, 7, 64, 70])), 7, 2
    if data.draw(st.booleans()):
        op: MaxPool | AdaptiveMaxPool = AdaptiveMaxPool(tuple(data.draw(st.integers(1, 5)) for _ in range(dims)))
    else:
        kernel, stride, dilation = (tuple(data.draw(small) for _ in range(dims)) for _ in range(3))
        padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        if any((k - 1) * d + 1 > n for k, d, n in zip(kernel, dilation, sizes, strict=True)):
            return
        op = MaxPool(kernel, stride, padding, dilation, data.draw(st.booleans()))
    torch.manual_seed(data.draw(st.integers(0, 5)))
    rate, height = data.draw(st.sampled_from([0.05, 0.5, 1.0])), torch.rand(channels) + 0.5
    spikes = (torch.rand(T, N, channels, *sizes) < rate).float()
    wanted, _ = increments(lambda total: op.run({}, total), spikes)  # (T, N, C, ...)
    images = spikes.unsqueeze(3) if dims == 1 else spikes
    bits = native.pack_spikes(images.permute(0, 1, 3, 4, 2))
    shape = tuple(wanted.shape[2:])
    found, past = [], None
    for part in (slice(0, 3), slice(3, T)):  # the counts are carried on
        some = PackedSpikes(bits[part], height, (channels, *sizes))
        pooled, past = pool_spikes(op, some, shape, past)
        found.append(pooled.data)
    heights = height.reshape(-1, *(1,) * dims)
    assert torch.equal(torch.cat(found), wanted * heights)


def test_max_pooling_stays_in_bits() -> None:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*first, nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(4, 3, 12, 12)
    model(x)
    snn = sc.convert(model.eval(), x, 6)
    snn.engine = "event"
    snn(x)
    with count_work() as work:
        snn(x)
    constant, last, scores = 4 * 32 * 12 * 12 * 4, 6 * 4 * 32 * 4 * 4 * 4, 6 * 4 * 5 * 4
    bits = 6 * 4 * 8 * (12 * 12 + 6 * 6 + 4 * 4)  # one word for up to 64 channels: neurons, pool, neurons
    moved = 2 * last  # floats for the linear layer, and what is flattened of them
    assert work.bytes <= constant + bits + moved + 2 * scores


def test_spikes_survive_packing() -> None:
    for channels in (1, 8, 63, 64, 65, 200):
        spikes = random_spikes(2, 3, channels)
        assert torch.equal(native.unpack(native.pack_spikes(spikes), torch.full((channels,), 0.3)), spikes * 0.3)


@pytest.mark.parametrize("name", NETS)
def test_every_net_fires_alike_on_both_engines(name: str) -> None:
    """Spike for spike: on these small nets no potential lies within rounding of its threshold."""
    snn = in_float32(name)
    x = images(name)
    trains = {}
    for snn.engine in ("dense", "event", "auto"):
        trains[snn.engine] = spike_trains(snn, *x)
    for engine in ("event", "auto"):
        for site, spikes in trains["dense"].items():
            assert torch.equal(trains[engine][site] > 0, spikes > 0), (engine, site)


def test_layers_are_fused_and_spikes_stay_bits() -> None:
    snn = in_float32("resnet_block")
    program = lowered(snn.graph, snn.sites, {}, "event")
    assert len(program) < len(snn.graph.nodes)
    seen = []
    snn.engine = "event"
    with count_work() as work:
        snn.currents(images("resnet_block"), lambda node, value: seen.append(value))
    assert all(isinstance(value, PackedSpikes) for value in seen[:-1])
    assert work.events > 0


@pytest.mark.parametrize("widths", [(0, 1, 0, 1), (2, 0, 1, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("groups", [1, 2, 32])
def test_padding_of_its_own_is_fused_too(widths: tuple[int, int, int, int], groups: int) -> None:
    """Zeros on two sides only, as networks from TensorFlow have them."""
    torch.manual_seed(0)
    second = (nn.ZeroPad2d(widths), nn.Conv2d(32, 32, 3, 2, 1 if widths[0] else 0, groups=groups), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), *second, nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(4, 3, 12, 11)
    model(x)
    snn = sc.convert(model.eval(), x, 6)
    trains = {}
    for snn.engine in ("dense", "event", "auto"):
        trains[snn.engine] = spike_trains(snn, x)
    for site, spikes in trains["dense"].items():
        assert torch.equal(trains["event"][site] > 0, spikes > 0)
        assert torch.equal(trains["auto"][site] > 0, spikes > 0)
    assert "Pad" not in {type(step.node.op).__name__ for step in lowered(snn.graph, snn.sites, {}, "event")}


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("pad", [(), (nn.ZeroPad2d((0, 1, 0, 1)),)])
def test_a_pool_that_only_leaves_values_out(groups: int, pad: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    second = (nn.AvgPool2d(1, 2), *pad, nn.Conv2d(16, 16, 3, groups=groups), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *second, nn.Flatten(), nn.LazyLinear(5))
    assert_alike_on_all_engines(model, torch.randn(4, 3, 9, 11))


def test_a_mean_over_channels_is_no_global_pool() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(1, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            mean = self.a(x).relu().mean(1, keepdim=True)  # as many values as there were channels
            return self.b(mean).relu().flatten(1)

    assert_alike_on_all_engines(Net(), torch.randn(4, 3, 4, 4))


def assert_alike_on_all_engines(model: nn.Module, x: Tensor) -> None:
    model(x)
    snn = sc.convert(model.eval(), x, 6)
    snn.engine = "dense"
    expected = spike_trains(snn, x)
    for snn.engine in ("event", "auto"):
        for site, spikes in spike_trains(snn, x).items():
            assert torch.equal(spikes > 0, expected[site] > 0), (snn.engine, site)


def test_the_cost_of_the_event_engine_follows_the_spikes() -> None:
    """Counted, not timed: with thresholds so high that nobody fires there are no events."""
    snn = in_float32("resnet_block")
    x = images("resnet_block")
    snn.engine = "event"
    with count_work() as busy:
        snn(*x)
    snn.sites = {
        name: replace(site, threshold=site.threshold * 1e6) if hasattr(site, "threshold") else site
        for name, site in snn.sites.items()
    }
    with count_work() as quiet:
        snn(*x)
    assert quiet.events == 0 < busy.events
    assert quiet.neuron_steps == busy.neuron_steps


def test_engines_are_timed_beside_the_ann() -> None:
    snn, x = in_float32("resnet_block"), images("resnet_block")[0]
    snn.engine = "event"
    result = bench(snn, x, (1, 2), rounds=1)
    assert snn.engine == "event"
    assert [(t.engine, t.batch) for t in result.timings] == [(e, b) for b in (1, 2) for e in ("dense", "event", "auto")]
    for t in result.timings:
        assert t.ratio == pytest.approx(t.seconds / (snn.T * t.ann_seconds))
        assert t.difference < 1e-4
    assert result.peak_bytes > 2**20
    with pytest.raises(sc.DataError, match="too few for a batch of 99"):
        bench(snn, x, (99,))
    with pytest.raises(sc.DataError, match="must be 1 or more"):
        bench(snn, x, (0,))


def test_weights_are_packed_once_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    snn, x, packed = in_float32("resnet_block"), images("resnet_block"), []
    pack = native.pack_weights
    monkeypatch.setattr(native, "pack_weights", lambda *args: packed.append(1) or pack(*args))
    counts = []
    for snn.engine in ("event", "dense", "event", "auto", "event", "auto"):
        snn(*x)
        counts.append(len(packed))
    assert counts[0] == counts[1] == counts[2] < counts[3] == counts[4] == counts[5]


def test_an_unknown_engine_is_refused() -> None:
    snn = in_float32("resnet_block")
    with pytest.raises(sc.CalibrationError, match="there is no engine 'fast'; choose one of auto, dense, event"):
        lowered(snn.graph, snn.sites, {}, "fast")


def test_without_the_kernels_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    snn = in_float32("resnet_block")
    x = images("resnet_block")
    expected = snn(*x)
    monkeypatch.setattr(native, "PATH", native.PATH.with_name("missing.so"))
    native.library.cache_clear()
    snn.engine = "event"
    try:
        with pytest.warns(native.NativeNote, match="runs without its native kernels"):
            found = snn(*x)
        torch.testing.assert_close(found, expected)
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("channels", [1, 7, 16, 37, 64, 130])
def test_counts_are_sums_of_spikes(channels: int, lanes: int) -> None:
    spikes = random_spikes(9, 2, 3, 5, channels, rate=0.4)  # (T, B, H, W, C)
    height = torch.rand(channels)
    torch.testing.assert_close(native.count(native.pack_spikes(spikes), height), spikes.sum(0) * height)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_calibration_on_fused_layers_is_that_of_torch(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = sc.Recipe(sc.MMSE(per_channel=True), (sc.BiasShift(), sc.PotentialCalibration()), delay=delay)
    x = images("resnet_block")
    native_net = sc.convert(in_float32("resnet_block"), [x[0]], 6, recipe)
    monkeypatch.setattr("spikecal.replay.fused", lambda *_: None)
    other = sc.convert(in_float32("resnet_block"), [x[0]], 6, recipe)
    for name, site in native_net.sites.items():
        for key, t in site.tensors().items():
            torch.testing.assert_close(t, other.sites[name].tensors()[key], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------ the kernels trust what they get, so it is checked


def arguments() -> dict[str, Any]:
    """Of `native.run`, all of them right: a 1×1 convolution of 20 channels to 3, with neurons and a shortcut."""
    form = native.Conv(0, 0, 20, 4, 5, 1, 1, 1, 1, 4, 5, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0)
    weights = native.pack_weights(form, 3, torch.randn(3, 20, 1, 1), torch.ones(20))
    bits = torch.zeros(2, 1, 4, 5, 1, dtype=torch.int64)
    floats = {"constant": (1, 4, 5, 16), "addend": (2, 1, 4, 5, 16), "bias": (2, 16), "height": (16,)}
    given = {name: torch.zeros(shape) for name, shape in floats.items()}
    given |= {"threshold": torch.ones(16), "v": torch.zeros(1, 4, 5, 16), "shortcut": bits.clone()}
    return {"shape": (3, 4, 5), "convs": [(form, bits, weights)], "steps": 2, "images": 1, **given}


def test_right_arguments_are_taken() -> None:
    assert native.run(**arguments())[0].shape == (2, 1, 4, 5, 1)


@pytest.mark.parametrize("name", ["constant", "addend", "bias", "height", "threshold", "v", "shortcut"])
@pytest.mark.parametrize("wrong", ["dtype", "shape", "strides", "device"])
def test_wrong_buffers_are_refused(name: str, wrong: str) -> None:
    given = arguments()
    x = given[name]
    given[name] = {
        "dtype": x.double(),
        "shape": torch.cat([x, x], -1),
        "strides": torch.stack([x, x], -1)[..., 0],
        "device": x.to("meta"),
    }[wrong]
    with pytest.raises(ValueError, match=f"want {name} as"):
        native.run(**given)


@pytest.mark.parametrize("at", [1, 2], ids=["spikes", "weights"])
def test_wrong_spikes_and_weights_are_refused(at: int) -> None:
    given = arguments()
    conv = list(given["convs"][0])
    conv[at] = torch.cat([conv[at], conv[at]])
    with pytest.raises(ValueError, match=f"want {('spikes', 'weights')[at - 1]} as"):
        native.run(**{**given, "convs": [tuple(conv)]})


@pytest.mark.parametrize(
    "change",
    [{"stride_h": 0}, {"pad_w": -1}, {"groups": 2}, {"window_h": 2}, {"kernel_w": 0}, {"in_channels": -20}],
)
def test_impossible_convolutions_are_refused(change: dict[str, int]) -> None:
    given = arguments()
    ((form, *_),) = given["convs"]
    for name, value in change.items():
        setattr(form, name, value)
    with pytest.raises(ValueError, match=r"cannot do|do not go into|reach beyond"):
        native.run(**given)


def test_groups_that_do_not_fit_are_refused() -> None:
    given = arguments()
    ((form, spikes, weights),) = given["convs"]
    form.groups = 4
    with pytest.raises(ValueError, match="do not go into vectors"):
        native.pack_weights(form, 12, torch.randn(12, 5, 1, 1), torch.ones(20))
    other = native.Conv.from_buffer_copy(form)
    other.groups = 1
    with pytest.raises(ValueError, match="as many groups each"):
        native.run(**{**given, "convs": [(form, spikes, weights), (other, spikes, weights)]})
    with pytest.raises(ValueError, match="a delay of 0 or more"):
        native.run(**{**arguments(), "delay": -1})


def test_half_of_what_belongs_together_is_refused() -> None:
    for name in ("v", "height", "threshold", "shortcut"):
        with pytest.raises(ValueError, match="needs the height of its spikes"):
            native.run(**{**arguments(), name: None})


@pytest.mark.parametrize("threads", [1, 3])
def test_values_are_counted_by_cells_as_torch_does(threads: int) -> None:
    x = torch.randn(5, 4000).mul(2).round(decimals=1)  # many on the very border of a cell
    x[0, :2], x[4] = torch.tensor([torch.nan, -torch.inf]), -1.0
    top = torch.tensor([3.0, 1.0, 0.1, 7.7, 2.0], dtype=torch.float64)
    column_of = torch.arange(31).div(2, rounding_mode="floor").int()
    natively, by_torch = (torch.zeros(5, 16, 2, dtype=torch.float64) for _ in range(2))
    for part in (x[:, :3000].unflatten(1, (2, -1)).transpose(0, 1), x[None, :, 3000:]):  # (B, rows, n)
        with use_threads(threads):
            add_cells(part, top, column_of, natively)
        add_cells(part.double(), top, column_of, by_torch)  # which the kernels do not take
    torch.testing.assert_close(natively, by_torch)
    assert natively[..., 0].sum(1).tolist() == (x > 0).sum(1).tolist()


def dyadic(x: Tensor) -> Tensor:
    """Numbers of few bits, whose sums are exact in any order."""
    return (16 * x).round() / 16


@pytest.mark.parametrize(
    "change", [{}, {"delay": 1}, {"start": 2}, {"temporal": torch.arange(5.0).reshape(-1, 1, 1, 1) / 8}]
)
def test_dense_layers_pass_bits_and_take_some_images_at_a_time(
    residual: tuple[sc.SpikingNetwork, Tensor], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and in parts so small that each holds three images, two, or one: the same bits."""
    graph, x = residual[0].source.map_tensors(dyadic), dyadic(residual[1])
    snn = sc.convert(shell(graph), x, 5, sc.max_activation())
    for node in snn.graph.neurons:
        site = snn.sites[node.name]
        assert isinstance(site, Neurons)
        snn.sites[node.name] = replace(site, threshold=torch.full_like(site.threshold, 0.5), **change)
    snn.engine = "dense"

    def trains() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def keep(node: Node, value: Value) -> None:
            if node in snn.graph.neurons:
                assert isinstance(value, PackedSpikes)
                found[node.name] = value.bits

        snn.currents((x,), keep)
        return found

    whole = trains()
    assert all(bits.any() for bits in whole.values())
    for images in (3, 2, 1):
        monkeypatch.setattr("spikecal.engine.BLOCK", images * 4 * 5 * 32 * 16 * 16)  # bytes of the widest layer
        parts = trains()
        assert all(torch.equal(parts[name], bits) for name, bits in whole.items())


def test_the_dense_engine_does_convolutions_by_torch(
    residual: tuple[sc.SpikingNetwork, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    snn, x = residual
    snn.engine = "dense"
    with count_work() as work:
        snn(x)
    assert work.events == 0
    monkeypatch.setattr(native, "pack_weights", None)  # what native convolutions cannot do without
    snn._lowered.clear()
    snn(x)


def test_the_dense_engine_computes_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    snn = in_float32("resnet_block")
    for node in (n for n in with_channels_last(snn.graph).nodes if isinstance(n.op, Conv)):
        before, after = (g.tensors[node.op.weight] for g in (snn.graph, with_channels_last(snn.graph)))  # type: ignore[attr-defined]
        assert after.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(before, after)
    snn.engine = "dense"
    seen, run = [], Conv.run

    def watch(op: Conv, tensors: Tensors, x: Tensor) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return run(op, tensors, x)

    monkeypatch.setattr(Conv, "run", watch)
    snn(*images("resnet_block"))
    assert seen
    assert all(seen)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_spikes_are_moved_as_bits(data: st.DataObject) -> None:
    """Slices of pixels, and zeros around pixels and channels, across the words of bits: as torch does it to floats."""
    dims = data.draw(st.sampled_from([1, 2]))
    channels, size = data.draw(st.sampled_from([1, 16, 60, 64, 70, 130])), data.draw(st.integers(2, 6))
    spikes = random_spikes(3, 2, *(size,) * dims, channels).movedim(-1, 2)  # (t, B, C, ...)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, size - 1))
        axis, step = data.draw(st.integers(1, dims)), data.draw(st.integers(1, 3))
        op: Slice | Pad = Slice(axis, start, data.draw(st.integers(start + 1, size)), step)
    else:
        widths = data.draw(st.lists(st.sampled_from([0, 1, 3, 8, 64, 67]), min_size=2, max_size=2 * dims + 2))
        op = Pad(tuple(w if i >= 2 * dims else w % 5 for i, w in enumerate(widths[: len(widths) // 2 * 2])))
    height = torch.rand(channels) + 0.5
    wanted = op.run({}, (spikes * height.reshape(-1, *(1,) * dims)).flatten(0, 1)).unflatten(0, (3, 2))
    before, after = tuple(spikes.shape[2:]), tuple(wanted.shape[2:])
    assert moves_bits(op, before, after)
    images = spikes.reshape(3, 2, *image_shape(before)).permute(0, 1, 3, 4, 2)
    moved = move_spikes(op, PackedSpikes(native.pack_spikes(images), height, before), after)
    assert torch.equal(moved.data, wanted)
    torch.testing.assert_close(moved.mean(), wanted.mean(0))
    assert moved.bits.shape[-1] == native.words(after[0])


@pytest.mark.parametrize(
    ("op", "after"),
    [
        (Slice(0, 0, 2), (2, 4, 4)),
        (Pad((1, 1), value=1.0), (4, 4, 6)),
        (Pad((-1, 1)), (4, 4, 4)),
        (Pad((1, 1, 1, 1), "reflect"), (4, 6, 6)),
        (Reshape((64,)), (64,)),
    ],
)
def test_what_else_moves_spikes_is_left_to_torch(op: Op, after: tuple[int, ...]) -> None:
    assert not moves_bits(op, (4, 4, 4), after)
    assert not moves_bits(Slice(1, 0, 2), (4, 4, 4, 4), (4, 2, 4, 4))


@pytest.mark.parametrize("steps", [2, 5])
def test_a_flattened_signal_is_read_as_torch_reads_it(steps: int) -> None:
    """Of one dimension, in front of a linear layer with neurons: by events, and in the layer that calibrates."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8, 32), nn.ReLU(), nn.Linear(32, 5)
    )
    x = torch.randn(6, 3, 10)
    snn = sc.convert(model.eval().double(), x.double(), steps, "light")
    wanted = snn(x.double()).float()  # which torch alone does
    snn.float()
    for snn.engine in ("dense", "event", "auto"):
        torch.testing.assert_close(snn(x), wanted, rtol=1e-4, atol=1e-4)
    calibrated = sc.convert(model.float(), x, steps, "light")
    assert float((calibrated(x) - wanted).abs().mean()) < 0.1 * float(wanted.abs().mean())


def test_padding_by_nothing_is_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), Padded(), nn.Conv2d(16, 16, 3), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    snn = sc.convert(model.eval(), x, 3, "light")
    for snn.engine in ("dense", "event"):
        assert snn(x).shape == model(x).shape


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, ())


@pytest.mark.parametrize("engine", ["dense", "event", "auto"])
def test_a_shortcut_without_parameters_stays_in_bits(engine: str) -> None:
    """Every second pixel, and channels of zeros on both sides, as in the ResNets of He et al. for CIFAR."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, 2, 1), conv3(32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            return (self.c(self.b(x).relu()) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))).relu()

    torch.manual_seed(0)
    x = torch.randn(4, 3, 10, 10)
    snn = sc.convert(Block().eval(), x, 4, "light")
    program = lowered(snn.graph, snn.sites, {}, engine)
    (pad,) = (step.node for step in program if isinstance(step.node.op, Pad))
    last = next(step for step in program if step.node == snn.graph.neurons[-1])
    assert last.run.__self__.shortcut == pad.name  # type: ignore[attr-defined]
    snn.engine = engine
    found = snn.double()(x.double())  # by torch alone
    torch.testing.assert_close(snn.float()(x), found.float())


def test_taps_on_padding_cost_no_events() -> None:
    """A kernel over a map of 2 × 2 pixels reads four of its nine taps, so events pay at twice the rate."""
    conv = Conv("", padding=(1, 1))
    for size, way in ((32, "dense"), (2, "events")):
        form = conv_form(conv, (3, 3), (256, size, size), 256)
        assert form is not None
        assert choose(form, 256, 0.5) == way


@pytest.mark.parametrize("engine", ["dense", "event", "auto"])
@pytest.mark.parametrize("recipe", ["light", "best", "pipelined"])
def test_no_images_give_no_answers(residual: tuple[sc.SpikingNetwork, Tensor], engine: str, recipe: str) -> None:
    snn, x = residual
    snn = sc.convert(shell(snn.source), x, 3, recipe)
    snn.engine = engine
    assert snn(x[:0]).shape == snn.ann(x[:0]).shape == (0, 10)


@pytest.mark.parametrize("recipe", ["light", "best", "pipelined"])
def test_the_dense_engine_is_the_same_without_kernels(
    residual: tuple[sc.SpikingNetwork, Tensor], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snn, x = residual
    snn = sc.convert(shell(snn.source), x, 5, recipe)
    snn.engine = "dense"
    with count_work() as work:
        found = snn(x)
    assert work.calls == 8  # one a layer of neurons, and one for the floats that a convolution or a pool reads
    monkeypatch.setattr(native, "library", lambda: None)
    snn._lowered.clear()
    torch.testing.assert_close(snn(x), found)


def test_other_kernels_refuse_wrong_buffers() -> None:
    bits, height = torch.zeros(2, 3, 1, dtype=torch.int64), torch.ones(20)
    counts, most = (torch.zeros(1, 2, 2, 4, dtype=torch.int32) for _ in range(2))
    top, cells = torch.ones(2, dtype=torch.float64), torch.zeros(2, 4, 2, dtype=torch.float64)
    order = torch.arange(4).int()
    wrong: list[Callable[[], object]] = [
        lambda: native.unpack(bits, torch.ones(70)),
        lambda: native.unpack(bits.int(), height),
        lambda: native.count(bits, height.double()),
        lambda: native.pack_spikes(torch.zeros(2, 3, dtype=torch.float64)),
        lambda: native.add_cells(torch.zeros(1, 2, 5).double(), top, order, cells),
        lambda: native.add_cells(torch.zeros(2, 3, 5), top, order, cells),
        lambda: native.add_cells(torch.zeros(1, 2, 5), top.float(), order, cells),
        lambda: native.add_cells(torch.zeros(1, 2, 5), torch.zeros_like(top), order, cells),
        lambda: native.add_cells(torch.zeros(1, 2, 5), top, order, cells[:, :3]),
        lambda: native.add_cells(torch.zeros(1, 2, 5), top, order.long(), cells),
        lambda: native.add_cells(torch.zeros(1, 2, 5), top, order + 1, cells),
        lambda: native.add_cells(torch.zeros(1, 2, 5), top, order[:1], cells),
        lambda: native.pool(torch.zeros(1, 1, 2, 2, 1, dtype=torch.int64), counts, most, [[0], [9]], [[0], [1]]),
        lambda: native.pool(torch.zeros(1, 1, 2, 2, 1, dtype=torch.int64), counts.long(), most, [[0]], [[0], [1]]),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"native kernels want|windows must be given"):
            call()


# ------------------------------------------------------------ no more work than there was


@pytest.fixture(scope="module")
def residual() -> tuple[sc.SpikingNetwork, Tensor]:
    """conv, block with shortcut, pool, conv, linear: 32 channels, so that everything is done by kernels."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 32, 3, padding=1), conv3(32), conv3(32)
            self.d, self.e = nn.Conv2d(32, 64, 3, 2, 1), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            x = (self.c(self.b(x).relu()) + x).relu()
            x = self.d(F.avg_pool2d(x, 2)).relu()
            return self.e(x.mean((2, 3)))

    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    return sc.convert(Net().eval(), x, 8, "light"), x


def conv3(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1)


@pytest.mark.parametrize(
    ("engine", "nodes", "calls", "bytes_per_image"),
    [
        ("dense", 8 * 7 + 1, 8, 1_527_424),  # neurons, and what makes floats of the spikes in front of each layer
        ("event", 8 * 3 + 1, 5, 118_400),  # neurons, and what makes floats of the last spikes
        ("auto", 8 * 3 + 1, 5, 118_400),
    ],
)
def test_a_simulation_does_no_more_than_it_did(
    residual: tuple[sc.SpikingNetwork, Tensor], engine: str, nodes: int, calls: int, bytes_per_image: int
) -> None:
    """Per image: node-steps and bytes of values; kernel calls for all of them together."""
    snn, x = residual
    snn.engine = engine
    snn(x)  # packs the weights
    with count_work() as work:
        snn(x)
    assert work.node_steps <= nodes * len(x)
    assert work.neuron_steps == 8 * 4 * len(x)
    assert work.calls <= calls * -(-len(x) // snn.chunk_size(len(x)))
    assert work.bytes <= bytes_per_image * len(x)


@pytest.mark.parametrize("engine", ["event", "auto"])
def test_the_same_spikes_on_any_number_of_threads(residual: tuple[sc.SpikingNetwork, Tensor], engine: str) -> None:
    snn, x = residual
    snn.engine = engine
    found = []
    for count in (1, 2, 7):
        with use_threads(count):
            found.append((snn(x), snn(x[:1])))  # one image is shared out by rows
    for many, one in found[1:]:
        assert torch.equal(many, found[0][0])
        assert torch.equal(one, found[0][1])


def test_a_conversion_does_no_more_than_it_did(residual: tuple[sc.SpikingNetwork, Tensor]) -> None:
    snn, x = residual
    with count_work() as work:
        sc.convert(shell(snn.source), x, 8, "light", memory=10**9)
    assert work.node_steps <= 67 * len(x)
    assert work.neuron_steps == 2 * 8 * 4 * len(x)  # once for the error, once for what comes behind
    assert work.calls <= 21
    assert work.bytes <= 1_064_200 * len(x)
