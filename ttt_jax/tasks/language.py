"""Language modelling: the next token's loss, and perplexity over a held-out split."""

import functools
import math
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttt_jax import processes
from ttt_jax.data import text
from ttt_jax.data.duplicates import warn_of_shared
from ttt_jax.data.tokenizers import load_tokenizer
from ttt_jax.objective import make_token_loss, token_losses
from ttt_jax.tasks.base import Result, place_whole_rows, rows_to_read
from ttt_kernels import compat

Batch = dict[str, jax.Array]


class Language:
    """Next-token prediction on text; a `ttt_jax.tasks.base.Task`.

    A batch holds tokens, targets, segment_ids int32 and weights float32, each [B, T].
    """

    counted = "tokens"
    loss_name = "loss (nats per token)"
    rows = "batch"

    def __init__(self, config: Any):
        """Loads the tokenizer and checks it against the model.

        Args:
          config: a `ttt_jax.config.Config` whose data is a `DataConfig`.

        Raises:
          ValueError: the tokenizer cannot be loaded, or has more ids than the model has
            embeddings.
        """
        self.data = config.data
        self.loss_chunk = config.train.loss_chunk
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        if self.tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"config.model.vocab_size={config.model.vocab_size} is too small for the "
                f"tokenizer {config.data.tokenizer!r}, which has {self.tokenizer.vocab_size} ids"
            )

    def describe(self) -> str:
        """Names the text and its hash; perplexities compare only where that is the same.

        Warns of held-out documents that are trained on, too.
        """
        corpus = text.corpus_hash(self.data, self.tokenizer)
        if processes.is_first():
            found = text.shared_documents(self.data, self.tokenizer)
            warn_of_shared(*found, "documents", "tokens", self.data.source)
        return f"Text: {self.data.source!r} as {self.data.tokenizer}, hash {corpus}"

    def batches(self, split: str, mesh: Mesh | None = None) -> Any:
        """Opens this process's rows of a split, "train" or "eval" (see `Task.batches`)."""
        rows, block, blocks = rows_to_read(self.data.batch_size, mesh)
        return text.text_iterator(
            self.data,
            self.tokenizer,
            split=split,
            sequence_length=self.data.sequence_length,
            batch_size=rows,
            seed=self.data.shuffle_seed,
            process_index=block,
            process_count=blocks,
        )

    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of a batch."""
        shape = (self.data.batch_size, self.data.sequence_length)
        names = {"tokens": np.int32, "targets": np.int32, "segment_ids": np.int32}
        names["weights"] = np.float32
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in names.items()}

    def loss(
        self, model: nnx.Module, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Sums the negative log-likelihood over the tokens that count (see `Task.loss`)."""
        loss = make_token_loss(self.loss_chunk)
        return loss(model, _seen(batch, self.data.separates_documents()), key)

    def flops_per_step(self, model: nnx.Module) -> float:
        """Counts every position of a batch; padding costs as much to compute."""
        positions = self.data.batch_size * self.data.sequence_length
        return positions * model.flops_per_token(self.data.sequence_length)

    def evaluate(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, mesh: Mesh, max_batches: int = 0
    ) -> Result:
        """Computes the perplexity over all tokens of the split, and by position.

            loss = sum of nll over the tokens with weight > 0 / their number, in float64

        Raises:
          ValueError: the split holds no token to predict.
        """
        sums = Sums()
        eval_step = _eval_step(mesh, self.loss_chunk, self.data.separates_documents())
        with jax.set_mesh(mesh):
            for number, batch in enumerate(self.batches("eval", mesh), start=1):
                out = eval_step(graphdef, params, buffers, place_whole_rows(batch, mesh))
                sums.add(*(np.asarray(x) for x in out))
                if number == max_batches:
                    break
        return sums.result(self._unigram)

    @functools.cached_property
    def _unigram(self) -> float:
        return text.unigram_baseline(self.data, self.tokenizer)

    def artefacts(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, workdir: pathlib.Path
    ) -> list[pathlib.Path]:
        """Draws nothing; `launch/generate.py` writes samples."""
        return []


@functools.cache
def _eval_step(mesh: Mesh, loss_chunk: int, documents: bool) -> Any:
    """Compiles the loss of each token; the result is whole on every process."""

    def eval_step(graphdef, params, buffers, batch):
        model = nnx.merge(graphdef, params, buffers)
        nll = token_losses(model, _seen(batch, documents), loss_chunk)[0]
        return nll, batch["weights"], batch["segment_ids"]

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        eval_step,
        static_argnums=0,
        out_shardings=whole,
        compiler_options=compat.program_options(),
    )


def _seen(batch: dict[str, Any], documents: bool) -> dict[str, Any]:
    """Leaves out segment_ids where a row counts as one document."""
    return {name: x for name, x in batch.items() if documents or name != "segment_ids"}


class Sums:
    """Sums of token losses by position in the document, in float64 on the host.

    >>> sums = Sums()
    >>> sums.add(np.full((1, 3), np.log(2.0)), np.array([[1.0, 1.0, 0.0]]), np.zeros((1, 3), int))
    >>> round(sums.result(unigram=5.0).metrics["perplexity"], 6)
    2.0
    """

    def __init__(self) -> None:
        self._losses = np.zeros(0)
        self._counts = np.zeros(0, np.int64)

    def add(self, nll: np.ndarray, weights: np.ndarray, segment_ids: np.ndarray) -> None:
        """Adds the tokens of a batch whose weight is above 0; each array is [B, T]."""
        real = weights > 0
        positions = document_positions(segment_ids)[real]
        size = max(self._losses.size, real.shape[1])
        growth = (0, size - self._losses.size)
        self._losses, self._counts = np.pad(self._losses, growth), np.pad(self._counts, growth)
        self._losses += np.bincount(positions, weights=nll[real], minlength=size)
        self._counts += np.bincount(positions, minlength=size)

    def result(self, unigram: float) -> Result:
        """Returns the perplexity beside that of token frequencies.

        Raises:
          ValueError: no token was added.
        """
        tokens = int(self._counts.sum())
        if tokens == 0:
            raise ValueError(
                "the evaluation split holds no token to predict; is eval_fraction tiny?"
            )
        loss = float(self._losses.sum() / tokens)
        perplexity = _exp(loss)
        metrics = {"perplexity": perplexity, "loss": loss, "unigram_perplexity": unigram}
        ranges = _ranges(self._losses, self._counts)
        lines = ["position in document      tokens  perplexity"]
        for first, last, count, value in ranges:
            lines.append(f"{f'{first} to {last}':>20}  {count:>10,}  {value:>10.3f}")
        return Result(
            metrics=metrics,
            summary=f"held-out perplexity {perplexity:.3f} over {tokens:,} tokens; "
            f"unigram baseline {unigram:.3f}",
            table="\n".join(lines),
            details={"tokens": tokens, "by_position": ranges},
        )


def document_positions(segment_ids: np.ndarray) -> np.ndarray:
    """Counts each token's position in its document.

    Args:
      segment_ids: int32 [B, T]; a document is a run of equal ids.

    Returns:
      int64 [B, T], 0 at the first token of each run.

    >>> document_positions(np.array([[0, 0, 1, 1, 1, -1]]))
    array([[0, 1, 0, 1, 2, 0]])
    """
    index = np.arange(segment_ids.shape[1])[None]
    starts = np.ones(segment_ids.shape, bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def _ranges(losses: np.ndarray, counts: np.ndarray) -> tuple[tuple[int, int, int, float], ...]:
    """(first, last, tokens, perplexity) of the positions 0..15, 16..31, 32..63, ... with tokens."""
    ranges = []
    first, stop = 0, 16
    while first < counts.size:
        tokens = int(counts[first:stop].sum())
        if tokens:
            mean = float(losses[first:stop].sum() / tokens)
            ranges.append((first, min(stop, counts.size) - 1, tokens, _exp(mean)))
        first, stop = stop, 2 * stop
    return tuple(ranges)


def _exp(loss: float) -> float:
    """exp of a mean loss, infinite instead of an OverflowError."""
    return math.exp(loss) if loss < 700.0 else math.inf
