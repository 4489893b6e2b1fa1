"""Small corpora for the tests of the data pipeline."""

import hashlib
import pathlib

import numpy as np

from ttt_jax.config import DataConfig


def write_texts(folder: pathlib.Path, lengths: list[int], seed: int = 0) -> str:
    """Writes one .txt file of random letters for each length; returns the glob of all."""
    random = np.random.default_rng(seed)
    for number, length in enumerate(lengths):
        letters = random.integers(ord("a"), ord("z") + 1, length)
        (folder / f"{number:04d}.txt").write_bytes(letters.astype(np.uint8).tobytes())
    return str(folder / "*.txt")


def data_config(source: str, **fields) -> DataConfig:
    """A configuration for `source`, with a quarter held out."""
    return DataConfig(**{"source": source, "eval_fraction": 0.25, **fields})


def digest(batch: dict[str, np.ndarray]) -> str:
    """A hash of names, dtypes, shapes and values of a batch."""
    out = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name]
        out.update(f"{name} {value.dtype} {value.shape}".encode())
        out.update(np.ascontiguousarray(value).tobytes())
    return out.hexdigest()
