"""All experiments from one command: cells that resume, processes side by side, one report each."""

import ast
import contextlib
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ttt_jax import checkpoint, sharding, workdirs
from ttt_jax.config import DataConfig
from ttt_jax.data import mixture, shards, sources
from ttt_jax.data.tokenizers import load_tokenizer
from ttt_jax.experiments import ablation, length, paradoxes, recall, throughput
from ttt_jax.experiments.cells import Cell, Interrupted, Values, failures, run_cells
from ttt_jax.experiments.report import Report
from ttt_jax.experiments.systems import SCALES, TASKS
from ttt_jax.metrics import note
from ttt_jax.tasks import make_task
from ttt_jax.train_step import make_trainee


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
      experiments: keys of `EXPERIMENTS`, or "all".
      scale: one of `systems.SCALES`.
      tasks: of ablation and paradoxes, keys of `systems.TASKS`.
      models: of the ablation, titles; none given: all.
      seeds: seeds of each model.
      fields: dotted configuration fields of the language models to change.
      jobs: processes side by side.
      report: False runs the cells alone, as a process beside others does.
      command: the command line, for the report and for the processes side by side.
    """

    experiments: tuple[str, ...] = ("ablation",)
    scale: str = "tiny"
    tasks: tuple[str, ...] = tuple(TASKS)
    models: tuple[str, ...] = ()
    seeds: int = 3
    fields: Values = dataclasses.field(default_factory=dict)
    jobs: int = 1
    report: bool = True
    command: Sequence[str] = ()

    def names(self) -> tuple[str, ...]:
        """Returns the experiments, "all" spelled out.

        Raises:
          ValueError: a name, scale or task is unknown, or there is none.

        >>> Options(experiments=("all",)).names()
        ('ablation', 'paradoxes', 'throughput', ...'length')
        """
        names = tuple(EXPERIMENTS) if "all" in self.experiments else self.experiments
        for given, known, flag in (
            (names, tuple(EXPERIMENTS), "experiment"),
            ((self.scale,), SCALES, "scale"),
            (self.tasks, tuple(TASKS), "tasks"),
        ):
            if not given:
                raise ValueError(
                    f"{flag}='' is empty (an unset shell variable?); give --{flag} with some of "
                    f"{list(known)}"
                )
            unknown = [name for name in given if name not in known]
            if unknown:
                raise ValueError(f"{flag}={unknown[0]!r} must be one of {list(known)}")
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment: its title, its cells, and how their results become a report."""

    title: str
    cells: Callable[[Options], list[Cell]]
    report: Callable[[dict[str, Values], Report, pathlib.Path], None]


EXPERIMENTS = {
    "ablation": Experiment(
        "The six-step reduction",
        lambda o: ablation.cells(o.scale, o.seeds, o.tasks, o.models, o.fields),
        ablation.report,
    ),
    "paradoxes": Experiment(
        "Paradoxes of memorisation at test time",
        lambda o: paradoxes.cells(o.scale, o.seeds, o.tasks, o.fields),
        paradoxes.report,
    ),
    "throughput": Experiment(
        "Throughput of the layer", lambda o: throughput.cells(o.scale), throughput.report
    ),
    "recall": Experiment(
        "What the state holds", lambda o: recall.cells(o.scale, o.seeds), recall.report
    ),
    "length": Experiment(
        "Beyond the training length", lambda o: length.cells(o.scale, o.fields), length.report
    ),
}


def parse_fields(words: Sequence[str]) -> Values:
    """Reads "train.steps=5" and the like; a value that is no Python literal is text.

    Raises:
      ValueError: a word has no "=".

    >>> parse_fields(["train.steps=5", "data.source=books/*.txt"])
    {'train.steps': 5, 'data.source': 'books/*.txt'}
    """
    fields = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"set={word!r} must be field=value")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    return fields


def main(options: Options, workdir: str | os.PathLike[str]) -> int:
    """Runs the cells that are not done, and writes the reports.

    Args:
      options: what to run.
      workdir: folder for ``cells/`` and, per experiment, a folder with report.md.

    Returns:
      The exit code: 0; 1 if a cell failed; 128 + n if signal n ended a training.

    Raises:
      ValueError: an unknown name, a field that does not exist or names what is not there, or a
        workdir that cannot be written to; nothing was run.
    """
    names, root = options.names(), pathlib.Path(workdir)
    plan = {name: EXPERIMENTS[name].cells(options) for name in names}
    unique = list({cell.folder(root): cell for cells in plan.values() for cell in cells}.values())
    workdirs.check_output("workdir", workdir)
    waiting = [cell for cell in unique if not (cell.folder(root) / "result.json").exists()]
    _check_fields(options.fields, [cell.config for cell in waiting if cell.config is not None])
    root.mkdir(parents=True, exist_ok=True)
    if jax.config.jax_compilation_cache_dir is None:  # the seeds of a model share their programs
        jax.config.update("jax_compilation_cache_dir", str(root.resolve() / "compiled"))
    start = time.perf_counter()
    if options.jobs > 1:
        _side_by_side(options)
    try:
        results = run_cells(unique, root)
    except Interrupted as stopped:
        return stopped.exit_code
    if not options.report:
        return 0
    minutes = (time.perf_counter() - start) / 60
    for name, cells in plan.items():
        mine = {cell.name: results[cell.name] for cell in cells}
        path = _write_report(name, mine, root, options, minutes)
        note(f"Report: {path}")
    failed = failures(results)
    for name, message in failed.items():
        note(f"FAILED: {name}: {message}")
    return int(bool(failed))


def _check_fields(fields: Values, configs: Sequence[Any]) -> None:
    """Raises ValueError where data, tokenizer or weights that `fields` name are not there.

    Every cell would fail alike. Weights that fit some of the models are left to the cells.
    """
    for kind, config in {type(config.data): config for config in configs}.items():
        if "data.tokenizer" in fields:
            with _named("data.tokenizer", fields):
                load_tokenizer(config.data.tokenizer)
        if "data.source" in fields:
            with _named("data.source", fields):
                if kind is not DataConfig:
                    make_task(config)
                    continue
                for source, _ in mixture.parse(config.data.source):
                    if not shards.is_shard_folder(source):
                        sources.find_files(source)
    if not fields.get("train.init_from"):
        return
    misfits = []
    for config in {repr(config.model): config for config in configs}.values():
        mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
        parts = (config.model, config.optimizer, config.train.steps, mesh)
        trainee = make_trainee(*parts, averaged=config.train.ema_decay > 0)
        try:
            with _named("train.init_from", fields):
                checkpoint.find_initial(config, trainee)
            return
        except ValueError as error:
            misfits.append(error)
            if isinstance(error.__cause__, checkpoint.CheckpointError):
                break
    if misfits:
        raise misfits[0]


@contextlib.contextmanager
def _named(field: str, fields: Values) -> Iterator[None]:
    """Puts the flag that set a field before the message of an error."""
    try:
        yield
    except (ValueError, checkpoint.CheckpointError) as error:
        raise ValueError(f"--set={field}={fields[field]}: {error}") from error


def _side_by_side(options: Options) -> None:
    """Runs the command in `jobs` processes that share the cells; what fails runs again here."""
    command = [sys.executable, *options.command, "--jobs=1", "--noreport"]
    running = [subprocess.Popen(command) for _ in range(options.jobs)]
    try:
        for process in running:
            process.wait()
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        raise


def _write_report(
    name: str, results: dict[str, Values], root: pathlib.Path, options: Options, minutes: float
) -> pathlib.Path:
    """Writes the report of one experiment from the results of its cells."""
    command = shlex.join(["python", *options.command]) if options.command else "a call of main()"
    experiment = EXPERIMENTS[name]
    out = Report(experiment.title, root / name, command)
    wall, processor = (
        sum(values.get(name, 0.0) for values in results.values()) / 60
        for name in ("seconds", "processor_seconds")
    )
    out.text(
        f"Scale {options.scale}, {options.seeds} seeds (0 to {options.seeds - 1}), {len(results)} "
        f"cells that took {wall:.1f} minutes ({processor:.1f} of processor time) in all processes; "
        f"this run {minutes:.1f} minutes with {options.jobs} side by side."
    )
    skipped = {cell: values["skipped"] for cell, values in results.items() if values.get("skipped")}
    if skipped:
        listed = ", ".join(f"{cell} {count}" for cell, count in skipped.items())
        out.text(f"Steps left out because loss or gradient was not finite: {listed}.")
    for cell, message in failures(results).items():
        out.text(f"FAILED: {cell}: {message}")
    experiment.report(results, out, root)
    return out.write()
