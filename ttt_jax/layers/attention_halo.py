"""Causal attention on a sequence that is cut over devices: the keys before a cut come to it.

A window reaches back over the left edge of a shard; those keys and values, the halo, are fetched
from the devices to the left, inside a ``jax.shard_map``. Queries and outputs stay where they are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.inner_loop.sequence_parallel_exchange import shift
from ttt_jax.layers.attention import attend, causal_attention, choose
from ttt_jax.layers.attention_blocks import NO_DOCUMENT, KeyValue, join


def halo_length(length: int, devices: int, window: int | None) -> int:
    """Tokens that a device fetches: what its window reaches, at most all that lie to the left.

    Args:
      length: tokens of a shard.
      devices: along the axis, P.
      window: tokens that a query sees, or None for all earlier ones.

    Returns:
      min(window − 1, (P − 1) · length). Twice as many vectors of a head's size are moved.

    >>> halo_length(512, 4, 64), halo_length(16, 4, 64), halo_length(16, 4, None)
    (63, 48, 48)
    """
    everything = (devices - 1) * length
    return everything if window is None else min(window - 1, everything)


def halo_attention(
    q, k, v, *, axis_name: str, window=None, documents=None, implementation="auto"
):
    """`causal_attention` of one device's stretch of a sequence, inside `jax.shard_map`.

    Args:
      q: [batch, time / devices, heads, head_dim], any float dtype.
      k: likewise.
      v: likewise.
      axis_name: mesh axis over which time is cut into equal stretches.
      window: number of tokens that a query sees, at least 1; None for all earlier ones.
      documents: [batch, time / devices], int32, numbered over the whole sequence, or None.
      implementation: as in `causal_attention`. A kernel that has no room for earlier keys runs
        over halo and shard together, queries of the halo included.

    Returns:
      Like q.

    Raises:
      ValueError: as in `causal_attention`.

    >>> x = jnp.ones((4, 1, 6, 2, 8))
    >>> one = lambda x: halo_attention(x, x, x, axis_name="seq", window=9)
    >>> jax.vmap(one, axis_name="seq")(x).shape
    (4, 1, 6, 2, 8)
    """
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, or None for all earlier tokens")
    batch, length = q.shape[:2]
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    size = halo_length(length, devices, window)
    window = window or devices * length
    chosen = choose(implementation, q, window, documents, None)
    with jax.named_scope("attention"):
        if size == 0:
            own = KeyValue(k, v, documents)
            return causal_attention(
                q, k, v, window=window, documents=documents, implementation=implementation
            )
        if chosen == "xla":
            if documents is None:
                documents = jnp.zeros((batch, length), jnp.int32)
            own = KeyValue(k, v, documents)
            keys = join(halo(own, size, axis_name), own)
            return attend(q, documents, keys, offset=size, window=window)
        own = KeyValue(k, v, documents)
        missing = size - jnp.minimum(size, index * length)
        return _extended(q, own, halo(own, size, axis_name), missing, window, chosen)


def halo(own: KeyValue, size: int, axis_name: str) -> KeyValue:
    """The keys, values and documents of the tokens ahead of a shard.

    Args:
      own: those of the shard, its documents numbered over the whole sequence or None.
      size: tokens to fetch, from `halo_length`.
      axis_name: the mesh axis.

    Returns:
      The same for `size` tokens; zeros of document −2 where the sequence has not begun.
    """
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = own.key.shape[1]
    whole, rest = divmod(size, length)
    if whole == devices - 1:  # everything: one collective instead of as many as there are devices
        everything = lax.all_gather(own, axis_name, axis=1, tiled=True)
        found = jax.tree.map(lambda x: jnp.roll(x, -(index + 1) * length, 1)[:, :size], everything)
    else:
        last = jax.tree.map(lambda x: x[:, length - rest :], own)
        parts = [shift(last, axis_name, whole + 1)] if rest else []
        parts += [shift(own, axis_name, hop) for hop in range(whole, 0, -1)]
        found = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    exists = jnp.arange(size) >= size - index * length

    def clean(x, nothing):
        return jnp.where(exists.reshape(1, -1, *(1,) * (x.ndim - 2)), x, nothing)

    document = None if found.document is None else clean(found.document, NO_DOCUMENT)
    return KeyValue(clean(found.key, 0), clean(found.value, 0), document)


def _extended(q, own: KeyValue, before: KeyValue, missing, window: int, implementation: str):
    """Attention over halo and shard as one sequence, for kernels that take nothing else.

    The `missing` tokens of a halo from before the sequence are moved behind all others, where
    causality hides them.
    """
    size, length = before.key.shape[1], q.shape[1]
    queries = jnp.concatenate([jnp.zeros_like(q, shape=(q.shape[0], size, *q.shape[2:])), q], 1)
    queries, keys = jax.tree.map(lambda x: jnp.roll(x, -missing, 1), (queries, join(before, own)))
    out = causal_attention(
        queries, keys.key, keys.value, window=window, documents=keys.document,
        implementation=implementation,
    )  # fmt: skip
    return lax.dynamic_slice_in_dim(out, size - missing, length, 1)
