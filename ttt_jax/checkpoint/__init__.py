"""Checkpoints of a run: parameters, optimizer, data position, configuration."""

from ttt_jax.checkpoint.initial import InitialWeights, find_initial, new_state
from ttt_jax.checkpoint.loading import LoadedModel, load_arrays, load_model
from ttt_jax.checkpoint.manager import Checkpoints
from ttt_jax.workdirs import CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "InitialWeights",
    "LoadedModel",
    "find_initial",
    "load_arrays",
    "load_model",
    "new_state",
]
