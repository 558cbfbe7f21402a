"""convert(): what it takes, what it refuses, and what it says when something goes wrong on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spikecal as sc
from helpers import captured, converted, distance, inputs, least_memory, leaves, prepared, shell, spike_trains
from spikecal.replay import Layer
from spikecal.simulation import Neurons, run_ann
from zoo import example, make

T = 4


def mlp(batches: Any, T: int = T, recipe: Any = "light", **options: Any) -> sc.SpikingNetwork:
    return sc.convert(shell(captured("mlp")), batches, T, recipe, **options)


def same(a: sc.SpikingNetwork, b: sc.SpikingNetwork, name: str = "mlp") -> bool:
    x = inputs(name, 5, seed=7)
    return all(torch.equal(y, z) for y, z in zip(leaves(a.over_time(*x)), leaves(b.over_time(*x)), strict=True))


# ---------------------------------------------------------------------- batches


def test_any_iterable_of_batches_will_do() -> None:
    (x,) = inputs("mlp", 12)
    y = torch.arange(12)
    parts, labels = x.split(5), y.split(5)
    dataset = TensorDataset(x, y)
    ways: list[Any] = [
        list(parts),
        (part for part in parts),
        list(zip(parts, labels, strict=True)),
        [[part, label] for part, label in zip(parts, labels, strict=True)],
        [(part, label, "name", None) for part, label in zip(parts, labels, strict=True)],
        [((part,), label) for part, label in zip(parts, labels, strict=True)],
        [(part,) for part in parts],
        DataLoader(dataset, batch_size=5),
        DataLoader(TensorDataset(x), batch_size=1),
        x,
        [x],
        [x.float()],  # another precision
    ]
    first = mlp([x])
    for batches in ways[:-1]:
        assert same(mlp(batches), first)
    assert distance([mlp(ways[-1]).ann(x)], [first.ann(x)]) < 1e-9


def test_labels_are_ignored() -> None:
    (x,) = inputs("mlp", 12)
    assert same(mlp([(x, torch.zeros(12))]), mlp([(x, "anything")]))


def test_models_with_two_inputs_take_them_in_a_tuple() -> None:
    x, y = inputs("siamese", 12)
    graph = shell(captured("siamese"))
    ways: list[Any] = [
        [(x, y)],
        [[x, y]],
        [(x, y, torch.arange(12))],
        [((x, y), torch.arange(12))],
        zip(x.split(5), y.split(5), strict=True),
        DataLoader(TensorDataset(x, y, torch.arange(12)), batch_size=5),
    ]
    first, *others = [sc.convert(graph, batches, T) for batches in ways]
    for other in others:
        assert same(other, first, "siamese")


def test_no_more_batches_are_taken_than_needed() -> None:
    taken = []

    def many() -> Iterator[Tensor]:
        for i in range(50):
            taken.append(i)
            yield torch.randn(10, 10, generator=torch.Generator().manual_seed(i))

    mlp(many(), recipe=sc.light(threshold_images=35, calibration_images=20))
    assert len(taken) == 4


def test_a_model_is_converted_in_its_own_precision() -> None:
    model, (x,) = make("mlp").double(), example("mlp", 8)
    snn = sc.convert(model, x, T)
    assert snn.graph.dtype == torch.float64
    assert distance([snn.ann(x)], [model(x.double())]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "resnet_block"])
def test_half_precision_is_refused_with_the_remedy(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(sc.UnsupportedModelError, match=rf"computes in {dtype}; convert it with model.float\(\) first"):
        sc.convert(make(name).to(dtype), [example(name, 8)], T)


def test_a_model_of_two_precisions_is_refused_with_the_remedy() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu() + self.shift

    with pytest.raises(sc.UnsupportedModelError, match=r"in torch.float32 and torch.float64; convert it with model.fl"):
        sc.convert(Mixed(), torch.randn(4, 3), T)


# ---------------------------------------------------------------------- determinism


def test_same_seed_same_network() -> None:
    x = inputs("resnet_block", 24)
    recipe = sc.light(calibration_images=8)
    first, again, other = (sc.convert(shell(captured("resnet_block")), [x], T, recipe, seed=seed) for seed in (3, 3, 4))
    assert same(first, again, "resnet_block")
    assert not same(first, other, "resnet_block")
    for name in (n.name for n in first.graph.neurons):  # the seed picks images for the steps, not for thresholds
        assert torch.equal(first.sites[name].threshold, other.sites[name].threshold)


@pytest.mark.parametrize(("T", "images"), [(2, 20), (4, 10), (8, 8)])
def test_with_few_steps_a_recipe_may_look_at_more_images(T: int, images: int) -> None:
    seen: list[int] = []

    class Count:
        def apply(self, layer: Layer) -> None:
            seen.append(layer.images)

    recipe = sc.Recipe(sc.MMSE(), (Count(),), threshold_images=20, calibration_images=8, image_steps=40)
    sc.convert(make("mlp"), [example("mlp", 30)], T, recipe)
    assert set(seen) == {images}


def test_more_images_than_a_recipe_needs_are_left_out_where_memory_is_short() -> None:
    x, recipe = inputs("resnet_block", 96), sc.light(threshold_images=96, calibration_images=16)
    memory = least_memory(captured("resnet_block"), x, 2, recipe)
    more = replace(recipe, image_steps=2 * 96)
    with pytest.raises(sc.CalibrationError, match=r"too small at .* fewer images \(calibration_images= "):
        sc.convert(shell(captured("resnet_block")), [x], 2, replace(more, calibration_images=96), memory=memory)
    found, plain = (sc.convert(shell(captured("resnet_block")), [x], 2, r, memory=memory) for r in (more, recipe))
    assert same(found, plain, "resnet_block")
    assert found.recipe.images_for(2) == 16  # and it says so
    assert sc.convert(shell(captured("resnet_block")), [x], 2, more, memory="1GiB").recipe.images_for(2) == 96


@pytest.mark.parametrize("name", ["resnet_block", "densenet", "unet", "mlp"])
def test_the_memory_that_an_error_asks_for_is_enough(name: str) -> None:
    """At once, not at the next layer that needs more."""
    x, recipe = inputs(name, 2000), sc.light(threshold_images=2000, calibration_images=2000)
    given = sum(t.nbytes for t in x) * 2 + 2**19
    with pytest.raises(sc.MemoryBudgetError, match=r"it needs [0-9]+ MiB") as error:
        sc.convert(shell(captured(name)), [x], 8, recipe, memory=given)
    needed = re.search("it needs ([0-9]+) MiB", str(error.value))[1]
    sc.convert(shell(captured(name)), [x], 8, recipe, memory=f"{needed}MiB")


def test_global_seeds_do_not_matter() -> None:
    x = inputs("mlp", 24)
    torch.manual_seed(1)
    first = mlp([x], recipe=sc.light(calibration_images=8))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert same(mlp([x], recipe=sc.light(calibration_images=8)), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("recipe", [sc.light(), sc.advanced(iterations=10, lr=1e-3), sc.percentile()])
@pytest.mark.parametrize("name", ["resnet_block", "densenet", "input_skip", "unet"])
def test_a_small_memory_gives_the_same_network(name: str, recipe: sc.Recipe) -> None:
    """A budget that is just enough: images go through in many chunks."""
    x = inputs(name, 12)
    large = sc.convert(shell(captured(name)), [x], T, recipe, memory="4GiB")
    small = sc.convert(shell(captured(name)), [x], T, recipe, memory=least_memory(captured(name), x, T, recipe))
    other = inputs(name, 3, seed=7)
    assert distance(leaves(small(*other)), leaves(large(*other))) < 1e-9


# ---------------------------------------------------------------------- statistics


def test_statistics_are_those_of_the_calibration_images() -> None:
    snn, x = converted("resnet_block"), inputs("resnet_block", 16)
    trains, ann = spike_trains(snn, *x), dict[str, Tensor]()
    run_ann(snn.source, x, lambda node, value: ann.update({node.name: value.data}))
    assert list(snn.statistics) == list(snn.sites)
    for name, statistics in snn.statistics.items():
        target = ann[name]
        if isinstance(snn.sites[name], Neurons):
            mean = trains[name].mean(0)
            assert statistics.firing_rate == pytest.approx(float((trains[name] > 0).double().mean()), abs=1e-9)
        else:
            mean = snn(*x)
            assert statistics.firing_rate is None
        error = float((target - mean).square().sum() / target.square().sum())
        assert statistics.error == pytest.approx(error, rel=1e-9)


# ---------------------------------------------------------------------- once more, from a spiking network


def test_a_spiking_network_can_be_calibrated_anew(tmp_path: Path) -> None:
    x = inputs("resnet_block", 16)
    first = converted("resnet_block", sc.Recipe(sc.MMSE(), (sc.WeightCalibration(iterations=20, lr=1e-3),)))
    path = tmp_path / "net.spk"
    first.save(path)
    direct = sc.convert(shell(captured("resnet_block")), [x], 6, "light")
    for model in (first, path, str(path)):  # starts from the original weights
        anew = sc.convert(model, [x], 6, "light")
        assert anew.T == 6
        assert anew.recipe == sc.light()
        assert same(anew, direct, "resnet_block")


def test_a_network_calibrated_anew_keeps_its_recipe() -> None:
    mine = sc.Recipe(sc.MaxActivation(), (sc.InitialPotential(),), name="mine")
    snn = mlp(inputs("mlp", 4), recipe=mine)
    assert sc.convert(snn, inputs("mlp", 4), 3).recipe == mine
    assert sc.convert(snn, inputs("mlp", 4), 3, "light").recipe == sc.light()


def test_a_binary_network_can_be_calibrated_anew() -> None:
    x, other = inputs("resnet_block", 16), inputs("resnet_block", 3, seed=7)
    anew = sc.convert(converted("resnet_block").binary(), [x], 6)
    assert distance([anew.ann(*other)], [converted("resnet_block").ann(*other)]) < 1e-9
    assert distance([anew.binary()(*other)], [anew(*other)]) < 1e-9


def test_neurons_of_pools_stay_in_a_network() -> None:
    x, pools = inputs("resnet_block", 8), sc.light(pool_to_conv=True)
    snn = sc.convert(shell(captured("resnet_block")), [x], T, pools)
    with pytest.raises(sc.CalibrationError, match=r"was converted with pool_to_conv, .* start from the model, or give"):
        sc.convert(snn, [x], T, "light")
    assert same(sc.convert(snn, [x], T, pools), snn, "resnet_block")
    assert same(sc.convert(snn, [x], T), snn, "resnet_block")


def test_a_network_without_pools_is_told() -> None:
    with pytest.warns(sc.NoEffectWarning, match="pool_to_conv changes nothing here: the network has no average pool"):
        mlp(inputs("mlp", 4), recipe=sc.light(pool_to_conv=True))


# ---------------------------------------------------------------------- refusals


def test_images_that_are_all_the_same_are_noticed() -> None:
    x = inputs("mlp", 4)
    with pytest.warns(UserWarning, match="all 4 calibration images are the same, .* check the loader") as found:
        sc.convert(shell(captured("mlp")), [[t[:1].expand_as(t) for t in x]], T)
    assert found[0].filename == __file__


@pytest.mark.parametrize("steps", [0, -3, 2.0, "8", None, True, 10**9])
def test_a_number_of_steps_without_meaning_is_refused(steps: Any) -> None:
    with pytest.raises(sc.CalibrationError, match=f"T must be a whole number from 1 to 65536, not {steps!r}"):
        mlp(inputs("mlp", 4), T=steps)


@pytest.mark.parametrize("batches", [[], iter(()), torch.zeros(0, 10), [torch.zeros(0, 10)] * 2])
def test_no_images_are_refused(batches: Any) -> None:
    with pytest.raises(sc.CalibrationError, match="there are no calibration images"):
        mlp(batches)


def test_images_of_whole_numbers_are_refused() -> None:
    with pytest.raises(sc.CalibrationError, match=r"floating point .* not torch.uint8; try x.float\(\) / 255"):
        mlp([torch.zeros(4, 10, dtype=torch.uint8)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_refused(value: float) -> None:
    (x,) = inputs("mlp", 4)
    x[2, 3] = value
    with pytest.raises(sc.CalibrationError, match="images hold NaN or infinite values"):
        mlp([x[:2], x[2:]])


def test_images_of_different_shapes_are_refused() -> None:
    with pytest.raises(sc.CalibrationError, match=r"differ in shape: \[\(10,\)\] and \[\(9,\)\]; resize or crop"):
        mlp([torch.zeros(2, 10), torch.zeros(2, 9)])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([3], "a batch must be a tensor or a tuple that starts with one, not int"),
        ([{"image": torch.zeros(2, 10)}], r"not dict; take out what the model gets, as in \(\(b\['image'\], "),
        (["image"], "not str"),
        ([(1, 2)], r"must start with 1 tensor\(s\) for the model, but starts with int"),
        ([()], "starts with nothing"),
        ([((torch.zeros(2, 10), torch.zeros(2, 10)), 1)], "starts with Tensor, Tensor"),
        ([torch.zeros(2, 9)], r"must have shape \(batch, 10\), not \(2, 9\)"),
    ],
)
def test_batches_of_something_else_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(sc.DataError, match=message):
        mlp(batches)


def test_a_dataset_of_single_images_is_refused_with_the_remedy() -> None:
    dataset = TensorDataset(*inputs("mlp", 4))
    with pytest.raises(sc.DataError, match=r"a TensorDataset gives single images; put it into a DataLoader\(dataset, "):
        mlp(dataset)
    pair = (torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.long))
    for use in (lambda: sc.convert(nn.Identity(), pair, 4), lambda: sc.evaluate(converted("resnet_block"), pair)):
        with pytest.raises(sc.DataError, match=r"images and their labels, one pair, not a list .*; write \[\(x, y\)\]"):
            use()
    with pytest.raises(sc.DataError, match="a TensorDataset gives single images"):
        sc.evaluate(converted("mlp"), dataset)
    with pytest.raises(sc.DataError, match="batches must be an iterable of tensors, such as a DataLoader, not int"):
        mlp(3)


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 8), (3, 1, 1)])
def test_images_of_another_shape_than_the_models_are_told_apart_from_a_bad_model(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    text = re.escape(f"the model cannot run on images of shape {shape}; check their channels and size, and that ")
    with pytest.raises(sc.DataError, match=text):
        sc.convert(model, torch.zeros(4, *shape), T)


def test_a_batch_that_is_a_single_number_is_refused() -> None:
    with pytest.raises(sc.SpikecalError):
        mlp([torch.tensor(1.0)])


def test_inputs_with_different_numbers_of_images_are_refused() -> None:
    x, y = inputs("siamese", 4)
    with pytest.raises(sc.DataError, match=r"different numbers of images: \[4, 3\]"):
        sc.convert(shell(captured("siamese")), [(x, y[:3])], T)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    model = make("mlp")
    with torch.no_grad():
        model.b.weight[1, 2] = bad
    with pytest.raises(sc.UnsupportedModelError, match=r"weights hold NaN or infinite values: b\.weight; "):
        sc.convert(model, example("mlp", 4), T)


def test_weights_of_a_network_that_are_not_finite_are_refused_by_name() -> None:
    """Its weights have been folded with a batch norm."""
    graph = prepared("mlp_bn")
    (name,) = (name for name in graph.tensors if name.startswith("layers.0") and name.endswith("*"))
    broken = graph.with_tensors({name: graph.tensors[name] / 0})
    with pytest.raises(sc.UnsupportedModelError, match=r"weights hold NaN or infinite values: layers\.0\.weight; "):
        sc.convert(shell(broken), inputs("mlp_bn", 4), T)


@pytest.mark.parametrize("model", [3, None, lambda x: x, {"weight": 1}])
def test_something_that_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(sc.UnsupportedModelError, match=r"a model must be an nn.Module"):
        sc.convert(model, inputs("mlp", 4), T)


@pytest.mark.parametrize("recipe", ["heavy", "", 3, [], {}])
def test_an_unknown_recipe_is_refused_with_the_known_ones(recipe: Any) -> None:
    text = re.escape(f"there is no recipe {recipe!r}; choose one of plain, light, ")
    with pytest.raises(sc.CalibrationError, match=text):
        mlp(inputs("mlp", 4), recipe=recipe)


@pytest.mark.parametrize("memory", ["lots", "", "GB", "-1GB", "3 apples", "1.2.3GB", ".", float("nan"), [1]])
def test_a_memory_budget_that_cannot_be_read_is_refused(memory: Any) -> None:
    with pytest.raises(sc.CalibrationError, match="cannot read the memory budget"):
        mlp(inputs("mlp", 4), memory=memory)


@pytest.mark.parametrize("memory", [0, -5, "0GB"])
def test_a_memory_budget_of_nothing_is_refused(memory: Any) -> None:
    with pytest.raises(sc.CalibrationError, match="must be positive"):
        mlp(inputs("mlp", 4), memory=memory)


@pytest.mark.parametrize("memory", ["100MB", "1GiB", "0.5gb", " 64 MiB ", "80000000", 10**8, 1.5e8])
def test_memory_budgets_come_in_many_spellings(memory: Any) -> None:
    assert same(mlp([inputs("mlp", 4)], memory=memory), mlp([inputs("mlp", 4)]))


def test_a_memory_budget_too_small_is_refused_with_what_is_needed() -> None:
    """Whoever follows the message arrives: each site asks once for the ANN's pass, and once for that over time."""
    x, mib, asked = inputs("unet", 8), 1, 0
    while asked <= 2 * len(captured("unet").neurons):
        try:
            snn = sc.convert(shell(captured("unet")), [x], 64, sc.max_activation(), memory=f"{mib}MiB")
            break
        except sc.CalibrationError as error:
            found = re.search(rf"of {mib} MiB is too small at '.*': it needs (\d+) MiB; raise it", str(error))
            assert found is not None
            assert int(found[1]) > mib
            mib, asked = int(found[1]), asked + 1
    assert asked
    assert snn.T == 64


def test_a_memory_budget_too_small_for_the_images_is_refused_with_what_is_needed() -> None:
    (x,) = inputs("mlp", 2000)
    recipe = sc.max_activation(threshold_images=2000)
    with pytest.raises(sc.CalibrationError, match="2000 images need a memory budget of 1 MiB; raise it"):
        mlp(x, recipe=recipe, memory=300_000)
    assert mlp(x, recipe=recipe, memory="1MiB").T == T


# ---------------------------------------------------------------------- context


class Faulty:
    """A step of one's own that fails at the second site."""

    def apply(self, layer: Any) -> None:
        if layer.segment.site.name == "relu@2":
            raise ZeroDivisionError("oh")


def test_an_error_on_the_way_tells_the_site() -> None:
    recipe = sc.Recipe(sc.MMSE(), (Faulty(),))
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        mlp(inputs("mlp", 4), recipe=recipe)
    assert caught.value.__notes__ == ["while calibrating 'relu@2', site 2 of 3"]


class Counting:
    """A step of one's own: it may look at the layer and do nothing."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def apply(self, layer: Any) -> None:
        self.sites.append(layer.segment.site.name)


def test_a_step_of_ones_own_sees_every_site_once() -> None:
    step = Counting()
    mlp(inputs("mlp", 4), recipe=sc.Recipe(sc.MMSE(), (step,)))
    assert step.sites == ["relu", "relu@2", "output"]


@pytest.mark.filterwarnings("ignore::spikecal.NoEffectWarning")
@pytest.mark.parametrize("recipe", [sc.light(), sc.advanced(iterations=3)], ids=["light", "advanced"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_conversion_works_in_every_gradient_mode(mode: Any, recipe: sc.Recipe) -> None:
    x = inputs("mlp", 8)
    with mode():
        snn = mlp([x], recipe=recipe)
        y = snn(*x)
    assert torch.equal(y, mlp([x], recipe=recipe)(*x))


def test_progress_goes_to_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    snn = mlp(inputs("mlp", 4), progress=True)
    assert capsys.readouterr().out == ""
    assert same(snn, mlp(inputs("mlp", 4)))


def test_a_network_as_one_activation_is_enough() -> None:
    x = torch.tensor([[-1.0, 0.5], [1.0, 2.0]])
    snn = sc.convert(nn.ReLU(), x, 8, "max_activation")
    assert snn.ann(x).tolist() == [[0.0, 0.5], [1.0, 2.0]]
    torch.testing.assert_close(snn(x), snn.ann(x), rtol=2e-5, atol=0)


# ---------------------------------------------------------------------- models in the clothes of training


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
def test_wrappers_of_training_are_taken_off(wrap: Any) -> None:
    net, x = small(), torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(sc.convert(wrap(net), [x], 2).ann(x), net(x).detach())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.jit.trace(small(), torch.randn(1, 1, 8, 8)), "TorchScript cannot be captured"),
        (lambda: small().state_dict(), "build the module and load these weights into it"),
        (lambda: "net.pth", "net.pth: a model file must end in .*; this one holds weights"),
    ],
    ids=["script", "weights", "file"],
)
def test_what_is_no_module_is_told_so(model: Any, message: str) -> None:
    with pytest.raises(sc.UnsupportedModelError, match=message):
        sc.convert(model(), [torch.randn(4, 1, 8, 8)], 2)
