"""Depthwise convolutions stay where their images are: eight host devices, in a process."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp

from tests.tiny_run import program_environment
from tests.tolerances import tolerance

_ROOT = pathlib.Path(__file__).parent.parent.parent


def test_a_batch_that_is_cut_is_never_gathered():
    """No all-gather in the gradient's program; a device holds about an eighth of one's memory."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = program_environment(XLA_FLAGS=flags)
    command = [sys.executable, "-m", "tests.models.vittt_sharding_program"]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["devices"] == 8
    assert got["gathers"] == []
    assert got["all_reduces"] > 0  # of the gradients: the batch is cut
    assert got["error"] <= tolerance(jnp.float32, 16 * 64)
    eight, one = got["bytes"]
    assert eight < one / 4
