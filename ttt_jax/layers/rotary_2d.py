"""Rotary positions of an image's rows and columns."""

import jax.numpy as jnp
import numpy as np

from ttt_jax.layers.rms_norm import at_least_float32


def rotate_2d(x, base: float = 10000.0):
    """Rotates the pairs (x[2i], x[2i + 1]): the first half by the row, the second by the column.

    With n = channels / 4 and i < n, pair i turns by row · base^(−i/n) and pair n + i by
    column · base^(−i/n), over all channels of all heads (H-ViTTT, `vittt/models/h_vittt.py`).

    Args:
      x: [batch, height, width, channels], channels a multiple of 4, any float dtype.
      base: of the wavelengths.

    Returns:
      Same shape and dtype; computed in at least float32.

    Raises:
      ValueError: if the channels are no multiple of 4.

    >>> x = jnp.ones((1, 2, 2, 4))
    >>> rotate_2d(x)[0, 0, 0].tolist(), round(float((rotate_2d(x) ** 2).sum()), 5)
    ([1.0, 1.0, 1.0, 1.0], 16.0)
    """
    height, width, channels = x.shape[1:]
    if channels % 4:
        raise ValueError(f"{channels=} must be a multiple of 4: pairs turn by row and by column")
    quarter = channels // 4
    speeds = base ** -(np.arange(quarter) / quarter)
    rows = np.broadcast_to(np.arange(height)[:, None, None] * speeds, (height, width, quarter))
    columns = np.broadcast_to(np.arange(width)[:, None] * speeds, (height, width, quarter))
    angles = np.concatenate([rows, columns], axis=-1)
    wide = at_least_float32(x.dtype)
    cos, sin = jnp.asarray(np.cos(angles), wide), jnp.asarray(np.sin(angles), wide)
    even, odd = x[..., 0::2].astype(wide), x[..., 1::2].astype(wide)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
