"""The two-layer GELU feed-forward layer of vision transformers."""

import jax
from flax import nnx

from ttt_jax.layers.activations import gelu
from ttt_jax.layers.linear import Linear, by_rows


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

    def __call__(self, x):
        """Applies the layer.

        Args:
          x: [..., hidden_size].

        Returns:
          [..., hidden_size] in the layer's dtype.
        """
        with jax.named_scope("mlp"):
            hidden = gelu(by_rows(self.up, x))
            return by_rows(self.down, hidden)
