"""The network that the package ships works as its script left it."""

from __future__ import annotations

import torch

from spikecal.data import load_data
from spikecal.models import DigitsNet, digits_net
from spikecal.models.digits import WEIGHTS


def test_shipped_digits_net_is_accurate_on_held_out_images() -> None:
    data = load_data("digits", split="test")
    with torch.inference_mode():
        right = digits_net()(data.x).argmax(1) == data.y
    assert right.float().mean() >= 0.97


def test_shipped_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size < 200_000


def test_digits_net_comes_in_eval_mode_and_independent() -> None:
    first, second = digits_net(), digits_net()
    assert isinstance(first, DigitsNet)
    assert not first.training
    with torch.no_grad():
        first.head.bias.add_(1)
    assert not torch.equal(first.head.bias, second.head.bias)


def test_untrained_digits_net_differs_from_the_trained_one() -> None:
    untrained, trained = digits_net(pretrained=False), digits_net()
    assert not untrained.training
    assert not torch.equal(untrained.head.weight, trained.head.weight)


def test_batch_size_is_free() -> None:
    model = digits_net()
    x = load_data("digits", split="test", limit=5).x
    with torch.inference_mode():
        one_by_one = torch.cat([model(image[None]) for image in x])
        torch.testing.assert_close(model(x), one_by_one)
