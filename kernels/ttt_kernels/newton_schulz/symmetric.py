"""Newton-Schulz orthogonalisation of large matrices on Hopper GPUs: symmetric products by kernels.

The form of `xla`, whose products `X' = B X` stay cuBLAS'. Of a symmetric result half of the tiles
are computed and mirrored, and what XLA makes of it in a pass of its own is the kernel's epilogue::

    A = X Xᵀ        B = c A² + b A + a I        S = G Xᵀ + X Gᵀ        c (S A + A S) + b S

One launch each, a thread block a tile: for matrices that no cluster of `mosaic_gpu` is enough for.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ttt_kernels.newton_schulz import mosaic_gpu_ring, xla
from ttt_kernels.newton_schulz.mosaic_gpu_ring import Layout
from ttt_kernels.newton_schulz.mosaic_gpu_step import BLOCK, Step

TILE = 128
STAGES = 6
FEWEST_TILES = 120  # timed: 126, those of six matrices of 768 rows


def unsupported(x: jax.Array, iterations: int, dtype: jnp.dtype) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if dtype != jnp.bfloat16:
        return f"dtype={dtype}: the products of the kernels are bfloat16"
    if min(x.shape[-2:]) % TILE or max(x.shape[-2:]) % BLOCK or x.size == 0:
        return f"matrices of {x.shape[-2:]}: the smaller side must be a multiple of {TILE}"
    return None


def untimed(x: jax.Array) -> str | None:
    """Why the kernels are taken by name alone, or None."""
    tiles = _tiles(min(x.shape[-2:])) * (x.size // (x.shape[-2] * x.shape[-1]))
    if tiles < FEWEST_TILES:
        return f"{tiles} tiles of symmetric results; below {FEWEST_TILES} nothing has been timed"
    return None


def newton_schulz(
    x: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    eps: float,
    dtype: jnp.dtype,
    interpret=None,
) -> jax.Array:
    """The iteration of `api.newton_schulz` for arguments without `unsupported`.

    Args:
      x, coefficients, eps, dtype: as there.
      interpret: None, or what `compat.gpu_interpret_params` returns.
    """
    y = x.reshape(-1, *x.shape[-2:])
    return xla.newton_schulz(y, coefficients, eps, dtype, Kernels(interpret)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Kernels(xla.Products):
    """The symmetric products of [n, ...] matrices, each one launch."""

    interpret: object = None

    def gram(self, x):
        return _launch("newton_schulz_gram", (x,), interpret=self.interpret)

    def polynomial(self, gram, triple):
        return _launch("newton_schulz_polynomial", (gram,), _table(triple), self.interpret)

    def outer(self, g, x):
        return _launch("newton_schulz_outer", (g, x), interpret=self.interpret)

    def gram_gradient(self, outer, gram, triple):
        table = _table((0.0, *triple[1:]))
        return _launch("newton_schulz_gram_gradient", (outer, gram), table, self.interpret)


def _tiles(rows: int) -> int:
    """Tiles of a symmetric result that are computed."""
    down = rows // TILE
    return down * (down + 1) // 2


def _table(triple) -> jax.Array:
    return jnp.asarray(triple, jnp.float32)


# Jitted by itself, so that a model of many layers lowers and compiles each kernel once.
@functools.partial(jax.jit, static_argnames=("name", "interpret"))
def _launch(name: str, factors, table=None, interpret=None):
    """`U Uᵀ` of (U,), or `U Vᵀ + V Uᵀ` of (U, V); with a table (a, b, c), of which U and V are
    symmetric, `c` times that `+ b U + a I`."""
    count, rows, _ = factors[0].shape

    def iteration(k, n, inputs, outputs):
        del k
        parts = [reference.at[n] for reference in inputs[: len(factors)]]
        terms = ((parts[0], parts[-1]), (parts[-1], parts[0]))[: len(factors)]
        step = Step(terms, outputs[0].at[n], True)
        if table is not None:
            weights = inputs[-1]
            step = dataclasses.replace(
                step, weights=lambda: [weights[i] for i in (2, 1, 0)], other=parts[0]
            )
        return (step,)

    layout = Layout(TILE, TILE, _tiles(rows), STAGES, apart=True)
    out_types = [jax.ShapeDtypeStruct((count, rows, rows), jnp.bfloat16)]
    arrays = [*factors, *([] if table is None else [table])]
    (made,) = mosaic_gpu_ring.launch(
        name, iteration, 1, arrays, out_types, count, layout, interpret
    )
    return made
