"""The benchmark networks are what they are said to be: architecture, weights and pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import networks
import shared_data


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_network_reaches_its_known_accuracy(name: str, shared_data_dir: Path) -> None:
    n = 200
    known = networks.NETWORKS[name].accuracy / 100
    x, y = shared_data.images(networks.NETWORKS[name].dataset, "test", n, seed=0, normalisation=name)
    with torch.inference_mode():
        accuracy = (shared_data.network(name)(x).argmax(1) == y).float().mean().item()
    three_sigma = 3 * (known * (1 - known) / n) ** 0.5
    assert accuracy == pytest.approx(known, abs=three_sigma)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_network_reaches_its_exact_accuracy_on_all_images(name: str, shared_data_dir: Path) -> None:
    network = networks.NETWORKS[name]
    model, right = shared_data.network(name), 0
    with torch.inference_mode():
        for x, y in shared_data.image_data(network.dataset, "test", None, normalisation=name).batches(250):
            right += int((model(x).argmax(1) == y).sum())
    assert right / 5000 == pytest.approx(network.accuracy / 100, abs=2e-4)


def test_images_are_drawn_by_seed(shared_data_dir: Path) -> None:
    x, y = shared_data.images("cifar10", "test", 8, seed=1)
    again, _ = shared_data.images("cifar10", "test", 8, seed=1)
    other, _ = shared_data.images("cifar10", "test", 8, seed=2)
    assert x.shape == (8, 3, 32, 32)
    assert y.dtype == torch.int64
    assert 0 <= x.min() < x.max() <= 1
    assert torch.equal(x, again)
    assert not torch.equal(x, other)


def test_imagenet_labels_are_the_standard_ones(shared_data_dir: Path) -> None:
    for dataset in ("imagenet_val", "imagenet_samples"):
        data = shared_data.image_data(dataset, None, None, normalisation=networks.EFFICIENTNET_LITE)
        assert data.y is not None
        assert torch.equal(data.y.sort().values, torch.arange(0, 1000, 2))


def test_raw_bytes_are_restored(shared_data_dir: Path) -> None:
    x, _ = shared_data.images("cifar10", "test", 4, normalisation="resnet8_mlperf_cifar10")
    torch.testing.assert_close(x, x.round(), atol=1e-4, rtol=0)
    assert x.max() > 200


def test_absent_data_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKECAL_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no 'resnet20_cifar10.safetensors': see its SOURCES.md"):
        shared_data.network("resnet20_cifar10")
    with pytest.raises(FileNotFoundError, match=r"has no 'cifar10.zip'"):
        shared_data.images("cifar10", "test", 1)
    with pytest.raises(ValueError, match="there is no network 'resnet21'"):
        shared_data.network("resnet21")
    monkeypatch.setenv("SPIKECAL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="set SPIKECAL_DATA"):
        shared_data.directory()


def test_weights_that_do_not_fit_are_refused() -> None:
    weights = networks.NETWORKS["resnet20_cifar10"].build().state_dict()
    weights["stray"] = weights.pop("linear.bias")
    with pytest.raises(ValueError, match=r"do not fit resnet20_cifar10: \['linear.bias', 'stray'\]"):
        networks.load("resnet20_cifar10", weights)
