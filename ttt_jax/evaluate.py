"""Perplexity of a language model over a held-out split: exact, over all tokens, by position."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttt_jax import sharding
from ttt_jax.checkpoint import load_model
from ttt_jax.inputs import open_inputs
from ttt_jax.metrics import note
from ttt_jax.train_step import token_losses

REPORT = "evaluation.json"

EvalStep = Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The result of an evaluation.

    Attributes:
      tokens: number of predicted tokens, each counted once.
      loss: mean negative log-likelihood, nats per token.
      by_position: (first, last, tokens, perplexity) for ranges of the position in the document,
        0 being its first token (the first prediction is that of token 1), last included.
    """

    tokens: int
    loss: float
    by_position: tuple[tuple[int, int, int, float], ...]

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return _exp(self.loss)

    def table(self) -> str:
        """Writes the perplexity by position as aligned lines."""
        lines = ["position in document      tokens  perplexity"]
        for first, last, tokens, perplexity in self.by_position:
            lines.append(f"{f'{first} to {last}':>20}  {tokens:>10,}  {perplexity:>10.3f}")
        return "\n".join(lines)


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


def make_eval_step(
    graphdef: nnx.GraphDef, mesh: Mesh, loss_chunk: int, documents: bool = True
) -> EvalStep:
    """Compiles the loss of each token.

    Args:
      graphdef: the model without its parameters.
      mesh: the device mesh.
      loss_chunk: positions of each row whose logits exist at one time.
      documents: whether the model keeps the documents of a row apart.

    Returns:
      A function (params, batch) -> (nll float32, weights float32, segment_ids int32), each
      [B, T] and whole on every process, so that every process sums over all rows.
    """

    def eval_step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        seen = batch if documents else without_documents(batch)
        nll = token_losses(nnx.merge(graphdef, params), seen, loss_chunk)[0]
        return nll, batch["weights"], batch["segment_ids"]

    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def without_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """Leaves out segment_ids, so that a row counts as one document."""
    return {name: value for name, value in batch.items() if name != "segment_ids"}


def evaluate(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
    max_batches: int = 0,
) -> Perplexity:
    """Computes the perplexity over all batches.

        loss = sum of nll over the tokens with weight > 0 / their number,   in float64 on the host

    Args:
      eval_step: of `make_eval_step`.
      params: the model's parameters.
      batches: dicts of tokens, targets, segment_ids int32 [B, T] and weights float32 [B, T], all
        of one shape; rows without data have weight 0.
      mesh: the mesh on which `eval_step` runs.
      max_batches: stop after so many; 0 takes all.

    Returns:
      The perplexity.

    Raises:
      ValueError: the batches hold no token to predict.
    """
    losses = np.zeros(0)
    counts = np.zeros(0, np.int64)
    with jax.set_mesh(mesh):
        for number, batch in enumerate(batches, start=1):
            rows = batch["tokens"].shape[0] * jax.process_count()
            placement = sharding.batch_sharding(mesh, rows)
            out = eval_step(params, sharding.place_batch(batch, placement))
            nll, weights, segment_ids = (np.asarray(x) for x in out)
            real = weights > 0
            positions = document_positions(segment_ids)[real]
            size = max(losses.size, real.shape[1])
            losses = np.pad(losses, (0, size - losses.size))
            counts = np.pad(counts, (0, size - counts.size))
            losses += np.bincount(positions, weights=nll[real], minlength=size)
            counts += np.bincount(positions, minlength=size)
            if number == max_batches:
                break
    if counts.sum() == 0:
        raise ValueError("the evaluation split holds no token to predict; is eval_fraction tiny?")
    return Perplexity(
        tokens=int(counts.sum()),
        loss=float(losses.sum() / counts.sum()),
        by_position=_ranges(losses, counts),
    )


def print_report(step: int, result: Perplexity, unigram: float) -> None:
    """Prints an evaluation beside the perplexity of the unigram baseline."""
    note(
        f"Held-out perplexity at step {step}: {result.perplexity:.3f} over {result.tokens:,} "
        f"tokens; unigram baseline {unigram:.3f}"
    )
    note(result.table())


def write_report(
    workdir: str | os.PathLike[str], step: int, result: Perplexity, unigram: float
) -> None:
    """Writes evaluation.json, which marks the run as finished, in one piece or not at all.

    Args:
      workdir: the run's folder.
      step: the step of the parameters.
      result: of `evaluate`.
      unigram: held-out perplexity of token frequencies, the baseline.
    """
    record = {"step": step, "perplexity": result.perplexity, "unigram_perplexity": unigram}
    record |= {"loss": result.loss, "tokens": result.tokens, "by_position": result.by_position}
    path = pathlib.Path(workdir) / REPORT
    if jax.process_index() == 0:
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(record, indent=2) + "\n")
        draft.replace(path)


def read_report(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns what `write_report` wrote for the run in `workdir`, or None if it has not ended.

    >>> read_report("/no/such/folder") is None
    True
    """
    path = pathlib.Path(workdir) / REPORT
    return json.loads(path.read_text()) if path.exists() else None


def evaluate_workdir(
    workdir: str | os.PathLike[str], step: int | None = None, source: str | None = None
) -> tuple[int, Perplexity, float]:
    """Evaluates a trained model, on its own held-out split or on that of another text.

    Args:
      workdir: the run's folder.
      step: the checkpoint's step; None takes the newest that can be read.
      source: another `config.data.source`; None keeps the run's own.

    Returns:
      (step, perplexity, perplexity of the unigram baseline on the same split).

    Raises:
      CheckpointError: there is no run, or no readable checkpoint, in `workdir`.
      ValueError: the text cannot be read, or holds no token to predict.
    """
    config, model, step = load_model(workdir, step)
    if source is not None:
        config.data.source = source
    inputs = open_inputs(config)
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh()
    documents = config.data.separates_documents()
    eval_step = make_eval_step(graphdef, mesh, config.train.loss_chunk, documents)
    result = evaluate(eval_step, nnx.to_pure_dict(params), inputs.batches("eval"), mesh)
    return step, result, inputs.unigram_perplexity()


def _ranges(losses: np.ndarray, counts: np.ndarray) -> tuple[tuple[int, int, int, float], ...]:
    """Sums over the ranges 0..15, 16..31, 32..63, ... (doubling) that hold tokens."""
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
