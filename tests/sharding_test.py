"""Meshes: the rules, and eight host devices against one in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.tiny_run import program_environment
from tests.tolerances import tolerance
from ttt_jax import sharding

_ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(
    scope="module",
    params=[6, *(pytest.param(variant, marks=pytest.mark.exhaustive) for variant in (0, 2))],
    ids=lambda variant: f"V{variant}",
)
def eight_devices(request, tmp_path_factory):
    """What tests/sharding_program.py prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = program_environment(XLA_FLAGS=flags)
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "tests.sharding_program", str(folder), str(request.param)]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "mesh, part", [("data 8", 1.0), ("fsdp 8", 1 / 8), ("data 2, model 4", 1 / 4)]
)
def test_every_mesh_gives_the_loss_and_gradient_of_one_device(mesh, part, eight_devices):
    got = eight_devices[mesh]
    limit = tolerance(jnp.float32, 16 * 24)
    assert got["loss"] <= limit
    assert got["gradient"] <= limit
    assert got["part"] == part  # of the embedding, on one device
    assert got["compiles"] == 1


@pytest.mark.parametrize("mesh", ["one", "data 2, model 4"])
def test_a_checkpoint_of_eight_devices_goes_on_elsewhere(mesh, eight_devices):
    assert eight_devices[f"restored on {mesh}"] <= 1e-6


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"data=3, fsdp=1, seq=1, model=1 do not multiply to the 1"):
        sharding.make_mesh(data=3, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="model=2"):
        sharding.make_mesh(model=2, devices=jax.devices()[:1])


def test_a_batch_that_does_not_divide_is_refused():
    class Mesh:
        shape = {"data": 2, "fsdp": 4, "model": 1}

    with pytest.raises(ValueError, match=r"batch_size=12 .* a multiple of mesh.data"):
        sharding.batch_sharding(Mesh(), 12)


@pytest.mark.parametrize(
    "names, shape, expected",
    [
        (("embed", "mlp"), (8, 8), ("fsdp", "model")),
        (("layers", "embed", "heads"), (3, 8, 8), (None, "fsdp", "model")),
        (("batch", "seq", "embed"), (8, 5, 8), (("data", "fsdp"), None, None)),
        (("vocab", "embed"), (258, 8), (None, "fsdp")),
        (("heads", "mlp"), (4, 8), ("model", None)),
        (("heads", None, None), (3, 8, 8), (None, None, None)),
        ((None,), (8,), (None,)),
    ],
)
def test_rules(names, shape, expected):
    spec = sharding.partition_spec(names, shape, {"data": 2, "fsdp": 2, "model": 4})
    assert tuple(spec) == expected


def test_constrain_needs_a_name_for_each_axis_and_no_mesh():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, ("batch", "embed")) is x
    with pytest.raises(ValueError, match="must name the 2 axes"):
        sharding.constrain(x, ("batch",))
