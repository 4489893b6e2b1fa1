"""Newton-Schulz by the TPU kernels: values, gradients, lowering, compilation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tests.kernels import tpu
from tests.kernels.linear_attention_test import rms_error
from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, mosaic_tpu

EPS = 1e-7


def reference(x, coefficients):
    """The definition, one matrix at a time, in float32."""
    def one(g):
        y = g / (jnp.linalg.norm(g) + EPS)
        for a, b, c in coefficients:
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        return y

    flat = x.reshape(-1, *x.shape[-2:])
    return jnp.stack([one(g) for g in flat]).reshape(x.shape)


def both(function, x, cotangent):
    value, pullback = jax.vjp(function, x)
    return value, pullback(cotangent)[0]


@pytest.mark.parametrize(
    "shape, dtype, iterations, cores",
    [pytest.param((2, 24, 40), jnp.float32, 2, 2, marks=pytest.mark.exhaustive),
     ((3, 1, 64, 16), jnp.float32, 1, 1), ((2, 32, 32), jnp.bfloat16, 5, 2)],
    ids=str,
)
def test_kernels_equal_the_definition(shape, dtype, iterations, cores):
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    x = x.astype(dtype).astype(jnp.float32).at[-1].set(0)
    coefficients = LACT_COEFFICIENTS[:iterations]
    kernel = functools.partial(
        mosaic_tpu.newton_schulz, coefficients=coefficients, eps=EPS, dtype=jnp.dtype(dtype),
        interpret=compat.tpu_interpret_params(seed=iterations, cores=cores),
    )
    got = tpu.interpreted(jax.jit(functools.partial(both, kernel)), x, cotangent)
    # At the zero matrix, where the definition has no gradient: y = x prod(a) / eps.
    slope = math.prod(a for a, _, _ in coefficients) / EPS
    assert float(jnp.abs(got[0][-1]).max()) == 0
    assert_close(got[1][-1], slope * cotangent[-1], tolerance(dtype), "zero matrix")
    got, x, cotangent = jax.tree.map(lambda a: a[:-1], (got, x, cotangent))
    want = both(functools.partial(reference, coefficients=coefficients), x, cotangent)
    xla = functools.partial(newton_schulz, coefficients=coefficients, dtype=dtype,
                            implementation="xla")
    plain = both(xla, x, cotangent)
    for name, value, expected, other in zip(("y", "dx"), got, want, plain, strict=True):
        if dtype == jnp.float32:
            assert_close(value, expected, tolerance(dtype, max(shape) * iterations), name)
        else:  # five iterations in bfloat16 amplify roundings: no worse than the XLA form
            assert rms_error(value, expected) < 1.2 * rms_error(other, expected), name


def test_a_race_is_found():
    def body(x, out):
        out[...] = x[...]

    copy = compat.tpu_kernel(  # every grid point writes the one block of the result
        body, name="race", semantics=("parallel",), vmem_bytes=0,
        interpret=compat.tpu_interpret_params(cores=2),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    )
    with pytest.raises(Exception, match="(?i)race"):
        tpu.interpreted(copy, jnp.ones((32, 128)))
    compat.reset_tpu_interpreter()


def gradient(x, dtype=jnp.bfloat16):
    def loss(x):
        y = mosaic_tpu.newton_schulz(x, LACT_COEFFICIENTS, EPS, jnp.dtype(dtype))
        return jnp.sum(y * y)

    return jax.value_and_grad(loss)(x)


@pytest.mark.parametrize("shape", [(16, 4, 384, 384), (12, 128, 128), (2, 320, 576), (1, 512, 512)],
                         ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_kernels_lower_for_a_tpu(shape, dtype):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = tpu.lowered(functools.partial(gradient, dtype=dtype), x)
    assert program.count('kernel_name = "newton_schulz_forward"') == 1
    assert program.count('kernel_name = "newton_schulz_backward"') == 1


@pytest.mark.parametrize("chip", tpu.TOPOLOGIES)
@pytest.mark.parametrize(
    "size, dtype",
    [(384, jnp.bfloat16), (64, jnp.bfloat16),
     pytest.param(768, jnp.bfloat16, marks=pytest.mark.exhaustive),
     pytest.param(384, jnp.float32, marks=pytest.mark.exhaustive),
     pytest.param(100, jnp.bfloat16, marks=pytest.mark.exhaustive)],
)
def test_kernels_compile_and_fit(chip, size, dtype):
    # More matrices than fit in VMEM, where the compiler would keep them and count them.
    x = jax.ShapeDtypeStruct((1024, size, size), jnp.float32)
    found = tpu.kernels(chip, functools.partial(gradient, dtype=dtype), x)
    for name, backward in (("forward", False), ("backward", True)):
        estimate = mosaic_tpu.vmem_bytes((size, size), 5, dtype, backward)
        assert found[f"newton_schulz_{name}"] <= estimate <= compat.TPU_VMEM_BYTES, name


def test_choice_and_refusals(monkeypatch):
    x = jnp.ones((1, 8, 8))
    with pytest.raises(NotImplementedError, match="for a CPU, not a TPU.*'xla' can"):
        newton_schulz(x, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="'triton'"):
        newton_schulz(x, implementation="triton")
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")
    wide = jax.ShapeDtypeStruct((1, 4096, 4096), jnp.float32)
    with pytest.raises(NotImplementedError, match="bytes of VMEM.*smaller"):
        jax.eval_shape(functools.partial(newton_schulz, implementation="mosaic_tpu"), wide)
    assert 'kernel_name = "newton_schulz_forward"' in tpu.lowered(newton_schulz, x)
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert "tpu_custom_call" not in tpu.lowered(lambda x: newton_schulz(x), x)
    with pytest.raises(NotImplementedError, match="'data': 2.*shard_map"):
        newton_schulz(x, implementation="mosaic_tpu")
