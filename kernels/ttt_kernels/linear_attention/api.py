"""The public linear attention operation and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.choice import choose
from ttt_kernels.linear_attention import (
    mosaic_gpu,
    mosaic_gpu_chunk,
    mosaic_tpu,
    reference,
    shapes,
    xla,
)

Implementation = Literal["reference", "xla", "mosaic_gpu", "mosaic_tpu"]


def _mosaic_gpu(q, k, v, *, causal: str, **options) -> tuple[jax.Array, jax.Array]:
    """The Mosaic GPU kernels of either causal order."""
    if causal == "token":
        return mosaic_gpu.linear_attention(q, k, v, causal=causal, **options)
    return mosaic_gpu_chunk.linear_attention(q, k, v, **options)


_IMPLEMENTATIONS = {
    "mosaic_tpu": mosaic_tpu.linear_attention,
    "mosaic_gpu": _mosaic_gpu,
    "xla": xla.linear_attention,
    "reference": reference.linear_attention,
}


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    causal: Literal["token", "chunk"] = "token",
    chunk_size: int | None = None,
    include_current_chunk: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal linear attention with decay, carried state and packed documents.

    `S_t = exp(log_decay_t) S_{t-1} + k_t^T v_t`, `o_t = q_t S_t` (causal by token). Causal by
    chunk, a token reads the state at the end of the chunk before its own or, with
    `include_current_chunk`, at the end of its own chunk; chunks are counted from the start of
    each document. No scale is applied.

    Args:
      q, k: [batch, time, heads, key_dim] floats; time >= 1.
      v: [batch, time, heads, value_dim] floats. q, k and v of different dtypes are promoted to
        their common one.
      log_decay: [batch, time, heads] natural logarithms of the factors by which the state shrinks
        ahead of each token, <= 0, or None for 1. Any value from 0 to -inf is safe.
      initial_state: [batch, heads, key_dim, value_dim], the state ahead of the row's first
        document, or None for zero.
      segment_ids: [batch, time] integers. A document is a maximal run of equal ids >= 0 and starts
        from a zero state (the first one from `initial_state`); -1 marks padding, which has no
        influence and a zero output and may hold NaN. None: each row is one document.
      causal: "token" or "chunk".
      chunk_size: tokens a chunk, >= 1; with causal="chunk" only.
      include_current_chunk: whether a chunk sees itself whole; with causal="chunk" only.
      implementation: "reference" (token by token), "xla" (chunked products, any device),
        "mosaic_gpu" (kernels for Hopper GPUs: bfloat16; causal by token: dims up to 256, by chunk:
        up to 768 and one document a row),
        "mosaic_tpu" (kernels for TPUs: bfloat16 or float32), or None, which picks the fastest that
        runs here and logs the choice once. A named implementation never falls back.

    Returns:
      (out, final_state): out [batch, time, heads, value_dim] in the inputs' dtype; final_state
      [batch, heads, key_dim, value_dim], the state after the last token of each row, float32
      (float64 for float64 inputs). Both are differentiable in every float argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: arXiv 2602.21204 (Test-time training with KV binding is secretly linear attention),
    Theorem 5.2.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 1, 2))
    >>> out, state = linear_attention(x, x, x, segment_ids=jnp.array([[0, 0, 1, 1]]))
    >>> out[0, :, 0, 0].tolist(), state.shape
    ([2.0, 4.0, 2.0, 4.0], (1, 1, 2, 2))
    """
    shapes.check_causal(causal, chunk_size, include_current_chunk)
    shapes.check_arrays(q, k, v, log_decay, initial_state, segment_ids)
    dtype = jnp.result_type(q, k, v)
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    if causal == "token":
        gpu = mosaic_gpu.unsupported(q, v, causal) or compat.hopper_problem()
    else:
        gpu = mosaic_gpu_chunk.unsupported(q, v, segment_ids) or compat.hopper_problem()
        if gpu is None and implementation is None:
            gpu = mosaic_gpu_chunk.untimed(q, v, log_decay, chunk_size)
    tpu = mosaic_tpu.unsupported(q, v) or compat.tpu_problem()
    problems = {"mosaic_tpu": tpu, "mosaic_gpu": gpu}
    run = choose("linear_attention", implementation, _IMPLEMENTATIONS, problems)
    with jax.named_scope("linear_attention"):
        return run(
            q, k, v, log_decay=log_decay, initial_state=initial_state, segment_ids=segment_ids,
            causal=causal, chunk_size=chunk_size, include_current_chunk=include_current_chunk,
        )
