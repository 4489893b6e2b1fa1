"""PyTorch's ``.pt`` and ``.pth`` files without PyTorch, and without running what is in them.

Such a file is a zip archive: ``data.pkl`` (a pickle of the object, in which a tensor is a call of
``torch._utils._rebuild_tensor_v2`` on a storage) and ``data/0``, ``data/1``, … (the storages' raw
bytes). A pickle can name any function of the machine that reads it. Here five names mean something
of ours and every other one becomes an inert object: nothing is imported, and nothing is called.
"""

import collections
import os
import pathlib
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


class Inert:
    """What a name outside the five becomes: it takes whatever a pickle does to it, and is nothing.

    Example:
      >>> thing = Inert("any", argument=1)
      >>> thing["key"] = 2
      >>> thing.append(3)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes anything."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        """Takes anything."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drops it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drops it."""

    def append(self, item: Any) -> None:
        """Drops it."""

    def extend(self, items: Any) -> None:
        """Drops them."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, path, file, archive: zipfile.ZipFile, folder: str):
        super().__init__(file)
        self._path, self._archive, self._folder = path, archive, folder
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch", "Size"): tuple,
        }
        return known.get((module, name)) or type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise ValueError(f"{self._path}: a storage of an unknown kind, {pid!r}")
        if key not in self._storages:
            info = self._archive.getinfo(f"{self._folder}data/{key}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size < count * dtype.itemsize:
                raise ValueError(f"{self._path}: storage {key} is compressed or cut short")
            self._storages[key] = np.frombuffer(self._archive.read(info), dtype, count)
        return self._storages[key]

    def _rebuild(self, storage, offset, size, stride, *_: Any) -> np.ndarray:
        """A view of the storage; one that would reach outside of it is refused."""
        size, stride = tuple(map(int, size)), tuple(map(int, stride))
        if 0 in size:
            return np.zeros(size, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if min((offset, *size, *stride)) < 0 or last >= storage.size:
            raise ValueError(
                f"{self._path}: a tensor of shape {list(size)} reaches element {last} of a "
                f"storage of {storage.size}; the file is damaged"
            )
        step = storage.itemsize
        return np.lib.stride_tricks.as_strided(
            storage[offset:], size, [s * step for s in stride], writeable=False
        )


def read(path: str | os.PathLike[str]) -> Any:
    """Reads the object of a file; only containers, numbers, strings and tensors mean anything.

    Args:
      path: what ``torch.save`` of PyTorch 1.6 or later wrote.

    Returns:
      The object, with NumPy arrays for tensors and ``Inert`` ones for all other classes.

    Raises:
      ValueError: the file is no such archive, or is damaged.
      OSError: there is no such file.
    """
    with open(path, "rb") as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                return _load(path, archive)
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"{path} is not a zip archive ({error}): it is damaged, or PyTorch before 1.6 wrote"
                " it; save it again with a later one"
            ) from error
        except ValueError:
            raise
        except Exception as error:  # a damaged pickle raises many kinds
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _load(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> Any:
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{path} is a zip file without PyTorch's data.pkl")
    with archive.open(pickles[0]) as file:
        return _Unpickler(path, file, archive, pickles[0].removesuffix("data.pkl")).load()


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a state dict: the file's object, or what it holds as "model" or "state_dict".

    Args:
      path: a ``.pt`` or ``.pth`` file.

    Returns:
      Name to array.

    Raises:
      ValueError: there is no state dict, or one of its entries is no tensor.
    """
    found = read(path)
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; a state dict is needed")
    for name, value in found.items():
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{path}: {name!r} is a {type(value).__name__}, not a tensor")
    return dict(found)


def write(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes ``{"model": state dict}`` as ``torch.save`` would, in one piece or not at all.

    Args:
      path: the file; one that exists is replaced.
      tensors: name to array, of a dtype in ``STORAGES``.

    Raises:
      ValueError: a dtype that PyTorch does not have.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "a.pt"
      ...     write(path, {"w": np.arange(3.0)})
      ...     read_tensors(path)["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    for name, array in tensors.items():
        if array.dtype not in _STORAGE_OF:
            raise ValueError(f"tensor {name!r} is {array.dtype}: use one of {list(_STORAGE_OF)}")
    path = pathlib.Path(path)
    draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:

            def add(name: str, data: bytes) -> None:  # a fixed date: equal tensors, equal bytes
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)

            add("data.pkl", _pickle(tensors))
            add("byteorder", b"little")
            for index, array in enumerate(tensors.values()):
                add(f"data/{index}", np.ascontiguousarray(array).tobytes())
            add("version", b"3\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _pickle(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Protocol 2, opcode by opcode: no class of PyTorch is at hand that ``pickle`` could name."""
    empty = b"ccollections\nOrderedDict\n)R"
    out = [b"\x80\x02}", _text("model"), empty, b"("]
    for index, (name, array) in enumerate(tensors.items()):
        dims, strides = array.shape, [1]
        for size in reversed(dims[1:]):
            strides.insert(0, strides[0] * size)
        storage = b"ctorch\n" + _STORAGE_OF[array.dtype].encode() + b"\n"
        out += [_text(name), b"ctorch._utils\n_rebuild_tensor_v2\n(("]
        out += [_text("storage"), storage, _text(str(index)), _text("cpu"), _number(array.size)]
        out += [b"tQ", _number(0), _numbers(dims), _numbers(strides[: len(dims)])]
        out += [b"\x89", empty, b"tR"]
    return b"".join([*out, b"us."])


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _number(value: int) -> bytes:
    wide = abs(value) >= 2**31
    return (b"\x8a\x08" if wide else b"J") + value.to_bytes(8 if wide else 4, "little", signed=True)


def _numbers(values) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"
