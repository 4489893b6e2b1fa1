"""The SwiGLU feed-forward layer."""

import jax
from flax import nnx

from ttt_jax.layers.linear import Linear


def default_intermediate_size(hidden_size: int) -> int:
    """8/3 of the width, rounded up to a multiple of 256: the official LaCT models' choice.

    Args:
      hidden_size: width of the model.

    Returns:
      Width of the feed-forward layer.

    >>> default_intermediate_size(1536), default_intermediate_size(768)
    (4096, 2048)
    """
    return -(-(hidden_size * 8 // 3) // 256) * 256


class SwigluMLP(nnx.Module):
    """y = (silu(x W_gate) ⊙ x W_up) W_down (Shazeer 2020, eq. 6).

    >>> import jax.numpy as jnp
    >>> mlp = SwigluMLP(8, 16, stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
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
    ):
        """Makes the three projections.

        Args:
          hidden_size: width of input and output.
          intermediate_size: width of the gate.
          stddev: standard deviation of the initial weights.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        options = dict(stddev=stddev, dtype=dtype, rngs=rngs)
        wide = ("embed", "mlp")
        self.gate = Linear(hidden_size, intermediate_size, names=wide, **options)
        self.up = Linear(hidden_size, intermediate_size, names=wide, **options)
        self.down = Linear(intermediate_size, hidden_size, names=("mlp", "embed"), **options)

    def __call__(self, x):
        """Applies the layer.

        Args:
          x: [..., hidden_size].

        Returns:
          [..., hidden_size] in the layer's dtype.
        """
        with jax.named_scope("mlp"):
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def swiglu_flops(hidden_size: int, intermediate_size: int) -> int:
    """Matmul FLOPs of `SwigluMLP` for one token, forward.

    Args:
      hidden_size: width of input and output.
      intermediate_size: width of the gate.

    Returns:
      2 FLOPs for each multiply-add of the three products.

    >>> swiglu_flops(8, 16)
    768
    """
    return 6 * hidden_size * intermediate_size
