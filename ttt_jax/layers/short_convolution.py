"""Causal depthwise convolutions over a few tokens, ahead of a token mixer."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.sharding import param


def causal_convolution(x, kernel, documents=None):
    """y[t, c] = Σ_j kernel[j, c] x[t − j, c] over the tokens t − j of t's document.

    Args:
      x: [batch, time, channels], any float dtype.
      kernel: [width, channels]; row 0 weighs the token itself.
      documents: [batch, time], int32: tokens of equal documents see each other; None for one
        document a row.

    Returns:
      Like x, summed in at least float32.

    Source: the "shift" of Fu et al., *Hungry Hungry Hippos* (arXiv 2212.14052), section 3.

    >>> x = jnp.arange(1.0, 4.0).reshape(1, 3, 1)
    >>> causal_convolution(x, jnp.array([[0.0], [1.0]])).ravel().tolist()
    [0.0, 1.0, 2.0]
    """
    wide = at_least_float32(x.dtype)
    time, total = x.shape[1], 0
    for back, row in enumerate(kernel.astype(wide)):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :time]
        if documents is not None:
            before = jnp.pad(documents, ((0, 0), (back, 0)), constant_values=-1)[:, :time]
            earlier = jnp.where((before == documents)[..., None], earlier, 0)
        total = total + earlier.astype(wide) * row
    return total.astype(x.dtype)


class ShortConvolution(nnx.Module):
    """silu(`causal_convolution`) with a learned kernel, as ahead of DeltaNet and Mamba-2.

    >>> ShortConvolution(6, width=4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 6))).shape
    (2, 5, 6)
    """

    def __init__(self, channels: int, *, width: int, rngs: nnx.Rngs):
        """Makes the kernel, uniform in ±1/√width (PyTorch's default).

        Args:
          channels: of input and output.
          width: tokens that an output sees, its own included.
          rngs: random streams; "params" is used.
        """
        bound = width**-0.5
        kernel = jax.random.uniform(rngs.params(), (width, channels), jnp.float32, -bound, bound)
        self.kernel = param(kernel, (None, "heads"))

    def __call__(self, x, documents=None):
        """Applies the layer.

        Args:
          x: [batch, time, channels].
          documents: as in `causal_convolution`.

        Returns:
          Like x.
        """
        with jax.named_scope("short_convolution"):
            return jax.nn.silu(causal_convolution(x, self.kernel[...], documents))
