"""The feed-forward layer of hierarchical vision models: a GELU MLP with a depthwise convolution."""

import jax
from flax import nnx

from ttt_jax.layers.activations import gelu
from ttt_jax.layers.convolution import DepthwiseConv
from ttt_jax.layers.linear import Linear


class ConvMLP(nnx.Module):
    """y = gelu(h + dwconv(h)) W_down + b,  h = gelu(x W_up + b)  (H-ViTTT, `models/h_vittt.py`).

    >>> import jax.numpy as jnp
    >>> mlp = ConvMLP(8, 16, stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 3, 5, 8))).shape
    (2, 3, 5, 8)
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, stddev: float, dtype: str, rngs: nnx.Rngs
    ):
        """Makes the projections and the convolution between them.

        Args:
          hidden_size: width of input and output.
          intermediate_size: width between the two.
          stddev: standard deviation of the initial projections.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        options = dict(stddev=stddev, dtype=dtype, bias=True, rngs=rngs)
        self.up = Linear(hidden_size, intermediate_size, names=("embed", "mlp"), **options)
        self.conv = DepthwiseConv(intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, names=("mlp", "embed"), **options)

    def __call__(self, x):
        """Applies the layer.

        Args:
          x: [batch, height, width, hidden_size].

        Returns:
          Same shape, in the layer's dtype.
        """
        with jax.named_scope("mlp"):
            x = gelu(self.up(x))
            return self.down(gelu(self.conv(x, residual=True)))

    def branch(self, x):
        """(the layer's result, no bias still to be added), as `GeluMLP.branch`."""
        return self(x), None
