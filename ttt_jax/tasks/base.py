"""What a training run must know about its task: data, loss, evaluation, pictures.

The trainer is the same for language, classification and view synthesis; a task is one object of
the type below, made from the run's configuration by `ttt_jax.tasks.make_task`.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ttt_jax import sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What an evaluation found.

    Attributes:
      metrics: numbers by name, the headline first, trivial baselines among them.
      summary: the result in one line, with its baselines.
      table: more, as aligned lines; may be empty.
      details: more, for evaluation.json; JSON values.
    """

    metrics: dict[str, float]
    summary: str
    table: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def headline(self) -> tuple[str, float]:
        """Name and value of the first metric.

        >>> Result(metrics={"top1": 0.5, "majority_top1": 0.1}, summary="").headline
        ('top1', 0.5)
        """
        return next(iter(self.metrics.items()))


class Task(Protocol):
    """One kind of work; made from a validated `ttt_jax.config.Config`.

    Attributes:
      counted: what a rate counts, a plural noun: "tokens", "images", "views".
      loss_name: the loss with its unit, the label of the plot: "loss (nats per token)".
      rows: logical name of a batch's rows (`ttt_jax.sharding`): "batch", or "images" where the
        devices along mesh.seq take rows of their own instead of parts of each row.
    """

    counted: str
    loss_name: str
    rows: str

    def __init__(self, config: Any):
        """Opens the data and checks it against the model.

        Raises:
          ValueError: the data cannot be read, or does not fit the model; nothing was written.
        """

    def describe(self) -> str:
        """Returns one line about the data, its hash included."""

    def batches(self, split: str, mesh: Mesh | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Opens this process's share of a split, from its beginning.

        Args:
          split: "train": endless; the batch is a function of (seed, step) alone. "eval": every
            example once, the last batch filled up with rows of weight 0.
          mesh: the device mesh, which says who reads which rows; None reads all of them here.

        Returns:
          A checkpointable iterator (`get_state`, `set_state`) of dicts of arrays, rows first.
        """

    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of one batch of all processes, without opening the data."""

    def loss(
        self, model: nnx.Module, batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Computes the loss of a batch as a sum and a count (a `ttt_jax.objective.Loss`).

        Args:
          model: in training: it may use `key` and change its running statistics.
          batch: some rows of a batch.
          key: random key of the step.

        Returns:
          (sum of weighted losses, float32 []; {"count": the sum of the weights, and statistics
          whose mean is reported}). Their quotient is the loss.
        """

    def flops_per_step(self, model: nnx.Module) -> float:
        """Returns the model FLOPs of a forward pass over one batch of all processes."""

    def evaluate(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, mesh: Mesh, max_batches: int = 0
    ) -> Result:
        """Evaluates over the held-out split.

        Args:
          graphdef, params, buffers: the parts of a model, as of `nnx.split`.
          mesh: the device mesh.
          max_batches: stop after so many batches; 0 takes all.
        """

    def artefacts(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, workdir: pathlib.Path
    ) -> list[pathlib.Path]:
        """Writes pictures of what the model does to `workdir`; returns their paths."""


def rows_to_read(
    batch_size: int, mesh: Mesh | None, rows: str = "batch"
) -> tuple[int, int, int]:
    """Says which rows of each batch this process reads.

    Args:
      batch_size: rows of a batch, over all processes.
      mesh: the device mesh; None for a process that reads all rows by itself.
      rows: the logical name of rows, `Task.rows`.

    Returns:
      (rows to read, number of this block of rows, number of blocks); see `sharding.row_block`.

    Raises:
      ValueError: the batch does not divide by the number of blocks.

    >>> rows_to_read(8, None)
    (8, 0, 1)
    """
    block, blocks = (0, 1) if mesh is None else sharding.row_block(mesh, rows)
    if batch_size % blocks:
        raise ValueError(
            f"config.data.batch_size={batch_size} must be a multiple of the {blocks} groups of "
            "processes that read rows of their own"
        )
    return batch_size // blocks, block, blocks


def place_whole_rows(
    batch: dict[str, np.ndarray], mesh: Mesh, rows: str = "batch"
) -> dict[str, jax.Array]:
    """Puts this process's rows of an evaluation batch on the devices of the mesh."""
    count = next(iter(batch.values())).shape[0] * sharding.row_block(mesh, rows)[1]
    return sharding.place_batch(batch, sharding.batch_sharding(mesh, count, rows))
