"""Official weights on disk: Hugging Face folders, ``.safetensors``, ``.pt`` and ``.pth`` files."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from ttt_jax.convert import safetensors_format, torch_archive

TORCH = (".pt", ".pth", ".bin")
_RULE = "use a folder, or a file that ends with .safetensors, .pt, .pth or .bin"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a state dict.

    Args:
      path: a file, or a Hugging Face folder: one file or several with an index.

    Returns:
      Official name to array.

    Raises:
      ValueError: there is no such file, it cannot be read, is of another format or damaged, or
        the folder holds no weights.

    Example:
      >>> read_tensors("weights.npz")
      Traceback (most recent call last):
      ...
      ValueError: weights.npz: no such file or folder; use a folder, or a file that ends with ...
    """
    path = pathlib.Path(path)
    if path.is_dir():
        found: dict[str, np.ndarray] = {}
        for part in _parts(path):
            found |= read_tensors(part)
        return found
    if path.suffix not in (".safetensors", *TORCH):
        missing = "" if path.exists() else "no such file or folder; "
        raise ValueError(f"{path}: {missing}{_RULE}")
    try:
        if path.suffix in TORCH:
            return torch_archive.read_tensors(path)
        return safetensors_format.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); {_RULE}") from error


def read_config(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads ``config.json`` of a Hugging Face folder; ``None`` where there is none.

    Raises:
      ValueError: it cannot be read.
    """
    path = pathlib.Path(path) / "config.json"
    return _read_json(path) if path.is_file() else None


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None,
) -> None:
    """Writes a state dict, in one piece or not at all.

    Args:
      path: where nothing is yet. A file by its suffix, or a folder in Hugging Face's form; folders
        above it are made.
      tensors: official name to array.
      config: of ``config.json`` in a folder.

    Raises:
      ValueError: there is something at ``path``, it cannot be written, or it would be a folder and
        there is no config.
    """
    check_new(path)
    path = pathlib.Path(path)
    if path.suffix not in (".safetensors", *TORCH) and config is None:
        raise ValueError(f"{path}: this model has no folder form; use .pth, .pt or .safetensors")
    try:
        _write(path, tensors, config)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}); give another name"
        ) from error


def check_new(path: str | os.PathLike[str]) -> None:
    """Checks that a file or folder can be written under a name that is still free.

    Raises:
      ValueError: there is something at ``path``.

    >>> check_new("/")
    Traceback (most recent call last):
    ...
    ValueError: / exists; give another name or delete it
    """
    if pathlib.Path(path).exists():
        raise ValueError(f"{path} exists; give another name or delete it")


def _write(path: pathlib.Path, tensors, config) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        safetensors_format.write(path, tensors)
    elif path.suffix in TORCH:
        torch_archive.write(path, tensors)
    else:
        draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
        draft.mkdir()
        try:
            (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            safetensors_format.write(draft / "model.safetensors", tensors)
            draft.rename(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _parts(folder: pathlib.Path) -> list[pathlib.Path]:
    """The weight files of a Hugging Face folder: by its index, or the one file."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            found = _read_json(index).get("weight_map")
            if not isinstance(found, dict) or not found:
                raise ValueError(f'{index} has no "weight_map" of tensors to files; fetch it again')
            parts = [folder / part for part in sorted(set(found.values()))]
            missing = [part.name for part in parts if not part.is_file()]
            if missing:
                raise ValueError(f"{index} names {missing[0]}, which is not there; fetch it too")
            return parts
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(
        f"{folder} holds neither model.safetensors nor pytorch_model.bin nor an index; give "
        "the folder that does, or the file itself"
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads an object of a file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is a JSON {type(found).__name__}, no object; fetch it again")
    return found
