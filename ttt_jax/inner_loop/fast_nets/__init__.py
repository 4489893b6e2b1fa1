"""Fast networks: ``f(x) = φ(x; Θ) W``, the inner models that a TTT layer trains token by token.

Row vectors: a weight is ``[..., in, out]`` and acts as ``x @ W``. The gradient of a matrix is a sum
of outer products over tokens, ``Σ_t rate_t left_tᵀ right_t``; the built-in networks name the two
factors in closed form, a user's own network gets the gradient by ``jax.vjp``.
"""

from ttt_jax.inner_loop.fast_nets.base import (
    Cotangent,
    FastNet,
    OuterProductNet,
    Rates,
    TokenMatrix,
    Weights,
    dense,
    outer_products,
)
from ttt_jax.inner_loop.fast_nets.convolution import DepthwiseConv3x3
from ttt_jax.inner_loop.fast_nets.gated import GLU, Linear, SwiGLU
from ttt_jax.inner_loop.fast_nets.mlp import MLP
from ttt_jax.inner_loop.fast_nets.polynomial import Polynomial, monomials

__all__ = [
    "GLU",
    "MLP",
    "Cotangent",
    "DepthwiseConv3x3",
    "FastNet",
    "Linear",
    "OuterProductNet",
    "Polynomial",
    "Rates",
    "SwiGLU",
    "TokenMatrix",
    "Weights",
    "dense",
    "monomials",
    "outer_products",
]
