"""Evaluation of a trained model by its task, and the report that marks a run as finished."""

import json
import os
import pathlib
from typing import Any

import jax

from ttt_jax import sharding, workdirs
from ttt_jax.checkpoint import load_arrays
from ttt_jax.metrics import note
from ttt_jax.tasks import Result, make_task

REPORT = "evaluation.json"


def print_report(step: int, result: Result) -> None:
    """Prints an evaluation beside its baselines."""
    note(f"Step {step}: {result.summary}")
    if result.table:
        note(result.table)


def write_report(workdir: str | os.PathLike[str], step: int, result: Result) -> None:
    """Writes evaluation.json, which marks the run as finished, in one piece or not at all.

    Args:
      workdir: the run's folder.
      step: the step of the parameters.
      result: of `Task.evaluate`.
    """
    record = {"step": step, "summary": result.summary} | result.metrics | result.details
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
    workdir: str | os.PathLike[str],
    step: int | None = None,
    source: str | None = None,
    pictures: str | os.PathLike[str] | None = None,
) -> tuple[int, Result, list[pathlib.Path]]:
    """Evaluates a trained model, on its own held-out split or on that of other data.

    Args:
      workdir: the run's folder.
      step: the checkpoint's step; None takes the newest that can be read.
      source: another `config.data.source`; None keeps the run's own.
      pictures: a folder for the task's pictures; None draws none.

    Returns:
      (step, result, paths of the pictures).

    Raises:
      CheckpointError: there is no run, or no readable checkpoint, in `workdir`.
      ValueError: the data cannot be read, its held-out split is empty, or `pictures` cannot be
        written to.
    """
    if pictures is not None:
        workdirs.check_output("pictures", pictures)
    loaded = load_arrays(workdir, step)
    if source is not None:
        loaded.config.data.source = source
    task = make_task(loaded.config)
    arrays = (loaded.graphdef, loaded.params, loaded.buffers)
    result = task.evaluate(*arrays, sharding.make_mesh())
    paths = []
    if pictures is not None:
        folder = pathlib.Path(pictures)
        folder.mkdir(parents=True, exist_ok=True)
        paths = task.artefacts(*arrays, folder)
    return loaded.step, result, paths
