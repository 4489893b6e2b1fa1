"""The delta rule, token by token: the specification of every other implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.linear_attention import segments
from ttt_kernels.linear_attention.shapes import accumulator_dtype


def _read(row: jax.Array, state: jax.Array) -> jax.Array:
    """`row S`. [b, h, k], [b, h, k, v] -> [b, h, v]; a plain sum, exact on every device."""
    return jnp.sum(row[..., None] * state, axis=-2)


def _outer(key: jax.Array, value: jax.Array) -> jax.Array:
    """`key^T value`. [b, h, k], [b, h, v] -> [b, h, k, v]."""
    return key[..., None] * value[..., None, :]


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    erase_read: jax.Array | None = None,
    erase_write: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    reset_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence one token at a time in float32 (float64 for float64 inputs).

    With `D = diag(exp(log_decay_t))` and `o_t = q_t S_t`, one of::

        S_t = D S_{t-1} + beta_t k_t^T (v_t - k_t D S_{t-1})                       beta
        S_t = D S_{t-1} + erase_write_t^T (erase_read_t S_{t-1}) + k_t^T v_t       an erase pair
        S_t = D S_{t-1} + k_t^T v_t                                                neither

    Arguments and results as in `ttt_kernels.delta_rule`. Its backward pass keeps one state a
    token: use it to decode and to check.

    Sources: arXiv 2412.06464 (Gated DeltaNet), eq. 10; arXiv 2503.14456 (RWKV-7), section 4, the
    evolution of the weighted key value state.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> delta_rule(x, x, x, beta=jnp.full((1, 3, 1), 0.5))[0].ravel().tolist()
    [0.5, 0.75, 0.875]
    """
    batch, length, heads, key_dim = q.shape
    acc = accumulator_dtype(q.dtype)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    if log_decay is None:
        log_decay = jnp.zeros((batch, length, heads), acc)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    if reset_state is None:
        reset_state = jnp.zeros((heads, key_dim, v.shape[-1]), acc)
    reset_state = jnp.broadcast_to(reset_state, (batch, heads, key_dim, v.shape[-1])).astype(acc)
    if initial_state is None:
        initial_state = reset_state
    real = segments.is_real(segment_ids)
    resets = jnp.diff(segments.document_index(segment_ids), axis=1, prepend=0) > 0

    def by_time(x):
        if x is None:
            return None
        mask = real.reshape(real.shape + (1,) * (x.ndim - 2))
        return jnp.moveaxis(jnp.where(mask, x, 0).astype(acc), 1, 0)

    def step(state, token):
        q_t, k_t, v_t, beta_t, decay_t, read_t, write_t, reset_t, real_t = token
        before = jnp.where(reset_t[:, None, None, None], reset_state, state)
        decayed = jnp.exp(decay_t)[..., None] * before
        if beta_t is not None:
            error = v_t - _read(k_t, decayed)
            new = decayed + _outer(k_t, beta_t[..., None] * error)
        else:
            new = decayed + _outer(k_t, v_t)
            if read_t is not None:
                new = new + _outer(write_t, _read(read_t, before))
        state = jnp.where(real_t[:, None, None, None], new, state)
        return state, _read(q_t, state)

    floats = (q, k, v, beta, log_decay, erase_read, erase_write)
    tokens = (*map(by_time, floats), resets.T, real.T)
    final, out = lax.scan(step, initial_state.astype(acc), tokens)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), final
