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


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a state dict.

    Args:
      path: a file, or a Hugging Face folder: one file or several with an index.

    Returns:
      Official name to array.

    Raises:
      ValueError: the file is of another format or damaged, or the folder holds no weights.
      OSError: a file cannot be read.

    Example:
      >>> read_tensors("weights.npz")
      Traceback (most recent call last):
      ...
      ValueError: weights.npz: use a folder, or a file that ends with .safetensors, .pt, ...
    """
    path = pathlib.Path(path)
    if path.is_dir():
        found: dict[str, np.ndarray] = {}
        for part in _parts(path):
            found |= read_tensors(part)
        return found
    if path.suffix == ".safetensors":
        return safetensors_format.read(path)
    if path.suffix in TORCH:
        return torch_archive.read_tensors(path)
    raise ValueError(
        f"{path}: use a folder, or a file that ends with .safetensors, .pt, .pth or .bin"
    )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads ``config.json`` of a Hugging Face folder; ``None`` where there is none."""
    path = pathlib.Path(path) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None,
) -> None:
    """Writes a state dict, in one piece or not at all.

    Args:
      path: where nothing is yet. A file by its suffix, or a folder in Hugging Face's form.
      tensors: official name to array.
      config: of ``config.json`` in a folder.

    Raises:
      ValueError: there is something at ``path``, or a folder cannot be written without a config.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise ValueError(f"{path} exists; give another name or delete it")
    if path.suffix == ".safetensors":
        safetensors_format.write(path, tensors)
    elif path.suffix in TORCH:
        torch_archive.write(path, tensors)
    elif config is None:
        raise ValueError(f"{path}: this model has no folder form; use .pth, .pt or .safetensors")
    else:
        draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
        draft.mkdir(parents=True)
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
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / part for part in names]
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
