"""Scenes cut over devices by their views: rows of a batch become rows of parts of scenes.

Attention looks at one view, so views are cut where sequences of tokens are, over the mesh axis seq
(``mesh.seq``). A model that treats rows apart needs to know nothing of it; where the views of a
scene meet, in the updates of the fast weights, sums run over the axis.
"""

import jax

from ttt_jax.sharding import constrain, devices_along


def view_parts(*views: int) -> int:
    """Counts the parts into which the ambient mesh cuts scenes by their views.

    Args:
      *views: numbers of views, of the input and of what is asked for.

    Returns:
      The devices along seq where they divide all of these, else 1: each does the same work.

    >>> view_parts(4, 8)
    1
    """
    parts = devices_along("seq")
    return parts if all(count % parts == 0 for count in views) else 1


def cut_views(x: jax.Array, parts: int) -> jax.Array:
    """Makes rows of parts of scenes: [batch, views, ...] to [parts · batch, views / parts, ...].

    Row p · batch + b holds the p-th of equal stretches of the views of scene b, so that all parts
    of a device follow one another. Nothing is moved where each device has all views of its scenes.

    Args:
      x: [batch, views, ...].
      parts: of `view_parts`.

    >>> import jax.numpy as jnp
    >>> cut_views(jnp.arange(8).reshape(2, 4), 2).tolist()
    [[0, 1], [4, 5], [2, 3], [6, 7]]
    """
    if parts == 1:
        return x
    x = x.reshape(x.shape[0], parts, -1, *x.shape[2:]).swapaxes(0, 1)
    x = constrain(x, ("seq", "batch", *(None,) * (x.ndim - 2)))
    x = x.reshape(-1, *x.shape[2:])
    return constrain(x, ("parts", *(None,) * (x.ndim - 1)))


def join_views(x: jax.Array, parts: int) -> jax.Array:
    """The inverse of `cut_views`; the views stay where they are, cut over seq.

    Args:
      x: [parts · batch, views / parts, ...].
      parts: of `view_parts`.

    >>> import jax.numpy as jnp
    >>> join_views(cut_views(jnp.arange(8).reshape(2, 4), 2), 2).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if parts == 1:
        return x
    x = x.reshape(parts, -1, *x.shape[1:])
    x = constrain(x, ("seq", "batch", *(None,) * (x.ndim - 2))).swapaxes(0, 1)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return constrain(x, ("batch", "seq", *(None,) * (x.ndim - 2)))
