"""Parts of matrices rounded on Hopper GPUs, all in one launch of small thread blocks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.round_parts import xla

ROWS = 4  # a warp each
STEPS = 4  # of so many rows, which a thread block loads before it stores
_WIDTHS = (768, 512, 256)  # columns of a thread block
TIMED = False


def unsupported(matrices) -> str | None:
    """Why the kernel cannot run these arguments on any device, or None."""
    for x in matrices:
        if x.dtype != jnp.float32:
            return f"a matrix is {x.dtype}; the Mosaic GPU kernel takes float32"
        if x.shape[0] % (ROWS * STEPS) or x.shape[-1] % min(_WIDTHS):
            return (
                f"a matrix has shape {x.shape}; the Mosaic GPU kernel takes multiples of "
                f"{ROWS * STEPS} rows and of {min(_WIDTHS)} columns a part"
            )
    return compat.layout_problem()


def untimed() -> str | None:
    """Why the kernel is taken by name alone, or None."""
    return None if TIMED else "nothing has been timed"


def round_parts(matrices, parts, interpret: bool = False) -> tuple:
    """`ttt_kernels.round_parts` by the kernel, for arguments without `unsupported`.

    Args:
      matrices, parts: as there.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).
    """
    return _core(matrices, parts, compat.gpu_interpret_params() if interpret else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _core(matrices, parts, interpret):
    cuts = []
    for x, counts in zip(matrices, parts, strict=True):
        starts = [sum(counts[:n]) * x.shape[-1] for n in range(len(counts) + 1)]
        cuts.append(tuple(zip(starts, starts[1:], strict=False)))
    flat = tuple(x.reshape(len(x), -1) for x in matrices)
    return tuple(_launch(flat, tuple(cuts), interpret))


def _forward(matrices, parts, interpret):
    return _core(matrices, parts, interpret), tuple(x.shape for x in matrices)


def _backward(parts, interpret, shapes, errors):
    like = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)  # read by nobody
    return jax.vjp(lambda matrices: xla.round_parts(matrices, parts), like)[1](errors)


_core.defvjp(_forward, _backward)


# Jitted by itself, so that a model of many layers lowers and compiles it once.
@functools.partial(jax.jit, static_argnames=("cuts", "interpret"))
def _launch(matrices, cuts, interpret) -> tuple:
    """The columns `cuts[n]`, (first, end) of each result, of each of matrices [rows, columns]."""
    plgpu = compat.mosaic_gpu()
    tiling = plgpu.Tiling(((ROWS, 256), (8,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tasks, out_types, end = [], [], 0  # of each result: its thread blocks, and what they read
    for n, (x, cut) in enumerate(zip(matrices, cuts, strict=True)):
        for low, high in cut:
            width = next(w for w in _WIDTHS if (high - low) % w == 0)
            across = (high - low) // width
            first, end = end, end + len(x) // (ROWS * STEPS) * across
            tasks.append((first, end, n, low, width, across))
            out_types.append(jax.ShapeDtypeStruct((len(x), high - low), jnp.bfloat16))

    def round_parts(*refs):
        here = lax.axis_index("piece")

        def work(source, target, index, low, width, across):
            row, column = (f(index, jnp.int32(across)) for f in (lax.div, lax.rem))
            places = [pl.ds((row * STEPS + n) * ROWS, ROWS) for n in range(STEPS)]
            columns = pl.ds(low + column * width, width)
            arrays = [
                compat.load(source.at[rows, columns], layout=layout, optimized=False)
                for rows in places
            ]
            for rows, x in zip(places, arrays, strict=True):
                made = x.astype(jnp.bfloat16)
                compat.store(target.at[rows, pl.ds(column * width, width)], made)

        for (first, last, n, *cut), target in zip(tasks, refs[len(matrices) :], strict=True):
            pl.when((here >= first) & (here < last))(
                functools.partial(work, refs[n], target, here - first, *cut)
            )

    return compat.gpu_kernel(
        round_parts,
        out_type=out_types,
        grid=(end,),
        grid_names=("piece",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
    )(*matrices)
