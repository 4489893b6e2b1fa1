"""The two-layer GELU feed-forward layer of vision transformers."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers.linear import Linear, by_rows
from ttt_jax.sharding import on_each_device
from ttt_kernels.bias_gelu import bias_gelu


class GeluMLP(nnx.Module):
    """y = gelu(x W_up + b_up) W_down + b_down, with the exact (erf) GELU (Hendrycks & Gimpel 2016).

    >>> import jax.numpy as jnp
    >>> mlp = GeluMLP(8, 16, stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 3, 8))).shape
    (2, 3, 8)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        stddev: float,
        dtype: str,
        rngs: nnx.Rngs,
        out_stddev: float | None = None,
        bias: bool = False,
    ):
        """Makes the two projections.

        Args:
          hidden_size: width of input and output.
          intermediate_size: width between the two.
          stddev: standard deviation of the initial weights.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
          out_stddev: standard deviation of the second projection, `stddev` if None.
          bias: whether both projections have a bias.
        """
        options = dict(dtype=dtype, rngs=rngs, bias=bias)
        wide, back = ("embed", "mlp"), ("mlp", "embed")
        out_stddev = stddev if out_stddev is None else out_stddev
        self.up = Linear(hidden_size, intermediate_size, names=wide, stddev=stddev, **options)
        self.down = Linear(intermediate_size, hidden_size, names=back, stddev=out_stddev, **options)

    def __call__(self, x, rows: str = "images"):
        """Applies the layer.

        Args:
          x: [..., hidden_size].
          rows: as of `branch`.

        Returns:
          [..., hidden_size] in the layer's dtype.
        """
        y, bias = self.branch(x, rows)
        return y if bias is None else y + bias.astype(y.dtype)

    def branch(self, x, rows: str = "images"):
        """The layer without its last bias, for those who add that in a pass of their own.

        Args:
          x: [..., hidden_size], of which only the first axis is cut over devices.
          rows: logical name of that axis.

        Returns:
          ([..., hidden_size] in the layer's dtype, the bias [hidden_size] or None).
        """
        with jax.named_scope("mlp"):
            hidden = by_rows(functools.partial(self._hidden, rows=rows), x)
            bias = None if self.down.bias is None else self.down.bias[...]
            return by_rows(self.down.product, hidden), bias

    def _hidden(self, x, rows: str):
        """gelu(x W_up + b_up) of [rows, hidden_size]."""
        y, names = self.up.product(x), (rows, "mlp")
        bias = jnp.zeros(y.shape[1:]) if self.up.bias is None else self.up.bias[...]
        return on_each_device(bias_gelu, (y, bias), (names, ("mlp",)), names)
