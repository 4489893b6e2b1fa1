"""The checkpoints of a workdir: written in the background, read back, kept and set aside.

They lie in the workdir (see `ttt_jax.workdirs`) under ``checkpoints/<step>/``. Those that cannot be
read are moved to ``broken/`` once an older one is taken in their place; nothing is deleted. A
checkpoint appears under its name only once it is complete, so a killed process leaves none half
written; Orbax's API version 1 is used, and only here.
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint import v1 as ocp

from ttt_jax import config as config_lib
from ttt_jax import processes
from ttt_jax.checkpoint.leaves import check_leaves, leaf_table, parts_of
from ttt_jax.train_step import TrainState
from ttt_jax.workdirs import CheckpointError

logger = logging.getLogger(__name__)


class _NotWholeError(Exception):
    """Says why a checkpoint cannot be read."""


class Checkpoints:
    """The checkpoints of one workdir.

    Example (a run):

        checkpoints = Checkpoints(workdir, keep=3)
        restored = checkpoints.restore(trainee.abstract, iterator)     # None: start afresh
        checkpoints.save(step, state, iterator, config)                # returns at once
        checkpoints.close()                                            # waits; raises on failure
    """

    def __init__(self, workdir: str | os.PathLike[str], keep: int | None = None):
        """Opens the checkpoints of `workdir`.

        Args:
          workdir: the run's folder.
          keep: newest checkpoints to keep when saving; None keeps all.
        """
        self._folder = pathlib.Path(workdir).resolve() / "checkpoints"
        self._keep = keep
        self._pending: Any = None
        self._checkpointer = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        policies = ocp.training.preservation_policies
        policy = policies.PreserveAll() if self._keep is None else policies.LatestN(self._keep)
        # Only a writer may clear what a killed writer left behind.
        return ocp.training.Checkpointer(
            self._folder, preservation_policy=policy, cleanup_tmp_directories=self._keep is not None
        )

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in rising order."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def save(self, step: int, state: TrainState, data: Any, config: Any) -> None:
        """Starts to write a checkpoint and returns; waits for the one before it.

        Args:
          step: its name; not there yet.
          state: the state after `step` steps. It may be donated as soon as this returns.
          data: the iterator that yields the next step's batch; its `get_state()` is JSON and
            the same on every process.
          config: the run's configuration.

        Raises:
          CheckpointError: this or the previous checkpoint could not be written.
        """
        self.wait()
        metadata = {
            "config": config_lib.to_dict(config),
            "data": data.get_state(),
            "leaves": leaf_table(state),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("jax", "flax", "optax", "orbax-checkpoint", "grain")
            },
        }
        try:
            self._pending = self._checkpointer.save_checkpointables_async(
                step, parts_of(state), force=True, custom_metadata=metadata
            )
        except Exception as error:
            raise self._failure(error) from error
        if self._pending is None:
            raise CheckpointError(f"checkpoint {step} in {self._folder} was refused by Orbax")

    def wait(self) -> None:
        """Waits until the last `save` is on disk. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Waits for the last `save` and gives the folder free. Raises CheckpointError."""
        try:
            self.wait()
        finally:
            try:
                self._checkpointer.close()
            except Exception as error:  # Orbax raises what a background write died of once more
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint in {self._folder} failed: {error}; the last whole one stays, and the "
            "same command goes on from it once the cause is gone (a full disk?)"
        )

    def restore(self, abstract: TrainState, data: Any) -> TrainState | None:
        """Reads the newest checkpoint that is whole, and moves `data` to its position.

        A checkpoint that cannot be read is passed over with a warning, for the one before it, and
        then moved to ``broken/``. Where none can be read they all stay: the fault may pass.

        Args:
          abstract: the state's shapes, dtypes and shardings; the mesh may be another one than
            that of the checkpoint.
          data: an iterator like the one saved; its position changes.

        Returns:
          The state, or None if there is no checkpoint at all, not even in ``broken/``.

        Raises:
          ValueError: a leaf has another shape or dtype in the checkpoint, or its data position
            is of other data; the message names what differs.
          CheckpointError: there are checkpoints and none can be read, or all are in ``broken/``.
        """
        steps, broken = self.steps(), self._folder.parent / "broken"
        if not processes.all_equal(steps):
            raise CheckpointError(
                f"the processes find different checkpoints in {self._folder}, this one {steps}: "
                "they must share one folder"
            )
        for step in reversed(steps):
            found = self._try_load(step, parts_of(abstract), abstract)
            if processes.all_true(found is not None):
                position = found.pop("metadata")["data"]
                if position is not None:  # None: converted weights, no data read yet
                    data.set_state(position)
                self._set_aside([newer for newer in steps if newer > step], broken)
                return found.pop("rest")._replace(**found)
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self._folder} can be read, and all were left "
                "there; run the same command again if the fault may have passed (a file system, "
                "memory), or give another --workdir to begin anew"
            )
        # A new run would cut the log of the one whose checkpoints these are.
        if not processes.all_true(not (broken.is_dir() and any(broken.iterdir()))):
            raise CheckpointError(
                f"{broken} holds checkpoints and {self._folder} none; move one back, as "
                f"{self._folder / 'STEP'}, to go on from it, or give another --workdir, or remove "
                f"{broken.name}/ to begin anew"
            )
        return None

    def restore_parts(
        self, abstract: dict[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Reads some parts alone, of one step or of the newest whole checkpoint.

        Args:
          abstract: shapes, dtypes and shardings of "params", "average" or "buffers"; the others
            are not read.
          step: the checkpoint's step; None takes the newest that can be read.

        Returns:
          (the parts by name, what `save` wrote beside them, step).

        Raises:
          ValueError: a leaf has another shape or dtype in the checkpoint.
          CheckpointError: there is no such checkpoint, or it cannot be read.
        """
        steps = self.steps()
        if step is not None:
            with self._named(step):
                found = self._load(step, abstract, abstract)
                return found, found.pop("metadata"), step
        for candidate in reversed(steps):
            found = self._try_load(candidate, abstract, abstract)
            if found is not None:
                return found, found.pop("metadata"), candidate
        raise CheckpointError(f"{self._folder} holds no readable checkpoint (steps {steps})")

    def leaves(self, step: int) -> dict[str, list[Any]]:
        """Returns the `leaf_table` of a step's state, without reading the state.

        Raises:
          CheckpointError: there is no such checkpoint, or it cannot be read.
        """
        with self._named(step):
            return self._read_metadata(step)["leaves"]

    @contextlib.contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Around the reading of a step for which no other is taken: says which there are."""
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(
                f"step={step}: {self._folder} holds the steps {steps}; give one of these, "
                "or leave it out for the newest"
            )
        try:
            yield
        except _NotWholeError as error:
            others = [other for other in steps if other != step]
            way = f"name another step, of {others}" if others else "there is no other step"
            path = self._folder / str(step)
            raise CheckpointError(f"{path} cannot be read ({error}); {way}") from error

    def _try_load(self, step: int, parts: dict[str, Any], abstract: Any) -> dict[str, Any] | None:
        """`_load`; None with a warning if the checkpoint is not whole."""
        try:
            return self._load(step, parts, abstract)
        except _NotWholeError as error:
            path = self._folder / str(step)
            logger.warning("checkpoint %s is not whole and is passed over: %s", path, error)
            return None

    def _load(self, step: int, parts: dict[str, Any], abstract: Any) -> dict[str, Any]:
        """Loads `parts` and the metadata of a step. Raises _NotWholeError."""
        metadata = self._read_metadata(step)
        check_leaves(metadata["leaves"], leaf_table(abstract), self._folder / str(step))
        try:
            return self._checkpointer.load_checkpointables(step, parts) | {"metadata": metadata}
        except Exception as error:  # Orbax raises many kinds for a file that is missing or cut
            raise _NotWholeError((str(error).splitlines() or [repr(error)])[0][:300]) from error

    def _read_metadata(self, step: int) -> dict[str, Any]:
        """What `save` wrote beside a state. Raises _NotWholeError."""
        path = self._folder / str(step)
        try:
            metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
            return metadata | {"leaves": metadata["leaves"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _NotWholeError(str(error)) from error

    def _set_aside(self, steps: list[int], broken: pathlib.Path) -> None:
        """Moves unreadable checkpoints out of the way, so that they are not counted as kept."""
        if not steps:
            return
        self._checkpointer.close()
        if processes.is_first():
            broken.mkdir(exist_ok=True)
            for step in steps:
                target = broken / f"{step}-{time.time_ns()}"
                (self._folder / str(step)).rename(target)
                logger.warning("checkpoint %d was moved to %s", step, target)
        processes.all_true(True)  # the others wait for the move
        self._checkpointer = self._open()
