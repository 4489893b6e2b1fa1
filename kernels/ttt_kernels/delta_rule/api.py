"""The public delta rule and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels.delta_rule import checks, reference, xla

Implementation = Literal["reference", "xla"]


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
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention whose state forgets by a decay and erases before it writes.

    With `D = diag(exp(log_decay_t))` (the identity without one) and `o_t = q_t S_t`::

        S_t = D S_{t-1} - beta_t k_t^T (k_t D S_{t-1} - v_t)                     with beta
        S_t = D S_{t-1} + erase_write_t^T (erase_read_t S_{t-1}) + k_t^T v_t     with an erase pair
        S_t = D S_{t-1} + k_t^T v_t                                              with neither

    The erase pair reads the state ahead of the decay. No scale is applied, nothing is normalised.

    ======================  ======================================================================
    DeltaNet                beta
    Gated DeltaNet          beta, log_decay [batch, time, heads]
    Kimi delta attention    beta, log_decay [batch, time, heads, key_dim]
    RWKV-7                  erase_read = -kappa, erase_write = kappa a, log_decay by channel
    identity plus low rank  erase_read, erase_write
    gated linear attention  log_decay [batch, time, heads, key_dim]
    Mamba-2, RetNet         log_decay [batch, time, heads]
    ======================  ======================================================================

    Args:
      q, k: [batch, time, heads, key_dim] floats; time >= 1. A delta rule is stable for
        `beta |k|^2` between 0 and 2, so keys are usually of unit norm.
      v: [batch, time, heads, value_dim] floats. q, k and v of different dtypes are promoted to
        their common one.
      beta: [batch, time, heads] rates of the correction, or None. Not beside an erase pair.
      log_decay: [batch, time, heads] or [batch, time, heads, key_dim] natural logarithms of the
        factors by which the state (or each of its key channels) shrinks ahead of each token,
        <= 0, or None for 1. Any value from 0 to -inf is safe.
      erase_read, erase_write: [batch, time, heads, key_dim], both or neither.
      initial_state: [batch, heads, key_dim, value_dim], the state ahead of the row's first
        document, or None for `reset_state`.
      reset_state: [heads, key_dim, value_dim] or [batch, heads, key_dim, value_dim], the state
        from which every further document starts, or None for zero.
      segment_ids: [batch, time] integers. A document is a maximal run of equal ids >= 0 and starts
        from `reset_state` (the first one from `initial_state`); -1 marks padding, which has no
        influence and a zero output and may hold NaN. None: each row is one document.
      chunk_size: tokens a chunk, 1 to 16 or a multiple of 16, or None for 64; of "xla". It
        changes speed and memory, not the result.
      implementation: "reference" (token by token, one state a token kept for the gradient), "xla"
        (WY chunks, any device, memory linear in time), or None: "reference" for a single token,
        else "xla".

    Returns:
      (out, final_state): out [batch, time, heads, value_dim] in the inputs' dtype; final_state
      [batch, heads, key_dim, value_dim], the state after the last token of each row, float32
      (float64 for float64 inputs). Both are differentiable in every float argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value, or two erase rules at once.

    Sources: arXiv 2406.06484 (DeltaNet), section 2; arXiv 2412.06464 (Gated DeltaNet), eq. 10;
    arXiv 2510.26692 (Kimi Linear), eq. 1; arXiv 2503.14456 (RWKV-7), section 4; arXiv 2312.06635
    (gated linear attention), section 4.

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 4, 1, 1))
    >>> v = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1, 1)
    >>> out, state = delta_rule(k, k, v, beta=jnp.ones((1, 4, 1)))  # the new value replaces the old
    >>> out.ravel().tolist(), state.shape
    ([1.0, 2.0, 3.0, 4.0], (1, 1, 1, 1))
    """
    checks.check_erase(beta, erase_read, erase_write)
    checks.check_chunk_size(chunk_size)
    checks.check_arrays(
        q, k, v, beta, log_decay, erase_read, erase_write, initial_state, reset_state, segment_ids
    )
    named = isinstance(implementation, str) and implementation in ("reference", "xla")
    if not named and implementation is not None:
        raise ValueError(f"implementation={implementation!r} must be 'reference', 'xla' or None")
    if implementation == "reference" and chunk_size is not None:
        raise ValueError(
            f"chunk_size={chunk_size} has no meaning with implementation='reference', which runs "
            "token by token; leave it out"
        )
    dtype = jnp.result_type(q, k, v)
    arguments = dict(
        beta=beta, log_decay=log_decay, erase_read=erase_read, erase_write=erase_write,
        initial_state=initial_state, reset_state=reset_state, segment_ids=segment_ids,
    )
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    if implementation == "reference" or (implementation is None and q.shape[1] == 1):
        with jax.named_scope("delta_rule_reference"):
            return reference.delta_rule(q, k, v, **arguments)
    with jax.named_scope("delta_rule_xla"):
        return xla.delta_rule(q, k, v, **arguments, chunk_size=chunk_size)
