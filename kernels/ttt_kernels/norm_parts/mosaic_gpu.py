"""Norms and activations of the parts of rows on Hopper GPUs through Pallas' Mosaic GPU backend.

Each way is one pass over memory; XLA makes two forward, where the backward pass wants the norms,
and two or three backward. An array of several parts is read, and its gradient written, as the
product has it: slices of it would be copied. A group lies in one warp, 8 numbers or fewer a lane.
Forwards rows go straight into registers; backwards, by rings.
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
from ttt_kernels.row_walk import Walk
from ttt_kernels.rows import Rows, store, wide

ROWS = 4  # of a step; a warp each
MAX_WIDTH = 1024  # of a part, that a row of it fits into a warp's registers
MAX_FEATURES = 2048  # of all parts, for the rings
BACKWARD = (3, 4)  # warpgroups, and slots of each one's ring


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
    if features > MAX_FEATURES:
        return f"{features} features; the Mosaic GPU kernel takes at most {MAX_FEATURES}"
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


class _Groups:
    """Registers that are [rows, groups, size], for `columns` in groups of `size`."""

    @property
    def side(self) -> int:
        """Groups side by side in a warp's lanes, as few as let a lane load 16 bytes at once."""
        groups = self.columns // self.size
        wanted = max(1, 256 // (self.size & -self.size))
        return min(groups & -groups, wanted)

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


@dataclasses.dataclass(frozen=True)
class _Rows(_Groups, Rows):
    """Blocks are parts, each an array [rows, groups, size].

    Attributes:
      size: columns of a group.
    """

    size: int = 64

    def here(self):
        return slice(None)


@dataclasses.dataclass(frozen=True)
class _Walk(_Groups, Walk):
    """A walk over all parts at once, each a source.

    Attributes:
      size: columns of a group.
      boxes: whether slots have the shape of a copy's box; JAX's interpreter cannot reshape it.
    """

    size: int = 64
    boxes: bool = True

    @property
    def shape(self):
        # A copy takes up to 256 numbers along an axis.
        inner = math.gcd(self.size, 256) if self.boxes else self.size
        return self.columns // inner, inner

    def view(self, ref):
        groups = self.columns // self.size, self.size
        return ref if self.shape == groups else ref.reshape(self.step, *groups)

    @property
    def partial(self):
        return (4, self.size) if self.side > 1 else (4, 1, self.size)

    def zeros(self):
        zeros = jnp.zeros((4, self.side, self.size), jnp.float32)
        return (compat.mosaic_gpu().layout_cast(zeros, self.layout()),) * self.sums

    def fold(self, x):
        """[4, side, size], the sums over what a lane has of one column, of [step, groups, size]."""
        pieces = [
            x[i : i + 4, j : j + self.side]
            for i in range(0, self.step, 4)
            for j in range(0, x.shape[1], self.side)
        ]
        return functools.reduce(jnp.add, pieces)

    def add_up(self, totals, out_ref, scratch):
        if self.side > 1:  # of one, a sum would be a reshape, which Mosaic has not
            totals = [jnp.sum(total, axis=1) for total in totals]
        super().add_up(totals, out_ref, scratch)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def forward(x, scales, kinds, size: int, epsilon: float, interpret) -> tuple[jax.Array, ...]:
    """The parts, [rows, features / parts] each, of x [rows, features]; scales as of the API."""
    (rows, features), parts = x.shape, len(kinds)
    groups = _Rows(rows, features // parts, ROWS, blocks=parts, size=size)
    shape = groups.columns // size, size

    def norm_parts_forward(x_ref, *refs):
        out_refs = refs[-parts:]

        def make(part, kind):
            def step(rows, arrays, carry):
                y, *_ = _map(kind, arrays[0], epsilon)
                if kind == "rms":
                    y = y * wide(groups.load_vector(refs[0].at[part]), y)
                store(out_refs[part].at[rows], y)
                return carry

            groups.walk([x_ref.at[:, part]], step)

        for part, kind in enumerate(kinds):
            pl.when(groups.block() == part)(functools.partial(make, part, kind))

    made = compat.gpu_kernel(
        norm_parts_forward,
        out_type=[jax.ShapeDtypeStruct((rows, *shape), x.dtype)] * parts,
        **groups.launch(interpret),
    )(x.reshape(rows, parts, *shape), *([] if scales is None else [_float(scales)]))
    return tuple(y.reshape(rows, -1) for y in made)


@functools.partial(jax.jit, static_argnames=_STATIC)
def backward(x, scales, errors, kinds, size: int, epsilon: float, interpret):
    """(gradient of x, gradient of scales or None), from those of the parts."""
    (rows, features), parts = x.shape, len(kinds)
    width = features // parts
    sums = 0 if scales is None else parts
    options = dict(size=size, step=ROWS, boxes=interpret is None)
    walk = _Walk(rows, width, 2 * parts, *BACKWARD, sums, **options)
    if sums * walk.side * size > 1024:  # of three, the sums spill registers
        walk = dataclasses.replace(walk, warpgroups=2)

    def norm_parts_backward(x_ref, *refs):
        refs = list(refs)
        weights = [] if scales is None else _load(walk, kinds, refs.pop(0))
        error_refs = [refs.pop(0) for _ in kinds]
        dx_ref = refs.pop(0)
        sums_ref = None if scales is None else refs.pop(0)

        def step(row, arrays, totals):
            totals = list(totals)
            for part, kind in enumerate(kinds):
                a, error = arrays[part], arrays[parts + part]
                made, factor, inverse, slopes = _map(kind, a, epsilon)
                if kind == "rms":
                    totals[part] = totals[part] + walk.fold(error * made)
                    error = error * wide(weights[part], error)
                if factor is not None:
                    along = jnp.sum(error * made, axis=2) * factor
                    error = (error - made * _along(along, error)) * _along(inverse, error)
                if slopes is not None:
                    error = error * slopes
                compat.store(dx_ref.at[pl.ds(row, ROWS), part], error.astype(x.dtype))
            return tuple(totals)

        sources = [x_ref.at[:, part] for part in range(parts)] + error_refs
        totals = walk.run(sources, refs[:2], step, walk.zeros())
        if sums:
            walk.add_up(totals, sums_ref, refs[2:])

    out_type = [jax.ShapeDtypeStruct((rows, parts, width // size, size), x.dtype)]
    if sums:
        out_type.append(jax.ShapeDtypeStruct((walk.groups, sums, size), jnp.float32))
    dx, *partial_sums = compat.gpu_kernel(
        norm_parts_backward,
        out_type=out_type,
        scratch_types=walk.scratch(),
        **walk.launch(interpret),
    )(
        x.reshape(rows, parts, *walk.shape),
        *([] if scales is None else [_float(scales)]),
        *(error.reshape(rows, *walk.shape) for error in errors),
    )
    dscales = jnp.sum(partial_sums[0], axis=0).astype(scales.dtype) if sums else None
    return dx.reshape(x.shape), dscales


def _float(vectors):
    return vectors.astype(jnp.float32)


def _load(walk, kinds, scale_ref):
    """Scales of the parts that have some; None of the others."""
    return [
        walk.load_vector(scale_ref.at[part]) if kind == "rms" else None
        for part, kind in enumerate(kinds)
    ]


def _along(values, like):
    """Numbers of groups, for each of their columns."""
    return lax.broadcast_in_dim(values, like.shape, (0, 1))


def _map(kind: str, x, epsilon: float):
    """(results without a scale n, c, r, slopes) of groups x [rows, groups, size].

    With the activations a = x, or silu(x) and its slopes: n = r a, where the gradient of a is
    r (e - n c Σ e n); c and r are [rows, groups]. Without a norm they are None. Slopes is None
    where a = x.
    """
    size, slopes = x.shape[2], None
    if kind != "rms":
        root = lax.rsqrt(1 + jnp.exp2(x * -math.log2(math.e)))
        gate = root * root  # in fewer instructions than a quotient
        x = x * gate
        slopes = gate + x - x * gate
    if kind == "silu":
        return x, None, None, slopes
    squares = jnp.sum(x * x, axis=2)
    if kind == "rms":
        factor, inverse = 1 / size, lax.rsqrt(squares * (1 / size) + epsilon)
    else:
        norm = jnp.sqrt(squares)
        inverse = 1 / (norm + epsilon)
        factor = (norm + epsilon) / jnp.where(norm > 0, norm, 1.0)
    return x * _along(inverse, x), factor, inverse, slopes
