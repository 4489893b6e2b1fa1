"""Associative recall and needle tasks, exact and endless: each batch is a function of (seed, step).

A row holds a context of slots of two tokens and then queries::

    k₃ v₇  ·  ·  k₁ v₂  ·  ·   k₁  k₃        the answers are v₂ and v₇

In multi-query associative recall every slot may hold a pair and empty ones are blank; in the needle
task few slots do, and the others hold random tokens, the hay.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

BLANK = 0


class RecallBatch(NamedTuple):
    """A batch of rows.

    Attributes:
      tokens: [rows, time] int32: 2·slots of context, then `max_pairs` queries.
      targets: [rows, max_pairs] int32: the value bound to each query's key; `BLANK` where the
        query is blank.
      pairs: [rows] int32: pairs of the row.
      distance: [rows, max_pairs] int32: tokens from the value to the query; 0 at blank queries.
    """

    tokens: np.ndarray
    targets: np.ndarray
    pairs: np.ndarray
    distance: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallTask:
    """Pairs of a key and a value to be found again.

    Attributes:
      pairs: numbers of pairs, ascending; rows take them in turn.
      slots: slots of the context; at least the largest number of pairs.
      keys: keys of the vocabulary; those of a row are distinct.
      values: values of the vocabulary, drawn independently; a guess is right once in `values`.
      hay: random tokens that fill slots without a pair; 0 leaves them blank.

    Raises:
      ValueError: there are fewer slots or keys than pairs, or a number is out of range.

    Sources: Arora et al., *Zoology* (arXiv 2312.04927), section 3, for multi-query associative
    recall (there, queries follow after gaps drawn from a power law; here they follow the context
    in random order); the needle is the passkey of Mohtashami and Jaggi (arXiv 2305.16300).

    >>> RecallTask(pairs=(4, 8), slots=8, keys=16, values=16).vocab_size
    33
    """

    pairs: tuple[int, ...]
    slots: int
    keys: int
    values: int
    hay: int = 0

    def __post_init__(self):
        if not self.pairs or min(self.pairs) < 1 or list(self.pairs) != sorted(set(self.pairs)):
            raise ValueError(f"pairs={self.pairs}: give positive numbers in ascending order")
        for name in ("slots", "keys"):
            if getattr(self, name) < self.max_pairs:
                raise ValueError(
                    f"{name}={getattr(self, name)}: {self.max_pairs} pairs need as many at least"
                )
        if self.values < 2 or self.hay < 0:
            raise ValueError(f"values={self.values}, hay={self.hay}: use at least 2 and 0")

    @property
    def max_pairs(self) -> int:
        """The largest number of pairs, which is the number of queries."""
        return self.pairs[-1]

    @property
    def context(self) -> int:
        """Tokens before the first query."""
        return 2 * self.slots

    @property
    def time(self) -> int:
        """Tokens of a row."""
        return self.context + self.max_pairs

    @property
    def vocab_size(self) -> int:
        """Blank, keys, values, hay, in this order."""
        return 1 + self.keys + self.values + self.hay

    def batch(self, seed: int, step: int, rows: int) -> RecallBatch:
        """Makes a batch.

        Args:
          seed: of the stream.
          step: number of the batch in it.
          rows: rows of the batch.

        Returns:
          The batch: equal arguments give equal batches.

        >>> task = RecallTask(pairs=(1,), slots=2, keys=2, values=2)
        >>> task.batch(seed=0, step=0, rows=3).tokens.shape
        (3, 5)
        """
        rng = np.random.default_rng([seed, step])
        pairs = np.resize(np.array(self.pairs, np.int32), rows)
        keys = 1 + _distinct(rng, rows, self.keys, self.max_pairs)
        values = 1 + self.keys + rng.integers(self.values, size=keys.shape)
        places = _distinct(rng, rows, self.slots, self.max_pairs)
        used = np.arange(self.max_pairs) < pairs[:, None]
        slots = np.full((rows, self.slots, 2), BLANK)
        if self.hay:
            slots = self.vocab_size - 1 - rng.integers(self.hay, size=slots.shape)
        row, pair = np.nonzero(used)
        slots[row, places[row, pair]] = np.stack([keys, values], -1)[row, pair]
        # Queries stand in random order, blank ones between them.
        order = _distinct(rng, rows, self.max_pairs, self.max_pairs)
        keys, values, places, used = (
            np.take_along_axis(x, order, axis=1) for x in (keys, values, places, used)
        )
        queries = np.where(used, keys, BLANK)
        tokens = np.concatenate([slots.reshape(rows, -1), queries], axis=1)
        distance = self.context + np.arange(self.max_pairs) - (2 * places + 1)
        return RecallBatch(
            tokens.astype(np.int32),
            np.where(used, values, BLANK).astype(np.int32),
            pairs,
            np.where(used, distance, 0).astype(np.int32),
        )


def accuracy(batch: RecallBatch, answers: np.ndarray) -> dict[int, float]:
    """Share of right answers among the queries that are not blank, by number of pairs.

    Args:
      batch: what was asked.
      answers: [rows, max_pairs], token ids.

    Returns:
      Number of pairs -> accuracy in [0, 1].

    >>> task = RecallTask(pairs=(1, 2), slots=2, keys=2, values=2)
    >>> batch = task.batch(seed=0, step=0, rows=4)
    >>> accuracy(batch, batch.targets)
    {1: 1.0, 2: 1.0}
    """
    asked, right = batch.targets != BLANK, batch.targets == answers
    return {
        int(number): float(np.mean(right[batch.pairs == number][asked[batch.pairs == number]]))
        for number in np.unique(batch.pairs)
    }


def accuracy_by_distance(
    batch: RecallBatch, answers: np.ndarray, parts: int
) -> list[tuple[int, float]]:
    """Share of right answers by the distance from value to query, in equal parts of its range.

    Args:
      batch: what was asked.
      answers: [rows, max_pairs], token ids.
      parts: number of parts.

    Returns:
      (largest distance of the part in tokens, accuracy) for each part that has queries.
    """
    asked = batch.targets != BLANK
    distance, right = batch.distance[asked], (batch.targets == answers)[asked]
    edges = np.linspace(0, distance.max(), parts + 1)
    found = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        inside = (distance > low) & (distance <= high)
        if inside.any():
            found.append((round(high), float(np.mean(right[inside]))))
    return found


def _distinct(rng: np.random.Generator, rows: int, among: int, count: int) -> np.ndarray:
    """`count` different numbers below `among` in each row, [rows, count]."""
    return np.argsort(rng.random((rows, among)), axis=1)[:, :count]
