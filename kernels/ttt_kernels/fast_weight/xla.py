"""The fast weight in plain JAX: batched products, any backend.

Products that feed products are rounded to the tokens' dtype (accumulated in float32 or wider), and
gate and up are one product: on an H200 float32 intermediates take a third more time. `mosaic_gpu`
has the same products for wide hidden layers, and kernels of its own between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
def _outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """The sum of their outer products over tokens, in float32 or wider.

    What comes back to it is rounded to the tokens' dtype: JAX would widen the tokens to it, and a
    GPU then multiplies float32 at half the speed.
    """
    return _product("bhti,bhto->bhio", left, right, wide=True)


def _outer_backward(tokens, error):
    left, right = tokens
    error = error.astype(left.dtype)
    d_left = _product("bhto,bhio->bhti", right, error).astype(left.dtype)
    d_right = _product("bhti,bhio->bhto", left, error).astype(right.dtype)
    return d_left, lax.optimization_barrier(d_right)


_outer.defvjp(lambda *tokens: (_outer(*tokens), tokens), _outer_backward)


def _gate_up(x: jax.Array, w0: jax.Array, w2: jax.Array, axes: str) -> jax.Array:
    """`x [W0, W2]`: gate and up beside each other, and so are their errors and gradients.

    Two arrays of them XLA would copy together, since their products share x.
    """
    return _dense(x, jnp.concatenate([w0, w2], axis=-1), axes)


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
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _hidden(gate_up: jax.Array, rate: jax.Array | None, dtype) -> jax.Array:
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    value = jax.nn.silu(gate) * up
    return _apart((value if rate is None else value * _wide(rate)).astype(dtype))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _errors(gate_up, error, rates: jax.Array, dtype) -> jax.Array:
    """Gradients of gate and up, beside each other, each times its rate, from their product's."""
    error, rates = _wide(error), _wide(rates)
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    sigmoid = jax.nn.sigmoid(gate)
    gate_error = error * up * (sigmoid * (1 + gate * (1 - sigmoid))) * rates[..., 0:1]
    up_error = error * gate * sigmoid * rates[..., 2:3]
    return jnp.concatenate([gate_error.astype(dtype), up_error.astype(dtype)], axis=-1)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def hidden(w0: jax.Array, w2: jax.Array, x: jax.Array, rates: jax.Array | None) -> jax.Array:
    """`rate (silu(x W0) * (x W2))`, token-major; see `ttt_kernels.fast_weight_hidden`."""
    rates = None if rates is None else rates[..., None]
    return _hidden(_gate_up(x, w0, w2, "bth"), rates, x.dtype)


def apply(
    w0: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    q: jax.Array,
    hidden_of: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """`(silu(q W0) * (q W2)) W1`; see `ttt_kernels.fast_weight_apply`.

    `hidden_of` makes the hidden activations of gate and up, which lie beside each other.
    """
    gate_up = _gate_up(q, w0, w2, "bht")
    value = _hidden(gate_up, None, q.dtype) if hidden_of is None else hidden_of(gate_up)
    return _dense(value, w1, "bht").astype(q.dtype)


def gradients(
    w0: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    k: jax.Array,
    error: jax.Array,
    rates: jax.Array,
    errors_of: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, ...]:
    """Gradients of all matrices, or of `w1` for one rate; `ttt_kernels.fast_weight_gradients`.

    `errors_of` makes (hidden activations with their rate, errors of gate and up with theirs).
    """
    gate_up = _gate_up(k, w0, w2, "bht")
    if rates.shape[-1] == 1:
        return (_outer(_hidden(gate_up, rates, k.dtype), error),)
    back = _dense(error, w1.mT, "bht")
    if errors_of is None:
        value = _hidden(gate_up, rates[..., 1:2], k.dtype)
        errors = _errors(gate_up, back, rates, k.dtype)
    else:
        value, errors = errors_of(gate_up, back, rates)
    d_w0, d_w2 = jnp.split(_outer(k, errors), 2, axis=-1)
    # As Newton-Schulz takes a tall matrix: XLA makes a pass of its own to turn one for it.
    return d_w0, _outer(error, value).mT, d_w2
