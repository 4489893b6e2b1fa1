"""From a stream of tokens to batches, through grain; the position can be saved and restored."""

import contextlib
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from absl import flags

from ttt_jax.data import packing


class Batches:
    """A grain data source: batch s of process p holds the rows (s P + p) B .. (s P + p + 1) B - 1.

    So the batches of P processes, one under the other, are the batch of one process of B P rows.
    """

    def __init__(
        self,
        tokens: Any,
        rows: Any,
        *,
        sequence_length: int,
        batch_size: int,
        process_index: int,
        process_count: int,
    ):
        """Describes the batches.

        Args:
          tokens: the stream; [a:b] gives an integer array [b - a].
          rows: of this split: `ttt_jax.data.rows.TrainRows`, its `EvalRows`, or
            `ttt_jax.data.mixture.MixedRows`.
          sequence_length: T.
          batch_size: rows of one process, B.
          process_index, process_count: p and P.
        """
        self._tokens = tokens
        self._rows = rows
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._process_index = process_index
        self._process_count = process_count

    def __len__(self) -> int:
        return -(-len(self._rows) // (self._batch_size * self._process_count))

    def __getitem__(self, step: Any) -> dict[str, np.ndarray]:
        batch = packing.empty_batch(self._batch_size, self._sequence_length)
        first = (int(step) * self._process_count + self._process_index) * self._batch_size
        for row in range(self._batch_size):
            packing.fill_row(self._tokens, self._rows.pieces(first + row), batch, row)
        return batch


class DataPositionError(ValueError):
    """A saved position cannot be used with the data of this run."""


class BatchIterator(grain.DatasetIterator):
    """Iterates over `Batches`; its state is the number of batches taken and what they come from.

    Nothing is read and no worker starts before the first batch is asked for, so restoring a
    position costs nothing; and the position does not depend on the number of workers, on what
    they have read ahead, or on the number of processes that share the rows.
    """

    def __init__(self, batches: Batches, identity: dict[str, Any], num_workers: int):
        """Starts at the first batch.

        Args:
          batches: what to read.
          identity: what the stream is a function of (JSON); a state of another one is refused.
          num_workers: reader processes; 0 reads in a thread of this process.
        """
        super().__init__()
        self._batches = batches
        identity = identity | {"order": _order_drawn()}
        self._identity = json.loads(json.dumps(identity))
        self._num_workers = num_workers
        self._step = 0
        self._readers: list[Any] = []  # the open reader, if any
        # A reader must end before the modules that it needs: with this object, or at exit.
        weakref.finalize(self, _close_all, self._readers)
        self._refused: DataPositionError | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        if self._refused is not None:
            raise self._refused
        if self._readers:
            batch = next(self._readers[0])
        else:
            with _workers_may_start():
                self._readers.append(self._open())
                batch = next(self._readers[0])
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position: the next batch's number, and what the stream is a function of."""
        if self._refused is not None:
            raise self._refused
        return {"step": self._step, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position of `get_state`.

        Raises:
          DataPositionError: the position is of another stream (other text, tokenizer, length,
            batch or seed), where it would mean other batches.
        """
        # Positions saved before "order" was kept are taken as they are.
        theirs = {"order": _order_drawn()} | state
        del theirs["step"]
        for name in sorted(theirs.keys() | self._identity.keys()):
            if theirs.get(name) != self._identity.get(name):
                raise DataPositionError(
                    f"the saved position in the data is of {name}={theirs.get(name)!r}, and this "
                    f"run has {name}={self._identity.get(name)!r}; resume with the data, "
                    "tokenizer, Python and NumPy that the run began with"
                )
        self.close_reader()
        self._refused = None
        self._step = int(state["step"])

    async def load(self, directory: Any) -> Any:
        """Orbax's entry: returns a coroutine that moves to the position saved in `directory`.

        Every process saves the same position, each in a file named after its number and the
        number of processes; any of them will do, so a run may go on with another number. Orbax
        hides what is raised in here and takes the checkpoint for broken, so a position of other
        data is refused by the next use of the iterator.
        """

        async def load_any() -> None:
            paths = sorted(directory.glob("process_*.json"))
            if not paths:
                raise FileNotFoundError(f"{directory} holds no position in the data")
            try:
                self.set_state(json.loads(paths[0].read_text()))
            except DataPositionError as error:
                self._refused = error

        return load_any()

    def close(self) -> None:
        """Ends the reader; the iterator is not used again."""
        self.close_reader()
        super().close()

    def close_reader(self) -> None:
        """Ends the workers; the next batch starts new ones."""
        if self._readers:  # empty at exit, when this module's names may be gone
            _close_all(self._readers)

    def _open(self) -> Any:
        data = grain.MapDataset.source(self._batches)[self._step :]
        read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        data = data.to_iter_dataset(read)
        if self._num_workers:
            options = grain.MultiprocessingOptions(
                num_workers=self._num_workers, per_worker_buffer_size=2
            )
            data = data.mp_prefetch(options)
            # Batches come through pipes: shared memory is small in containers (64 MB in Docker),
            # and what is in it when a process ends is reported as leaked.
            piped = grain.experimental.DatasetOptions(min_shm_size=2**40)
            data = grain.experimental.WithOptionsIterDataset(data, piped)
        return iter(data)


@functools.cache
def _order_drawn() -> str:
    """What this NumPy draws as an order; NumPy does not promise the same in all versions."""
    drawn = np.random.default_rng([0, 0]).permutation(2**12).astype("<i8")
    return hashlib.sha256(drawn.tobytes()).hexdigest()[:8]


def _close_all(readers: list[Any]) -> None:
    """Ends the readers and empties the list, so that nothing of them outlives this call."""
    while readers:
        readers.pop().close()


@contextlib.contextmanager
def _workers_may_start() -> Iterator[None]:
    """While entered, grain's worker processes can start from a script, a test or a notebook.

    Two things stand in the way elsewhere. grain reads absl flags once jax is imported, which fails
    before absl's app.run has parsed them. And Python's "spawn" imports the main script in each
    worker, which runs a script without an ``if __name__ == "__main__"`` guard a second time; the
    workers need nothing from it, so it is hidden from them.
    """
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in vars(main)}
    unparsed = not flags.FLAGS.is_parsed()
    if unparsed:
        flags.FLAGS.mark_as_parsed()
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
        if unparsed:
            flags.FLAGS.unparse_flags()
