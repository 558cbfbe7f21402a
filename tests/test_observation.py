"""Models that torch.export cannot follow, or follows in silence: all that offends is listed, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikecal as sc

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, ReLU, what is tried in the middle, and a classifier."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle = middle
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.LazyLinear(5)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("keep", torch.tensor([True, False, True, False]))
        self.gain = nn.Parameter(torch.full((4, 1, 1), 2.0))
        self(X)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.middle(self, self.conv(x).relu()).mean((2, 3)))
        return y


def refusals(middle: Callable[[Net, Tensor], Tensor]) -> list[str]:
    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(Net(middle), X, 2)
    assert all(r.why and r.where for r in caught.value.refusals)
    return [r.what for r in caught.value.refusals]


def test_a_decision_hidden_from_tracing_is_found() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        try:
            if float(y.max()) > 100:
                y = y * 0
        except Exception:
            pass
        return F.silu(y)

    assert refusals(middle) == ["control flow", "silu"]


def test_a_refused_model_is_left_as_it_was() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        if not net.flag or y.max() > 100:
            net.gain.data.copy_(y.std((0, 2, 3)).view(4, 1, 1))
            net.flag.fill_(False)
        return y * net.gain

    net = Net(middle)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(sc.UnsupportedModelError, match="control flow"):
        sc.convert(net, X, 2)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)


def test_a_way_that_does_not_end_is_left() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        z = -y - 1
        if z.max() > 0:
            while z.max() < 1:
                z = z * 2
        return y.tanh()

    assert refusals(middle) == ["control flow", "control flow", "tanh"]


@pytest.mark.parametrize(
    "end",
    [
        lambda y: y + torch.from_numpy(y.detach().numpy()),
        lambda y: y * len(f"{y.mean():.2f}"),
        lambda y: y.view(2, 4, 8, 8) if len(y) == 2 else y,
        lambda y: y * y[y > 0.5].numel(),
        lambda y: y * (y.mean((0, 2, 3)).tolist()[0] > 1),
    ],
)
def test_everything_is_listed_where_tracing_cannot_go_on(end: Callable[[Tensor], Tensor]) -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        y = F.silu(y)
        if y.max() > 10:
            y = F.gelu(y)
        return end(y) * y.sigmoid()

    assert {"control flow", "silu", "gelu", "sigmoid", "mul"} <= set(refusals(middle))


def test_random_numbers_are_refused() -> None:
    assert refusals(lambda net, y: y + torch.randn(4, 8, 8)) == ["randn"]


def test_what_differs_for_a_single_image_is_refused() -> None:
    with pytest.raises(sc.UnsupportedModelError, match=r"differs from the model .* batch size"):
        sc.convert(Net(lambda net, y: y * 2 if y.shape[0] == 1 else y), X, 2)


def test_decisions_by_the_models_own_state_are_taken_once_and_for_all() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        return y * net.gain if net.flag and net.gain.max().item() > 1 else F.silu(y)

    net = Net(middle)
    snn = sc.convert(net, X, 2)
    torch.testing.assert_close(snn.ann(X), net(X))


def test_a_mask_chooses_channels() -> None:
    net = Net(lambda net, y: y[:, net.keep])
    torch.testing.assert_close(sc.convert(net, X, 2).ann(X), net(X))


def test_modules_with_underscores_keep_their_path() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._blocks = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self._blocks(x)
            return y.relu()

    with pytest.raises(sc.UnsupportedModelError, match=r"silu at _blocks\.1"):
        sc.convert(Hidden(), X, 2)


def test_a_program_of_fixed_batch_size_is_refused_with_everything_else() -> None:
    program = torch.export.export(Net(lambda net, y: F.gelu(y)), (X,))
    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(program, X, 2)
    assert [r.what for r in caught.value.refusals] == ["batch size", "gelu"]


def test_a_result_that_is_no_tensor_is_refused_with_everything_else() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(scores=F.silu(x).relu())

    with pytest.raises(sc.UnsupportedModelError, match="returns a SimpleNamespace; return tensors in tuples") as caught:
        sc.convert(Named(), X, 2)
    assert [r.what for r in caught.value.refusals] == ["output", "silu"]


def test_a_batch_size_in_the_result_is_refused_with_everything_else() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x.relu().tanh(), x.shape[0]

    with pytest.raises(sc.UnsupportedModelError, match="returns its batch size; return only tensors") as caught:
        sc.convert(Counting(), X, 2)
    assert sorted(r.what for r in caught.value.refusals) == ["output", "tanh"]


def test_a_program_of_free_image_size_is_refused_with_everything_else() -> None:
    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height")}
    program = torch.export.export(nn.Sequential(nn.ReLU(), nn.GELU()), (X,), dynamic_shapes=(sizes,))
    with pytest.raises(sc.UnsupportedModelError, match="export it with a fixed image size") as caught:
        sc.convert(program, X, 2)
    assert [r.what for r in caught.value.refusals] == ["input", "gelu"]


def test_a_call_in_a_helper_method_has_its_own_line() -> None:
    class Helped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x.relu()) + self.helper(x)

        def helper(self, x: Tensor) -> Tensor:
            return F.gelu(x) * x.tanh()

    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(Helped(), X, 2)
    line = Helped.helper.__code__.co_firstlineno + 1
    found = [(r.what, r.where.partition(" ")[2]) for r in caught.value.refusals]
    assert found == [(what, f"(test_observation.py:{line})") for what in ("gelu", "tanh", "mul") * 2]

    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x.relu())

        def helper(self, x: Tensor) -> Tensor:
            return x.cumprod(1)

    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(Unknown(), X, 2)
    line = Unknown.helper.__code__.co_firstlineno + 1
    assert [r.where for r in caught.value.refusals] == [f"cumprod (test_observation.py:{line})"]


def test_decisions_behind_decisions_are_followed() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        if y.max() > 100:
            y = y.tanh()
            if y.min() < -100:
                y = F.gelu(y)
                if y.mean() > 100:
                    y = F.silu(y)
        return y

    assert sorted(refusals(middle)) == ["control flow"] * 3 + ["gelu", "silu", "tanh"]


def test_numbers_that_decide_are_read_otherwise_too() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        level = y.mean().item()
        if level > 50:
            return y.tanh()
        return F.gelu(y) if level < -50 else y

    assert sorted(refusals(middle)) == ["control flow", "gelu", "tanh"]


def test_what_stands_in_the_branches_of_a_cond_is_listed() -> None:
    class Cond(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.relu()
            y = torch.cond(y.sum() > 1, lambda a: F.gelu(a), lambda a: F.silu(a), (y,))
            return y.tanh()

    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(Cond(), X, 2)
    assert [r.what for r in caught.value.refusals] == ["sum", "cond", "gelu", "silu", "tanh"]


def test_every_turn_of_a_loop_decides() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        for f in (F.gelu, F.silu, torch.tanh):
            if y.mean() > 100:
                y = f(y)
        return y

    assert sorted(refusals(middle)) == ["control flow", "gelu", "silu", "tanh"]


def test_experts_chosen_by_number_are_listed() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        return (torch.relu, F.gelu, F.silu)[int(y.mean() * 0)](y)

    assert sorted(refusals(middle)) == ["control flow", "gelu", "silu"]


def test_a_harmless_call_of_the_same_name_does_not_hide_the_line() -> None:
    class Helped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x.relu())

        def helper(self, x: Tensor) -> Tensor:
            x = x * 2
            return x * x.sigmoid()

    with pytest.raises(sc.UnsupportedModelError) as caught:
        sc.convert(Helped(), X, 2)
    line = Helped.helper.__code__.co_firstlineno + 2
    assert {r.where.partition(" ")[2] for r in caught.value.refusals} == {f"(test_observation.py:{line})"}


def test_lists_of_numbers_are_read_otherwise_too() -> None:
    def middle(net: Net, y: Tensor) -> Tensor:
        return F.silu(y) if y.mean((1, 2, 3)).tolist()[0] > 50 else y

    assert sorted(refusals(middle)) == ["control flow", "silu"]
