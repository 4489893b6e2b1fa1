"""The fast weight token by token: the specification of the other implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def _wide(dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _network(weights, x: jax.Array) -> jax.Array:
    """`f(x)` of one token of each row and head, [batch, heads, key_dim] to [.., value_dim]."""
    w0, w1, w2 = weights

    def product(x, w):
        return jnp.sum(x[..., None] * w, axis=-2)

    return product(jax.nn.silu(product(x, w0)) * product(x, w2), w1)


def hidden(w0: jax.Array, w2: jax.Array, x: jax.Array, rates: jax.Array | None) -> jax.Array:
    """One token after the other in float32 (float64 for float64 tokens), token-major."""
    w0, w2 = (w.astype(_wide(x.dtype)) for w in (w0, w2))
    rates = jnp.ones(x.shape[:3], w0.dtype) if rates is None else rates.astype(w0.dtype)

    def step(token):
        x, rate = token
        x = x.astype(w0.dtype)[..., None]
        value = jax.nn.silu(jnp.sum(x * w0, axis=-2)) * jnp.sum(x * w2, axis=-2)
        return value * rate[..., None]

    out = lax.map(step, (jnp.moveaxis(x, 1, 0), jnp.moveaxis(rates, 1, 0)))
    return jnp.moveaxis(out, 0, 1).astype(x.dtype)


def apply(w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array) -> jax.Array:
    """One token after the other in float32 (float64 for float64 tokens)."""
    weights = [w.astype(_wide(q.dtype)) for w in (w0, w1, w2)]
    out = lax.map(lambda x: _network(weights, x.astype(weights[0].dtype)), jnp.moveaxis(q, 2, 0))
    return jnp.moveaxis(out, 0, 2).astype(q.dtype)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array
) -> tuple[jax.Array, ...]:
    """One token after the other, each gradient by `jax.vjp`; all matrices, or `w1` for one rate."""
    wide = _wide(k.dtype)
    weights = [w.astype(wide) for w in (w0, w1, w2)]
    trained = (0, 1, 2) if rates.shape[-1] == 3 else (1,)

    def step(sums, token):
        x, cotangent, rate = token
        _, pullback = jax.vjp(lambda w: _network(w, x), weights)
        found = pullback(cotangent)[0]
        new = [
            total + rate[..., n, None, None] * found[i]
            for n, (i, total) in enumerate(zip(trained, sums, strict=True))
        ]
        return tuple(new), None

    tokens = [jnp.moveaxis(x.astype(wide), 2, 0) for x in (k, error, rates)]
    zeros = tuple(jnp.zeros_like(weights[i]) for i in trained)
    return lax.scan(step, zeros, tokens)[0]
