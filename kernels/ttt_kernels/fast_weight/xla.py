"""The fast weight in plain JAX: batched products, any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of operands in the tokens' dtype, accumulated in float32 or wider."""
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    exact = lax.Precision.DEFAULT if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=wide)


def _forwards(x: jax.Array, w: jax.Array) -> jax.Array:
    return _product("bhti,bhio->bhto", x, w)


def _backwards(x: jax.Array, w: jax.Array) -> jax.Array:
    return _product("bhto,bhio->bhti", x, w)


def _outer(left: jax.Array, right: jax.Array) -> jax.Array:
    return _product("bhti,bhto->bhio", left, right)


def apply(w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array) -> jax.Array:
    """`(silu(q W0) * (q W2)) W1`; see `ttt_kernels.fast_weight_apply`."""
    hidden = jax.nn.silu(_forwards(q, w0)) * _forwards(q, w2)
    return _forwards(hidden.astype(q.dtype), w1).astype(q.dtype)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of all matrices, or of `w1` for one rate; `ttt_kernels.fast_weight_gradients`."""
    dtype = k.dtype
    gate, up = _forwards(k, w0), _forwards(k, w2)
    rates = rates.astype(gate.dtype)
    sigmoid = jax.nn.sigmoid(gate)
    activated = gate * sigmoid
    if rates.shape[-1] == 1:
        return (_outer((activated * up * rates).astype(dtype), error),)
    hidden_error = _backwards(error, w1)
    gate_error = hidden_error * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return (
        _outer(k, (gate_error * rates[..., 0:1]).astype(dtype)),
        _outer((activated * up * rates[..., 1:2]).astype(dtype), error),
        _outer(k, (hidden_error * activated * rates[..., 2:3]).astype(dtype)),
    )
