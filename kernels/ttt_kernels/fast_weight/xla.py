"""The fast weight in plain JAX: batched products, any backend.

Products that feed products are rounded to the tokens' dtype (accumulated in float32 or wider), and
gate and up are one product: on an H200 float32 intermediates take a third more time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels import compat


def _product(equation: str, a: jax.Array, b: jax.Array, wide: bool = False) -> jax.Array:
    """An einsum accumulated in float32 or wider; the result has the operands' dtype.

    Where `wide`, and on CPUs, it has that of the sums.
    """
    sums = jnp.promote_types(a.dtype, jnp.float32)
    dtype = sums if wide else a.dtype
    if compat.target_platform() == "cpu":  # where XLA accumulates in the dtype of the result
        a, b, dtype = a.astype(sums), b.astype(sums), sums
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    exact = lax.Precision.DEFAULT if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=dtype)


@jax.custom_vjp
def _outer(left: jax.Array, *rights: jax.Array) -> tuple[jax.Array, ...]:
    """Sums of left and each right, of one width, over tokens, in float32 or wider.

    What comes back to them is rounded to the tokens' dtype: JAX would widen the tokens to it, and a
    GPU then multiplies float32 at half the speed.
    """
    return tuple(_product("bhti,bhto->bhio", left, right, wide=True) for right in rights)


def _outer_backward(tokens, errors):
    left, *rights = tokens
    errors = [error.astype(left.dtype) for error in errors]
    pairs = zip(rights, errors, strict=True)
    d_left = sum(_product("bhto,bhio->bhti", *pair).astype(left.dtype) for pair in pairs)
    d_rights = _product("bhti,bhio->bhto", left, jnp.concatenate(errors, -1)).astype(left.dtype)
    return d_left, *jnp.split(lax.optimization_barrier(d_rights), len(rights), -1)


_outer.defvjp(lambda *tokens: (_outer(*tokens), tokens), _outer_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gate_and_up(
    x: jax.Array, w0: jax.Array, w2: jax.Array, axes: str
) -> tuple[jax.Array, jax.Array]:
    """`x W0` and `x W2` by one product; the gradients by two: XLA would copy them together."""
    return tuple(jnp.split(_dense(x, jnp.concatenate([w0, w2], axis=-1), axes), 2, axis=-1))


def _gate_and_up_forward(x, w0, w2, axes):
    return _gate_and_up(x, w0, w2, axes), (x, w0, w2)


def _gate_and_up_backward(axes, inputs, errors):
    x, *weights = inputs
    errors = [e.astype(x.dtype) for e in errors]
    dx = sum(_dense(e, w.mT, axes).astype(x.dtype) for e, w in zip(errors, weights, strict=True))
    made = []
    for error, w in zip(errors, weights, strict=True):
        dw = _product(f"{axes}i,{axes}o->bhio", x, error)
        made.append((jnp.sum(dw, 0, keepdims=True) if len(w) < len(dw) else dw).astype(w.dtype))
    return dx, *made


_gate_and_up.defvjp(_gate_and_up_forward, _gate_and_up_backward)


def _dense(x: jax.Array, w: jax.Array, axes: str) -> jax.Array:
    """`x W` with tokens whose axes are `axes` and a last one; all rows may share the matrices."""
    if axes == "bth" and w.shape[0] == 1:  # rows and tokens lie side by side: one product a head
        return _product("bthi,hio->btho", x, w[0])
    w = jnp.broadcast_to(w, (x.shape[0], *w.shape[1:]))
    return _product(f"{axes}i,bhio->{axes}o", x, w)


@jax.custom_vjp
def _apart(x):
    """x, whose gradient comes from products: in the backward pass XLA fuses none of those with what
    reads it, and so makes all that reads it in one pass over memory, where it makes several else.
    """
    return x


_apart.defvjp(lambda x: (x, None), lambda _, error: (lax.optimization_barrier(error),))


# What is made of gate and up keeps nothing for the backward pass but its arguments: term by term
# JAX would keep half a dozen arrays of the hidden width, in float32.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _hidden(gate: jax.Array, up: jax.Array, rate: jax.Array | None, dtype) -> jax.Array:
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    value = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
    return _apart((value if rate is None else value * rate.astype(wide)).astype(dtype))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=4)
def _errors(gate, up, error: jax.Array, rates: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Gradients of gate and up, each times its rate, from that of their product."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    gate, up, error, rates = (x.astype(wide) for x in (gate, up, error, rates))
    sigmoid = jax.nn.sigmoid(gate)
    gate_error = error * up * (sigmoid * (1 + gate * (1 - sigmoid))) * rates[..., 0:1]
    up_error = error * gate * sigmoid * rates[..., 2:3]
    return gate_error.astype(dtype), up_error.astype(dtype)


def hidden(w0: jax.Array, w2: jax.Array, x: jax.Array, rates: jax.Array | None) -> jax.Array:
    """`rate (silu(x W0) * (x W2))`, token-major; see `ttt_kernels.fast_weight_hidden`."""
    rates = None if rates is None else rates[..., None]
    return _hidden(*_gate_and_up(x, w0, w2, "bth"), rates, x.dtype)


def apply(w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array) -> jax.Array:
    """`(silu(q W0) * (q W2)) W1`; see `ttt_kernels.fast_weight_apply`."""
    value = _hidden(*_gate_and_up(q, w0, w2, "bht"), None, q.dtype)
    return _dense(value, w1, "bht").astype(q.dtype)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of all matrices, or of `w1` for one rate; `ttt_kernels.fast_weight_gradients`."""
    gate, up = _gate_and_up(k, w0, w2, "bht")
    if rates.shape[-1] == 1:
        return _outer(_hidden(gate, up, rates, k.dtype), error)
    errors = _errors(gate, up, _dense(error, w1.mT, "bht"), rates, k.dtype)
    d_w0, d_w2 = _outer(k, *errors)
    return d_w0, *_outer(_hidden(gate, up, rates[..., 1:2], k.dtype), error), d_w2
