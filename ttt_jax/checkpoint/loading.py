"""Trained models read from a workdir, for whatever does not train them further."""

import dataclasses
import os
from typing import Any

from flax import nnx

from ttt_jax import models, sharding
from ttt_jax.checkpoint.manager import Checkpoints
from ttt_jax.train_step import abstract_params
from ttt_jax.workdirs import CheckpointError, read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A trained model as read from a workdir.

    Attributes:
      config: the run's configuration.
      graphdef: the model without its arrays.
      params: its parameters; their moving average where the run kept one.
      buffers: its running statistics.
      position: in the data of training, as `save` was given it; None for converted weights.
      step: the checkpoint's step.
    """

    config: Any
    graphdef: nnx.GraphDef
    params: Any
    buffers: Any
    position: dict[str, Any] | None
    step: int

    def model(self) -> nnx.Module:
        """Returns the model with its arrays."""
        return nnx.merge(self.graphdef, self.params, self.buffers)


def load_arrays(workdir: str | os.PathLike[str], step: int | None = None) -> LoadedModel:
    """Loads a trained model for evaluation or generation, on the mesh `MeshConfig()`.

    Args:
      workdir: the run's folder.
      step: the checkpoint's step; None takes the newest that can be read.

    Returns:
      The model and its configuration.

    Raises:
      CheckpointError: `workdir` has no name, or there is no run, no such step, or no readable
        checkpoint in it.
    """
    config = read_config(workdir)
    if config is None:
        raise CheckpointError(
            f"workdir={str(workdir)!r} holds no run: config.json is missing; give the --workdir of "
            "launch/train.py or launch/convert.py"
        )
    graphdef, params, buffers, _ = abstract_params(config.model, sharding.make_mesh(), models.build)
    name = "average" if config.train.ema_decay > 0 else "params"
    wanted = {name: params} | ({"buffers": buffers} if buffers else {})
    checkpoints = Checkpoints(workdir)
    try:
        found, metadata, step = checkpoints.restore_parts(wanted, step)
    except CheckpointError as error:
        if step is None:
            raise
        message = str(error).removeprefix(f"step={step}: ")
        raise CheckpointError(f"--step={step}: {message}") from error
    finally:
        checkpoints.close()
    return LoadedModel(
        config=config,
        graphdef=graphdef,
        params=found[name],
        buffers=found.get("buffers", {}),
        position=metadata["data"],
        step=step,
    )


def load_model(
    workdir: str | os.PathLike[str], step: int | None = None
) -> tuple[Any, nnx.Module, int]:
    """Loads a trained model; returns (configuration, model, step). See `load_arrays`."""
    loaded = load_arrays(workdir, step)
    return loaded.config, loaded.model(), loaded.step
