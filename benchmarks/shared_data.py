"""The images and trained weights that lie outside the repository, ready for a benchmark or a test.

The folder is the one that the environment variable SPIKECAL_DATA names, by default `../shared/data` beside
the repository; its SOURCES.md says where everything comes from. Weights that a script of this repository trained lie
in `benchmarks/weights`, each beside a record of how it was trained.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import networks
from networks import Normalisation
from spikecal.data import ImageData, ImageFiles, load_data

REPOSITORY = Path(__file__).resolve().parent.parent
OWN_WEIGHTS = REPOSITORY / "benchmarks" / "weights"


def directory() -> Path:
    """The data folder."""
    path = Path(os.environ.get("SPIKECAL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not path.is_dir():
        raise FileNotFoundError(f"there is no data folder '{path}': set SPIKECAL_DATA to the one you have")
    return path


def file(name: str) -> Path:
    """A file of the data folder."""
    path = directory() / name
    if not path.is_file():
        raise FileNotFoundError(f"the data folder '{path.parent}' has no '{name}': see its SOURCES.md")
    return path


def network(name: str) -> nn.Module:
    """A trained network of `networks.NETWORKS`, in eval mode."""
    if name not in networks.NETWORKS:
        raise ValueError(f"there is no network '{name}': choose one of {', '.join(networks.NETWORKS)}")
    own = OWN_WEIGHTS / f"{name}.safetensors"
    return networks.load(name, load_file(own if own.is_file() else file(own.name)))


def images(
    dataset: str,
    split: str | None,
    n: int | None,
    seed: int = 0,
    normalisation: str | Normalisation = networks.PIXELS,
) -> tuple[Tensor, Tensor]:
    """`n` images (all if None) drawn with `seed`, preprocessed as a network expects them, and their labels.

    Args:
        dataset: cifar10 or cifar100, split into train and test; imagenet_val or imagenet_samples, not split.
        normalisation: the name of a network, or a `Normalisation`; by default pixels stay in [0, 1].
    """
    data = image_data(dataset, split, n, seed, normalisation)
    assert data.y is not None
    return data.x, data.y


def image_data(
    dataset: str,
    split: str | None,
    n: int | None,
    seed: int = 0,
    normalisation: str | Normalisation = networks.PIXELS,
) -> ImageData:
    """The same as `images`, but decoded batch by batch."""
    if isinstance(normalisation, str):
        normalisation = networks.NETWORKS[normalisation].normalisation
    pixels = {"mean": normalisation.mean, "std": normalisation.std}
    archive = file(f"{dataset}.zip")
    if not dataset.startswith("imagenet"):
        return load_data(archive, split=split, limit=n, seed=seed, **pixels)
    data = load_data(archive, split=split, size=256, crop=224, limit=n, seed=seed, **pixels)
    return ImageData(data.images, imagenet_labels(archive, data))


def imagenet_labels(archive: Path, data: ImageData) -> Tensor:
    """Standard class indices 0..999, which ranks are not: the archives hold every second class.

    A name is `INDEX_SYNSET/FILE` in the validation images and `SYNSET_LABEL.JPEG` in the samples.
    """
    assert isinstance(data.images, ImageFiles)
    names = data.images.names
    if data.classes:
        return torch.tensor([int(name.split("_")[0]) for name in names])
    index = {synset: int(number) for number, synset, *_ in _class_lines(archive)}
    return torch.tensor([index[name.split("_")[0]] for name in names])


def _class_lines(archive: Path) -> list[list[str]]:
    with zipfile.ZipFile(archive) as file:
        return [line.split() for line in file.read("classes.txt").decode().splitlines()]
