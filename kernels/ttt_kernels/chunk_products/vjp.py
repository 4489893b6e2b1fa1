"""The chunk products as differentiable functions of any backend.

A backend has `summaries(k, v, chunk_size, dtype)` and `outputs(q, states, chunk_size,
transposed)` and is hashable: the module `xla`, or a value of `mosaic_gpu.Kernels`. The gradients
are calls of the same differentiable functions, so every order of derivative exists.
"""

from __future__ import annotations

import functools

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def summaries(k, v, chunk_size: int, dtype, backend) -> jax.Array:
    """`k^T v` over each chunk; k and v of one dtype. See `ttt_kernels.chunk_summaries`."""
    return backend.summaries(k, v, chunk_size, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def outputs(q, states, chunk_size: int, transposed: bool, backend) -> jax.Array:
    """Each token times its chunk's state. See `ttt_kernels.chunk_outputs`."""
    return backend.outputs(q, states, chunk_size, transposed)


def _summaries_forward(k, v, chunk_size, dtype, backend):
    return summaries(k, v, chunk_size, dtype, backend), (k, v)


def _summaries_backward(chunk_size, dtype, backend, residuals, d_summaries):
    k, v = residuals
    # Rounded once for both products.
    d_summaries = d_summaries.astype(k.dtype)
    dk = outputs(v, d_summaries, chunk_size, True, backend)
    return dk, outputs(k, d_summaries, chunk_size, False, backend)


def _outputs_forward(q, states, chunk_size, transposed, backend):
    return outputs(q, states, chunk_size, transposed, backend), (q, states)


def _outputs_backward(chunk_size, transposed, backend, residuals, d_out):
    q, states = residuals
    dq = outputs(d_out, states, chunk_size, not transposed, backend)
    left, right = (d_out, q) if transposed else (q, d_out)
    return dq, summaries(left, right, chunk_size, states.dtype, backend)


summaries.defvjp(_summaries_forward, _summaries_backward)
outputs.defvjp(_outputs_forward, _outputs_backward)
