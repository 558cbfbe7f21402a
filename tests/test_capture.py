"""From a model to a graph: the twin equals the model, the model stays as it was, and what has no meaning is refused."""

from __future__ import annotations

import copy
import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import spikecal as sc
import spikecal.capture as capture_module
import zoo
from helpers import capture_watched, captured, distance, in_use, inputs, leaves, state_of
from spikecal.capture import Refused, capture, survey
from spikecal.graph import Graph
from spikecal.ops import Activation, Conv
from spikecal.refusals import NO_RULE, PRODUCTS, REMEDIES
from spikecal.simulation import run_ann
from spikecal.tracing import traced
from zoo import example, make

# ---------------------------------------------------------------------- the twin


@pytest.mark.parametrize("name", zoo.ZOO)
def test_twin_equals_the_model(name: str) -> None:
    """In both precisions, at batch sizes other than the one it was captured with."""
    graph, model = captured(name), make(name)
    single = graph.map_tensors(Tensor.float)
    for batch in (1, 3):
        x = inputs(name, batch, seed=7)
        x32 = [t.float() for t in x]
        assert distance(run_ann(single, x32), leaves(model.float()(*x32))) < 1e-4
        assert distance(run_ann(graph, x), leaves(model.double()(*x))) < 1e-9


@pytest.mark.parametrize("name", zoo.ZOO)
def test_graph_is_sound_and_survives_json(name: str) -> None:
    graph = captured(name)
    graph.check()
    again = Graph.from_dict(graph.to_dict(), graph.tensors)
    assert again.nodes == graph.nodes
    assert again.structure == graph.structure


@pytest.mark.parametrize("name", zoo.ZOO)
def test_capture_leaves_the_model_as_it_was(name: str) -> None:
    """Weights, statistics, training flags, gradients, hooks and random state, of a model that is in use."""
    _, before, after = capture_watched(name)
    assert after == before


@pytest.mark.parametrize(
    "name", ["conv_bn", "dropout_and_identity", "one_relu_five_times", "two_inputs_two_outputs", "tokens"]
)
def test_conversion_leaves_model_and_images_as_they_were(name: str) -> None:
    model, batch = in_use(make(name)), example(name, 4)
    before, kept = state_of(model), [x.clone() for x in batch]
    snn = sc.convert(model, [batch], T=2, recipe="max_activation")
    assert state_of(model) == before
    assert all(torch.equal(x, y) for x, y in zip(batch, kept, strict=True))
    with torch.no_grad():
        assert distance(leaves(snn.ann(*batch)), leaves(model.eval()(*batch))) < 1e-4


def test_random_numbers_that_a_model_draws_are_given_back() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return x.relu()

    state = torch.get_rng_state()
    sc.convert(Drawing(), torch.rand(4, 3, generator=torch.Generator()), T=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_graph_does_not_alias_the_model() -> None:
    model = make("mlp")
    graph, x = capture(model, example("mlp")), example("mlp", 3)
    (before,) = run_ann(graph, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (after,) = run_ann(graph, x)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", zoo.EITHER)
def test_beyond_the_agreed_operations_right_or_refused(name: str) -> None:
    model = make(name).double()
    try:
        graph = capture(model, inputs(name, 2))
    except sc.UnsupportedModelError as error:
        assert re.search(r"because of \d+ places?:\n  \w+", str(error))  # noqa: PT017
        return
    for batch in (1, 3):
        x = inputs(name, batch, seed=7)
        theirs = leaves(model(*(t.clone() for t in x)))
        ours = leaves(graph.unflatten(run_ann(graph, x)))
        assert distance(ours, theirs) < 1e-9


# ---------------------------------------------------------------------- in-place operations and call sites


def test_every_call_of_one_relu_is_a_neuron_of_its_own() -> None:
    names = [node.name for node in captured("one_relu_five_times").neurons]
    assert len(set(names)) == 5
    assert all(re.fullmatch(r"relu(@\d)?", name) for name in names)


def test_a_neuron_is_named_after_the_module_that_calls_it() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 3, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.act(self.conv(x)) - self.act(x))

    model = nn.Sequential(nn.Sequential(Sum()), Sum())
    names = [node.name for node in capture(model, [torch.randn(2, 3, 4, 4)]).neurons]
    assert names == ["0.0.act", "0.0.act@2", "0.0.relu", "1.act", "1.act@2", "1.relu"]


def test_every_spelling_of_relu_is_an_activation() -> None:
    assert [node.op for node in captured("relu_spellings").neurons] == [Activation()] * 12


def test_every_spelling_of_a_clipped_relu_keeps_its_cap() -> None:
    graph = captured("clipped_spellings")
    caps = [float(graph.tensors[node.op.cap]) for node in graph.neurons]
    assert sorted(caps) == sorted([6, 6, 6, 6, 4, 2, 0.7, 1, 1.5, 0.25])


def test_a_choice_between_a_value_and_zero_is_an_activation() -> None:
    assert [node.op for node in captured("relu_as_a_choice").neurons] == [Activation()] * 9


def test_an_in_place_relu_is_seen_by_later_readers_only() -> None:
    graph = captured("inplace_relu_input_read_before")
    sources = {n.name: graph.by_name[n.inputs[0]].op for n in graph.nodes if isinstance(n.op, Conv)}
    assert isinstance(sources["b"], Conv)  # reads a's signed value
    assert isinstance(sources["c"], Activation)


def test_an_in_place_relu_is_seen_through_an_earlier_view() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x + 1
            view = y.view(y.size(0), 2, 2)
            y.relu_()
            return view, y

    x = torch.tensor([[-3.0, 1.0, -0.5, 2.0]])
    view, y = run_ann(capture(Net(), [x]), [x])
    assert y.tolist() == [[0.0, 2.0, 0.5, 3.0]]
    assert view.flatten().tolist() == [0.0, 2.0, 0.5, 3.0]


def test_an_in_place_sum_is_seen_by_its_alias() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.relu()
            alias = y
            y += x
            return alias * 2

    x = torch.tensor([[-3.0, 1.0]])
    assert run_ann(capture(Net(), [x]), [x])[0].tolist() == [[-6.0, 4.0]]


def test_a_value_from_before_the_in_place_relu_stays() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            old = y + 0
            y.relu_()
            return old - y

    x = torch.tensor([[-3.0, 1.0]])
    assert run_ann(capture(Net(), [x]), [x])[0].tolist() == [[-3.0, 0.0]]


# ---------------------------------------------------------------------- refusals


def offenders(error: sc.UnsupportedModelError) -> list[str]:
    """The operations that the message lists, one a line."""
    return re.findall(r"^  (\S+) at ", str(error), re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, operations in zoo.OFFENDS.items() if operations])
def test_refusal_names_every_offender(name: str) -> None:
    with pytest.raises(sc.UnsupportedModelError) as caught:
        capture(make(name), example(name))
    found = offenders(caught.value)
    for operation in zoo.OFFENDS[name]:
        assert any(operation == f or f.startswith(f"{operation}_") for f in found), f"{operation} is not in {found}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rolled_batch", "it rolls over the batch as well; name the dimensions"),
        ("upper_bound_of_a_signed_value", "an upper bound alone is not a ReLU; put a ReLU in front of it"),
        ("minimum_of_activations", "the minimum of two values that depend on the images is not a ReLU"),
        ("bound_by_an_activation", "a bound that depends on the images is not one of a ReLU"),
        ("choice_of_another_value", r"a choice between values .* but for torch.where\(x > 0, x, 0\)"),
        ("comparison", r"a comparison has no spiking meaning, but for torch.where\(x > 0, x, 0\)"),
        ("half_precision_inside", "goes from torch.float32 to torch.float16, .* has one precision; remove the cast"),
        ("rounded", "goes from torch.float32 to torch.int32"),
        ("relu_of_a_slice", "it writes into a part of a tensor, in place; put the parts together with torch.cat"),
    ],
)
def test_refusal_says_what_to_do(name: str, message: str) -> None:
    with pytest.raises(sc.UnsupportedModelError, match=message):
        capture(make(name), example(name))


def test_the_positions_of_maxima_are_refused() -> None:
    class Unpooling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, positions = torch.max(x.relu(), 1)
            return values + positions

    with pytest.raises(sc.UnsupportedModelError, match="the positions of maxima have no spiking meaning"):
        capture(Unpooling(), [torch.randn(2, 3)])


def test_a_recurrent_layer_is_refused() -> None:
    """Its initial state is a tensor whose batch is not dimension 0."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1].relu())

    with pytest.raises(sc.UnsupportedModelError, match="lstm at cell"):
        capture(Recurrent(), [torch.randn(2, 7, 4)])


@pytest.mark.parametrize("name", ["no_activation", "no_activation_but_of_a_constant"])
def test_a_net_without_activation_is_refused(name: str) -> None:
    with pytest.raises(sc.UnsupportedModelError, match="no activation to convert: it needs at least one ReLU"):
        capture(make(name), example(name))


def test_control_flow_on_data_is_refused_with_the_reason() -> None:
    name = "data_dependent_control_flow"
    with pytest.raises(sc.UnsupportedModelError, match=r"control flow at forward \(zoo.py:\d+\): an if"):
        capture(make(name), example(name))


class Deciding(nn.Module):
    """Offenders in front of, on both sides of and behind decisions by the images."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        x = x.tanh() if x.mean() > 0 else nn.functional.gelu(x)
        for _ in range(int(x.abs().sum()) % 3 + 1):
            x = x.relu()
        while x.max().item() > 0.1:
            x = x * 0.5
        if x.isnan().any():
            raise ValueError("no numbers")
        return x * x.sigmoid()


def test_what_offends_around_control_flow_is_listed_too() -> None:
    with pytest.raises(sc.UnsupportedModelError) as caught:
        capture(Deciding(), [torch.rand(2, 3)])
    found = {(r.what, r.where.partition(" ")[0]) for r in caught.value.refusals}
    offenders = {("silu", "act"), *((name, name) for name in ("tanh", "gelu", "abs", "sigmoid", "mul"))}
    assert found == offenders | {("control flow", "forward")}
    lines = {r.where for r in caught.value.refusals if r.what == "control flow"}
    places = ("x.mean() > 0", "int(x", ".item()", "isnan")
    assert lines == {f"forward ({line_of(Deciding.forward, place)})" for place in places}


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.relu()
        return x


def test_control_flow_is_refused_with_its_module_and_line() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(Choosing()))
    with pytest.raises(sc.UnsupportedModelError) as caught:
        capture(model, [torch.randn(2, 3)])
    (refusal,) = caught.value.refusals
    assert (refusal.what, refusal.where) == ("control flow", f"1.0 ({line_of(Choosing.forward, 'if ')})")
    assert "write it without" in refusal.why


def test_a_fixed_batch_size_is_refused_with_the_remedy() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().view(2, -1).tanh()

    with pytest.raises(sc.UnsupportedModelError, match=r"batch size at forward: .* use x.shape\[0\], or -1") as caught:
        capture(Fixed(), [torch.randn(2, 3)])
    assert [r.what for r in caught.value.refusals] == ["batch size", "tanh"]


def test_a_failing_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sc.UnsupportedModelError):
        capture(Choosing(), [torch.randn(2, 3)])
    assert capfd.readouterr() == ("", "")


class Windows(nn.Module):
    """Windows ride in the batch dimension for a while; offenders stand inside and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu().view(-1, 2, 4).permute(0, 2, 1).reshape(-1, 2)  # (B * 4, 2)
        y = y * y
        y = (self.act(y) @ torch.ones(2, 2)).reshape(-1, 8)
        return y * x


def test_offenders_among_and_behind_values_that_mix_the_batch_are_found() -> None:
    with pytest.raises(sc.UnsupportedModelError) as caught:
        capture(Windows(), [torch.randn(2, 8)])
    assert [(r.what, r.where.partition(" ")[0]) for r in caught.value.refusals] == [
        ("reshape", "reshape"),
        ("mul", "mul"),
        ("gelu", "act"),
        ("mul", "mul"),
    ]


def test_a_survey_shows_the_whole_graph_of_a_refused_model() -> None:
    graph, refusals = survey(Offending(), [torch.randn(2, 3, 8, 8)])
    assert [node.name for node in graph.nodes] == [
        *("x", "block.conv", "block.act", "block.tanh", "elu", "tail.0", "tail.1", "output")
    ]
    assert [node.name for node in graph.nodes if isinstance(node.op, Refused)] == [
        refusal.where.partition(" ")[0] for refusal in refusals
    ]
    assert all(node.inputs for node in graph.nodes[1:])
    assert {node.shape for node in graph.nodes[1:]} == {(3, 6, 6)}


def test_every_remedy_says_what_to_do() -> None:
    assert [name for name, text in {**REMEDIES, **PRODUCTS, "": NO_RULE}.items() if ";" not in text] == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        return torch.tanh(x)


class Offending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.tail = nn.Sequential(nn.ReLU(), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.block(x))
        return self.tail(x)


def line_of(function: Callable[..., Any], text: str) -> str:
    """Where in this file a piece of a function stands."""
    source, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(source) if text in line)
    return f"test_capture.py:{first + offset}"


def test_message_names_module_and_line_of_every_offender_at_once() -> None:
    with pytest.raises(sc.UnsupportedModelError) as caught:
        capture(Offending(), [torch.randn(2, 3, 8, 8)])
    first, *places = str(caught.value).splitlines()
    assert first.endswith("because of 4 places:")
    expected = [
        f"  silu at block.act ({line_of(Block.forward, 'self.act')}): SiLU is not a ReLU; ",
        f"  tanh at block.tanh ({line_of(Block.forward, 'tanh')}): tanh is not a ReLU; ",
        f"  elu at elu ({line_of(Offending.forward, 'elu')}): ELU is not a ReLU; ",
        f"  gelu at tail.1 ({line_of(Offending.forward, 'self.tail')}): GELU is not a ReLU; ",
    ]
    assert len(places) == 4
    for line, start in zip(places, expected, strict=True):
        assert line.startswith(start)


def test_a_model_that_changes_its_buffers_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * self.calls).relu()

    model = Counting()
    with pytest.raises(sc.UnsupportedModelError, match="changes its own buffers"):
        sc.convert(model, [torch.randn(4, 3)], T=2)
    assert float(model.calls) == 1


def test_a_model_that_writes_to_its_input_leaves_the_images_alone() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return x.relu()

    x = torch.randn(4, 3)
    kept = x.clone()
    snn = sc.convert(Writing(), [x], T=2)
    assert torch.equal(x, kept)
    assert torch.equal(snn.ann(x), (kept - 0.5).relu())


def test_a_change_of_precision_inside_is_no_obstacle() -> None:
    class Casting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().relu()

    x = torch.randn(4, 3)
    assert torch.equal(sc.convert(Casting(), [x], T=2).ann(x), x.relu())


def test_inputs_without_names_are_refused() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return (xs[0] + xs[1]).relu()

    with pytest.raises(sc.UnsupportedModelError, match="does not tell how many inputs"):
        sc.convert(Variadic(), [(torch.randn(4, 3), torch.randn(4, 3))], T=2)


def test_a_constant_beside_the_result_is_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.relu(), self.scale

    x = torch.randn(4, 3)
    y, scale = sc.convert(Net(), [x], T=2).ann(x)
    assert torch.equal(y, x.relu())
    assert torch.equal(scale, torch.ones(3))


def test_a_wrong_input_shape_is_refused_with_the_shape() -> None:
    with pytest.raises(sc.UnsupportedModelError, match=r"for images of shapes \[\(9,\)\]"):
        capture(make("mlp"), [torch.randn(2, 9)])


def test_a_model_that_computes_with_chance_is_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.full((3,), random.random())).relu()  # torch.export takes one number for all time

    with pytest.raises(sc.UnsupportedModelError, match=r"differs from the model .*random numbers, global state"):
        sc.convert(Noisy(), [torch.randn(4, 3)], T=2)


def test_active_dropout_in_an_exported_program_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5)).train()
    program = torch.export.export(model, (torch.randn(2, 3),), dynamic_shapes=({0: Dim("batch")},))
    with pytest.raises(sc.UnsupportedModelError, match=r"dropout is active .* export it in eval mode"):
        capture(program)


def test_forward_with_optional_arguments() -> None:
    class Optional(nn.Module):
        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return x.relu() * scale

    x = torch.tensor([[-1.0, 1.0], [2.0, -2.0]])
    assert sc.convert(Optional(), x, T=2).ann(x).tolist() == [[0.0, 2.0], [4.0, 0.0]]


# ---------------------------------------------------------------------- exported programs


def program(batch: Any) -> torch.export.ExportedProgram:
    return torch.export.export(make("mlp"), example("mlp"), dynamic_shapes=({0: batch},))


def test_a_program_with_a_dynamic_batch_is_captured() -> None:
    graph, x = capture(program(Dim("batch"))), example("mlp", 3, seed=7)
    assert distance(run_ann(graph, x), [make("mlp")(*x).detach()]) < 1e-5


def test_capture_leaves_the_program_as_it_was() -> None:
    exported = program(Dim("batch"))
    before, code = copy.deepcopy(exported.state_dict), exported.graph_module.code
    capture(exported)
    assert exported.graph_module.code == code
    assert all(torch.equal(t, before[k]) for k, t in exported.state_dict.items())


def test_a_program_with_a_fixed_batch_is_refused_with_the_remedy() -> None:
    with pytest.raises(sc.UnsupportedModelError, match="fixed batch size of 2; export it with") as caught:
        capture(program(None))
    assert 'torch.export.Dim("batch")' in str(caught.value)


def test_a_pt2_file_is_converted(tmp_path: Path) -> None:
    path, x = tmp_path / "net.pt2", example("mlp", 16)
    torch.export.save(program(Dim("batch")), path)
    from_file, from_model = sc.convert(path, [x], T=4), sc.convert(make("mlp"), [x], T=4)
    assert torch.equal(from_file(*x), from_model(*x))
    assert distance([from_file.ann(*x)], [make("mlp")(*x).detach()]) < 1e-5


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(b"no program")
    with pytest.raises(sc.UnsupportedModelError, match=r"net.pt2 is not a program that torch.export can read"):
        sc.convert(path, example("mlp"))
    with pytest.raises(sc.UnsupportedModelError, match="there is no file"):
        sc.convert(tmp_path / "other.pt2", example("mlp"))
    with pytest.raises(sc.UnsupportedModelError, match=r"net.pth: a model file must end in .pt2, .onnx, .spk"):
        sc.convert(tmp_path / "net.pth", example("mlp"))


# ---------------------------------------------------------------------- what depends on the images


class Asking(nn.Module):
    """A convolution, and what a function makes of it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.linear, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(12, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rows(net: Asking, x: Tensor) -> Tensor:
    return net.linear(x[:, :, 0, :4].flatten(1)).relu()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, x: torch.cond(x.mean() > 0, lambda y: y.relu(), lambda y: y * 1.0, (s.conv(x),)), "no control flow"),
        (lambda s, x: (y := s.conv(x).relu())[y.mean((1, 2, 3)) > 0], "index at index"),
        (lambda s, x: torch.where(s.conv(x) > 0, torch.ones(()), torch.zeros(())), "a choice between values"),
        (lambda s, x: F.max_pool1d(rows(s, x), 2), r"no axis of channels.*x.unsqueeze\(1\)"),
        (lambda s, x: F.avg_pool1d(rows(s, x), 2), "no axis of channels"),
        (lambda s, x: F.adaptive_max_pool1d(rows(s, x), 4), "no axis of channels"),
        (lambda s, x: F.adaptive_avg_pool1d(rows(s, x), 4), "no axis of channels"),
        (lambda s, x: torch.maximum(s.conv(x), x[:, :1].relu()), "of different shape"),
    ],
    ids=["cond", "mask", "where", "max_pool", "avg_pool", "adaptive_max", "adaptive_avg", "maximum"],
)
def test_what_only_the_images_decide_is_refused(function: Any, message: str) -> None:
    with pytest.raises(sc.UnsupportedModelError, match=message) as e:
        capture(Asking(function).eval(), [torch.randn(2, 3, 8, 8)])
    assert e.value.refusals


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.conv(x).clip(min=0).mean((2, 3)),
        lambda s, x: torch.max(s.conv(x).relu(), s.conv(-x).relu()).mean((2, 3)),
        lambda s, x: torch.stack([s.conv(x).relu(), s.conv(-x).relu(), s.conv(x + 1)]).mean(0).mean((2, 3)),
        lambda s, x: torch.stack([s.conv(x).relu(), s.conv(-x).relu()]).sum(dim=0).mean((2, 3)),
        lambda s, x: torch.stack([s.conv(x).relu(), s.conv(-x).relu()], 0).amax(0).mean((2, 3)),
        lambda s, x: (int(x.size(0) * 0.5), s.conv(x).relu().mean((2, 3)))[1],
    ],
    ids=["clip", "larger_of_two", "mean_of_stack", "sum_of_stack", "max_of_stack", "unused_share_of_the_batch"],
)
def test_other_spellings_are_understood(function: Any) -> None:
    net, x = Asking(function).eval(), torch.randn(4, 3, 8, 8)
    snn = sc.convert(net, [x], 32)
    torch.testing.assert_close(snn.ann(x), net(x).detach(), rtol=1e-5, atol=1e-5)
    assert float((snn(x) - snn.ann(x)).abs().max()) < 0.1


def test_a_result_that_depends_on_the_batch_size_is_refused() -> None:
    net = Asking(lambda s, x: s.conv(x).relu().mean((2, 3)) * int(x.size(0) * 0.6)).eval()
    with pytest.raises(sc.UnsupportedModelError, match="computes with its batch size"):
        sc.convert(net, [torch.randn(6, 3, 8, 8)], 2)


def test_programs_of_torch_export() -> None:
    net, x, batch = Asking(lambda s, x: s.conv(x).relu()).eval(), torch.randn(2, 3, 8, 8), torch.export.Dim("batch")
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(sc.convert(program.module(), [x], 2).ann(x), net(x).detach())
    free = torch.export.export(net, (x,), dynamic_shapes=({0: batch, 2: torch.export.Dim("height", min=4)},))
    with pytest.raises(sc.UnsupportedModelError, match="export it with a fixed image size and only the batch free"):
        sc.convert(free, [x], 2)


def test_programs_that_are_pure_already_are_read_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut gives the same graph, and is taken."""
    taken = 0
    for name in zoo.ZOO:
        program = traced(zoo.make(name), zoo.example(name)).program
        if not capture_module._is_pure(program):
            continue
        taken += 1
        short = capture(program)
        with monkeypatch.context() as patch:
            patch.setattr(capture_module, "_is_pure", lambda program: False)
            long = capture(program)
        assert [(n.op, n.shape) for n in short.nodes] == [(n.op, n.shape) for n in long.nodes]
        assert short.tensors.keys() == long.tensors.keys()
        assert all(torch.equal(short.tensors[key], long.tensors[key]) for key in short.tensors)
    assert taken >= 5
