"""Linear and embedding layers with logical axis names."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.sharding import constrain, param


class Linear(nnx.Module):
    """y = x W + b over the last axis of x, with any number of output axes.

    The weight is normal with the given standard deviation and the bias zero, both float32; the
    product runs in `dtype`.

    >>> layer = Linear(8, (3, 4), names=("embed", "gain", "gain"), stddev=0.02,
    ...                dtype="float32", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 8))).shape
    (2, 5, 3, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        names: Sequence[str | None],
        stddev: float,
        dtype: str,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        """Makes the parameters.

        Args:
          in_features: size of the last axis of the input.
          out_features: sizes of the output axes that replace it.
          names: logical names of the weight's axes, input axis first; "gain" for the output
            axes of a projection to a few gates, which is no matrix to an optimizer.
          stddev: standard deviation of the initial weight.
          dtype: dtype in which the product is computed.
          rngs: random streams; "params" is used.
          bias: whether to add a bias.
        """
        out = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        shape = (in_features, *out)
        weight = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.kernel = param(weight, names)
        self.bias = param(jnp.zeros(out, jnp.float32), tuple(names)[1:]) if bias else None
        self.dtype = dtype

    def __call__(self, x, out_dtype=None):
        """Applies the layer.

        Args:
          x: [..., in_features], any float dtype.
          out_dtype: dtype of the result and of the accumulation; the layer's dtype if None.

        Returns:
          [..., *out_features] in `out_dtype`.
        """
        y = self.product(x, out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def product(self, x, out_dtype=None):
        """x W without the bias, for those who add it in a pass of their own; as `__call__`."""
        out_dtype, kernel = out_dtype or self.dtype, self.kernel[...].astype(self.dtype)
        return jnp.tensordot(x.astype(self.dtype), kernel, axes=1, preferred_element_type=out_dtype)

    def split(self, x, together: Sequence[int] | None = None):
        """The products with each part of a kernel [in, parts, out], one by one or some together.

        The same values as slices of the whole product. On a GPU neither the slices nor, in the
        backward pass, the gradient put together from theirs are copied.

        Args:
          x: [..., in_features], any float dtype.
          together: how many neighbouring parts each product makes, side by side; one if None.

        Returns:
          A list of [..., out of a product's parts], in the layer's dtype.
        """
        x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        if together is None:
            made = [jnp.tensordot(x, kernel[:, i], axes=1) for i in range(kernel.shape[1])]
            return made if bias is None else [y + bias[i] for i, y in enumerate(made)]
        start, made = 0, []
        for count in together:
            parts = slice(start, start + count)
            x = x if start == 0 else _apart(x)
            y = jnp.tensordot(x, _apart(kernel[:, parts].reshape(len(kernel), -1)), axes=1)
            made.append(y if bias is None else y + bias[parts].reshape(-1))
            start += count
        return made


@jax.custom_vjp
def _apart(x):
    """x as an array of its own.

    XLA joins products of one x, to slice them apart again, and cuts a part of the weights anew in
    each of its products.
    """
    return jax.lax.optimization_barrier(x)


_apart.defvjp(lambda x: (_apart(x), None), lambda _, error: (error,))


def by_rows(layer, x, **options):
    """A layer over x as [rows, features]; for inputs of which only the first axis is cut.

    The same values. On a CPU the weight's gradient, a sum over one axis instead of several, is up
    to four times as fast. Two axes that are both cut over devices cannot be merged without moving
    data.

    Args:
      layer: a `Linear`, or any function of [rows, features].
      x: [..., features].
      **options: for the layer.

    Returns:
      [..., *out_features].

    >>> layer = Linear(8, (3, 4), names=("embed", "gain", "gain"), stddev=0.02,
    ...                dtype="float32", rngs=nnx.Rngs(0))
    >>> by_rows(layer, jnp.ones((2, 5, 8))).shape
    (2, 5, 3, 4)
    """
    y = layer(x.reshape(-1, x.shape[-1]), **options)
    return y.reshape(*x.shape[:-1], *y.shape[1:])


class Embedding(nnx.Module):
    """A table of `vocab_size` rows; looks rows up, and multiplies by its transpose when tied.

    >>> table = Embedding(10, 4, stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> table(jnp.array([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __init__(
        self, vocab_size: int, features: int, *, stddev: float, dtype: str, rngs: nnx.Rngs
    ):
        """Makes the table, normal with the given standard deviation, float32.

        Args:
          vocab_size: number of rows.
          features: size of a row.
          stddev: standard deviation of the initial table.
          dtype: dtype of the rows looked up and of the tied product's inputs.
          rngs: random streams; "params" is used.
        """
        shape = (vocab_size, features)
        table = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.table = param(table, ("vocab", "embed"))
        self.dtype = dtype

    def __call__(self, tokens):
        """Rows of the table.

        Args:
          tokens: integers of any shape, below the vocabulary size.

        Returns:
          [*tokens.shape, features] in the layer's dtype.
        """
        # Whole rows on every device: of a table that is cut along the rows' axis the partitioner
        # would collect the looked-up rows of the full batch instead.
        table = constrain(self.table[...], ("vocab", None))
        return jnp.take(table, tokens, axis=0).astype(self.dtype)

    def attend(self, x, out_dtype):
        """x Eᵀ, the output head of a model whose embedding is tied.

        Args:
          x: [..., features].
          out_dtype: dtype of the result and of the accumulation.

        Returns:
          [..., vocab_size] in `out_dtype`.
        """
        table = self.table[...].astype(self.dtype).T
        return jnp.tensordot(x.astype(self.dtype), table, axes=1, preferred_element_type=out_dtype)


def inverse_softplus(x: float) -> float:
    """The number whose softplus log(1 + exp(y)) is x.

    Args:
      x: a positive number.

    Returns:
      y = x + log(1 - exp(-x)).

    >>> round(float(jax.nn.softplus(inverse_softplus(0.001))), 9)
    0.001
    """
    return x + math.log(-math.expm1(-x))
