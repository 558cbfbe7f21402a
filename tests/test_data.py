"""Every kind of data that a command line may name, and what is said when it is not as it should be."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spikecal.data import load_data
from spikecal.errors import DataError


def paint(path: Path, value: int = 0, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    """A picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I") else (value,) * len(mode)).save(path)
    return path


def pack(folder: Path, archive: Path) -> Path:
    """The folder as an archive, without entries for the folders themselves."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(folder).as_posix())
    return archive


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of two pictures, whose value tells them apart; class index = rank of the name."""
    root = tmp_path / "pets"
    for value, name in enumerate(["dog/a.png", "dog/b.PNG", "cat/a.bmp", "cat/b.webp"]):
        paint(root / name, value * 51)
    (root / "notes.txt").write_text("not an image")
    (root / "cat" / ".DS_Store").write_text("not an image either")
    return root


def npz(tmp_path: Path, **arrays: object) -> Path:
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    return tmp_path / "data.npz"


# --- folders and archives ----------------------------------------------------------------------------------


def test_class_folders(pets: Path) -> None:
    data = load_data(pets)
    assert data.classes == ("cat", "dog")
    assert data.y is not None
    assert data.y.tolist() == [0, 0, 1, 1]
    assert data.x.shape == (4, 3, 4, 6)
    assert data.x.dtype == torch.float32
    torch.testing.assert_close(data.x[:, 0, 0, 0], torch.tensor([0.4, 0.6, 0.0, 0.2]), atol=0.01, rtol=0)


def test_an_archive_is_the_same_as_its_folder(pets: Path, tmp_path: Path) -> None:
    folder, archive = load_data(pets), load_data(pack(pets, tmp_path / "pets.zip"))
    assert torch.equal(folder.x, archive.x)
    assert torch.equal(folder.y, archive.y)  # type: ignore[arg-type]
    assert folder.classes == archive.classes


def test_a_folder_inside_an_archive(pets: Path, tmp_path: Path) -> None:
    archive = pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip")
    expected = load_data(pets).x
    assert torch.equal(load_data(f"{archive}/pets").x, expected)
    assert torch.equal(load_data(f"{archive}/pets/").x, expected)
    assert torch.equal(load_data(archive, split="pets").x, expected)
    assert load_data(f"{archive}/pets/dog").y is None
    archive.unlink()


def test_split_names_a_folder_inside(pets: Path) -> None:
    assert torch.equal(load_data(pets.parent, split="pets").x, load_data(pets).x)


def test_a_flat_folder_is_unlabelled(pets: Path) -> None:
    data = load_data(pets / "dog")
    assert data.y is None
    assert data.classes == ()
    (x,) = data.batches()
    assert torch.equal(x, data.x)  # type: ignore[arg-type]


def test_leftovers_of_an_archiver_are_ignored(pets: Path, tmp_path: Path) -> None:
    (pets / "__MACOSX" / "cat").mkdir(parents=True)
    (pets / "__MACOSX" / "cat" / "._a.png").write_text("resource fork")
    assert load_data(pack(pets, tmp_path / "pets.zip")).classes == ("cat", "dog")


# --- preprocessing -----------------------------------------------------------------------------------------


def test_normalisation_is_per_channel(pets: Path) -> None:
    plain = load_data(pets).x
    x = load_data(pets, mean=[0.1, 0.2, 0.3], std=[1, 2, 4]).x
    torch.testing.assert_close(x[:, 2], (plain[:, 2] - 0.3) / 4)
    torch.testing.assert_close(load_data(pets, std=1 / 255).x, plain * 255)


def test_short_side_is_resized_and_centre_is_cropped(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20))
    picture.paste((255, 255, 255), (10, 0, 30, 20))
    picture.save(tmp_path / "wide.png")
    Image.new("RGB", (10, 10)).save(tmp_path / "square.png")
    x = load_data(tmp_path, size=10, crop=8).x
    assert x.shape == (2, 3, 8, 8)
    assert x[0].max() == 0
    assert x[1].min() > 0.9


def test_resize_keeps_the_aspect(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", size=(30, 20))
    assert load_data(tmp_path, size=10).x.shape == (1, 3, 10, 15)


def test_grey_images_keep_one_channel(tmp_path: Path) -> None:
    for name in "ab":
        paint(tmp_path / f"{name}.png", 255, mode="L")
    assert load_data(tmp_path).x.shape == (2, 1, 4, 6)
    assert load_data(tmp_path, mean=(0.5, 0.5, 0.5)).x.shape == (2, 3, 4, 6)


def test_a_grey_image_among_coloured_ones_becomes_coloured(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", 255, mode="L")
    paint(tmp_path / "b.png", 255)
    x = load_data(tmp_path).x
    assert x.shape == (2, 3, 4, 6)
    assert torch.equal(x[0], x[1])


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (6, 4), (255, 0, 0)).convert(mode).save(tmp_path / "a.tif")
    x = load_data(tmp_path).x
    assert x.shape == (1, 3, 4, 6)
    assert x[0, 0].min() > 0.9
    assert x[0, 1:].max() < 0.1


# --- batches and draws -------------------------------------------------------------------------------------


def test_batches_cover_everything_in_order_and_again(pets: Path) -> None:
    data = load_data(pets)
    batches = data.batches(3)
    assert len(batches) == 2
    for _ in range(2):
        xs, ys = zip(*batches, strict=True)
        assert [len(x) for x in xs] == [3, 1]
        assert torch.equal(torch.cat(xs), data.x)
        assert torch.equal(torch.cat(ys), data.y)  # type: ignore[arg-type]


def test_files_are_decoded_only_when_their_batch_is(pets: Path) -> None:
    data = load_data(pets)
    (pets / "dog" / "b.PNG").write_bytes(b"damaged after it was probed")
    batches = iter(data.batches(3))
    assert len(next(batches)) == 2
    with pytest.raises(DataError, match=r"image 'dog/b.PNG'"):
        next(batches)


@pytest.mark.parametrize("spec", ["digits", "pets"])
def test_limit_draws_by_seed_and_a_smaller_draw_begins_a_larger(spec: str, pets: Path) -> None:
    def draw(limit: int, seed: int) -> torch.Tensor:
        return load_data(pets if spec == "pets" else spec, limit=limit, seed=seed).x

    assert len(draw(3, 0)) == 3
    assert torch.equal(draw(3, 0)[:2], draw(2, 0))
    assert any(not torch.equal(draw(3, 0), draw(3, seed)) for seed in range(1, 5))


def test_limit_keeps_images_and_labels_together(pets: Path) -> None:
    x, y = load_data(pets).x, load_data(pets).y
    drawn = load_data(pets, limit=100, seed=3)
    assert len(drawn) == 4
    assert drawn.y is not None
    assert y is not None
    known = {image.sum().item(): label for image, label in zip(x, y.tolist(), strict=True)}
    assert [known[image.sum().item()] for image in drawn.x] == drawn.y.tolist()


# --- arrays and named sets ---------------------------------------------------------------------------------


def test_npz(tmp_path: Path) -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype="float64").reshape(2, 3, 4, 5)
    data = load_data(npz(tmp_path, x=x, y=np.array([7, 0], dtype="uint8")))
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert data.y is not None
    assert data.y.dtype == torch.int64
    assert data.y.tolist() == [7, 0]


def test_npz_bytes_are_scaled(tmp_path: Path) -> None:
    x = np.full((2, 1, 4, 5), 255, dtype="uint8")
    data = load_data(npz(tmp_path, x=x), mean=0.5, std=0.5)
    assert data.y is None
    assert torch.equal(data.x, torch.ones(2, 1, 4, 5))


def test_npz_may_hold_features_and_splits(tmp_path: Path) -> None:
    path = npz(tmp_path, x_train=np.zeros((4, 9), "float32"), x_test=np.ones((2, 9), "float32"), y_test=[1, 0])
    assert load_data(path, split="train").x.shape == (4, 9)
    assert load_data(path, split="train").y is None
    assert load_data(path, split="test", mean=1.0).x.abs().max() == 0


def test_digits_splits_are_disjoint_stratified_and_complete() -> None:
    train, test, both = (load_data("digits", split=split) for split in ("train", "test", None))
    assert len(train) + len(test) == len(both) == 1797
    assert len(test) / len(both) == pytest.approx(0.3, abs=0.005)
    assert both.x.shape == (1797, 1, 8, 8)
    assert (both.x.min(), both.x.max()) == (0, 1)
    assert train.y is not None
    assert test.y is not None
    assert (test.y.bincount() / (train.y.bincount() + test.y.bincount())).sub(0.3).abs().max() < 0.01
    images = {image.numpy().tobytes() for image in train.x}
    assert not any(image.numpy().tobytes() in images for image in test.x)


# --- what can be wrong -------------------------------------------------------------------------------------


def refuse(match: str, spec: object, **options: object) -> None:
    with pytest.raises(DataError, match=match):
        load_data(spec, **options)  # type: ignore[arg-type]


def test_missing_paths(pets: Path, tmp_path: Path) -> None:
    refuse(r"no file or folder '.*absent': name a folder .* or a named set \(digits\)", tmp_path / "absent")
    refuse(r"no folder '.*val': choose one of cat, dog", pets, split="val")
    refuse(r"has no folder 'val': choose one of cat, dog", pack(pets, tmp_path / "a.zip"), split="val")
    refuse("neither a folder nor a .zip or .npz file", pets / "notes.txt")
    refuse("the digits have no split 'val': choose train or test", "digits", split="val")


def test_folders_without_images(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse("there are no images in '.*empty'", tmp_path / "empty")
    (pets / "bird").mkdir()
    refuse("the class folder 'bird' of '.*pets' has no images: fill or remove it", pets)


def test_archive_without_images(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.mkdir("bird")
    refuse("there are no images in '.*a.zip'", archive)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("cat/a.png", b"")
    refuse("the class folder 'bird'", archive)


def test_folder_above_the_class_folders(pets: Path) -> None:
    refuse("name the folder whose subfolders are the classes, such as '.*/pets'", pets.parent)
    paint(pets / "stray.png")
    refuse("images outside its class folders", pets)


def test_truncated_archive(pets: Path, tmp_path: Path) -> None:
    archive = pack(pets, tmp_path / "a.zip")
    archive.write_bytes(archive.read_bytes()[:-40])
    refuse("'.*a.zip' is damaged or incomplete .*: fetch the archive again", archive)


def test_corrupt_member(pets: Path, tmp_path: Path) -> None:
    archive = pack(pets, tmp_path / "a.zip")
    content = archive.read_bytes()
    archive.write_bytes(content.replace(b"IDAT", b"JUNK"))
    with pytest.raises(DataError, match=r"image 'dog/a.png' of '.*a.zip' cannot be read .*: replace or remove"):
        _ = load_data(archive).x


def test_damaged_image(tmp_path: Path) -> None:
    whole = paint(tmp_path / "a.jpg", size=(64, 64)).read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    refuse("image 'a.jpg' of '.*' cannot be read", tmp_path)


def test_a_file_that_only_looks_like_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no pixels")
    refuse("image 'a.png' of '[^']*' is not an image: replace or remove it$", tmp_path)


def test_deep_image(tmp_path: Path) -> None:
    paint(tmp_path / "a.tif", 70, mode="I")
    refuse("more than 8 bits a channel", tmp_path)


def test_images_of_different_sizes(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", size=(6, 4))
    paint(tmp_path / "b.png", size=(6, 5))
    with pytest.raises(DataError, match=r"image 'b.png' of '.*' is 6x5, another 6x4: give a crop"):
        _ = load_data(tmp_path).x
    assert load_data(tmp_path, crop=4).x.shape == (2, 3, 4, 4)
    refuse("is smaller than the crop of 5 pixels: give a size", tmp_path, crop=5)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"images": np.zeros((2, 1, 4, 4))}, "has no array 'x', only images: name another split, or add it"),
        ({"x": np.zeros((2, 32, 32, 3))}, r"channels last, \(2, 32, 32, 3\): save x.transpose\(0, 3, 1, 2\)"),
        ({"x": np.zeros(2)}, r"has shape \(2,\): it must be \(N, C, H, W\), or N samples of another shape"),
        ({"x": np.zeros((0, 1, 4, 4))}, r"holds no images: x has shape \(0, 1, 4, 4\)"),
        ({"x": np.zeros((2, 1, 4, 4), "int64")}, "is int64: save it as float32, or as uint8"),
        ({"x": np.full((2, 1, 4, 4), np.nan)}, "holds NaN or infinite values"),
        ({"x": np.array([{}, {}])}, "is no .npz file of plain arrays"),
        ({"x": np.zeros((2, 1, 4, 4)), "y": np.zeros(3, "int64")}, "has 2 images but 3 labels"),
        ({"x": np.zeros((2, 1, 4, 4)), "y": np.zeros(2)}, r"y in '.*' is float64 of shape \(2,\)"),
        ({"x": np.zeros((2, 1, 4, 4)), "y": np.eye(2, dtype="int64")}, "must hold one integer per image"),
        ({"x": np.zeros((2, 1, 4, 4)), "y": np.array([0, -1])}, "holds the negative label -1"),
    ],
)
def test_unfit_arrays(arrays: dict[str, object], match: str, tmp_path: Path) -> None:
    refuse(match, npz(tmp_path, **arrays))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 truncated"])
def test_damaged_npz(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    refuse("'.*a.npz' is no .npz file, or an incomplete one: save it with np.savez", tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 64), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_samples_may_have_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape).astype("uint8")
    mean = [0.1 * (1 + i) for i in range(shape[1])]
    data = load_data(npz(tmp_path, x=x), mean=mean, std=0.5)
    wanted = (x / 255 - np.reshape(mean, (-1,) + (1,) * (x.ndim - 2))) / 0.5
    torch.testing.assert_close(data.x, torch.from_numpy(wanted).float())


def test_array_in_the_wrong_format(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    refuse("is no .npz file, or an incomplete one", tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mean": (0.5, 0.5)}, "have 2 and 1 numbers but the images have 1 channels: give one number"),
        ({"std": 0.0}, "std must be one positive number, or one per channel, not 0.0"),
        ({"mean": []}, r"mean must be one finite number, or one per channel, not \[\]"),
        ({"mean": float("nan")}, "mean must be one finite number"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"size": 8}, "size and crop are for image files"),
        ({"crop": -1}, "crop must be at least 1 pixel, not -1"),
        ({"size": 8, "crop": 9}, "a crop of 9 pixels does not fit into size 8"),
    ],
)
def test_unfit_options(options: dict[str, object], match: str) -> None:
    refuse(match, "digits", **options)


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(DataError, match="batch size must be at least 1, not 0"):
        load_data("digits", limit=1).batches(0)


@pytest.mark.parametrize(
    ("module", "spec", "extra"), [("PIL", "pets", "images"), ("sklearn.datasets", "digits", "demo")]
)
def test_a_missing_package_is_named(
    module: str, spec: str, extra: str, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refuse(rf'pip install "spikecal\[{extra}\]"', pets if spec == "pets" else spec)
