"""Fast networks: ``f(x) = φ(x; Θ) W``, the inner models that a TTT layer trains token by token.

Row vectors: a weight is ``[..., in, out]`` and acts as ``x @ W``. The gradient of a matrix is a sum
of outer products over tokens, ``Σ_t rate_t left_tᵀ right_t``; the built-in networks name the two
factors in closed form, a user's own network gets the gradient by ``jax.vjp``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

Weights = Mapping[str, jax.Array]
Cotangent = Callable[[jax.Array], jax.Array]
Rates = Mapping[str, jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastNet:
    """Base of the fast networks; a user's own one gives ``names``, ``shapes`` and ``apply``.

    Attributes:
      init_scale: standard deviation of the initial weights times ``sqrt(fan_in)``; 0 starts at zero.
      names: the weight matrices, in the order in which ``lr`` counts them.
      last: name of the last layer where it is linear and bias-free (then ``f = features @ W``),
        else ``None``: such a layer is not a linear attention.

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
    last: ClassVar[str | None] = None

    def shapes(
        self, key_dim: int, value_dim: int, hidden_dim: int
    ) -> dict[str, tuple[int, ...]]:
        """The shape of each matrix of one head, ``(in, out)``, by name."""
        raise NotImplementedError(f"{type(self).__name__} must define shapes")

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``f(x)``: ``[..., time, key_dim]`` to ``[..., time, value_dim]``."""
        return dense(self.features(weights, x), weights[self.last])

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x; Θ)``, the input of the last layer, ``[..., time, features]``."""
        raise NotImplementedError(f"{type(self).__name__} has no linear last layer")

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
                    f"rate of {name} has shape {rate.shape}: {type(self).__name__} takes one rate a "
                    "token; per-channel rates need a network that defines factors"
                )
            scaled = error if rate is None else (error * rate).astype(error.dtype)
            gradients[name] = pullback(scaled)[0][name]
        return gradients

    def init(
        self, key: jax.Array, heads: int, key_dim: int, value_dim: int, hidden_dim: int
    ) -> dict[str, jax.Array]:
        """Initial weights, normal with ``init_scale/sqrt(fan_in)``: name to ``[heads, in, out]``."""
        shapes = self.shapes(key_dim, value_dim, hidden_dim)
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, (heads, *shape)) * (self.init_scale * shape[0] ** -0.5)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(OuterProductNet):
    """``f(x) = x W``: linear attention's state, DeltaNet's, Mamba-2's.

    Example:
      >>> import jax
      >>> {n: w.shape for n, w in Linear().init(jax.random.key(0), 2, 4, 3, 0).items()}
      {'w': (2, 4, 3)}
    """

    names: ClassVar[tuple[str, ...]] = ("w",)
    last: ClassVar[str | None] = "w"

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w`` is ``(key_dim, value_dim)``; ``hidden_dim`` is not used."""
        return {"w": (key_dim, value_dim)}

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x) = x``."""
        return x

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """``∂L/∂W = xᵀ ∂L/∂f``."""
        return {"w": (x, cotangent(self.apply(weights, x)))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(OuterProductNet):
    """``f(x) = (silu(x W0) ⊙ (x W2)) W1``: LaCT's fast network.

    Source: LaCT (Zhang et al., 2025), ``lact_model/ttt_operation.py`` for the naming of weights.

    Example:
      >>> import jax
      >>> {n: w.shape for n, w in SwiGLU().init(jax.random.key(0), 1, 4, 3, 8).items()}
      {'w0': (1, 4, 8), 'w1': (1, 8, 3), 'w2': (1, 4, 8)}
    """

    names: ClassVar[tuple[str, ...]] = ("w0", "w1", "w2")
    last: ClassVar[str | None] = "w1"

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w0`` and ``w2`` are ``(key_dim, hidden_dim)``, ``w1`` ``(hidden_dim, value_dim)``."""
        return {
            "w0": (key_dim, hidden_dim),
            "w1": (hidden_dim, value_dim),
            "w2": (key_dim, hidden_dim),
        }

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x) = silu(x W0) ⊙ (x W2)``."""
        return jax.nn.silu(dense(x, weights["w0"])) * dense(x, weights["w2"])

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Back-propagation through the gate: ``silu'(z) = σ(z) (1 + z (1 − σ(z)))``."""
        gate, up = dense(x, weights["w0"]), dense(x, weights["w2"])
        sigmoid = jax.nn.sigmoid(gate)
        activated = gate * sigmoid
        hidden = activated * up
        error = cotangent(dense(hidden, weights["w1"]))
        hidden_error = dense(error, weights["w1"].mT)
        gate_error = hidden_error * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        up_error = hidden_error * activated
        return {"w0": (x, gate_error), "w1": (hidden, error), "w2": (x, up_error)}


def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ W`` in ``x.dtype``: the float32 state is rounded to the tokens' dtype for the product.

    Args:
      x: ``[..., time, in]``.
      weight: ``[..., in, out]``; leading axes broadcast against those of ``x``.

    Returns:
      ``[..., time, out]`` in ``x.dtype``; the accumulation is float32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> dense(jnp.ones((5, 2), jnp.bfloat16), jnp.ones((2, 3))).dtype
      dtype(bfloat16)
    """
    return jnp.matmul(x, weight.astype(x.dtype))


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
        left = (left * rate).astype(left.dtype)
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum("...ti,...to->...io", left, right, preferred_element_type=wide)
