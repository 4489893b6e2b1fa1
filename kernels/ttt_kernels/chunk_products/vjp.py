"""The chunk products as differentiable functions of any backend.

A backend has the four functions of `xla` and is hashable: the module `xla`, or a value of
`mosaic_gpu.Kernels`. The gradients are calls of the same functions, so every order of derivative
exists.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ttt_kernels.chunk_products import xla


def summaries(k, v, chunk_size: int, dtype, backend, rates=None) -> jax.Array:
    """`sum_t rate_t k_t^T v_t` over each chunk, k and v of one dtype; see `chunk_summaries`."""
    return _summaries(k, v, rates, chunk_size, dtype, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _summaries(k, v, rates, chunk_size, dtype, backend):
    return backend.summaries(k, v, chunk_size, dtype, rates)


def _summaries_forward(k, v, rates, chunk_size, dtype, backend):
    return _summaries(k, v, rates, chunk_size, dtype, backend), (k, v, rates)


def _summaries_backward(chunk_size, dtype, backend, residuals, d_summaries):
    k, v, rates = residuals
    # Rounded once for both products.
    d_summaries = d_summaries.astype(k.dtype)
    if rates is None:
        dk = outputs(v, d_summaries, chunk_size, True, backend)
        return dk, outputs(k, d_summaries, chunk_size, False, backend), None
    dk, d_rates = rated_outputs(v, d_summaries, rates, k, chunk_size, True, backend)
    dv, _ = rated_outputs(k, d_summaries, rates, None, chunk_size, False, backend)
    return dk, dv, d_rates.astype(rates.dtype)


_summaries.defvjp(_summaries_forward, _summaries_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def outputs(q, states, chunk_size: int, transposed: bool, backend) -> jax.Array:
    """Each token times its chunk's state. See `ttt_kernels.chunk_outputs`."""
    return backend.outputs(q, states, chunk_size, transposed)


def _outputs_forward(q, states, chunk_size, transposed, backend):
    return outputs(q, states, chunk_size, transposed, backend), (q, states)


def _outputs_backward(chunk_size, transposed, backend, residuals, d_out):
    q, states = residuals
    dq = outputs(d_out, states, chunk_size, not transposed, backend)
    left, right = (d_out, q) if transposed else (q, d_out)
    return dq, summaries(left, right, chunk_size, states.dtype, backend)


outputs.defvjp(_outputs_forward, _outputs_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def rated_outputs(q, states, rates, other, chunk_size: int, transposed: bool, backend):
    """What the gradients of `summaries` with rates are made of.

    Args:
      q, states, chunk_size, transposed: as of `ttt_kernels.chunk_outputs`, S the chunk's state.
      rates: [batch, time, heads] floats.
      other: [batch, time, heads, value_dim], or None.
      backend: of the products.

    Returns:
      (`rate_t q_t S`; `sum(other_t * q_t S)`, shaped and typed as rates, or None).
    """
    return backend.rated_outputs(q, states, rates, other, chunk_size, transposed)


def _rated_forward(q, states, rates, other, chunk_size, transposed, backend):
    made = rated_outputs(q, states, rates, other, chunk_size, transposed, backend)
    return made, (q, states, rates, other)


def _rated_backward(chunk_size, transposed, backend, residuals, cotangents):
    def in_steps(q, states, rates, other):  # second derivatives are rare
        raw = outputs(q, states, chunk_size, transposed, backend)
        dots = None if other is None else jnp.sum(other * raw, -1, dtype=rates.dtype)
        return (raw * rates[..., None]).astype(raw.dtype), dots

    return jax.vjp(in_steps, *residuals)[1](cotangents)


rated_outputs.defvjp(_rated_forward, _rated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def states(summaries, decay, initial, include: bool, reverse: bool, dtype, backend):
    """`S_c = decay_c S_{c-1} + G_c` for every chunk. See `ttt_kernels.chunk_states`.

    With `reverse` the chunks come from the last to the first; `initial` may be None for a float32
    zero. Returns the states in `dtype`, ahead of each chunk or, with `include`, behind it, and the
    last one in the dtype of `initial`.
    """
    return backend.states(summaries, decay, initial, include, reverse, dtype)


def _states_forward(summaries, decay, initial, include, reverse, dtype, backend):
    made, final = states(summaries, decay, initial, include, reverse, dtype, backend)
    # A summary's gradient has its dtype, of which an array of no size tells.
    return (made, final), (made, decay, initial, jnp.zeros((0,), summaries.dtype))


def _states_backward(include, reverse, dtype, backend, residuals, cotangents):
    made, decay, initial, like = residuals
    d_states, d_final = cotangents
    # The gradient of S_c, and so of G_c, is R_c = d_states (of who reads S_c) + decay R_{c+1}.
    ahead, passed = made, decay
    if include:
        edge = jnp.zeros_like(made[:, :, 0]) if initial is None else initial.astype(dtype)
        ahead = xla.shifted(made, edge, reverse)
        if decay is not None:
            passed = xla.shifted(decay, jnp.ones_like(decay[:, :, 0]), not reverse)
    d_summaries, d_initial = states(
        d_states, passed, d_final, include, not reverse, like.dtype, backend
    )
    d_decay = None
    if decay is not None:
        if include:
            d_initial = decay[:, :, -1 if reverse else 0, None, None] * d_initial
        products = d_summaries.astype(decay.dtype) * ahead.astype(decay.dtype)
        d_decay = jnp.sum(products, (-1, -2))
    return d_summaries, d_decay, None if initial is None else d_initial


states.defvjp(_states_forward, _states_backward)
