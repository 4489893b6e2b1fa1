"""Blocks of keys for window attention: each block of queries needs its own and the one before."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_DOCUMENT = -2


class KeyValue(NamedTuple):
    """Keys and values [batch, length, heads, head_dim] and documents [batch, length], int32."""

    key: jax.Array
    value: jax.Array
    document: jax.Array | None


def visible(query_index, key_index, window, query_document, key_document):
    """Which keys a query sees: near enough before it, and in its document.

    Args:
      query_index: [queries], int32, places on a common axis with the keys.
      key_index: [keys], int32.
      window: number of tokens that a query sees, itself included.
      query_document: [batch, queries], int32, or None for one document.
      key_document: [batch, keys], int32, or None.

    Returns:
      bool, [batch or 1, 1, queries, keys].

    >>> visible(jnp.arange(3), jnp.arange(3), 2, None, None)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    distance = query_index[:, None] - key_index[None, :]
    near = (distance >= 0) & (distance < window)
    if query_document is None:
        return near[None, None]
    same = query_document[:, :, None] == key_document[:, None, :]
    return (near & same)[:, None]


def blocks_with_previous(q, own: KeyValue, size: int, previous: KeyValue | None):
    """Cuts a sequence into blocks, and puts beside each block of keys the one before.

    Args:
      q: [batch, time, heads, head_dim].
      own: keys, values and documents of the same tokens.
      size: tokens of a block.
      previous: `size` keys, values and documents from before the first token; None for nothing,
        which no query can see.

    Returns:
      (q, own, before), each with axes [blocks, batch, size, …]; the last block is filled up with
      zeros, which come after every real token.

    >>> x = jnp.ones((1, 5, 1, 2))
    >>> q, own, before = blocks_with_previous(x, KeyValue(x, x, None), 2, None)
    >>> q.shape, before.document[:, 0].tolist()
    ((3, 1, 2, 1, 2), [[-2, -2], [0, 0], [0, 0]])
    """
    batch, time, heads, dim = q.shape
    if previous is None:
        if own.document is None:
            own = own._replace(document=jnp.zeros((batch, time), jnp.int32))
        empty = jnp.zeros((batch, size, heads, dim), q.dtype)
        nowhere = jnp.full((batch, size), NO_DOCUMENT, jnp.int32)
        previous = KeyValue(empty, empty, nowhere)
    length = -(-time // size) * size

    def cut(x):
        widths = [(0, 0), (0, length - time)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths)
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    own = jax.tree.map(cut, own)
    before = jax.tree.map(lambda first, x: jnp.concatenate([first[None], x[:-1]]), previous, own)
    return cut(q), own, before


def join(before: KeyValue, own: KeyValue) -> KeyValue:
    """Two stretches of keys as one.

    Args:
      before: the earlier one.
      own: the later one.

    Returns:
      Both along the time axis, axis 1.

    >>> x = jnp.ones((1, 2, 1, 2))
    >>> join(KeyValue(x, x, None), KeyValue(x, x, None)).key.shape
    (1, 4, 1, 2)
    """
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), before, own)
