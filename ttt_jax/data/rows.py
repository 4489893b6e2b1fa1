"""Which pieces of which documents each row of a split holds, in which order."""

from typing import Any

import numpy as np

from ttt_jax.data import packing

_ENDLESS = 2**50  # rows of a stream without an end; grain wants a length


class TrainRows:
    """The rows of all epochs: documents in a new order each epoch, packed, then shuffled again.

    Documents are shuffled, packed and their rows shuffled within blocks of at most 2**20 documents,
    which take their documents from everywhere in the corpus (block b of n has b, b + n, b + 2n,
    ...) and follow each other in a new order each epoch. So no more than three blocks are ever
    planned in memory, about 16 bytes a document and 8 a row of them, however large the corpus is;
    a corpus of up to 2**20 documents is one block. All orders are drawn from (seed, epoch, block),
    so row g is a function of the corpus, T and the seed alone. The second shuffle keeps the pieces
    of a long document from filling a batch.
    """

    def __init__(
        self,
        offsets: np.ndarray,
        documents: np.ndarray,
        *,
        sequence_length: int,
        seed: int,
        pack: bool,
        block_documents: int = 2**20,
    ):
        """Counts the rows of each block.

        Args:
          offsets: int64 [n + 1], bounds of the documents in the stream.
          documents: int [d], the documents of the split.
          sequence_length: T.
          seed: seed of the order, at least 0.
          pack: several documents in a row, without padding; else one piece of a document a row.
          block_documents: documents of a block at most.
        """
        self._offsets = offsets
        self._documents = documents
        self._sequence_length = sequence_length
        self._seed = seed
        self._pack = pack
        self._blocks = -(-len(documents) // block_documents)
        self._plans: dict[int, tuple[packing.RowPlan, np.ndarray]] = {}
        count = packing.dense_rows if pack else packing.aligned_rows
        self._rows = np.array(
            [count(offsets, documents[b :: self._blocks], sequence_length)
             for b in range(self._blocks)]
        )  # fmt: skip
        self.rows_per_epoch = int(self._rows.sum())

    def __len__(self) -> int:
        return _ENDLESS

    def pieces(self, row: int) -> packing.Pieces:
        """Returns the pieces of row `row`, counted over all epochs."""
        epoch, place = divmod(row, self.rows_per_epoch)
        number = 0
        if self._blocks > 1:
            ends = np.cumsum(self._rows[self._block_order(epoch)])
            number = int(np.searchsorted(ends, place, side="right"))
            place -= int(ends[number - 1]) if number else 0
        plan, order = self._block(epoch, number)
        return plan.pieces(int(order[place]))

    def _block_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._blocks)

    def _block(self, epoch: int, number: int) -> tuple[packing.RowPlan, np.ndarray]:
        """Plans an epoch's block, and keeps its neighbours' plans for reads across the edge."""
        key = epoch * self._blocks + number
        found = self._plans.get(key)
        if found is None:
            block, what = 0, [self._seed, epoch]
            if self._blocks > 1:
                block = int(self._block_order(epoch)[number])
                what.append(block)
            random = np.random.default_rng(what)
            documents = random.permutation(self._documents[block :: self._blocks])
            if self._pack:
                plan = packing.dense_plan(self._offsets, documents, self._sequence_length)
            else:
                plan = packing.aligned_plan(
                    self._offsets, documents, self._sequence_length, pack=False
                )
            found = (plan, random.permutation(plan.num_rows))
            # A new dict, because reader threads may look into the old one at this moment.
            near = {k: p for k, p in self._plans.items() if abs(k - key) <= 1}
            self._plans = {**near, key: found}
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # a worker plans its blocks itself


class EvalRows:
    """The rows of one pass, in the order of the corpus; no document of at most T slots is cut."""

    def __init__(
        self, offsets: np.ndarray, documents: np.ndarray, *, sequence_length: int, pack: bool
    ):
        """Plans the rows; arguments as for `TrainRows`."""
        self._plan = packing.aligned_plan(offsets, documents, sequence_length, pack)

    def __len__(self) -> int:
        return self._plan.num_rows

    def pieces(self, row: int) -> packing.Pieces:
        """Returns the pieces of a row; none past the end, where batches are filled up."""
        return self._plan.pieces(row) if row < self._plan.num_rows else []
