"""Chunk-causal linear attention from chunk products, the form of the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.chunk_products_test import interpreted, needs_interpreter, slow
from tests.kernels.linear_attention_test import BF16_RMS, cotangents, make, results, rms_error
from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, linear_attention
from ttt_kernels.chunk_products import mosaic_gpu, xla
from ttt_kernels.linear_attention import mosaic_gpu_chunk

CASES = [
    # length, chunk_size, include_current_chunk, decay, state
    (47, 10, False, True, True),
    (40, 8, True, False, False),
    slow(5, 100, True, True, True),
    slow(30, 1, False, False, True),
]


@pytest.mark.parametrize("length, chunk_size, include, decay, state", CASES)
def test_products_equal_reference(length, chunk_size, include, decay, state):
    x, _ = make(length, 2, length, 2, 4, 6, decay=decay, state=state, packed=False)

    def by_products(q, k, v, log_decay=None, initial_state=None, segment_ids=None):
        return mosaic_gpu_chunk.by_products(
            q, k, v, log_decay, initial_state, chunk_size, include, xla
        )

    reference = functools.partial(
        linear_attention, causal="chunk", chunk_size=chunk_size, include_current_chunk=include,
        implementation="reference",
    )
    got, want = (results(x, None, f, cotangents(x)) for f in (by_products, reference))
    for name, expected in want.items():
        assert_close(got[name], expected, tolerance(jnp.float32, length), name)


@needs_interpreter
@pytest.mark.exhaustive
@pytest.mark.parametrize("include, decay", [(False, True), (True, True), (False, False)])
def test_kernels_in_the_interpreter(include, decay):
    x, _ = make(1, 1, 150, 2, 64, 128, decay=decay, state=decay, packed=False, dtype=jnp.bfloat16)
    kernels = mosaic_gpu.Kernels(interpret=True)

    def by_kernels(q, k, v, initial_state=None, log_decay=None, segment_ids=None):
        return mosaic_gpu_chunk.by_products(
            q, k, v, log_decay, initial_state, 64, include, kernels
        )

    reference = functools.partial(
        linear_attention, causal="chunk", chunk_size=64, include_current_chunk=include,
        implementation="reference",
    )
    exact = {n: v.astype(jnp.float32) for n, v in x.items()}
    got = interpreted(results, x, None, by_kernels, cotangents(x))
    want = results(exact, None, reference, cotangents(x))
    plain = functools.partial(reference, implementation="xla")
    plain = results(x, None, plain, cotangents(x))
    for name, expected in want.items():
        # Gradients of decays are differences of large sums: no worse than the XLA form's.
        bound = BF16_RMS
        if name == "d_log_decay":
            bound = max(bound, 1.2 * rms_error(plain[name], expected))
        assert rms_error(got[name], expected) < bound, name


def test_gradient_is_seven_kernels_and_no_transposition():
    x = jax.ShapeDtypeStruct((1, 32768, 4, 384), jnp.bfloat16)

    def loss(q, k, v):
        out, final = mosaic_gpu_chunk.linear_attention(q, k, v, chunk_size=2048)
        return jnp.sum(out, dtype=jnp.float32) + jnp.sum(final)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    lowered = gradient.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    # The summaries and their prefix forwards (the outputs are not needed) and, of their gradients,
    # backwards; dq, dk, dv.
    assert lowered.count("custom_call @mosaic_gpu") == 7
    for name in ("chunk_summaries", "chunk_states", "chunk_outputs"):
        assert name in lowered
    assert "stablehlo.transpose" not in lowered


def test_none_takes_the_kernels_with_decays_up_to_384(monkeypatch):
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    for width, kernels in ((384, 3), (768, 0)):
        x = jax.ShapeDtypeStruct((1, 4096, 2, width), jnp.bfloat16)
        decay = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
        run = jax.jit(functools.partial(linear_attention, causal="chunk", chunk_size=2048))
        lowered = run.trace(x, x, x, decay).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("custom_call @mosaic_gpu") == kernels, width
