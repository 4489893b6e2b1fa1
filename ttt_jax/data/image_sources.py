"""Labelled images of one split: arrays in memory, folders of files, TensorFlow Datasets."""

import functools
import gzip
import hashlib
import importlib.util
import os
import pathlib
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ttt_jax.data import idx, tfds_builders
from ttt_jax.data.image_decode import decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MANY = 20_000  # files, which are not looked at one by one when a run starts
_TRAIN, _HELD_OUT = ("train", "training"), ("val", "validation", "valid", "test")


class ImageSet(Protocol):
    """Images that can be read in any order, in this process or in a worker.

    Attributes:
      classes: names of the classes; labels count them.
      hash: hexadecimal digits that tell two sets apart.
    """

    classes: tuple[str, ...]
    hash: str

    def __len__(self) -> int:
        """Returns the number of images."""

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns (an RGB image, its label).

        Raises:
          UnreadableImage: this image is damaged.
        """

    def sizes(self) -> np.ndarray | None:
        """Returns the bytes of each image, int64 [n]; None where they are not to be had at once."""

    def content(self, index: int) -> tuple[str, bytes]:
        """Returns (the image's name, its bytes as they are stored); where `sizes` is not None."""


class ArraySet:
    """Images in memory.

    >>> images = ArraySet(np.zeros((2, 4, 4), np.uint8), np.array([0, 1]), ("a", "b"))
    >>> len(images), images.read(1)[0].size, images.read(1)[1]
    (2, (4, 4), 1)
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]):
        """Keeps the arrays.

        Args:
          images: uint8 [n, height, width] or [n, height, width, 3].
          labels: int [n], below the number of classes.
          classes: their names.
        """
        self.images, self.labels, self.classes = images, labels.astype(np.int32), classes
        digest = hashlib.sha256(f"{images.shape}".encode())
        digest.update(np.ascontiguousarray(images))
        digest.update(np.ascontiguousarray(self.labels))
        self.hash = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSet.read`."""
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def sizes(self) -> np.ndarray:
        """See `ImageSet.sizes`."""
        return np.full(len(self), self.images[:1].nbytes)

    def content(self, index: int) -> tuple[str, bytes]:
        """See `ImageSet.content`."""
        return f"image {index}", self.images[index].tobytes()


class FolderSet:
    """Image files in one subfolder a class; the names of the subfolders, sorted, are the classes.

    Files with other endings, and hidden ones, are left out. The hash is that of the files' names.
    """

    def __init__(self, folder: pathlib.Path, classes: tuple[str, ...] | None = None):
        """Lists the files.

        Args:
          folder: the folder.
          classes: of the training split, where this is the held-out one.

        Raises:
          ValueError: there are no class folders, one is empty, or one is of no training class.
        """
        found = tuple(sorted(entry.name for entry in os.scandir(folder) if _is_folder(entry)))
        if not found:
            raise ValueError(
                f"config.data.source: {folder} has no subfolders; images lie in one folder a class"
            )
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise ValueError(f"{folder / unknown[0]} is no class of the training split")
        self._files: list[str] = []
        labels = []
        for name in found:
            files = sorted(
                str(path.relative_to(folder))
                for path in (folder / name).rglob("*")
                if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
            )
            if not files:
                raise ValueError(
                    f"{folder / name} holds no image ({', '.join(SUFFIXES)}); remove the folder"
                )
            self._files += files
            labels += [self.classes.index(name)] * len(files)
        self._folder, self._labels = folder, np.array(labels, np.int32)
        self.hash = hashlib.sha256("\n".join(self._files).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSet.read`."""
        path = self._folder / self._files[index]
        return decode(path, str(path)), int(self._labels[index])

    def sizes(self) -> np.ndarray | None:
        """See `ImageSet.sizes`; None where there are more than 20,000 files to look at."""
        if len(self) > _MANY:
            return None
        return np.array([(self._folder / name).stat().st_size for name in self._files])

    def content(self, index: int) -> tuple[str, bytes]:
        """See `ImageSet.content`."""
        path = self._folder / self._files[index]
        return str(path), path.read_bytes()


class TfdsSet:
    """A split of a data set that TFDS prepared as ArrayRecord, read without TensorFlow."""

    def __init__(self, source: str, name: str, split: str):
        """Finds the set and its features.

        Args:
          source: what the user wrote, for messages.
          name: of the data set.
          split: in TFDS's notation.

        Raises:
          ValueError: it is not prepared, or has not one image and one label.
        """
        self._source, self._name, self._split = source, name, split
        builder = tfds_builders.prepared(source, name)
        self._image, self._label = _image_and_label(source, builder)
        self.classes = tuple(builder.info.features[self._label].names)
        size = len(self._records)
        self.hash = hashlib.sha256(f"{builder.info.full_name}[{split}] {size}".encode()).hexdigest()

    @functools.cached_property
    def _records(self) -> Any:
        tfds = tfds_builders.import_tfds(self._source)
        builder = tfds_builders.prepared(self._source, self._name)
        # Pillow decodes: TFDS's own decoder stops the run at the first damaged image.
        decoders = {self._image: tfds.decode.SkipDecoding()}
        return tfds_builders.data_source(self._source, builder, self._split, decoders=decoders)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_records"}

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSet.read`."""
        record = self._records[index]
        image = decode(bytes(record[self._image]), f"{self._source}[{self._split}], record {index}")
        return image, int(record[self._label])

    def sizes(self) -> None:
        """See `ImageSet.sizes`: every record would have to be read."""
        return None


class Subset:
    """Some images of a set."""

    def __init__(self, whole: ImageSet, indices: np.ndarray):
        """Keeps which ones.

        Args:
          whole: the set.
          indices: int [n].
        """
        self._whole, self._indices = whole, indices
        self.classes = whole.classes
        self.hash = hashlib.sha256(whole.hash.encode() + indices.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSet.read`."""
        return self._whole.read(int(self._indices[index]))

    def sizes(self) -> np.ndarray | None:
        """See `ImageSet.sizes`."""
        sizes = self._whole.sizes()
        return None if sizes is None else sizes[self._indices]

    def content(self, index: int) -> tuple[str, bytes]:
        """See `ImageSet.content`."""
        return self._whole.content(int(self._indices[index]))


def open_images(source: str, eval_fraction: float) -> tuple[ImageSet, ImageSet]:
    """Opens the two splits of a source.

    Args:
      source: see `ttt_jax.config_images.ImageConfig`.
      eval_fraction: held out where the source has no held-out part; which images does not depend
        on any seed.

    Returns:
      (training images, held-out images), of the same classes.

    Raises:
      ValueError: there is no such source, or it cannot be used.

    >>> train, held_out = open_images("builtin", 0.2)
    >>> len(train), len(held_out), len(train.classes)
    (1438, 359, 10)
    """
    if source == "builtin":
        return hold_out(builtin(), eval_fraction)
    if source.startswith("tfds:"):
        return _open_tfds(source, eval_fraction)
    folder = pathlib.Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f'config.data.source={source!r} is no folder; it may be one, "builtin" or "tfds:NAME"'
        )
    arrays = idx.read_folder(folder)
    if arrays:
        classes = tuple(str(n) for n in range(1 + max(labels.max() for _, labels in arrays)))
        sets = [ArraySet(images, labels, classes) for images, labels in arrays]
        return (sets[0], sets[1]) if len(sets) == 2 else hold_out(sets[0], eval_fraction)
    train = next((folder / name for name in _TRAIN if (folder / name).is_dir()), None)
    if train is None:
        return hold_out(FolderSet(folder), eval_fraction)
    whole = FolderSet(train)
    held_out = next((folder / name for name in _HELD_OUT if (folder / name).is_dir()), None)
    if held_out is None:
        return hold_out(whole, eval_fraction)
    return whole, FolderSet(held_out, whole.classes)


def hold_out(images: ImageSet, eval_fraction: float) -> tuple[Subset, Subset]:
    """Cuts a set in two, at random but always in the same way.

    Raises:
      ValueError: one of the two would be empty.
    """
    count = round(len(images) * eval_fraction)
    if not 0 < count < len(images):
        raise ValueError(
            f"config.data.eval_fraction={eval_fraction} of {len(images)} images leaves nothing to "
            "train on or nothing to hold out; change it or give more images"
        )
    order = np.random.default_rng(0).permutation(len(images))
    return Subset(images, np.sort(order[count:])), Subset(images, np.sort(order[:count]))


def builtin() -> ArraySet:
    """Reads 1,797 handwritten digits of 8×8 (Alpaydin & Kaynak, UCI 1998), of scikit-learn.

    Raises:
      ValueError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError('config.data.source="builtin" needs scikit-learn: pip install it')
    path = pathlib.Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int32)
    images = (table[:, :-1].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)
    return ArraySet(images, table[:, -1], tuple("0123456789"))


def _is_folder(entry: os.DirEntry) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _open_tfds(source: str, eval_fraction: float) -> tuple[ImageSet, ImageSet]:
    name, _, split = source.removeprefix("tfds:").partition("[")
    split = split.removesuffix("]")
    if split:
        return hold_out(TfdsSet(source, name, split), eval_fraction)
    known = tfds_builders.prepared(source, name).info.splits
    train = TfdsSet(source, name, "train")
    held_out = next((s for s in ("validation", "test") if s in known), None)
    if held_out is None:
        return hold_out(train, eval_fraction)
    return train, TfdsSet(source, name, held_out)


def _image_and_label(source: str, builder: Any) -> tuple[str, str]:
    """Names of the only image feature and the only class label (or those called so)."""
    tfds = tfds_builders.import_tfds(source)
    features = builder.info.features
    names = []
    for kind, usual in ((tfds.features.Image, "image"), (tfds.features.ClassLabel, "label")):
        found = [key for key, value in features.items() if isinstance(value, kind)]
        if usual not in found and len(found) != 1:
            raise ValueError(
                f"config.data.source={source!r} has the {kind.__name__} features {found}; there "
                f"must be one, or one called {usual!r}"
            )
        names.append(usual if usual in found else found[0])
    return names[0], names[1]
