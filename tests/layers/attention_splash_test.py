"""Splash attention: the interpreter against the XLA form, and the lowering for a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_jax.layers import attention_splash
from ttt_jax.layers.attention import causal_attention, document_indices
from ttt_jax.sharding import on_each_device

_KERNELS = {"fwd_segmented_residuals", "dq_segmented_no_residuals", "dkv_segmented_no_residuals"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 128, so that 300 tokens are several blocks and do not fill the last one."""
    monkeypatch.setattr(attention_splash, "_BLOCK", 128)


def inputs(dtype, batch=2, time=300, heads=2, dim=8):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, time, heads, dim)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys]


def packed(batch=2, time=300):
    """Documents whose bounds lie inside and on the bounds of blocks."""
    starts = jnp.array([[0, 128, 131, 256], [0, 7, 8, 299]])[:batch]
    ids = jnp.sum(jnp.arange(time)[:, None] >= starts[:, None], axis=-1)
    return document_indices(ids.astype(jnp.int32))


@pytest.mark.parametrize(
    "window, documents, dtype",
    [
        (40, True, "float32"),
        (None, False, "float32"),
        pytest.param(150, True, "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(2, False, "float32", marks=pytest.mark.exhaustive),
        pytest.param(1000, True, "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_values_and_gradients_equal_those_of_xla(window, documents, dtype):
    q, k, v, cotangent = inputs(dtype)
    documents = packed() if documents else None

    def both(q, k, v):
        out, pull = jax.vjp(
            lambda *x: attention_splash.attention(*x, window, documents, interpret=True), q, k, v
        )
        xla, pull_xla = jax.vjp(
            lambda *x: causal_attention(
                *x, window=window, documents=documents, implementation="xla"
            ),
            *(x.astype(jnp.float32) for x in (q, k, v)),
        )
        wide = cotangent.astype(jnp.float32)
        return (out, *pull(cotangent)), (xla, *pull_xla(wide))

    found, expected = jax.jit(both)(q, k, v)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, tolerance(dtype, 300), name)


def test_it_lowers_for_a_tpu_with_the_unfused_backward():
    """The blocks pass the checks of the TPU lowering, at the LaCT-760M head size and others."""
    documents = packed(1)

    def loss(q, k, v):
        out = attention_splash.attention(q, k, v, 40, documents)
        return jnp.sum(out.astype(jnp.float32))

    for dim in (64, 72, 128):
        shape = jax.ShapeDtypeStruct((1, 300, 2, dim), jnp.bfloat16)
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, shape, shape)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert set(re.findall(r'kernel_name = "splash_mha_(\w+)"', text)) == _KERNELS


@pytest.mark.parametrize("window", [1, 5, 8, 9, 100])
def test_blocks_of_the_mask_are_those_of_the_definition(window):
    mask = attention_splash._WindowMask(64, window)
    distance = np.arange(64)[:, None] - np.arange(64)
    whole = (distance >= 0) & (distance < window)
    for query, key in np.ndindex(8, 8):
        block = slice(8 * query, 8 * query + 8), slice(8 * key, 8 * key + 8)
        assert np.array_equal(mask[block], whole[block])


def test_the_mask_is_built_once_for_all_layers_and_heads():
    attention_splash._kernel.cache_clear()
    shape = jax.ShapeDtypeStruct((1, 256, 3, 64), jnp.bfloat16)
    for _ in range(3):
        jax.eval_shape(lambda x: attention_splash.attention(x, x, x, 64, None), shape)
    assert attention_splash._kernel.cache_info().misses == 1


@pytest.mark.parametrize("heads, expected", [(8, (2, 256, 2, 16)), (3, (2, 256, 3, 16))])
def test_every_device_sees_its_own_rows_and_heads(heads, expected):
    """Heads that do not divide stay whole; inside of a shard_map over everything nothing is cut."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.AbstractMesh((2, 1, 4), ("data", "fsdp", "model"), axis_types=auto)
    names, seen = ("batch", None, "heads", None), []

    def local(q, ids):
        seen.append((q.shape, ids.shape))
        return jnp.sin(q)

    def call(q, ids):
        return on_each_device(local, (q, ids), (names, ("batch", None)), names)

    q = jax.ShapeDtypeStruct((4, 256, heads, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        out = jax.eval_shape(call, q, ids)
        whole = jax.shard_map(call, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        jax.eval_shape(whole, q, ids)
    assert out.shape == q.shape
    assert seen == [(expected, (2, 256)), (q.shape, ids.shape)]


def test_refusals_name_the_argument_and_the_way_out():
    q, k, v, _ = inputs("float32", time=4)
    with pytest.raises(NotImplementedError, match="needs a TPU, this program is for 'cpu'"):
        causal_attention(q, k, v, implementation="splash")
    error = attention_splash.obstacle(q, previous=(k, v))
    assert isinstance(error, ValueError) and "decode with 'auto' or 'xla'" in str(error)
