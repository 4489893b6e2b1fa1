"""The safetensors file format in NumPy: no library and no copy of the file in memory.

A file is 8 bytes (the header's length, little-endian), a JSON header ``{name: {"dtype", "shape",
"data_offsets"}}`` and the tensors' bytes, C order, little-endian. Written files have the order of
the official library (by dtype as in ``DTYPES``, then by name), so that equal tensors are equal
bytes.

Source: github.com/huggingface/safetensors, section "Format" of its README.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

DTYPES = {
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, the official library's own limit


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the tensors of a file.

    Args:
      path: a ``.safetensors`` file.

    Returns:
      Name to array; each is a read-only view of the file, read from disk when it is used.

    Raises:
      ValueError: the file is not in this format or is cut short; the message names the tensor.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "a.safetensors"
      ...     write(path, {"w": np.arange(3.0, dtype=np.float32)})
      ...     read(path)["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file, or it is cut short: {size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a JSON {type(header).__name__}, no object")
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else b""
    return {name: _tensor(path, name, entry, data) for name, entry in header.items()}


def _tensor(path, name: str, entry: Mapping, data: np.ndarray) -> np.ndarray:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        wanted = math.prod(shape) * DTYPES[dtype].itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: tensor {name!r} has the entry {entry!r} ({error!r})") from error
    if not 0 <= begin <= end <= len(data) or end - begin != wanted:
        raise ValueError(
            f"{path}: tensor {name!r} is {dtype}{list(shape)}, {wanted} bytes, but lies at {begin} "
            f"to {end} of {len(data)}; the file is damaged or cut short"
        )
    return np.frombuffer(data[begin:end], DTYPES[dtype]).reshape(shape)


def write(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors into a new file, in one piece or not at all.

    Args:
      path: the file; one that exists is replaced.
      tensors: name to array, of a dtype in ``DTYPES``.

    Raises:
      ValueError: a dtype that the format does not have.
    """
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} is {array.dtype}: use one of {list(_NAMES)}")
    order = list(_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        array, begin = tensors[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    draft = pathlib.Path(path).with_name(f".{pathlib.Path(path).name}.incomplete-{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(np.ascontiguousarray(tensors[name]).tobytes())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
