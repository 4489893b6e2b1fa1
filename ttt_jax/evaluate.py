"""Evaluation of a trained model by its task, and the report that marks a run as finished."""

import json
import os
import pathlib
from typing import Any

import jax

from ttt_jax import sharding, workdirs
from ttt_jax.checkpoint import LoadedModel, load_arrays
from ttt_jax.metrics import note
from ttt_jax.tasks import Result, Task, make_task

REPORT = "evaluation.json"
HASHES = ("corpus", "images", "hash")  # of text, images and views, in a saved position


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
      source: another `config.data.source`, or the run's own, whatever it holds now; None takes the
        run's own, which must hold what the run was trained on.
      pictures: a folder for the task's pictures; None draws none.

    Returns:
      (step, result, paths of the pictures).

    Raises:
      CheckpointError: there is no run, or no readable checkpoint, in `workdir`.
      ValueError: the data cannot be read or is not that of the training, its held-out split is
        empty, or `pictures` cannot be written to.
    """
    if pictures is not None:
        workdirs.check_output("pictures", pictures)
    loaded = load_arrays(workdir, step)
    if source is not None:
        loaded.config.data.source = source
    task = make_task(loaded.config)
    if source is None:
        _check_data(task, loaded)
    arrays = (loaded.graphdef, loaded.params, loaded.buffers)
    result = task.evaluate(*arrays, sharding.make_mesh())
    paths = []
    if pictures is not None:
        folder = pathlib.Path(pictures)
        folder.mkdir(parents=True, exist_ok=True)
        paths = task.artefacts(*arrays, folder)
    return loaded.step, result, paths


def _check_data(task: Task, loaded: LoadedModel) -> None:
    """Raises ValueError unless the data is what the model was trained on.

    Other files share out anew what is held out, so that it may have been trained on.
    """
    if loaded.position is None:
        return
    ours, source = task.batches("train").get_state(), loaded.config.data.source
    for name in HASHES:
        theirs = loaded.position.get(name)
        if theirs is not None and theirs != ours.get(name):
            raise ValueError(
                f"config.data.source={source!r} has {name}={ours.get(name)!r} now, and checkpoint "
                f"{loaded.step} was trained on {name}={theirs!r}: what is held out now may have "
                f"been learnt; bring the data back, or give --source={source!r} to use it as it is"
            )
