"""Tokens in ArrayRecord files: written once, then read at any place without loading the rest.

A folder holds ``tokens-00000-of-00002.array_record`` and so on, ``documents.npy`` (int64
[documents + 1], the bounds of the documents in the stream of tokens), ``hashes.npy`` (uint64
[documents], of their ids) and ``metadata.json``. A record is 8192 tokens of the stream, the last
one the rest, as little-endian uint16 where the vocabulary allows it, else uint32. Reading tokens
a..b touches the records that hold them alone, however long a document is.
"""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np
from grain import sources as grain_sources

from ttt_jax.data.sources import METADATA
from ttt_jax.data.tokenizers import Tokenizer

FORMAT = "ttt_jax tokens, version 1"
RECORD_TOKENS = 8192
_BOUNDS = "documents.npy"
_HASHES = "hashes.npy"


class ShardTokens:
    """The stream of tokens of a folder; [a:b] reads it.

    Example: ``ShardTokens(folder, metadata)[10:20]`` is an int32 array of 10 tokens.
    """

    def __init__(self, folder: pathlib.Path, metadata: dict[str, Any]):
        """Opens the shards.

        Args:
          folder: the folder.
          metadata: of `read_metadata`.
        """
        paths = [str(folder / name) for name in metadata["shards"]]
        self._source = grain_sources.ArrayRecordDataSource(paths)
        self._dtype = np.dtype(metadata["dtype"])
        self._size = int(metadata["record_tokens"])
        self._length = int(metadata["tokens"])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self._length)
        if stop <= start:
            return np.zeros(0, np.int32)
        first = start // self._size
        keys = list(range(first, (stop - 1) // self._size + 1))
        records = [np.frombuffer(r, self._dtype) for r in self._source.__getitems__(keys)]
        joined = np.concatenate(records).astype(np.int32)
        return joined[start - first * self._size : stop - first * self._size]


class ShardWriter:
    """Writes documents to a folder of shards, which exists and is empty; `close` completes it.

    The folder has no metadata.json, and so is no corpus, before `close`.
    """

    def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer, shard_tokens: int):
        """Starts the first shard.

        Args:
          folder: an empty folder.
          tokenizer: the one that makes the ids; its name, size and hash go into the metadata.
          shard_tokens: tokens of a shard, rounded up to whole records.
        """
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._shard_records = max(1, -(-shard_tokens // RECORD_TOKENS))
        self._writers = 0
        self._writer: Any = None
        self._records = 0
        self._rest = np.zeros(0, np.int32)
        self._lengths: list[int] = []
        self._hashes: list[int] = []
        self._digest = hashlib.sha256()

    def add(self, ids: np.ndarray) -> None:
        """Appends a document, int32 [n] with n >= 2."""
        self._lengths.append(len(ids))
        self._hashes.append(hash_document(ids))
        self._digest.update(np.ascontiguousarray(ids, "<i4"))
        stream = np.concatenate([self._rest, ids])
        whole = len(stream) // RECORD_TOKENS * RECORD_TOKENS
        for start in range(0, whole, RECORD_TOKENS):
            self._write(stream[start : start + RECORD_TOKENS])
        self._rest = stream[whole:]

    def close(self, source: str, skipped: int = 0) -> dict[str, Any]:
        """Writes what is left, the bounds, and the metadata.

        Args:
          source: what the text was read from, for the record.
          skipped: number of empty documents that were left out, for the record.

        Returns:
          The metadata.
        """
        if len(self._rest):
            self._write(self._rest)
        self.abort()
        count = self._writers
        names = [f"tokens-{i:05d}-of-{count:05d}.array_record" for i in range(count)]
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=offsets[1:])
        np.save(self._folder / _BOUNDS, offsets)
        np.save(self._folder / _HASHES, np.array(self._hashes, np.uint64))
        self._digest.update(np.ascontiguousarray(offsets, "<i8"))
        metadata = {
            "format": FORMAT,
            "source": source,
            "skipped": skipped,
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "documents": len(self._lengths),
            "tokens": int(offsets[-1]),
            "hash": self._digest.hexdigest(),
            "dtype": self._dtype.str,
            "record_tokens": RECORD_TOKENS,
            "shards": {name: (self._folder / name).stat().st_size for name in names},
        }
        (self._folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        return metadata

    def abort(self) -> None:
        """Closes the shard that is being written."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _write(self, tokens: np.ndarray) -> None:
        """Writes one record, to a new shard where the last one is full."""
        if self._records % self._shard_records == 0:
            from array_record.python import array_record_module

            self.abort()
            path = str(self._path(self._writers))
            # One record a group: any record can be read without its neighbours.
            self._writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
            self._writers += 1
        self._writer.write(tokens.astype(self._dtype).tobytes())
        self._records += 1

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"tokens-{number:05d}.writing"


def is_shard_folder(source: str) -> bool:
    """Says whether `source` is a folder with metadata.json."""
    return (pathlib.Path(source).expanduser() / METADATA).is_file()


def read_metadata(folder: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Reads and checks the metadata of a folder of shards.

    Args:
      folder: with metadata.json.
      tokenizer: the one of this run.

    Returns:
      The metadata.

    Raises:
      ValueError: another format, another tokenizer, or a shard that is missing or cut.
    """
    path = folder / METADATA
    try:
        metadata = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read ({error}); run launch/tokenize_text.py again"
        raise ValueError(message) from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not of the format {FORMAT!r}; run launch/tokenize_text.py again"
        )
    if metadata["tokenizer_fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was written with the tokenizer {metadata['tokenizer']!r} of "
            f"{metadata['vocab_size']} ids (sha256 {metadata['tokenizer_fingerprint'][:8]}), and "
            f"this run has {tokenizer.name!r} of {tokenizer.vocab_size} ids (sha256 "
            f"{tokenizer.fingerprint[:8]}); give the same tokenizer or tokenize again"
        )
    for name, size in metadata["shards"].items():
        shard = folder / name
        if not shard.is_file() or shard.stat().st_size != size:
            state = f"has {shard.stat().st_size} bytes" if shard.is_file() else "is missing"
            raise ValueError(
                f"{shard} {state} and should have {size} bytes; copy the folder again or run "
                "launch/tokenize_text.py again"
            )
    return metadata


def read_bounds(folder: pathlib.Path, metadata: dict[str, Any]) -> np.ndarray:
    """Reads the bounds of the documents, int64 [documents + 1].

    Raises:
      ValueError: the file is missing or does not fit the metadata.
    """
    path = folder / _BOUNDS
    try:
        offsets = np.load(path, mmap_mode="r")  # 8 bytes a document, in no process's own memory
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy the folder again") from error
    if offsets.shape != (metadata["documents"] + 1,) or offsets[-1] != metadata["tokens"]:
        raise ValueError(f"{path} does not fit {METADATA} beside it; copy the folder again")
    return offsets


def read_hashes(folder: pathlib.Path, metadata: dict[str, Any]) -> np.ndarray:
    """Reads the hashes of the documents, uint64 [documents]; zeros where none were written."""
    try:
        hashes = np.load(folder / _HASHES)
    except (OSError, ValueError):
        hashes = np.zeros(0, np.uint64)
    count = metadata["documents"]
    return hashes if hashes.shape == (count,) else np.zeros(count, np.uint64)


def hash_document(ids: np.ndarray) -> int:
    """Returns 64 bits that equal documents share; not 0, which stands for unknown.

    >>> hash_document(np.array([1, 2])) == hash_document(np.array([1, 2], np.uint16))
    True
    """
    content = np.ascontiguousarray(ids, "<i4")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
