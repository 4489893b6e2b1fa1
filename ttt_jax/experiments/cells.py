"""Cells of an experiment: each runs once, is kept, goes on where it was stopped, and fails alone.

A cell is a name, a function, and a key: the values on which its result depends. Its result is
JSON in ``cells/<name>/result.json``; a cell whose key has changed is run anew in a folder of its
own, so that no table mixes two configurations.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ttt_jax import config as config_lib
from ttt_jax import evaluate, metrics, train
from ttt_jax.metrics import note

logger = logging.getLogger(__name__)

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to run.

    Attributes:
      name: title, also of its folder; letters, digits and ``- . _``.
      key: JSON values on which the result depends.
      run: from the cell's folder to its result, JSON values.
      config: the `ttt_jax.config.Config` that it trains; None where it trains none.
    """

    name: str
    key: Values
    run: Callable[[pathlib.Path], Values]
    config: Any = None

    def folder(self, root: pathlib.Path) -> pathlib.Path:
        """Returns the cell's folder: its name and a hash of its key."""
        text = json.dumps(self.key, sort_keys=True)
        return root / "cells" / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class Interrupted(Exception):
    """A training inside a cell was ended by a signal; its state is saved."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


def run_cells(cells: Sequence[Cell], root: pathlib.Path) -> dict[str, Values]:
    """Runs the cells that are not done, one after the other.

    Several processes may do so at once: a cell that another one is running is left to it.

    Args:
      cells: what to run; names differ.
      root: folder of the experiments; cells with equal name and key are shared between them.

    Returns:
      Name -> result with the name of its "folder", its "seconds" and its "processor_seconds" of all
      cores; a cell that failed has {"failed": "Type: message"} and runs again next time; one left
      to another process is missing.

    Raises:
      Interrupted: a signal ended a training.
    """
    results = {}
    for number, cell in enumerate(cells, start=1):
        folder = cell.folder(root)
        done = folder / "result.json"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if done.exists():
                results[cell.name] = json.loads(done.read_text())
                continue
            note(f"\n=== {cell.name} ({number} of {len(cells)})")
            results[cell.name] = _run(cell, done)
        jax.clear_caches()
    return results


def _run(cell: Cell, done: pathlib.Path) -> Values:
    start, processor = time.perf_counter(), time.process_time()
    try:
        values = cell.run(done.parent)
    except Interrupted:
        raise
    except Exception as error:  # one failed cell must not cost the others
        logger.exception("cell %s failed", cell.name)
        return {"failed": f"{type(error).__name__}: {error}"}
    values = {
        **values,
        "folder": done.parent.name,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
    }
    draft = done.with_suffix(".tmp")
    draft.write_text(json.dumps(values, indent=2) + "\n")
    draft.replace(done)
    return values


def failures(results: dict[str, Values]) -> dict[str, str]:
    """Returns name -> message of the cells that failed.

    >>> failures({"a": {"loss": 1.0}, "b": {"failed": "ValueError: no"}})
    {'b': 'ValueError: no'}
    """
    return {name: v["failed"] for name, v in results.items() if "failed" in v}


def training_cell(name: str, config: Any, measure: Callable[[pathlib.Path], Values]) -> Cell:
    """A cell that trains a configuration and measures the result.

    Args:
      name: of the cell.
      config: a `ttt_jax.config.Config`; it is the key.
      measure: from the finished workdir to more values.

    Returns:
      The cell; its result holds the metrics of the evaluation, train_rate (median of the progress
      lines, in what the task counts a second), skipped (steps that were not finite and changed
      nothing), and what `measure` adds.
    """

    def run(folder: pathlib.Path) -> Values:
        code = train.main(config, folder)
        if code > 128:
            raise Interrupted(code)
        if code:
            raise RuntimeError(f"training ended with exit code {code}")
        report = evaluate.read_report(folder)
        lines = metrics.read_metrics(folder / "metrics.jsonl")
        lines = [line for line in lines if line["kind"] == "train"]
        rates = [
            value
            for line in lines
            for name, value in line.items()
            if name.endswith("_per_second") and value is not None
        ]
        found = {
            "train_rate": statistics.median(rates) if rates else None,
            "skipped": int(lines[-1]["skipped"]) if lines else 0,
        }
        return report | found | measure(folder)

    return Cell(name=name, key=config_lib.to_dict(config), run=run, config=config)
