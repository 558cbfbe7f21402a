"""The data that a command line names: folders, archives, arrays and named sets, all read the same way.

Image files are decoded batch by batch, so that a folder of any size fits into memory.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Batch = Tensor | tuple[Tensor, Tensor]
PerChannel = float | Sequence[float]


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images with their labels, if any. `classes` holds the class names by index, where there are names."""

    images: Tensor | ImageFiles
    y: Tensor | None = None  # (N,) int64
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def x(self) -> Tensor:
        """All images at once, (N, C, ...) float32; prefer `batches` where they may not fit into memory."""
        return self.images[:]

    def batches(self, batch_size: int = 64) -> Batches:
        """The images in order, as `(x, y)` pairs, or as `x` alone where there are no labels."""
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, not {batch_size}")
        return Batches(self, batch_size)


@dataclass(frozen=True)
class Batches:
    """An iterable rather than a generator: calibration may pass over the images more than once."""

    data: ImageData
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.data), self.batch_size):
            rows = slice(start, start + self.batch_size)
            x = self.data.images[rows]  # (B, C, H, W)
            yield x if self.data.y is None else (x, self.data.y[rows])


def load_data(
    spec: str | os.PathLike[str],
    *,
    split: str | None = None,
    size: int | None = None,
    crop: int | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> ImageData:
    """Read the data that `spec` names.

    `spec` is a folder of class folders, a flat folder of images (unlabelled), a `.zip` archive of either or
    `archive.zip/folder/inside`, an `.npz` file with `x` and optionally `y`, or the named set `digits`
    (`./digits` is a folder of that name). A class index is the rank of its folder's name.

    Args:
        split: a folder inside; of a named set, `train` or `test`; of an `.npz` file, `x_SPLIT` and `y_SPLIT`.
        size: resize image files to this length of the short side (bicubic).
        crop: then cut out a centred square of this length.
        mean: subtracted from pixel values in [0, 1], per channel.
        std: divides them afterwards, per channel.
        limit: at most this many images, drawn at random.
        seed: decides which; a smaller draw is the beginning of a larger one.
    """
    change = Preprocessing(size, crop, _per_channel("mean", mean, 0.0), _per_channel("std", std, 1.0))
    if str(spec) in NAMED_SETS:
        data = NAMED_SETS[str(spec)](split, change)
    else:
        path, inside = _locate(Path(spec).expanduser())
        if path.suffix.lower() == ".npz":
            data = _read_npz(path, split, change)
        else:
            data = _read_files(_open(path, PurePosixPath(inside, split or ".")), change)
    return data if limit is None else _draw(data, limit, seed)


def _locate(path: Path) -> tuple[Path, str]:
    """The file or folder on disk, and the rest of the path, which lies inside an archive."""
    for found in (path, *path.parents):
        if found.is_file() or (found == path and found.is_dir()):
            return found, path.relative_to(found).as_posix()
    raise DataError(
        f"there is no file or folder '{path}': name a folder of images, a .zip, an .npz, "
        f"or a named set ({', '.join(NAMED_SETS)})"
    )


def _draw(data: ImageData, limit: int, seed: int) -> ImageData:
    if limit < 1:
        raise DataError(f"limit must be at least 1, not {limit}")
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:limit]
    images = data.images[rows] if isinstance(data.images, Tensor) else data.images.take(rows.tolist())
    return replace(data, images=images, y=None if data.y is None else data.y[rows])


# --- what happens to the pixels ----------------------------------------------------------------------------


def _per_channel(name: str, value: PerChannel | None, default: float) -> Tensor:
    """`value` as a vector, of which one element stands for all channels."""
    values = [default] if value is None else [value] if isinstance(value, int | float) else list(value)
    vector = torch.tensor(values, dtype=torch.float32)
    if len(vector) == 0 or not vector.isfinite().all() or (name == "std" and (vector <= 0).any()):
        must = "positive" if name == "std" else "finite"
        raise DataError(f"{name} must be one {must} number, or one per channel, not {value}")
    return vector


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """Geometry, which only image files have, and normalisation."""

    size: int | None
    crop: int | None
    mean: Tensor  # (C,) or (1,)
    std: Tensor  # (C,) or (1,)

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("crop", self.crop)):
            if value is not None and value < 1:
                raise DataError(f"{name} must be at least 1 pixel, not {value}")
        if self.size and self.crop and self.crop > self.size:
            raise DataError(f"a crop of {self.crop} pixels does not fit into size {self.size}: lower the crop")

    @property
    def channels(self) -> int:
        return max(len(self.mean), len(self.std))

    def normalise(self, x: Tensor) -> Tensor:
        if {len(self.mean), len(self.std)} - {1, x.shape[1]}:
            raise DataError(
                f"mean and std have {len(self.mean)} and {len(self.std)} numbers but the images have "
                f"{x.shape[1]} channels: give one number, or one per channel"
            )
        shape = (-1,) + (1,) * (x.ndim - 2)
        return (x - self.mean.view(shape)) / self.std.view(shape)

    def reshape(self, image: Image, where: str) -> Image:
        """Short side to `size`, then the centred square of `crop`, rounded as torchvision does."""
        from PIL.Image import Resampling

        short = min(image.size)
        if self.size and self.size != short:
            width, height = (int(self.size * side / short) for side in image.size)
            image = image.resize((width, height), Resampling.BICUBIC)
        if self.crop and self.crop > min(image.size):
            raise DataError(f"{where} is smaller than the crop of {self.crop} pixels: give a size as well")
        if self.crop:
            left, top = (round((side - self.crop) / 2) for side in image.size)
            image = image.crop((left, top, left + self.crop, top + self.crop))
        return image


# --- arrays ------------------------------------------------------------------------------------------------

_BROKEN_ZIP = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


def array_names(path: Path) -> list[str]:
    """The arrays in an .npz file; none if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:
            return [name.removesuffix(".npy") for name in file.namelist()]
    except _BROKEN_ZIP:
        return []


def _read_npz(path: Path, split: str | None, change: Preprocessing) -> ImageData:
    """`x` and `y`, or `x_SPLIT` and `y_SPLIT`; nothing in the file is unpickled."""
    import numpy as np

    x, y = ("x", "y") if split is None else (f"x_{split}", f"y_{split}")
    try:
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise DataError(f"'{path}' is no .npz file, or an incomplete one: save it with np.savez")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (x, y) if name in file}
            names = ", ".join(file) or "nothing"
    except (ValueError, TypeError, *_BROKEN_ZIP) as error:
        raise DataError(f"'{path}' is no .npz file of plain arrays ({error}): save it with np.savez") from error
    if x not in arrays:
        raise DataError(f"'{path}' has no array '{x}', only {names}: name another split, or add it with np.savez")
    return _from_arrays(str(path), arrays[x], arrays.get(y), change)


def _from_arrays(name: str, x: np.ndarray, y: np.ndarray | None, change: Preprocessing) -> ImageData:
    if change.size or change.crop:
        raise DataError(f"size and crop are for image files, but '{name}' holds arrays: reshape them beforehand")
    images = change.normalise(_to_pixels(name, x))  # (N, C, ...)
    return ImageData(images, None if y is None else _to_labels(name, y, len(images)))


def _to_pixels(name: str, x: np.ndarray) -> Tensor:
    """float32; bytes are scaled to [0, 1], floats are taken as they are."""
    if x.ndim == 4 and 4 < x.shape[1] == x.shape[2] and x.shape[3] in (1, 3):
        raise DataError(f"x in '{name}' has its channels last, {x.shape}: save x.transpose(0, 3, 1, 2)")
    if not len(x):
        raise DataError(f"'{name}' holds no images: x has shape {x.shape}")
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(f"x in '{name}' has shape {x.shape}: it must be (N, C, H, W), or N samples of another shape")
    if x.dtype.kind != "f" and x.dtype != "uint8":
        raise DataError(f"x in '{name}' is {x.dtype}: save it as float32, or as uint8 for pixels 0..255")
    scale = 255 if x.dtype == "uint8" else 1
    images = torch.from_numpy(x.astype("float32")) / scale
    if not images.isfinite().all():
        raise DataError(f"x in '{name}' holds NaN or infinite values: replace them before saving")
    return images


def _to_labels(name: str, y: np.ndarray, n: int) -> Tensor:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"y in '{name}' is {y.dtype} of shape {y.shape}: it must hold one integer per image")
    if len(y) != n:
        raise DataError(f"'{name}' has {n} images but {len(y)} labels: x and y must be equally long")
    if y.min() < 0:
        raise DataError(f"y in '{name}' holds the negative label {y.min()}: classes count from 0")
    return torch.from_numpy(y.astype("int64"))


# --- image files -------------------------------------------------------------------------------------------

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
PROBES = 8


@dataclass(frozen=True)
class Store:
    """A folder on disk or in an archive: the names below it (folders end in '/'), and a way to read one."""

    title: str
    names: tuple[str, ...]
    read: Callable[[str], bytes]


def _open(path: Path, inside: PurePosixPath) -> Store:
    if path.is_dir():
        return _open_folder(path / inside)
    if path.suffix.lower() == ".zip":
        return _open_archive(path, inside)
    raise DataError(f"'{path}' is neither a folder nor a .zip or .npz file: name one of these")


def _open_folder(root: Path) -> Store:
    if not root.is_dir():
        siblings = (path.name for path in root.parent.glob("*/"))
        raise DataError(f"there is no folder '{root}': {_offer(siblings)}")
    names: list[str] = []
    for folder, folders, files in os.walk(root, followlinks=True):
        inside = PurePosixPath(Path(folder).relative_to(root).as_posix())
        names += [f"{inside / name}/" for name in folders]
        names += [f"{inside / name}" for name in files]
    return Store(str(root), tuple(names), lambda name: (root / name).read_bytes())


def _open_archive(path: Path, inside: PurePosixPath) -> Store:
    try:
        archive = zipfile.ZipFile(path)
    except _BROKEN_ZIP as error:
        raise DataError(f"'{path}' is damaged or incomplete ({error}): fetch the archive again") from error
    prefix = "" if inside == PurePosixPath() else f"{inside}/"
    names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
    below = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix) and name != prefix)
    if prefix and not below:
        raise DataError(f"'{path}' has no folder '{inside}': {_offer(n.split('/')[0] for n in names if '/' in n)}")
    return Store(str(path / inside), below, lambda name: archive.read(prefix + name))


def _offer(folders: Iterable[str]) -> str:
    names = sorted({*folders})
    return f"choose one of {', '.join(names[:12])}" if names else "there are no folders at all"


def _read_files(store: Store, change: Preprocessing) -> ImageData:
    names = _image_names(store)
    classes = _class_names(store, names)
    rank = {name: index for index, name in enumerate(classes)}
    labels = [rank[_top(name)] for name in names if classes]
    return ImageData(_probe(store, names, change), torch.tensor(labels) if classes else None, classes)


def _top(name: str) -> str:
    return name.split("/")[0]


def _visible(store: Store) -> list[str]:
    return [name for name in store.names if not any(part.startswith(".") for part in name.split("/"))]


def _image_names(store: Store) -> list[str]:
    """The images, sorted; all of them beside each other, or all of them in class folders."""
    names = sorted(name for name in _visible(store) if name.lower().endswith(EXTENSIONS))
    if not names:
        raise DataError(f"there are no images in '{store.title}': it needs files such as .png, .jpg or .webp")
    if {name.count("/") for name in names} not in ({0}, {1}):
        folder = _top(max(names, key=lambda name: name.count("/")))
        raise DataError(
            f"'{store.title}' has images outside its class folders or in folders below them: name the folder "
            f"whose subfolders are the classes, such as '{store.title}/{folder}'"
        )
    return names


def _class_names(store: Store, names: Sequence[str]) -> tuple[str, ...]:
    """The class folders, sorted. An empty one would shift the index of every class behind it: an error."""
    full = {_top(name) for name in names if "/" in name}
    empty = {_top(name) for name in _visible(store) if "/" in name} - full
    if full and empty:
        raise DataError(f"the class folder '{min(empty)}' of '{store.title}' has no images: fill or remove it")
    return tuple(sorted(full))


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files that are decoded when a slice of them is asked for."""

    store: Store
    names: tuple[str, ...]
    change: Preprocessing
    mode: str  # "L" or "RGB"
    size: tuple[int, int]  # width and height of every image

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: slice) -> Tensor:
        import numpy as np

        pixels = np.stack([self.decode(name) for name in self.names[rows]])  # (B, H, W, C) uint8
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()  # (B, C, H, W)
        return self.change.normalise(x.float() / 255)

    def take(self, rows: Sequence[int]) -> ImageFiles:
        return replace(self, names=tuple(self.names[row] for row in rows))

    def decode(self, name: str) -> np.ndarray:
        import numpy as np

        where = f"image '{name}' of '{self.store.title}'"
        image = self.change.reshape(_decode(self.store, name).convert(self.mode), where)
        if image.size != self.size:
            (w, h), (width, height) = image.size, self.size
            raise DataError(f"{where} is {w}x{h}, another {width}x{height}: give a crop to make them equal")
        return np.asarray(image).reshape(image.height, image.width, -1)  # (H, W, C)


def _probe(store: Store, names: Sequence[str], change: Preprocessing) -> ImageFiles:
    """Decide from a few images what all must be: grey if each of these is grey, and as large as the first."""
    few = [_decode(store, name) for name in names[:: -(-len(names) // PROBES)]]
    grey = change.channels == 1 and all(image.mode in ("1", "L", "LA") for image in few)
    size = change.reshape(few[0], f"image '{names[0]}' of '{store.title}'").size
    return ImageFiles(store, tuple(names), change, "L" if grey else "RGB", size)


def _decode(store: Store, name: str) -> Image:
    """The image, fully read. Deep pixels are refused, because Pillow would clip them to bytes."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError('reading images needs Pillow: pip install "spikecal[images]"') from error
    where = f"image '{name}' of '{store.title}'"
    try:
        image = Image.open(io.BytesIO(store.read(name)))
        image.load()
    except UnidentifiedImageError as error:  # its own words are about a buffer, not about a file
        raise DataError(f"{where} is not an image: replace or remove it") from error
    except (SyntaxError, ValueError, Image.DecompressionBombError, *_BROKEN_ZIP) as error:
        raise DataError(f"{where} cannot be read ({error}): replace or remove it") from error
    if image.mode[0] in "IF":
        raise DataError(f"{where} has more than 8 bits a channel: save it with 8, or all images as an .npz")
    return image.convert("RGBA") if "transparency" in image.info else image


# --- named sets --------------------------------------------------------------------------------------------


def _digits(split: str | None, change: Preprocessing) -> ImageData:
    """Scikit-learn's 8×8 handwritten digits, in [0, 1].

    Of each class, images 0, 3 and 6 of every ten are the test split: stratified, and the same on every
    machine because no random number is drawn.
    """
    import numpy as np

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError('the digits need scikit-learn: pip install "spikecal[demo]"') from error
    pixels, y = load_digits(return_X_y=True)
    turn = np.zeros_like(y)  # (N,) how many images of its class come before it
    for digit in range(10):
        turn[y == digit] = np.arange((y == digit).sum())
    test = np.isin(turn % 10, (0, 3, 6))
    splits = {None: test | True, "train": ~test, "test": test}
    if split not in splits:
        raise DataError(f"the digits have no split '{split}': choose train or test")
    x = pixels[splits[split]].reshape(-1, 1, 8, 8) / 16  # (N, 1, 8, 8)
    return replace(_from_arrays("digits", x, y[splits[split]], change), classes=tuple("0123456789"))


NAMED_SETS: dict[str, Callable[[str | None, Preprocessing], ImageData]] = {"digits": _digits}
