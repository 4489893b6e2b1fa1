"""Where the tokens of each row of a batch come from: documents cut and packed into rows.

All documents lie one behind another in one stream of tokens; `offsets` [n + 1] holds their bounds.
A document of L tokens has L - 1 *slots*: slot i is the input token i with the target i + 1. A row
of T positions takes pieces, runs of slots of one document; a piece of n slots reads n + 1 tokens,
so two pieces that follow each other in a document share one token, and every token but the first
of a document is a target exactly once. No slot joins two documents.
"""

import dataclasses
from typing import Protocol

import numpy as np

Pieces = list[tuple[int, int]]


class RowPlan(Protocol):
    """The rows of one pass over some documents.

    Attributes:
      num_rows: number of rows.
    """

    num_rows: int

    def pieces(self, row: int) -> Pieces:
        """Returns (first token's place in the stream, number of slots) of the pieces of a row."""


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """Rows without padding: the slots of the documents, in the order given, cut every T slots.

        row r holds the slots r T .. (r + 1) T - 1;   num_rows = ceil(sum_d (L_d - 1) / T)

    Only the last row may be short. A document that crosses the end of a row goes on in the next
    one as another piece. Finding a row takes a binary search, whatever the size of the corpus.

    Attributes:
      starts: int64 [n], the place of each document's first token in the stream.
      ends: int64 [n], number of slots up to and with each document.
      sequence_length: T.
    """

    starts: np.ndarray
    ends: np.ndarray
    sequence_length: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return -(-int(self.ends[-1]) // self.sequence_length)

    def pieces(self, row: int) -> Pieces:
        """Returns (first token's place in the stream, number of slots) of the pieces of a row."""
        slot = row * self.sequence_length
        stop = min(slot + self.sequence_length, int(self.ends[-1]))
        document = int(np.searchsorted(self.ends, slot, side="right"))
        found = []
        while slot < stop:
            begin = int(self.ends[document - 1]) if document else 0
            length = min(int(self.ends[document]), stop) - slot
            found.append((int(self.starts[document]) + slot - begin, length))
            slot += length
            document += 1
        return found


@dataclasses.dataclass(frozen=True)
class AlignedPlan:
    """Rows in which a document of at most T slots is never cut.

    A longer document is cut every T slots from its own start, so that what a model sees before a
    token does not depend on the other documents. Ends of rows are padded.

    Attributes:
      starts: int64 [m], the place of each piece's first token in the stream, row by row.
      lengths: int64 [m], slots of each piece.
      bounds: int64 [num_rows + 1], the pieces of row r are bounds[r] .. bounds[r + 1] - 1.
    """

    starts: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.bounds) - 1

    def pieces(self, row: int) -> Pieces:
        """Returns (first token's place in the stream, number of slots) of the pieces of a row."""
        mine = slice(int(self.bounds[row]), int(self.bounds[row + 1]))
        return list(zip(self.starts[mine].tolist(), self.lengths[mine].tolist(), strict=True))


def dense_rows(offsets: np.ndarray, documents: np.ndarray, sequence_length: int) -> int:
    """Counts the rows of `dense_plan`, whatever the order of the documents.

    >>> dense_rows(np.array([0, 3, 8]), np.array([1, 0]), 4)
    2
    """
    slots = offsets[documents + 1] - offsets[documents] - 1
    return -(-int(slots.sum()) // sequence_length)


def aligned_rows(offsets: np.ndarray, documents: np.ndarray, sequence_length: int) -> int:
    """Counts the rows of `aligned_plan` without packing, whatever the order of the documents.

    >>> aligned_rows(np.array([0, 3, 9]), np.array([1, 0]), 4)
    3
    """
    slots = offsets[documents + 1] - offsets[documents] - 1
    return int((-(-slots // sequence_length)).sum())


def dense_plan(offsets: np.ndarray, documents: np.ndarray, sequence_length: int) -> DensePlan:
    """Plans rows without padding.

    Args:
      offsets: int64 [n + 1], bounds of all documents in the stream; each has 2 tokens or more.
      documents: int [d], the documents to take, in this order.
      sequence_length: T, at least 1.

    Returns:
      The plan.

    >>> plan = dense_plan(np.array([0, 3, 8]), np.array([1, 0]), 4)
    >>> [plan.pieces(row) for row in range(plan.num_rows)]
    [[(3, 4)], [(0, 2)]]
    """
    slots = offsets[documents + 1] - offsets[documents] - 1
    return DensePlan(offsets[documents], np.cumsum(slots), sequence_length)


def aligned_plan(
    offsets: np.ndarray, documents: np.ndarray, sequence_length: int, pack: bool
) -> AlignedPlan:
    """Plans rows in which no document of at most T slots is cut.

    Args:
      offsets: int64 [n + 1], bounds of all documents in the stream; each has 2 tokens or more.
      documents: int [d], the documents to take, in this order.
      sequence_length: T, at least 1.
      pack: put pieces shorter than T into one row, in order, while they fit; else one piece a row.

    Returns:
      The plan.

    >>> plan = aligned_plan(np.array([0, 3, 9, 11]), np.arange(3), 4, pack=True)
    >>> [plan.pieces(row) for row in range(plan.num_rows)]
    [[(3, 4)], [(0, 2), (7, 1), (9, 1)]]
    """
    slots = offsets[documents + 1] - offsets[documents] - 1
    counts = -(-slots // sequence_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[documents], counts) + number * sequence_length
    lengths = np.minimum(np.repeat(slots, counts) - number * sequence_length, sequence_length)
    if not pack:
        return AlignedPlan(starts, lengths, np.arange(len(starts) + 1))
    order = np.argsort(lengths < sequence_length, kind="stable")  # full pieces, then the short
    starts, lengths = starts[order], lengths[order]
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(ends):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, before + sequence_length, side="right")))
    return AlignedPlan(starts, lengths, np.asarray(bounds))


def fill_row(tokens: np.ndarray, pieces: Pieces, out: dict[str, np.ndarray], row: int) -> None:
    """Writes the pieces of a row into a batch of padding.

    Args:
      tokens: the stream, or anything whose [a:b] is an integer array [b - a].
      pieces: (place of the first token, slots) of each piece; at most T slots together.
      out: arrays [B, T] of `empty_batch`; the row is changed in place.
      row: the row's number in the batch.
    """
    place = 0
    for segment, (start, length) in enumerate(pieces):
        run = tokens[start : start + length + 1]
        where = (row, slice(place, place + length))
        out["tokens"][where] = run[:-1]
        out["targets"][where] = run[1:]
        out["segment_ids"][where] = segment
        out["weights"][where] = 1.0
        place += length


def empty_batch(rows: int, sequence_length: int) -> dict[str, np.ndarray]:
    """Returns a batch of padding.

    Args:
      rows: B.
      sequence_length: T.

    Returns:
      tokens, targets int32 [B, T] of 0; segment_ids int32 [B, T] of -1; weights float32 [B, T]
      of 0.

    >>> empty_batch(1, 2)["segment_ids"]
    array([[-1, -1]], dtype=int32)
    """
    shape = (rows, sequence_length)
    return {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "segment_ids": np.full(shape, -1, np.int32),
        "weights": np.zeros(shape, np.float32),
    }
