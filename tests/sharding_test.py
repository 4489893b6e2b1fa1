"""Meshes: the rules, and eight host devices against one in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from configs import lact_nvs, vittt
from tests.tiny_run import program_environment
from tests.tolerances import tolerance
from ttt_jax import sharding
from ttt_jax.config import Config, MeshConfig
from ttt_jax.models import lact_llm

_ROOT = pathlib.Path(__file__).parent.parent


_MESHES = ("data 8", "fsdp 8", "data 2, model 4", "data 2, seq 4", "fsdp 2, seq 2, model 2")


@pytest.mark.parametrize(
    "name, meshes",
    [
        pytest.param(0, _MESHES, id="V0"),
        pytest.param(2, _MESHES, id="V2"),
        pytest.param(6, _MESHES, id="V6", marks=pytest.mark.exhaustive),
        pytest.param("vittt", ("fsdp 4, model 2", *_MESHES), id="vittt"),
        pytest.param("lact_nvs", ("fsdp 4, model 2", *_MESHES), id="lact_nvs"),
    ],
)
def test_eight_devices_are_one(name, meshes, tmp_path):
    """One test: tests that share a fixture may run in two workers, which make it twice."""
    result, log = _on_eight_devices(name, meshes, tmp_path)
    _assert_loss_and_gradient_are_those_of_one_device(result)
    _assert_parameters_are_cut_and_activations_stay(result, log)
    _assert_a_trainer_compiles_once_and_its_checkpoint_goes_on_on_one_device(result["trained"])


def _on_eight_devices(name, meshes, folder):
    """What tests/sharding_program.py prints, and its standard error."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = program_environment(XLA_FLAGS=flags)
    command = [sys.executable, "-m", "tests.sharding_program", str(folder), str(name), *meshes]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def _assert_loss_and_gradient_are_those_of_one_device(result):
    limit = tolerance(jnp.float32, 16 * 24)
    for mesh, got in result["meshes"].items():
        assert got["loss"] <= limit, mesh
        assert got["gradient"] <= limit, mesh


def _assert_parameters_are_cut_and_activations_stay(result, log):
    parts = {"data 8": 1, "fsdp 8": 8, "data 2, model 4": 4}
    parts |= {"data 2, seq 4": 1, "fsdp 2, seq 2, model 2": 4, "fsdp 4, model 2": 8}
    for mesh, got in result["meshes"].items():
        assert got["part"] == 1 / parts[mesh], mesh  # of the largest parameter, on one device
        assert got["gathered"] == [], mesh
    assert "Involuntary full rematerialization" not in log


def _assert_a_trainer_compiles_once_and_its_checkpoint_goes_on_on_one_device(trained):
    assert trained["compiles"] == 1
    assert trained["restored"] and trained["begun with"]
    assert trained["first loss"] <= tolerance(jnp.float32, 16 * 24)
    assert trained["next loss"] <= 1e-6


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"data=3, .*seq=1, model=1 do not multiply to the 1"):
        sharding.make_mesh(data=3, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="model=2"):
        sharding.make_mesh(model=2, devices=jax.devices()[:1])


def test_a_batch_that_does_not_divide_is_refused():
    class Mesh:
        shape = {"data": 2, "fsdp": 4, "seq": 1, "model": 1}

    with pytest.raises(ValueError, match=r"batch_size=12 .* of mesh.data \* mesh.fsdp = 8"):
        sharding.batch_sharding(Mesh(), 12)
    Mesh.shape = {"data": 2, "fsdp": 1, "seq": 4, "model": 1}
    with pytest.raises(ValueError, match=r"batch_size=12 .* mesh.fsdp \* mesh.seq = 8"):
        sharding.batch_sharding(Mesh(), 12, "images")


@pytest.mark.parametrize(
    "names, shape, expected",
    [
        (("embed", "mlp"), (8, 8), ("fsdp", "model")),
        (("layers", "embed", "heads"), (3, 8, 8), (None, "fsdp", "model")),
        (("batch", "seq", "embed"), (8, 6, 8), (("data", "fsdp"), "seq", None)),
        (("batch", "seq", "embed"), (8, 5, 8), (("data", "fsdp"), None, None)),
        (("images", None, "embed"), (8, 6, 8), (("data", "fsdp", "seq"), None, None)),
        (("parts", None, "heads"), (8, 6, 8), (("seq", "data", "fsdp"), None, "model")),
        (("vocab", "embed"), (258, 8), (None, "fsdp")),
        (("heads", "mlp"), (4, 8), ("model", None)),
        (("heads", None, None), (3, 8, 8), (None, None, None)),
        ((None,), (8,), (None,)),
    ],
)
def test_rules(names, shape, expected):
    spec = sharding.partition_spec(names, shape, {"data": 2, "fsdp": 2, "seq": 2, "model": 4})
    assert tuple(spec) == expected


def test_constrain_needs_a_name_for_each_axis_and_no_mesh():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, ("batch", "embed")) is x
    with pytest.raises(ValueError, match="must name the 2 axes"):
        sharding.constrain(x, ("batch",))


def test_sequences_that_do_not_divide_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 4, 1), sharding.MESH_AXES)
    with jax.sharding.use_abstract_mesh(mesh):
        assert sharding.sequence_axis(8) == "seq"
        with pytest.raises(ValueError, match="sequence_length=6 must be a multiple of mesh.seq=4"):
            sharding.sequence_axis(6)
    config = Config(model=lact_llm.preset("tiny"), mesh=MeshConfig(seq=3))
    with pytest.raises(ValueError, match=r"data.sequence_length=512: .* config.mesh.seq=3"):
        config.validate()
    config = lact_nvs.get_config("tiny")
    config.data.target_views, config.mesh.seq = 6, 4
    with pytest.raises(ValueError, match=r"data.target_views=6: .* config.mesh.seq=4"):
        config.validate()
    config = vittt.get_config("tiny")
    config.mesh.seq = 3  # images are rows of their own on each device
    config.validate()
