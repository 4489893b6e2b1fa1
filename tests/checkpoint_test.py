"""Checkpoints by themselves: retention, leaves that changed, a disk that is full."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_run import assert_equal_states
from ttt_jax import checkpoint
from ttt_jax.config import MeshConfig
from ttt_jax.train_step import TrainState

_SIZE = 256  # of a square matrix: 256 KiB, which no compression makes small


class Position:
    """Stands for a data iterator."""

    def __init__(self, step=0):
        self.step = step

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


def make_state(seed=0, shape=(_SIZE, _SIZE), dtype="float32", name="w"):
    zero, random = jnp.zeros((), jnp.int32), np.random.default_rng(seed)
    params = {"layer": {name: jnp.asarray(random.normal(size=shape), dtype)}}
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(zero + seed, zero, zero, key, params, {}, {}, {"momentum": params})


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def save(checkpoints, step):
    checkpoints.save(step, make_state(step), Position(step), MeshConfig())


def test_the_newest_are_kept_and_a_reader_removes_nothing(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
    for step in range(1, 5):
        save(checkpoints, step)
    checkpoints.close()
    reader, position = checkpoint.Checkpoints(tmp_path), Position()
    assert reader.steps() == [3, 4]
    state = reader.restore(shapes_of(make_state()), position)
    reader.close()
    assert position.step == 4
    assert_equal_states(state, make_state(4))
    assert checkpoint.Checkpoints(tmp_path).steps() == [3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (_SIZE, 8)}, r"layer/w is \[\[256, 256\], 'float32'\] there and \[\[256"),
        ({"dtype": "bfloat16"}, r"layer/w is .* 'float32'\] there and .* 'bfloat16'\]"),
        ({"name": "b"}, "layer/b is missing there"),
    ],
)
def test_a_leaf_that_changed_is_named_and_the_checkpoint_stays(change, message, tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    checkpoints.wait()
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(shapes_of(make_state(**change)), Position())
    assert_equal_states(checkpoints.restore(shapes_of(make_state()), Position()), make_state(1))
    checkpoints.close()


def test_a_disk_that_is_full_is_an_error_and_the_last_whole_checkpoint_stays(tmp_path):
    """No file may be larger than half of the matrix: the write fails as on a full disk."""
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_SIZE * _SIZE * 2, limits[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError, match="the same command goes on"):
            save(checkpoints, 2)  # written in the background
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reader = checkpoint.Checkpoints(tmp_path)
    assert reader.steps() == [1]
    assert_equal_states(reader.restore(shapes_of(make_state()), Position()), make_state(1))
    reader.close()
