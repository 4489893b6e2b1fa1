"""Prefixes over chunks: ``S_n = decay_n · S_{n-1} + values_n``, all of them at once."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.backends import backend_of
from ttt_kernels import compat
from ttt_kernels.chunk_products import chunk_states

# (decay, values, initial, ahead), as for ``prefix``, to: what the first chunk starts from, the
# prefix, and the state after the last chunk.
Scan = Callable[
    [jax.Array | None, jax.Array, jax.Array, bool], tuple[jax.Array, jax.Array, jax.Array]
]

_TRIANGULAR_LIMIT = 128  # chunks up to which a triangular product beats the scan


def scan_of(
    token_dtype: jnp.dtype, implementation: str | None, backend: str | None = "xla"
) -> Scan:
    """``prefix`` and ``total`` as a ``Scan``: the chunks at hand are all there are.

    States are read in the dtype of the tokens: where that has 16 bits, the products of a triangular
    prefix need not be exact to float32 (on a Hopper GPU they then take a fifth of the time). The
    last state, which is handed on, always is.

    Args:
      token_dtype: of the tokens.
      implementation: of ``prefix``; ``None`` picks.
      backend: of the operations of ``ttt_kernels``; with Hopper's kernels ``chunk_states`` is the
        prefix, and the states come in the dtype of the tokens.
    """
    if implementation is None and _has_kernel(token_dtype, backend):
        return _kernel_scan(token_dtype)
    short = jnp.dtype(token_dtype).itemsize == 2
    precision = jax.lax.Precision.HIGH if short else jax.lax.Precision.HIGHEST

    def scan(decay, values, initial, ahead):
        states = prefix(decay, values, initial, implementation, ahead, precision)
        return initial, states, total(decay, values, initial)

    return scan


def _has_kernel(token_dtype: jnp.dtype, backend: str | None) -> bool:
    """Whether a backend, or with ``None`` the device at hand, has a kernel for the prefix."""
    backend = backend_of("chunk_products", backend)
    named = backend == "mosaic_gpu"
    return token_dtype == jnp.bfloat16 and (named or not backend and not compat.hopper_problem())


def _kernel_scan(token_dtype: jnp.dtype) -> Scan:
    """``chunk_states`` as a ``Scan``; decays of channels, which it has not, by XLA."""
    by_channel = scan_of(token_dtype, "associative_scan")

    def scan(decay, values, initial, ahead):
        if decay is not None and decay.shape[3] != 1:
            return by_channel(decay, values, initial, ahead)
        if decay is not None:
            decay = jnp.broadcast_to(decay[..., 0, 0], values.shape[:3])
        states, last = chunk_states(
            values, initial, decay=decay, include_own=not ahead, dtype=token_dtype,
            implementation="mosaic_gpu",
        )
        return initial, states, last

    return scan


def total(decay: jax.Array | None, values: jax.Array, initial: jax.Array) -> jax.Array:
    """The state after the last chunk, as ``prefix`` has it, by one weighted sum.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = jnp.ones((1, 1, 3, 1, 1))
      >>> total(0.5 * ones, ones, jnp.zeros((1, 1, 1, 1))).item()
      1.75
    """
    values = values.astype(initial.dtype)
    if decay is None:
        return jnp.sum(values, 2) + initial
    kept = _products_after(decay)
    return jnp.sum(kept[:, :, 1:] * values, 2) + kept[:, :, 0] * initial


def prefix(
    decay: jax.Array | None,
    values: jax.Array,
    initial: jax.Array,
    implementation: str | None = None,
    ahead: bool = False,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> jax.Array:
    """All ``S_n = decay_n · S_{n-1} + values_n`` with ``S_{-1} = initial``.

    Args:
      decay: ``[batch, heads, n, 1 or in, 1]``, or ``None`` for 1.
      values: ``[batch, heads, n, in, out]``, of the dtype of ``initial`` or narrower.
      initial: ``[batch, heads, in, out]``.
      implementation: ``"associative_scan"`` (the definition), ``"triangular"`` (a product with the
        lower-triangular matrix of the decays' products: fewer launches for few chunks), ``None``.
      ahead: give the state ahead of each chunk, ``S_{-1}`` to ``S_{n-2}``, not the one after it.
      precision: of the triangular product.

    Returns:
      ``[batch, heads, n, in, out]`` in the dtype of ``initial``.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = jnp.ones((1, 1, 3, 1, 1))
      >>> prefix(0.5 * ones, ones, jnp.zeros((1, 1, 1, 1))).ravel().tolist()
      [1.0, 1.5, 1.75]
    """
    if implementation is None:
        small = values.shape[2] <= _TRIANGULAR_LIMIT
        scalar = decay is None or decay.shape[3] == 1
        implementation = "triangular" if small and scalar else "associative_scan"
    return PREFIXES[implementation](decay, values, initial, ahead, precision)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def running_product(x: jax.Array, axis: int) -> jax.Array:
    """``jnp.cumprod``; its gradient keeps ``x`` alone.

    The parts that JAX would keep of it are in part empty, and where they cross a ``shard_map``
    between the forward and the backward pass, jaxlib 0.11 ends in a segmentation fault.

    >>> running_product(jnp.array([2.0, 3.0, 4.0]), 0).tolist()
    [2.0, 6.0, 24.0]
    """
    return jnp.cumprod(x, axis)


def _products_after(decay: jax.Array) -> jax.Array:
    """``Π decay[m:]`` for ``m`` from 0 to n: what is left of a value at the end, n + 1 of them."""
    kept = jnp.flip(running_product(jnp.flip(decay, 2), 2), 2)
    return jnp.concatenate([kept, jnp.ones_like(kept[:, :, :1])], 2)


def _associative_prefix(decay, values, initial, ahead, precision):
    del precision  # sums, no products
    values = values.astype(initial.dtype)
    if decay is None:
        decay = jnp.ones((1, 1, values.shape[2], 1, 1), values.dtype)
    decay = jnp.broadcast_to(decay, (*values.shape[:3], *decay.shape[3:]))

    def combine(early, late):
        return early[0] * late[0], late[0] * early[1] + late[1]

    first = values[:, :, :1] + decay[:, :, :1] * initial[:, :, None]
    values = jnp.concatenate([first, values[:, :, 1:]], 2)
    states = jax.lax.associative_scan(combine, (decay, values), axis=2)[1]
    return _shift(states, initial[:, :, None]) if ahead else states


def _shift(x: jax.Array, first: jax.Array) -> jax.Array:
    """``first`` in front, the last one left out, along the axis of chunks."""
    return jnp.concatenate([first, x[:, :, :-1]], 2)


def _triangular_prefix(decay, values, initial, ahead, precision):
    number = values.shape[2]
    order = jnp.arange(number)
    after = order[:, None] - ahead  # the last chunk that each state has seen
    if decay is None:  # zeros and ones: exact in any dtype
        matrix, carried = (after >= order).astype(values.dtype), initial[:, :, None]
    else:
        if decay.shape[3] != 1:
            raise ValueError(
                f"decay has {decay.shape[3]} channels: implementation='triangular' needs one "
                "number a head; use 'associative_scan'"
            )
        decay, values = decay.astype(initial.dtype), values.astype(initial.dtype)
        # product of decay[m+1 .. n]: a running product down each column, started below the diagonal
        factors = jnp.where(order[:, None] > order, decay[..., 0], 1)
        matrix, kept = running_product(factors, 2), running_product(decay, 2)
        if ahead:
            matrix, kept = (_shift(x, jnp.ones_like(x[:, :, :1])) for x in (matrix, kept))
        matrix = jnp.where(after >= order, matrix, 0)
        carried = kept * initial[:, :, None]
    matrix = jnp.broadcast_to(matrix, (*values.shape[:2], number, number))
    summed = jnp.einsum(
        "bhnm,bhmio->bhnio",
        matrix,
        values,
        precision=precision,
        preferred_element_type=initial.dtype,
    )
    return summed + carried


PREFIXES: dict[str, Callable] = {
    "associative_scan": _associative_prefix,
    "triangular": _triangular_prefix,
}
