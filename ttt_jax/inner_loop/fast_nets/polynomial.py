"""Polynomial features in front of any fast network."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.fast_nets.base import Cotangent, OuterProductNet, Weights
from ttt_jax.inner_loop.parts import whole_number


def monomials(x: jax.Array, degree: int) -> jax.Array:
    """All monomials of the channels of ``x`` up to a total degree, the constant 1 among them.

    Args:
      x: ``[..., channels]``, any floating dtype.
      degree: at least 1.

    Returns:
      ``[..., C(channels + degree, degree)]`` in ``x.dtype``, by rising degree.

    Source: Atlas (arXiv 2505.23735), section 3.1: ``φ_p(x) = (x^β)_{|β| ≤ p}``.

    Example:
      >>> import jax.numpy as jnp
      >>> monomials(jnp.array([2.0, 3.0]), 2).tolist()
      [1.0, 2.0, 3.0, 4.0, 6.0, 9.0]
    """
    found = [jnp.ones_like(x[..., :1])]
    for order in range(1, degree + 1):
        picked = itertools.combinations_with_replacement(range(x.shape[-1]), order)
        columns = jnp.asarray(list(zip(*picked, strict=True)))  # [order, monomials]
        product = x[..., columns[0]]
        for column in columns[1:]:
            product = product * x[..., column]
        found.append(product)
    return jnp.concatenate(found, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polynomial(OuterProductNet):
    """``f(x) = net(φ_p(x))``, ``φ_p`` all monomials up to degree ``p``: a larger memory.

    Attributes:
      net: the network behind the features.
      degree: ``p``.

    Source: Atlas (arXiv 2505.23735), section 3.1.

    Example:
      >>> from ttt_jax.inner_loop.fast_nets import MLP
      >>> Polynomial(net=MLP(depth=2), degree=2).shapes(3, 4, 8)
      {'w1': (10, 8), 'w2': (8, 4)}
    """

    net: OuterProductNet
    degree: int = 2

    def __post_init__(self):
        if not isinstance(self.net, OuterProductNet):
            raise ValueError(f"net={self.net!r}: use a network that defines factors, e.g. MLP()")
        if getattr(self.net, "residual_norm", False) or self.net.mixes_tokens:
            raise ValueError(
                f"net={self.net!r}: its output is not of its input's kind once there are more "
                "features than channels; use MLP() without residual_norm, Linear() or SwiGLU()"
            )
        whole_number("degree", self.degree)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of ``net``."""
        return self.net.names

    @property
    def last(self) -> str | None:
        """That of ``net``."""
        return self.net.last

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """Those of ``net`` for ``C(key_dim + degree, degree)`` channels."""
        width = math.comb(key_dim + self.degree, self.degree)
        return self.net.shapes(width, value_dim, hidden_dim)

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(φ_p(x))``."""
        return self.net.features(weights, monomials(x, self.degree))

    def gate(self, weights: Weights, x: jax.Array) -> jax.Array | None:
        """That of ``net``."""
        return self.net.gate(weights, monomials(x, self.degree))

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``net(φ_p(x))``."""
        return self.net.apply(weights, monomials(x, self.degree))

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Those of ``net``; the features have no weights."""
        return self.net.factors(weights, monomials(x, self.degree), cotangent)
