"""What every fast network has in common, and its one product, ``dense``."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

Weights = Mapping[str, jax.Array]
Cotangent = Callable[[jax.Array], jax.Array]
Rates = Mapping[str, jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastNet:
    """Base of the fast networks; a user's own one gives ``names``, ``shapes`` and ``apply``.

    Attributes:
      init_scale: standard deviation of the initial weights times ``sqrt(fan_in)``; 0: all zero.
      names: the weight matrices, in the order in which ``lr`` counts them.
      static_names: arrays in ``weights`` that no inner step changes, e.g. of an output norm.
      last: name of the last layer where it is linear and bias-free (then
        ``f = (features @ W) · gate``), else ``None``: such a layer is not a linear attention.
      mixes_tokens: whether ``f`` looks at neighbouring tokens, so that it needs all at once.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class Relu(FastNet):
      ...     names = ("w0", "w1")
      ...     def shapes(self, key_dim, value_dim, hidden_dim):
      ...         return {"w0": (key_dim, hidden_dim), "w1": (hidden_dim, value_dim)}
      ...     def apply(self, weights, x):
      ...         return dense(jax.nn.relu(dense(x, weights["w0"])), weights["w1"])
      >>> weights = Relu().init(jax.random.key(0), 2, 4, 3, 8)
      >>> Relu().apply(weights, jnp.ones((2, 5, 4))).shape
      (2, 5, 3)
    """

    init_scale: float = 1.0
    names: ClassVar[tuple[str, ...]] = ()
    static_names: ClassVar[tuple[str, ...]] = ()
    last: ClassVar[str | None] = None
    mixes_tokens: ClassVar[bool] = False

    def shapes(
        self, key_dim: int, value_dim: int, hidden_dim: int
    ) -> dict[str, tuple[int, ...]]:
        """The shape of each matrix of one head, ``(in, out)``, by name."""
        raise NotImplementedError(f"{type(self).__name__} must define shapes")

    def static_shapes(self, key_dim: int, value_dim: int) -> dict[str, tuple[int, ...]]:
        """The shape of one head of each array of ``static_names``."""
        return {}

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``f(x)``: ``[..., time, key_dim]`` to ``[..., time, value_dim]``."""
        if self.last is None:
            name = type(self).__name__
            raise NotImplementedError(f"{name} must define apply, or last and features")
        out = dense(self.features(weights, x), weights[self.last])
        gate = self.gate(weights, x)
        return out if gate is None else out * gate

    def gate(self, weights: Weights, x: jax.Array) -> jax.Array | None:
        """What multiplies the output of the last layer, ``[..., time, value_dim]``, or ``None``."""
        return None

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x; Θ)``, the input of the last layer, ``[..., time, features]``."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} must define features for last={self.last!r}")

    def gradient(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent, rates: Rates
    ) -> dict[str, jax.Array]:
        """``Σ_t rate_t ∂L_t/∂W`` for each matrix named in ``rates``, float32 (or float64).

        Args:
          weights: all matrices, ``[..., in, out]``.
          x: keys, ``[..., time, key_dim]``.
          cotangent: maps the prediction ``f(x)`` to ``∂L/∂f``.
          rates: for each trained matrix ``[..., time, 1]``, or ``None`` for 1.
        """
        trained = {name: weights[name] for name in rates}
        prediction, pullback = jax.vjp(lambda w: self.apply({**weights, **w}, x), trained)
        error = cotangent(prediction)
        gradients = {}
        for name, rate in rates.items():
            if rate is not None and rate.shape[-1] != 1:
                raise ValueError(
                    f"rate of {name} has shape {rate.shape}: {type(self).__name__} takes one rate "
                    "a token; per-channel rates need a network that defines factors"
                )
            scaled = error if rate is None else (error * rate).astype(error.dtype)
            gradients[name] = pullback(scaled)[0][name]
        return gradients

    def init(
        self, key: jax.Array, heads: int, key_dim: int, value_dim: int, hidden_dim: int
    ) -> dict[str, jax.Array]:
        """Initial weights, normal with ``init_scale/sqrt(fan_in)``, each ``[heads, in, out]``."""
        shapes = self.shapes(key_dim, value_dim, hidden_dim)
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, (heads, *shape)) * (self.init_scale * shape[0] ** -0.5)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        } | self.init_static(heads, key_dim, value_dim)

    def init_static(self, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.Array]:
        """The arrays of ``static_names`` at the start, name to ``[heads, ...]``."""
        return {}


class OuterProductNet(FastNet):
    """A network whose gradients are written as ``Σ_t rate_t left_tᵀ right_t``."""

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """For each matrix ``(left [..., time, in], right [..., time, out])``."""
        raise NotImplementedError(f"{type(self).__name__} must define factors")

    def gradient(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent, rates: Rates
    ) -> dict[str, jax.Array]:
        """As ``FastNet.gradient``; a rate may also be ``[..., time, in]``, one a channel."""
        factors = self.factors(weights, x, cotangent)
        return {name: outer_products(*factors[name], rate) for name, rate in rates.items()}


class TokenMatrix(NamedTuple):
    """A matrix that differs from token to token: ``W_i = W − c_i Σ_{j≤i} left_jᵀ right_j``.

    ``dense`` takes one wherever it takes a matrix, and never builds the ``W_i``.
    """

    start: jax.Array  # W, [..., in, out]
    left: jax.Array  # [..., time, in]
    right: jax.Array  # [..., time, out]
    position_rate: jax.Array  # c, [..., time, 1]

    def matmul(self, x: jax.Array) -> jax.Array:
        """``x_i W_i`` for each token ``i``, ``[..., time, in]`` to ``[..., time, out]``."""
        scores = jnp.tril(x @ self.left.astype(x.dtype).mT) * self.position_rate.astype(x.dtype)
        return x @ self.start.astype(x.dtype) - scores @ self.right.astype(x.dtype)


def dense(x: jax.Array, weight: jax.Array | TokenMatrix) -> jax.Array:
    """``x @ W`` in ``x.dtype``: the float32 state is rounded to the tokens' dtype for the product.

    Args:
      x: ``[..., time, in]``.
      weight: ``[..., in, out]``; leading axes broadcast against those of ``x``. Or a
        ``TokenMatrix``: one matrix a token.

    Returns:
      ``[..., time, out]`` in ``x.dtype``; the accumulation is float32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> dense(jnp.ones((5, 2), jnp.bfloat16), jnp.ones((2, 3))).dtype
      dtype(bfloat16)
    """
    if isinstance(weight, TokenMatrix):
        return weight.matmul(x)
    return jnp.matmul(x, weight.astype(x.dtype))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _weighted(left: jax.Array, rate: jax.Array) -> jax.Array:
    """``left * rate`` in left's dtype; the backward pass keeps no float32 copy of ``left``."""
    return (left * rate).astype(left.dtype)


def outer_products(left: jax.Array, right: jax.Array, rate: jax.Array | None) -> jax.Array:
    """``Σ_t rate_t left_tᵀ right_t``, accumulated in float32 (float64 for float64 inputs).

    Args:
      left: ``[..., time, in]``.
      right: ``[..., time, out]``.
      rate: ``[..., time, 1]``, ``[..., time, in]`` (one a channel), or ``None`` for 1.

    Returns:
      ``[..., in, out]``.

    Example:
      >>> import jax.numpy as jnp
      >>> outer_products(jnp.ones((5, 2)), jnp.ones((5, 3)), jnp.full((5, 1), 0.5)).tolist()
      [[2.5, 2.5, 2.5], [2.5, 2.5, 2.5]]
    """
    if rate is not None:
        left = _weighted(left, rate)
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum("...ti,...to->...io", left, right, preferred_element_type=wide)
