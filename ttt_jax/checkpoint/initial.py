"""The state that a run begins with: parameters that are drawn, or those of another run."""

import contextlib
import dataclasses
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from ttt_jax import config as config_lib
from ttt_jax.checkpoint.leaves import check_leaves, leaf_table
from ttt_jax.checkpoint.manager import Checkpoints
from ttt_jax.train_step import Trainee, TrainState, init_state
from ttt_jax.workdirs import CheckpointError, holds_checkpoints, read_config

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Parameters of another run that a new one begins with.

    Attributes:
      workdir: the other run's folder.
      step: its checkpoint.
      part: of the checkpoint, "params" or their "average".
      differences: of the other run's model and tokenizer, (field, here, there) each.
      values: (parameters, running statistics), nested dicts of arrays on the new run's devices.
    """

    workdir: pathlib.Path
    step: int
    part: str
    differences: list[tuple[str, Any, Any]]
    values: tuple[Any, Any] = ({}, {})

    def __str__(self) -> str:
        """Says whose they are, and in what its model is another."""
        listed = "; ".join(f"{n} is {b!r} there, {a!r} here" for n, a, b in self.differences)
        return f"{self.part} of {self.workdir}, step {self.step}" + (listed and f" ({listed})")


def find_initial(config: Any, trainee: Trainee) -> InitialWeights | None:
    """Reads the parameters that ``config.train.init_from`` names, once it is sure that they fit.

    Args:
      config: the new run's configuration.
      trainee: the new run's; its mesh takes them.

    Returns:
      The parameters, or None where ``init_from`` is empty.

    Raises:
      CheckpointError: there is no run or no such checkpoint, or it cannot be read.
      ValueError: the other model has another leaf, or one of another shape or dtype, which is named
        with both shapes.
    """
    where = config.train.init_from
    if not where:
        return None
    try:
        workdir, step = _find_run(where)
        theirs = read_config(workdir)
        with contextlib.closing(Checkpoints(workdir)) as checkpoints:
            steps = checkpoints.steps()
            if step is not None and step not in steps:
                raise CheckpointError(f"step={step}: {workdir} holds the steps {steps}")
            step = steps[-1] if step is None else step
            found = InitialWeights(
                workdir=workdir,
                step=step,
                part="average" if theirs.train.ema_decay > 0 else "params",
                differences=[
                    change
                    for change in config_lib.differences(config, theirs)
                    if change[0].startswith("model") or change[0] == "data.tokenizer"
                ],
            )
            try:
                _check_fit(found, checkpoints.leaves(step), trainee)
                values, _, _ = checkpoints.restore_parts(_parts(found.part, trainee), step)
            except CheckpointError as error:
                others = [other for other in steps if other != step]
                named = f" (config.train.init_from={workdir / str(others[-1])})" if others else ""
                raise CheckpointError(f"{error}{named}") from error
    except CheckpointError as error:
        raise CheckpointError(f"config.train.init_from={where!r}: {error}") from error
    for name, here, there in found.differences:
        if name == "data.tokenizer":
            logger.warning(
                "config.train.init_from: %s is %r in %s and %r here: unless they are the same "
                "tokenizer, every embedding means another token than it was trained for",
                name, there, workdir, here,
            )  # fmt: skip
    return dataclasses.replace(found, values=(values[found.part], values.get("buffers", {})))


def _check_fit(found: InitialWeights, saved: dict[str, list[Any]], trainee: Trainee) -> None:
    """Compares a checkpoint's leaves with the new run's. Raises ValueError."""
    path = found.workdir / "checkpoints" / str(found.step)
    wanted = leaf_table(_parts(found.part, trainee))
    advice = f"config.train.init_from needs a model of the same arrays: {found}"
    check_leaves(saved, wanted, path, advice)
    for name, have in saved.items():
        if name.split("/")[0] in (found.part, "buffers") and name not in wanted:
            raise ValueError(
                f"checkpoint {path}: {name} is {have} there and missing in this run (shape, "
                f"dtype); {advice}"
            )


def new_state(trainee: Trainee, seed: int, values: tuple[Any, Any] | None = None) -> TrainState:
    """Creates the state at step 0.

    Args:
      trainee: of the run.
      seed: of the random numbers.
      values: parameters and running statistics, nested dicts of arrays; None draws them.

    Returns:
      The state. The optimizer's fresh state does not depend on the parameters' values.
    """
    state = init_state(trainee, seed)
    if values is None:
        return state
    averaged = bool(state.average)
    state = state._replace(params={}, buffers={}, average={})  # room for those that come
    params, buffers = values
    params = jax.device_put(params, trainee.shardings.params)
    return state._replace(
        params=params,
        buffers=jax.device_put(buffers, trainee.shardings.buffers),
        average=jax.tree.map(jnp.copy, params) if averaged else {},
    )


def _parts(part: str, trainee: Trainee) -> dict[str, Any]:
    """Shapes and shardings of what is read, as of `Checkpoints.restore_parts`."""
    buffers = trainee.abstract.buffers
    return {part: trainee.abstract.params} | ({"buffers": buffers} if buffers else {})


def _find_run(where: str) -> tuple[pathlib.Path, int | None]:
    """Parts WORKDIR[/STEP], or WORKDIR/checkpoints/STEP, which is where the step lies."""
    path = pathlib.Path(where).expanduser()
    choices = [(path, None)]
    if path.name.isdigit():
        step = int(path.name)
        choices += [(path.parent, step)]
        choices += [(path.parent.parent, step)] if path.parent.name == "checkpoints" else []
    for folder, step in choices:
        if (folder / "config.json").is_file():
            if not holds_checkpoints(folder):
                raise CheckpointError(
                    f"{folder} holds a run without a checkpoint; wait for its first one, or name "
                    "another run"
                )
            return folder, step
    raise CheckpointError(
        "there is no run (a folder with config.json); give WORKDIR or WORKDIR/STEP of "
        "launch/train.py, or of launch/convert.py, which makes one from official weights"
    )
