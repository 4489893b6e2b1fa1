"""Trains a model on its task: `main(config, workdir)` reads top to bottom.

The exit codes tell a scheduler what happened: 0 the run is finished; 1 it could not start or
failed; 3 too many steps in a row were not finite; 128 + n it was ended by signal n (SIGTERM is
143), its state is saved, and the same command goes on from there.
"""

import dataclasses
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from ttt_jax import checkpoint, evaluate, metrics, optim, processes, progress, sharding, workdirs
from ttt_jax import config as config_lib
from ttt_jax.metrics import note
from ttt_jax.tasks import Result, Task, make_task
from ttt_jax.train_step import Trainee, TrainState, make_train_step, make_trainee

EXIT_NOT_FINITE = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What the loop needs besides the state."""

    config: Any
    task: Task
    trainee: Trainee
    batches: Iterator[dict[str, np.ndarray]]
    placement: jax.sharding.NamedSharding
    checkpoints: checkpoint.Checkpoints
    log: metrics.MetricsLog
    measure: Callable[[TrainState, int], Result]
    stop: "StopSignal"


def main(config: Any, workdir: str | os.PathLike[str]) -> int:
    """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

    A resumed run is bit for bit the uninterrupted one on the same devices: parameters, optimizer
    and data position come from the checkpoint, and nothing else varies from run to run.

    Args:
      config: a `ttt_jax.config.Config`.
      workdir: folder for checkpoints, config.json, metrics.jsonl, evaluation.json, loss.png and
        the task's pictures.

    Returns:
      The process's exit code, see the head of this module.

    Raises:
      ValueError: the configuration breaks a rule, or is another one in another process, or
        `config.train.init_from` is of another model; nothing was written.
      CheckpointError: `workdir` cannot be used, or `config.train.init_from` cannot be read, and
        nothing was written; or a checkpoint could not be written.
    """
    # ------------------------------------------------------------------ configuration
    config.validate()
    if not processes.all_equal(list(config_lib.to_json(config).encode())):
        raise ValueError("the processes of this run were started with different flags")
    workdirs.check_workdir(workdir, config)
    if (done := _finished_message(workdir, config.train.steps)) is not None:
        note(done)
        return 0

    # ------------------------------------------------------------------ devices
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    note(f"Devices: {mesh.size} x {jax.devices()[0].device_kind} ({shape})")

    # ------------------------------------------------------------------ data
    task = make_task(config)
    rows = config.data.batch_size // config.train.accumulation_steps
    placement = sharding.batch_sharding(mesh, rows, task.rows)
    note(task.describe())
    train_batches = task.batches("train", mesh)

    # ------------------------------------------------------------------ model and optimizer
    averaged = config.train.ema_decay > 0
    trainee = make_trainee(
        config.model, config.optimizer, config.train.steps, mesh, averaged=averaged
    )
    params = trainee.abstract.params
    name = f"{type(config.model).__name__}, {sum(x.size for x in jax.tree.leaves(params)):,} values"
    note(f"Model: {name}; parameters by optimizer rule:")
    note(optim.describe_rules(trainee.names, params, config.optimizer))

    initial = None
    if processes.all_true(not workdirs.holds_checkpoints(workdir)):  # else what it holds goes on
        # Read before anything is written. The steps need more memory: gradients beside the state.
        initial = checkpoint.find_initial(config, trainee)

    with workdirs.alone_in(workdir):
        # ------------------------------------------------------------------ state: resumed or new
        checkpoints = checkpoint.Checkpoints(workdir, config.train.keep)
        state = checkpoints.restore(trainee.abstract, train_batches)
        if state is None:
            initial = initial or checkpoint.find_initial(config, trainee)
            state = checkpoint.new_state(trainee, config.train.seed, initial and initial.values)
            note(f"A new run in {workdir}" + (f", from the {initial}" if initial else ""))
        else:
            note(f"Resuming at step {int(state.step)} of {config.train.steps} in {workdir}")
        initial = None  # the state's alone from now on
        if processes.is_first():
            workdirs.write_config(workdir, config)
        log = metrics.MetricsLog(workdir, int(state.step))

        # ------------------------------------------------------------------ training
        def measure(state: TrainState, max_batches: int) -> Result:
            params, buffers = state.best_params(), state.buffers
            return task.evaluate(trainee.graphdef, params, buffers, mesh, max_batches)

        with StopSignal() as stop, jax.set_mesh(mesh):
            run = _Run(
                config=config,
                task=task,
                trainee=trainee,
                batches=train_batches,
                placement=placement,
                checkpoints=checkpoints,
                log=log,
                measure=measure,
                stop=stop,
            )
            state, code = _run_steps(run, state)
        checkpoints.close()

        # ------------------------------------------------------------------ evaluation and plot
        if code == 0:
            _evaluate(run, state, pathlib.Path(workdir))
        log.close()
        if processes.is_first() and (plot := metrics.plot_loss(workdir, name, task.loss_name)):
            note(f"Loss plot: {plot}")
        processes.all_true(True)  # none leaves while another still writes
    return code


def _evaluate(run: _Run, state: TrainState, workdir: pathlib.Path) -> None:
    """Evaluates the finished run over everything held out, and writes report and pictures."""
    step, result = int(state.step), run.measure(state, 0)
    run.log.write(step, "eval", result.metrics)
    evaluate.print_report(step, result)
    parts = (run.trainee.graphdef, state.best_params(), state.buffers)
    for path in run.task.artefacts(*parts, workdir):
        note(f"Picture: {path}")
    evaluate.write_report(workdir, step, result)


def _run_steps(run: _Run, state: TrainState) -> tuple[TrainState, int]:
    """Runs the steps that are left, and saves the last one; returns the state and exit code."""
    train = run.config.train
    train_step = make_train_step(
        run.trainee,
        run.task.loss,
        accumulation_steps=train.accumulation_steps,
        ema_decay=train.ema_decay,
    )
    abstract = run.trainee.abstract
    model = nnx.merge(run.trainee.graphdef, abstract.params, abstract.buffers)
    flops = 3 * run.task.flops_per_step(model)
    reporter = progress.Reporter(run.log, train.steps, train.log_every, run.task.counted, flops)
    first, code = int(state.step), 0
    for step in range(first + 1, train.steps + 1):
        _profile(step - first, train.profile_steps, run.log.path.parent / "profile")
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with reporter.timing("data"):
                batch = next(run.batches)
            batch = sharding.place_batch(batch, run.placement)
            asked_to_stop = processes.largest(run.stop.exit_code)
            state, values = train_step(state, batch)
        reporter.add(step, values)
        if train.eval_every and step % train.eval_every == 0 and step < train.steps:
            reporter.flush()
            result = run.measure(state, train.eval_batches)
            run.log.write(step, "eval", result.metrics)
            note(f"step {step}: {result.summary}")
            reporter.restart()
        too_many = reporter.skipped_in_a_row > train.max_nonfinite_steps
        code = EXIT_NOT_FINITE if too_many else int(asked_to_stop)
        if code:
            break
        if step % train.save_every == 0 and step < train.steps:
            with reporter.timing("checkpoint"):
                run.checkpoints.save(step, state, run.batches, run.config)
    reporter.flush()
    if reporter.skipped_in_a_row > train.max_nonfinite_steps:
        code = EXIT_NOT_FINITE
    if int(state.step) not in run.checkpoints.steps():
        run.checkpoints.save(int(state.step), state, run.batches, run.config)
    run.checkpoints.wait()
    if code == EXIT_NOT_FINITE:
        note(
            f"{reporter.skipped_in_a_row} steps in a row were not finite, and at most "
            f"config.train.max_nonfinite_steps={train.max_nonfinite_steps} are borne. If a part "
            "of the data is at fault, the same command goes on behind it, and gets further with a "
            "larger config.train.max_nonfinite_steps; if the training has diverged, begin anew "
            "in another --workdir with a lower learning rate"
        )
    if int(state.step) > first:
        note(f"Steps {first + 1} to {int(state.step)}: {reporter.summary()}")
    if code:
        note(f"Stopped at step {int(state.step)} with exit code {code}; the state is saved")
    return state, code


def _profile(done: int, count: int, folder: pathlib.Path) -> None:
    """Starts and stops the profiler around `count` steps, after the first three of a process."""
    if count and done == 4:
        jax.profiler.start_trace(str(folder))
    if count and done == 4 + count:
        jax.profiler.stop_trace()


def _finished_message(workdir: str | os.PathLike[str], steps: int) -> str | None:
    """Says that the run in `workdir` has its evaluation at `steps` or later; else None."""
    result = evaluate.read_report(workdir)
    if result is None or result["step"] < steps:
        return None
    past = f", past the {steps} asked for" if result["step"] > steps else ""
    return (
        f"The run in {workdir} is finished: step {result['step']}{past}, {result['summary']}. "
        "Nothing to do; give another --workdir for a new run"
    )


class StopSignal:
    """While entered, SIGTERM and Ctrl-C ask the loop to save and end; a second one ends at once.

    >>> with StopSignal() as stop:
    ...     stop.exit_code
    0
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        # Python lets only the main thread set handlers; elsewhere signals act as usual.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, _frame: Any) -> None:
        self.exit_code = 128 + signum
        signal.signal(signum, self._before[signum])
        note(f"{signal.Signals(signum).name}: saving and ending after this step")

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
