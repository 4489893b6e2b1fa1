"""Norms and activations of the parts of rows on Hopper GPUs through Pallas' Mosaic GPU backend.

Each way is one pass over memory; XLA makes two forward, where the backward pass wants the norms,
and two or three backward. An array of several parts is read, and its gradient written, as the
product has it: slices of it would be copied. A group lies in one warp, 8 numbers or fewer a lane.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.rows import Rows, store, wide

ROWS = 4  # of a thread block; a warp each
SUMMING = 528  # thread blocks that make sums for the scales' gradients: what fits into the GPU
AHEAD = False  # whether these load a step's rows before they work on the step before
MAX_WIDTH = 1024  # of a part, that a row of it fits into a warp's registers


def unsupported(x: jax.Array, parts: int, size: int) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    rows, features = x.shape
    width = features // parts
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Mosaic GPU kernel takes bfloat16"
    if rows % ROWS or rows * features >= 2**31:
        return f"{rows} rows; the Mosaic GPU kernel takes multiples of {ROWS}, below 2^31 numbers"
    if size % 64:
        return f"groups of {size}; the Mosaic GPU kernel takes multiples of 64"
    if width > MAX_WIDTH:
        return f"parts of {width}; the Mosaic GPU kernel takes at most {MAX_WIDTH}"
    return compat.layout_problem()


def norm_parts(x, scales, kinds, size: int, epsilon: float, interpret: bool = False):
    """`ttt_kernels.norm_parts` by the kernels, for arguments without `unsupported`.

    Args:
      x, scales, kinds, size, epsilon: as there.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).

    Returns:
      The parts, a tuple.
    """
    params = compat.gpu_interpret_params() if interpret else None
    return _core(x, scales, kinds, size, epsilon, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _core(x, scales, *options):
    return forward(x, scales, *options)


def _core_forward(x, scales, *options):
    return forward(x, scales, *options), (x, scales)


def _core_backward(kinds, size, epsilon, interpret, kept, errors):
    return backward(*kept, tuple(errors), kinds, size, epsilon, interpret)


_core.defvjp(_core_forward, _core_backward)
_STATIC = ("kinds", "size", "epsilon", "interpret")


@dataclasses.dataclass(frozen=True)
class _Groups(Rows):
    """Rows of which registers are [step, groups, size]; blocks are parts, each an array.

    Attributes:
      size: columns of a group.
    """

    size: int = 64

    @property
    def shape(self):
        return self.step, self.columns // self.size, self.size

    @property
    def side(self) -> int:
        """Groups side by side in a warp's lanes, as few as let a lane load 16 bytes at once."""
        wanted = max(1, 256 // (self.size & -self.size))
        return min(self.shape[1] & -self.shape[1], wanted)

    def layout(self):
        """A row a warp; groups, and the columns of each, over the lanes."""
        plgpu = compat.mosaic_gpu()
        lanes = 32 // self.side
        vector = min(8, (self.size & -self.size) // lanes)
        tiling = plgpu.Tiling(((4, self.side, lanes * vector), (vector,)))
        spread = (-3, -2) if self.side > 1 else (-2,)
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=spread, vector_dim=-1)

    def vector_layout(self):
        return self.layout().reduce((0, 1))

    @property
    def partial(self):
        return (4, self.size) if self.side > 1 else (4, 1, self.size)

    def zeros(self):
        zeros = jnp.zeros((4, self.side, self.size), jnp.float32)
        return compat.mosaic_gpu().layout_cast(zeros, self.layout())

    def fold(self, x):
        """[4, side, size], the sums over what a lane has of one column, of [step, groups, size]."""
        pieces = [
            x[i : i + 4, j : j + self.side]
            for i in range(0, self.step, 4)
            for j in range(0, x.shape[1], self.side)
        ]
        return functools.reduce(jnp.add, pieces)

    def here(self):
        return slice(None)

    def by_part(self, kinds, function) -> None:
        """`function(part, kind)` in the thread blocks of each part."""
        for part, kind in enumerate(kinds):
            pl.when(self.block() == part)(functools.partial(function, part, kind))

    def store_sums(self, ref, totals, scratch):
        if self.side > 1:  # of one, a sum would be a reshape, which Mosaic has not
            totals = [jnp.sum(total, axis=1) for total in totals]
        super().store_sums(ref, totals, scratch)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def forward(x, scales, kinds, size: int, epsilon: float, interpret) -> tuple[jax.Array, ...]:
    """The parts, [rows, features / parts] each, of x [rows, features]; scales as of the API."""
    groups, x = _groups(x, len(kinds), size)

    def norm_parts_forward(x_ref, *refs):
        out_refs = refs[-len(kinds) :]

        def make(part, kind):
            def step(rows, arrays, carry):
                y, _ = _activate(kind, arrays[0])
                if kind != "silu":
                    y = y * _along(_norm(kind, y, epsilon)[0], y)
                if kind == "rms":
                    y = y * wide(groups.load_vector(refs[0].at[part]), y)
                store(out_refs[part].at[rows], y)
                return carry

            groups.walk([x_ref.at[:, part]], step)

        groups.by_part(kinds, make)

    made = compat.gpu_kernel(
        norm_parts_forward,
        out_type=[jax.ShapeDtypeStruct((groups.rows, *groups.shape[1:]), x.dtype)] * len(kinds),
        **groups.launch(interpret),
    )(x, *_floats(scales))
    return tuple(y.reshape(len(y), -1) for y in made)


@functools.partial(jax.jit, static_argnames=_STATIC)
def backward(x, scales, errors, kinds, size: int, epsilon: float, interpret):
    """(gradient of x, gradient of scales or None), from those of the parts."""
    shape, parts, summed = x.shape, len(kinds), scales is not None
    steps = -(-len(x) * parts // (ROWS * SUMMING)) if summed else 1
    groups, x = _groups(x, parts, size, steps)

    def norm_parts_backward(x_ref, *refs):
        refs = list(refs)
        scale_ref = refs.pop(0) if summed else None
        error_refs, dx_ref = refs[:parts], refs[parts]
        sums_ref, scratch = refs[parts + 1 :] if summed else (None, None)

        def make(part, kind):
            scale = groups.load_vector(scale_ref.at[part]) if kind == "rms" else None

            def step(rows, arrays, total):
                x, error = arrays
                a, slopes = _activate(kind, x)
                if kind != "silu":
                    (r, c), product = _norm(kind, a, epsilon), error * a
                    if kind == "rms":
                        total = total + groups.fold(product * _along(r, a))
                        error, product = error * wide(scale, a), product * wide(scale, a)
                    along = jnp.sum(product, axis=2) * (r * r * c)
                    error = (error - a * _along(along, a)) * _along(r, a)
                if slopes is not None:
                    error = error * slopes
                store(dx_ref.at[rows, part], error)
                return total

            total = groups.zeros() if summed else ()
            total = groups.walk([x_ref.at[:, part], error_refs[part]], step, total)
            if summed:
                groups.store_sums(sums_ref.at[part], [total], scratch)

        groups.by_part(kinds, make)

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if summed:
        sums = (parts, groups.groups, 1, size)
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    dx, *sums = compat.gpu_kernel(
        norm_parts_backward,
        out_type=out_type,
        scratch_types=groups.scratch() if summed else (),
        **groups.launch(interpret),
    )(x, *_floats(scales), *(_groups(error, 1, size)[1][:, 0] for error in errors))
    dscales = jnp.sum(sums[0], axis=(1, 2)).astype(scales.dtype) if summed else None
    return dx.reshape(shape), dscales


def _groups(x, parts: int, size: int, steps: int = 1):
    """(how x is dealt out, x as [rows, parts, groups, size])."""
    rows, features = x.shape
    options = dict(step=ROWS, blocks=parts, steps=steps, ahead=AHEAD)
    groups = _Groups(rows, features // parts, size=size, **options)
    return groups, x.reshape(rows, parts, *groups.shape[1:])


def _floats(scales) -> list:
    return [] if scales is None else [scales.astype(jnp.float32)]


def _along(values, like):
    """Numbers of groups, for each of their columns."""
    return lax.broadcast_in_dim(values, like.shape, (0, 1))


def _activate(kind: str, x):
    """(a, its slopes): x and None, or silu(x)."""
    if kind == "rms":
        return x, None
    root = lax.rsqrt(1 + jnp.exp2(x * -math.log2(math.e)))
    gate = root * root  # in fewer instructions than a quotient
    x = x * gate
    return x, gate + x - x * gate


def _norm(kind: str, a, epsilon: float):
    """(r, c) [rows, groups] of groups a: r a is the norm, r (e - r² c a Σ e a) its gradient."""
    squares = jnp.sum(a * a, axis=2)
    if kind == "rms":
        return lax.rsqrt(squares * (1 / a.shape[2]) + epsilon), 1 / a.shape[2]
    norm = jnp.sqrt(squares)
    return 1 / (norm + epsilon), (norm + epsilon) / jnp.where(norm > 0, norm, 1.0)
