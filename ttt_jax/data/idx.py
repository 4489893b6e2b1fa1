"""IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist)."""

import gzip
import math
import pathlib
import struct
import zlib

import numpy as np

_IMAGES = ("images-idx3-ubyte", "images.idx3-ubyte", "images-idx4-ubyte")
_LABELS = ("labels-idx1-ubyte", "labels.idx1-ubyte")
_UNSIGNED_BYTES = 8


def read_folder(folder: pathlib.Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Reads the splits of a folder of IDX files, plain or gzipped.

    Args:
      folder: with train-images-idx3-ubyte and train-labels-idx1-ubyte, and perhaps t10k-... ones.

    Returns:
      [(training images uint8 [n, height, width] or [n, height, width, 3], labels uint8 [n])], and
      the held-out ones if there are any; [] where the folder holds no IDX files.

    Raises:
      ValueError: a file is damaged, or images and labels do not belong together.
    """
    splits = []
    for name in ("train", "t10k"):
        images = _find(folder, [f"{name}-{kind}" for kind in _IMAGES])
        labels = _find(folder, [f"{name}-{kind}" for kind in _LABELS])
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            there = images or labels
            raise ValueError(f"{there} has no partner: images and labels come in two files")
        pair = read(images), read(labels)
        fit = pair[0].ndim in (3, 4) and pair[1].ndim == 1 and len(pair[0]) == len(pair[1]) > 0
        if not fit or pair[0].shape[3:] not in ((), (3,)):
            raise ValueError(
                f"{images} has shape {pair[0].shape} and {labels} {pair[1].shape}; images are "
                "[n, height, width] or [n, height, width, 3], with one label each"
            )
        splits.append(pair)
    return splits


def read(path: pathlib.Path) -> np.ndarray:
    """Reads one file.

    Args:
      path: a file of unsigned bytes; gzipped if its name ends with .gz.

    Returns:
      uint8, of the shape that the file states.

    Raises:
      ValueError: the file is cut off, or of another type.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts with {data[:4]!r}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"{path} is cut off in its header, after {len(data)} bytes")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"{path} states the shape {shape} and holds {len(data) - start} bytes instead of "
            f"{math.prod(shape)}; get it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _find(folder: pathlib.Path, names: list[str]) -> pathlib.Path | None:
    paths = [folder / f"{name}{end}" for name in names for end in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)
