"""Token-causal linear attention on Hopper GPUs: in the interpreter, and lowered for CUDA."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.attention_battery import (
    BF16_RMS,
    cotangents,
    make,
    results,
    rms_error,
    slow,
)
from ttt_kernels import compat, linear_attention
from ttt_kernels.linear_attention import mosaic_gpu, tiling

INTERPRETED = [
    # length, heads, key_dim, value_dim, decay, state, packed, options
    (150, 1, 128, 128, False, True, False, dict(segments_per_row=2, stages=1)),
    (200, 1, 64, 48, True, True, True, dict(segments_per_row=2, stages=1)),
    (7, 1, 64, 128, True, False, False, dict(segments_per_row=1)),
    slow(200, 1, 128, 128, True, True, True, dict(segments_per_row=2, stages=1)),
    slow(200, 1, 192, 64, False, False, True, dict(segments_per_row=3)),
]


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11),
                    reason="the Mosaic GPU interpreter needs jax >= 0.11; lowering is tested")
@pytest.mark.parametrize("length, heads, key_dim, value_dim, decay, state, packed, options",
                         INTERPRETED, ids=str)
def test_mosaic_gpu_in_the_interpreter(
    length, heads, key_dim, value_dim, decay, state, packed, options, capfd
):
    x, ids = make(1, 1, length, heads, key_dim, value_dim, decay=decay, state=state,
                  packed=packed, dtype=jnp.bfloat16)
    exact = {n: v.astype(jnp.float32) for n, v in x.items()}
    if packed:  # the kernels zero padding themselves
        padding = (ids < 0)[..., None, None]
        x |= {n: jnp.where(padding, jnp.nan, x[n]) for n in "qkv"}
    kernel = functools.partial(mosaic_gpu.linear_attention, interpret=True, **options)
    try:
        got = results(x, ids, kernel, cotangents(x))
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    reference = functools.partial(linear_attention, implementation="reference")
    want = results(exact, ids, reference, cotangents(x))
    for name, expected in want.items():
        assert rms_error(got[name], expected) < BF16_RMS, name
    assert "RACE DETECTED" not in capfd.readouterr().out


LOWERED = [
    # batch, length, heads, key_dim, value_dim
    (1, 32768, 12, 128, 128),
    (2, 1, 1, 80, 128),
    (1, 4096, 3, 256, 256),
    slow((1, 32768, 24, 64, 64)),
    slow((40, 1000, 4, 128, 128)),
    slow((1, 4096, 3, 192, 192)),
]


@pytest.mark.parametrize("shape", LOWERED, ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
def test_mosaic_gpu_lowers_with_every_tiling(shape, decay):
    batch, length, heads, key_dim, value_dim = shape
    widths = (tiling.padded_dim(key_dim), tiling.padded_dim(value_dim))
    default = tiling.choose(batch, length, heads + heads % 2, *widths, decay=decay)
    for stages in tiling.stage_options(default, decay):
        lowered = _lower(shape, decay, grad=False, stages=stages).as_text()
        assert "linear_attention_outputs" in lowered
        assert ("linear_attention_summaries" in lowered) == (default.segments > 1)


def _lower(shape, decay, grad, **options):
    batch, length, heads, key_dim, value_dim = shape
    struct = jax.ShapeDtypeStruct
    x = {
        "q": struct((batch, length, heads, key_dim), jnp.bfloat16),
        "k": struct((batch, length, heads, key_dim), jnp.bfloat16),
        "v": struct((batch, length, heads, value_dim), jnp.bfloat16),
        "initial_state": struct((batch, heads, key_dim, value_dim), jnp.float32),
    }
    if decay:
        x["log_decay"] = struct((batch, length, heads), jnp.float32)

    def function(x):
        return mosaic_gpu.linear_attention(**x, **options)

    def gradient(x):
        return jax.grad(lambda x: sum(jnp.sum(y, dtype=jnp.float32) for y in function(x)))(x)

    return jax.jit(gradient if grad else function).trace(x).lower(lowering_platforms=("cuda",))


def test_mosaic_gpu_gradient_lowers_and_keeps_only_inputs_and_segment_states():
    lowered = _lower((1, 4096, 2, 128, 64), True, grad=True).as_text()
    # One forward pass of outputs, and one each for dq, dk and dv.
    assert lowered.count("linear_attention_outputs") >= 4
    x, _ = make(2, 1, 256, 2, 64, 64, decay=False, state=True, packed=False, dtype=jnp.bfloat16)
    _, pullback = jax.eval_shape(
        lambda x: jax.vjp(lambda x: mosaic_gpu.linear_attention(**x), x), x
    )
    kept = sum(math.prod(r.shape) * r.dtype.itemsize for r in jax.tree.leaves(pullback))
    inputs = sum(v.size * v.dtype.itemsize for v in x.values())
    states = 4 * 2 * 64 * 64 * 4  # segments, heads, widths, bytes
    assert kept <= inputs + states + 2 * 64 * 64 * 4


def test_mosaic_gpu_under_vmap_and_shard_map_adds_no_collective():
    x = jax.ShapeDtypeStruct((2, 300, 2, 128), jnp.bfloat16)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_batch = jax.sharding.PartitionSpec("data")

    def one(q, k, v):
        return mosaic_gpu.linear_attention(q, k, v)[0]

    mapped = jax.shard_map(one, mesh=mesh, in_specs=by_batch, out_specs=by_batch,
                           check_vma=False)
    batched = jax.vmap(lambda *row: one(*(r[None] for r in row)))
    for function in (mapped, batched):
        def loss(*arrays, function=function):
            return jnp.sum(function(*arrays), dtype=jnp.float32)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        lowered = gradient.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        # Summaries and prefix forwards (the outputs are not needed), dq; summaries and prefix
        # backwards, dk and dv.
        assert lowered.count("custom_call @mosaic_gpu") == 6
        if function is mapped:  # vmap hides the kernels' names
            assert "linear_attention_key_value" in lowered
        assert "all_gather" not in lowered and "all_reduce" not in lowered


def test_tiling_fits_and_refuses():
    for dims in ((64, 64), (128, 128), (192, 192), (256, 256), (256, 64)):
        for decay in (False, True):
            for portable in (False, True):
                plan = tiling.choose(1, 4096, 4, *dims, decay=decay, portable=portable)
                assert plan.shared_memory(decay) <= tiling.SHARED_MEMORY_BYTES
                beside = plan.with_beside()
                assert 1 <= beside.stages <= plan.stages
                assert beside.shared_memory(True, True) <= tiling.SHARED_MEMORY_BYTES
    with pytest.raises(ValueError, match="segments=0"):
        tiling.choose(1, 64, 2, 64, 64, decay=False, segments=0)
    with pytest.raises(ValueError, match="stages=9"):
        tiling.choose(1, 64, 2, 64, 64, decay=False, stages=9)
