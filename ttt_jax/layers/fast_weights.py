"""The initial fast weights of a TTT layer, learned as slow weights."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.fast_nets import FastNet
from ttt_jax.sharding import param

_GAIN = 0.5


class FastWeights(nnx.Module):
    """Initial weights W of a fast network, [heads, in, out] for each of its matrices.

    The last layer is stored whole. With `low_rank` r > 0 every other matrix is stored as
    W = L R + ½ I with L [heads, in, r] and R [heads, r, out] (LaCT's official language models, to
    keep the parameter count near that of their baselines).

    >>> from ttt_jax.inner_loop.fast_nets import SwiGLU
    >>> weights = FastWeights(SwiGLU(), 2, 8, 16, low_rank=4, rngs=nnx.Rngs(0))
    >>> {name: w.shape for name, w in weights().items()}
    {'w0': (2, 8, 16), 'w1': (2, 16, 8), 'w2': (2, 8, 16)}
    """

    def __init__(
        self,
        fast_net: FastNet,
        heads: int,
        head_dim: int,
        hidden_dim: int,
        *,
        low_rank: int,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        """Makes the parameters: normal, standard deviation gain/√in, or ½/√in, ½/√r for L and R.

        Args:
          fast_net: the network whose weights these are.
          heads: number of heads.
          head_dim: width of keys and of values.
          hidden_dim: width of the network's hidden layer, where it has one.
          low_rank: rank r; 0 stores every matrix whole.
          rngs: random streams; "params" is used.
          gain: of the matrices that are stored whole.
        """
        shapes = fast_net.shapes(head_dim, head_dim, hidden_dim)
        self.shapes = tuple(shapes.items())
        self.factored = tuple(n for n in shapes if low_rank > 0 and n != fast_net.last)

        def normal(shape, scale):
            value = jax.random.normal(rngs.params(), (heads, *shape), jnp.float32) * scale
            return param(value, ("heads", None, None))

        for name, (size_in, size_out) in self.shapes:
            if name in self.factored:
                left = normal((size_in, low_rank), _GAIN * size_in**-0.5)
                right = normal((low_rank, size_out), _GAIN * low_rank**-0.5)
                setattr(self, f"{name}_left", left)
                setattr(self, f"{name}_right", right)
            else:
                setattr(self, name, normal((size_in, size_out), gain * size_in**-0.5))

    def __call__(self):
        """The weights.

        Returns:
          name -> [heads, in, out], in the dtype of the parameters (float32): the state of the
          inner loop starts from them unrounded.
        """
        return {name: self._matrix(name, shape) for name, shape in self.shapes}

    def _matrix(self, name, shape):
        if name not in self.factored:
            return getattr(self, name)[...]
        left, right = getattr(self, f"{name}_left")[...], getattr(self, f"{name}_right")[...]
        return left @ right + 0.5 * jnp.eye(*shape, dtype=left.dtype)
