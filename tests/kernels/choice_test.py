"""The choice of an implementation, and what stands in the kernels' way on a device."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

from ttt_kernels import choice, compat, linear_attention

FORMS = {"mosaic_tpu": 1, "mosaic_gpu": 2, "xla": 3, "reference": 4}


def test_none_takes_the_first_that_can_and_says_why_once(caplog):
    choice._log.cache_clear()
    with caplog.at_level(logging.INFO, logger="ttt_kernels"):
        for _ in range(2):
            assert choice.choose("f", None, FORMS, {"mosaic_tpu": "a CPU"}) == 2
            assert choice.choose("f", None, FORMS, {"mosaic_tpu": "a CPU", "mosaic_gpu": "b"}) == 3
        assert choice.choose("f", None, FORMS, {"mosaic_gpu": "b"}) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "f runs by implementation='mosaic_gpu': not mosaic_tpu: a CPU",
        "f runs by implementation='xla': not mosaic_tpu: a CPU; not mosaic_gpu: b",
        "f runs by implementation='mosaic_tpu': the call and the device suit it",
    ]


def test_a_named_form_never_falls_back():
    problems = {"mosaic_tpu": "a CPU", "mosaic_gpu": None}
    assert choice.choose("f", "reference", FORMS, problems) == 4
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' cannot.*: a CPU; 'mosaic_gpu' can"):
        choice.choose("f", "mosaic_tpu", FORMS, problems)
    for unknown in ("cuda", "", ["xla"], 3, jnp.ones(2)):
        with pytest.raises(ValueError, match=r"unknown; use one of \['mosaic_tpu', .* or None"):
            choice.choose("f", unknown, FORMS, problems)


def _device(capability: str):
    return types.SimpleNamespace(
        platform="gpu", device_kind="a GPU", compute_capability=capability
    )


@pytest.mark.parametrize("capability, able", [("9.0", True), ("8.0", False), ("10.0", False)])
def test_hopper_kernels_need_sm90(monkeypatch, capability, able):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [_device(capability)])
    x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    if able:
        assert compat.hopper_problem() is None
        return
    with pytest.raises(NotImplementedError, match=f"capability {capability}.*sm90.*'xla' can"):
        linear_attention(x, x, x, implementation="mosaic_gpu")
    assert linear_attention(x, x, x)[0].shape == x.shape


def test_hopper_kernels_need_the_api_and_a_mapped_mesh(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [_device("9.0")])
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert "{'data': 2} are not inside a jax.shard_map" in compat.hopper_problem()
    gpu = compat.mosaic_gpu()
    monkeypatch.delattr(gpu, "kernel")
    compat.mosaic_gpu.cache_clear()
    assert "no plgpu.kernel" in compat.hopper_problem()
    monkeypatch.setattr(compat.importlib, "import_module", _missing)
    assert "no Pallas Mosaic GPU backend" in compat.hopper_problem()
    x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="no Pallas Mosaic GPU backend.*'xla' can"):
        linear_attention(x, x, x, implementation="mosaic_gpu")
    assert linear_attention(x, x, x)[0].shape == x.shape


def _missing(name):
    raise ImportError(name)


def test_a_program_for_a_tpu_never_takes_the_gpu_kernels(monkeypatch):
    """Not even on a machine with a Hopper GPU, where it is compiled ahead of time."""
    monkeypatch.setattr(jax, "devices", lambda: [_device("9.0")])
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")
    assert "program is for a TPU" in compat.hopper_problem()
