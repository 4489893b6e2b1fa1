"""Several sources of text in one stream, each with a fixed share of the training rows."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ttt_jax.data import corpus as corpus_lib
from ttt_jax.data import packing
from ttt_jax.data.rows import TrainRows
from ttt_jax.data.tokenizers import Tokenizer

_BLOCK = 1024  # rows in which the shares are exact


def parse(source: str) -> list[tuple[str, float]]:
    """Reads "a.txt=3;b/*.txt=1": sources with their weights, parted by ";".

    Args:
      source: one source, taken as it is, or several; a source without "=" has weight 1.

    Returns:
      (source, weight) of each.

    Raises:
      ValueError: a weight is no positive number, a source is empty or is given twice.

    >>> parse("books/*.txt=3;builtin")
    [('books/*.txt', 3.0), ('builtin', 1.0)]
    """
    if ";" not in source:
        return [(source, 1.0)]
    found: dict[str, float] = {}
    for part in source.split(";"):
        name, equals, weight = part.strip().rpartition("=")
        name, weight = (name, weight) if equals else (weight, "1")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not name or name in found or not 0 < value < float("inf"):
            raise ValueError(
                f"source={source!r}: {part!r} must be SOURCE=WEIGHT with a positive number, each "
                'source once, as in "books/*.txt=3;builtin=1"'
            )
        found[name] = value
    return list(found.items())


class JoinedTokens:
    """The streams of several corpora one behind another.

    >>> JoinedTokens([np.array([1, 2]), np.array([3])], [2, 1])[1:3]
    array([2, 3])
    """

    def __init__(self, parts: Sequence[Any], sizes: Sequence[int]):
        """Joins streams.

        Args:
          parts: each gives integers by [a:b].
          sizes: tokens of each.
        """
        self._parts = list(parts)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def __getitem__(self, place: slice) -> np.ndarray:
        found = []
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            first, last = max(place.start, start), min(place.stop, stop)
            if first < last:
                found.append(np.asarray(part[int(first - start) : int(last - start)]))
        return np.concatenate(found) if found else np.zeros(0, np.int32)


class MixedRows:
    """Rows of several sources: of each block of 1024 rows, a source has its share, in any order.

    Row g is a function of the sources, the weights and the seed alone; each source goes through
    its own epochs at its own pace.
    """

    def __init__(self, rows: Sequence[TrainRows], weights: Sequence[float], seed: int):
        """Fixes the shares.

        Args:
          rows: of each source.
          weights: of each, positive.
          seed: seed of the order within the blocks.

        Raises:
          ValueError: a share is less than half a row of a block, so the source would never come.
        """
        exact = _BLOCK * np.asarray(weights) / np.sum(weights)
        self._counts = np.floor(exact).astype(np.int64)
        for source in np.argsort(self._counts - exact)[: _BLOCK - self._counts.sum()]:
            self._counts[source] += 1
        if self._counts.min() == 0:
            raise ValueError(
                f"weights={list(weights)}: each source needs at least 1 in {_BLOCK} of the sum"
            )
        self._rows, self._seed = list(rows), seed

    def __len__(self) -> int:
        return len(self._rows[0])

    def pieces(self, row: int) -> packing.Pieces:
        """Returns the pieces of row `row`, counted from the beginning of the stream."""
        block, place = divmod(row, _BLOCK)
        random = np.random.default_rng([self._seed, block, 1])
        order = random.permutation(np.repeat(np.arange(len(self._rows)), self._counts))
        source = order[place]
        rank = int(np.count_nonzero(order[:place] == source))
        return self._rows[source].pieces(block * int(self._counts[source]) + rank)


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a run: one stream of tokens with its documents, parted into splits.

    Attributes:
      tokens: [a:b] gives an integer array.
      offsets: int64 [documents + 1], bounds of the documents.
      train: of each source, the indices of its training documents.
      held_out: indices of the held-out documents of all sources.
      weights: of each source.
      hash: of ids, bounds and, where there are several sources, their weights.
      hashes: uint64 [documents], of each document's ids, or 0 where it is not known.
      firsts: the first document of each source.
    """

    tokens: Any
    offsets: np.ndarray
    train: list[np.ndarray]
    held_out: np.ndarray
    weights: list[float]
    hash: str
    hashes: np.ndarray
    firsts: list[int]


def load(source: str, tokenizer: Tokenizer, eval_fraction: float) -> Text:
    """Loads one or several sources and parts the documents of each into the two splits.

    Args:
      source: as of `parse`; each source as of `ttt_jax.data.corpus.load`.
      tokenizer: what turns text into ids.
      eval_fraction: part of the documents of each source held out.

    Returns:
      The text.

    Raises:
      ValueError: see `parse`, `ttt_jax.data.corpus.load` and `ttt_jax.data.corpus.split`.
    """
    names, weights = zip(*parse(source), strict=True)
    corpora = [corpus_lib.load(name, tokenizer) for name in names]
    splits = [corpus_lib.split(corpus, eval_fraction) for corpus in corpora]
    # Of a document that was cut in two no part is known.
    known = [
        corpus.hashes if len(corpus.hashes) == len(offsets) - 1 else np.zeros(2, np.uint64)
        for corpus, (offsets, _, _) in zip(corpora, splits, strict=True)
    ]
    if len(corpora) == 1:
        offsets, train, held_out = splits[0]
        hash_ = corpora[0].hash
        return Text(corpora[0].tokens, offsets, [train], held_out, [1.0], hash_, known[0], [0])
    sizes = [int(offsets[-1]) for offsets, _, _ in splits]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    documents = np.concatenate([[0], np.cumsum([len(offsets) - 1 for offsets, _, _ in splits])])
    bounds = [offsets[:-1] + start for (offsets, _, _), start in zip(splits, starts, strict=False)]
    digest = hashlib.sha256(repr(weights).encode())
    for corpus in corpora:
        digest.update(corpus.hash.encode())
    return Text(
        tokens=JoinedTokens([corpus.tokens for corpus in corpora], sizes),
        offsets=np.concatenate([*bounds, starts[-1:]]),
        train=[train + first for (_, train, _), first in zip(splits, documents, strict=False)],
        held_out=np.concatenate(
            [held_out + first for (_, _, held_out), first in zip(splits, documents, strict=False)]
        ),
        weights=list(weights),
        hash=digest.hexdigest(),
        hashes=np.concatenate(known),
        firsts=documents[:-1].tolist(),
    )
