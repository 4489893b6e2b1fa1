"""Norms and activations of the parts of rows on a mesh."""

import jax

from ttt_jax.sharding import on_each_device
from ttt_kernels.norm_parts import norm_parts


def norm_rows(x, scales, kinds, size: int, epsilon: float, rows: str = "images"):
    """`ttt_kernels.norm_parts`, each device on its own rows and, of a single part, heads.

    Args:
      x: [rows, parts · heads · size].
      scales: [parts, size], or None.
      kinds: of the parts.
      size: of a group.
      epsilon: as there.
      rows: logical name of the rows.

    Returns:
      The parts, a tuple of [rows, heads · size].

    >>> import jax.numpy as jnp
    >>> [y.shape for y in norm_rows(jnp.ones((1, 4)), None, ("unit", "silu"), 2, 0.0)]
    [(1, 2), (1, 2)]
    """
    names = (rows, "heads" if len(kinds) == 1 else None)
    arrays = [x] if scales is None else [x, scales]

    def local(x, scales=None):
        return norm_parts(x, scales, kinds=kinds, size=size, epsilon=epsilon)

    with jax.named_scope("norm"):
        out = (names,) * len(kinds)
        return on_each_device(local, arrays, (names, (None, None))[: len(arrays)], out)
