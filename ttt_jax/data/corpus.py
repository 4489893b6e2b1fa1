"""A corpus: all documents as one stream of tokens, the bounds of each, and the held-out part."""

import dataclasses
import hashlib
import logging
import pathlib
from typing import Any

import numpy as np

from ttt_jax.data import shards, sources
from ttt_jax.data.tokenizers import Tokenizer, encode_document

logger = logging.getLogger(__name__)

_LARGE = 200_000_000  # tokens; beyond, shards start faster and take no memory
_cache: dict[tuple[Any, ...], "Corpus"] = {}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents of tokens.

    Attributes:
      tokens: the documents one behind another; [a:b] gives an integer array [b - a].
      offsets: int64 [documents + 1], where each begins and ends; each has 2 tokens or more.
      hash: sha256 over the ids and the bounds, the same for the same documents in memory and in
        shards.
      hashes: uint64 [documents], `shards.hash_document` of each, or 0 where it is not known.
    """

    tokens: Any
    offsets: np.ndarray
    hash: str
    hashes: np.ndarray


def load(source: str, tokenizer: Tokenizer) -> Corpus:
    """Loads a source. Text is encoded once in a process and kept; shards are opened and read later.

    Args:
      source: "builtin", "wiki", a path or glob of text files, "tfds:NAME", or a folder of shards.
      tokenizer: what turns text into ids.

    Returns:
      The corpus.

    Raises:
      ValueError: any document or file cannot be used, see `ttt_jax.data.sources` and
        `ttt_jax.data.shards`; or the vocabulary is too small for the text.

    >>> from ttt_jax.data.tokenizers import ByteTokenizer
    >>> load("builtin", ByteTokenizer()).offsets[0]
    np.int64(0)
    """
    if shards.is_shard_folder(source):
        folder = pathlib.Path(source).expanduser()
        metadata = shards.read_metadata(folder, tokenizer)
        offsets = shards.read_bounds(folder, metadata)
        hashes = shards.read_hashes(folder, metadata)
        return Corpus(shards.ShardTokens(folder, metadata), offsets, metadata["hash"], hashes)
    key = (source, sources.file_stamps(source), tokenizer.fingerprint)
    if key not in _cache:
        if len(_cache) >= 2:
            _cache.clear()
        _cache[key] = _encode_source(source, tokenizer)
    return _cache[key]


def encode(tokenizer: Tokenizer, name: str, text: str) -> np.ndarray:
    """Encodes a document and checks its ids.

    Args:
      tokenizer: what turns text into ids.
      name: the document's name in messages.
      text: its text.

    Returns:
      int32 [n], n >= 2, bos and eos included where the vocabulary has them.

    Raises:
      ValueError: the document is empty, the vocabulary is too small for it, or there is no token
        to predict.
    """
    if sources.is_empty(text):
        raise ValueError(
            f"{name} is an empty document; remove it, or let launch/tokenize_text.py --skip_empty "
            "count and leave out such documents"
        )
    try:
        ids = encode_document(tokenizer, text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if len(ids) < 2:
        raise ValueError(
            f"{name} is a document of {len(ids)} token, so it has no token to predict; remove it "
            "or join it to another"
        )
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise ValueError(
            f"{name} has the id {max(ids.max(), -ids.min())}, outside the vocabulary of "
            f"{tokenizer.vocab_size} ids of {tokenizer.name!r}; mend the tokenizer's file"
        )
    return ids


class UnknownCounter:
    """Counts the tokens that stand for text outside the vocabulary, and says so at the end."""

    def __init__(self, tokenizer: Tokenizer):
        """Starts at 0."""
        self._tokenizer = tokenizer
        self._unknown = 0
        self._tokens = 0
        self._example = ""

    def add(self, name: str, ids: np.ndarray) -> None:
        """Counts a document's ids, int32 [n]."""
        self._tokens += len(ids)
        unknown = 0
        if self._tokenizer.unk_id is not None:
            unknown = int(np.count_nonzero(ids == self._tokenizer.unk_id))
        self._unknown += unknown
        if unknown and not self._example:
            self._example = name

    def report(self) -> None:
        """Warns of unknown tokens. Raises ValueError where they are more than 1 in 100."""
        if not self._unknown:
            return
        message = (
            f"{self._unknown} of {self._tokens} tokens are outside the vocabulary of "
            f"{self._tokenizer.name!r} ({self._tokenizer.vocab_size} ids) and stand as unknown, "
            f"the first in {self._example}"
        )
        if self._unknown * 100 > self._tokens:
            raise ValueError(
                f"the vocabulary is too small for the data: {message}; give a tokenizer with byte "
                'fallback, or tokenizer="bytes"'
            )
        logger.warning("%s", message)


def split(corpus: Corpus, eval_fraction: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parts the documents into a training and a held-out split.

    round(n · eval_fraction) documents, at least 1 and not all, are held out; which ones depends on
    n alone, never on the shuffle seed. A corpus of one document is cut in two: its last
    eval_fraction of tokens is held out.

    Args:
      corpus: the documents.
      eval_fraction: in (0, 1).

    Returns:
      (offsets int64 [m + 1], training documents int64, held-out documents int64), the indices
      rising and into `offsets`.

    Raises:
      ValueError: the corpus is empty, or its one document is too short to be cut.
    """
    offsets = corpus.offsets
    count = len(offsets) - 1
    if count == 0:
        raise ValueError("the corpus has no documents; give a source with text")
    if count == 1:
        length = int(offsets[1])
        cut = length - max(2, round(length * eval_fraction))
        if cut < 2:
            raise ValueError(
                f"the corpus is one document of {length} tokens, too short to hold out "
                f"eval_fraction={eval_fraction} of it; give more text"
            )
        return np.array([0, cut, length]), np.array([0]), np.array([1])
    held_out = min(max(1, round(count * eval_fraction)), count - 1)
    order = np.random.default_rng(0).permutation(count)
    return offsets, np.sort(order[held_out:]), np.sort(order[:held_out])


def _encode_source(source: str, tokenizer: Tokenizer) -> Corpus:
    parts, hashes, unknown = [], [], UnknownCounter(tokenizer)
    small = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    digest = hashlib.sha256()
    for name, text in sources.read_documents(source):
        ids = encode(tokenizer, name, text)
        unknown.add(name, ids)
        digest.update(np.ascontiguousarray(ids, "<i4"))
        hashes.append(shards.hash_document(ids))
        parts.append(ids.astype(small))
    unknown.report()
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    digest.update(np.ascontiguousarray(offsets, "<i8"))
    if offsets[-1] > _LARGE:
        logger.warning(
            "source=%r holds %d tokens in memory; launch/tokenize_text.py makes shards of it that "
            "need none", source, offsets[-1],
        )  # fmt: skip
    tokens = np.concatenate([np.zeros(0, small), *parts])
    return Corpus(tokens, offsets, digest.hexdigest(), np.array(hashes, np.uint64))
