"""Batch normalisation with running statistics."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.sharding import param


class BatchNorm(nnx.Module):
    """y = (x − mean) / sqrt(var + ε) · scale + bias, over all axes but the last.

    In training the statistics are those of the batch (of all devices), and the running ones move
    towards them: r ← (1 − m) r + m s, with the unbiased variance. Else the running ones are used.
    Source: Ioffe & Szegedy 2015, algorithms 1 and 2.

    >>> norm = BatchNorm(2)
    >>> x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    >>> norm(x, train=True).round(3).tolist()
    [[-1.0, -1.0], [1.0, 1.0]]
    >>> norm.mean[...], norm.variance[...]
    (Array([0.2, 0.4], dtype=float32), Array([1.1, 1.7], dtype=float32))
    """

    def __init__(self, features: int, *, epsilon: float = 1e-5, momentum: float = 0.1):
        """Makes scale 1, bias 0, running mean 0 and running variance 1, float32.

        Args:
          features: size of the last axis.
          epsilon: added to the variance, in units of x².
          momentum: m, the weight of a new batch.
        """
        self.scale = param(jnp.ones(features, jnp.float32), ("embed",))
        self.bias = param(jnp.zeros(features, jnp.float32), ("embed",))
        self.mean = nnx.BatchStat(jnp.zeros(features, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(features, jnp.float32))
        self.epsilon, self.momentum = epsilon, momentum

    def __call__(self, x, *, train: bool):
        """Normalises.

        Args:
          x: [..., features], any float dtype.
          train: use and record the batch's statistics.

        Returns:
          Same shape and dtype; computed in at least float32.
        """
        wide = x.astype(at_least_float32(x.dtype))
        if train:
            axes = tuple(range(x.ndim - 1))
            mean = jnp.mean(wide, axis=axes)
            variance = jnp.mean(jnp.square(wide - mean), axis=axes)
            count = x.size // x.shape[-1]
            self._record(self.mean, mean)
            self._record(self.variance, variance * (count / max(count - 1, 1)))
        else:
            mean, variance = self.mean[...], self.variance[...]
        scale = self.scale[...] * lax.rsqrt(variance.astype(wide.dtype) + self.epsilon)
        return ((wide - mean) * scale + self.bias[...]).astype(x.dtype)

    def _record(self, running: nnx.BatchStat, value) -> None:
        value = lax.stop_gradient(value).astype(running.dtype)
        running[...] = (1 - self.momentum) * running[...] + self.momentum * value
