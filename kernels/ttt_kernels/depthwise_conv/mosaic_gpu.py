"""Depthwise 3×3 convolutions of small images on Hopper GPUs, through Pallas' Mosaic GPU backend.

Every pixel is read and written once: a block of threads walks over images, 64 channels at a time,
with the image in shared memory as tokens of its rows one after another, zeros before and after.
The neighbours of a row of pixels are then 16 tokens in a row; those beyond the left or right edge
are tokens of other rows, whose taps are zero. XLA's loop asks of each of the nine taps whether it
lies inside, at a fifth of the memory's speed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

CHANNELS = 64  # of a block
COLUMNS = 16  # tokens of an output row in registers; those beyond the image are thrown away
MAX_ROWS = 32  # of an image, that two of them fit into shared memory
MAX_PIXELS = 256  # of an image: what the copy engine takes along an axis
_CTAS = 264  # two a multiprocessor


def unsupported(x: jax.Array, stride: int) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    _, height, width, channels = x.shape
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Mosaic GPU kernel takes bfloat16"
    if stride != 1:
        return f"{stride=}; the Mosaic GPU kernel has stride 1"
    if channels % CHANNELS:
        return f"{channels} channels; the Mosaic GPU kernel takes multiples of {CHANNELS}"
    if height > MAX_ROWS or width > COLUMNS or height * width > MAX_PIXELS:
        limit = f"{MAX_ROWS} x {COLUMNS}, {MAX_PIXELS} in all"
        return f"{height} x {width} pixels; the Mosaic GPU kernel has at most {limit}"
    return compat.layout_problem()


def depthwise_conv(
    x, kernel, bias, stride: int, residual: bool, interpret: bool = False
) -> jax.Array:
    """`ttt_kernels.depthwise_conv` by the kernels, for arguments without `unsupported`.

    Args:
      x, kernel, bias, stride, residual: as there; the kernel and bias are not rounded.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).

    Returns:
      Like x.
    """
    del stride  # 1
    kernel = kernel.astype(jnp.float32)
    bias = jnp.zeros_like(kernel[0]) if bias is None else bias.astype(jnp.float32)
    if residual:  # is one more on the middle tap
        kernel = kernel.at[4].add(1.0)
    return _core(x, kernel, bias, compat.gpu_interpret_params() if interpret else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _core(x, kernel, bias, interpret):
    return forward(x, kernel, bias, interpret)


def _core_forward(x, kernel, bias, interpret):
    return forward(x, kernel, bias, interpret), (x, kernel)


def _core_backward(interpret, residuals, error):
    return backward(*residuals, error, interpret)


_core.defvjp(_core_forward, _core_backward)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames="interpret")
def forward(x, kernel, bias, interpret) -> jax.Array:
    """y[p, c] = bias[c] + Σ_j kernel[j, c] x[p + j, c].

    Args:
      x: [batch, height, width, channels] bfloat16.
      kernel: [9, channels] float32.
      bias: [channels] float32.
      interpret: None, or the interpreter's parameters.

    Returns:
      Like x.
    """
    plgpu = compat.mosaic_gpu()
    stages, plan = 2, _Plan(*x.shape)

    def depthwise_conv_forward(x_ref, taps_ref, out_ref, xs, out, full):
        block, first, count = plan.place()
        columns = pl.ds(block * CHANNELS, CHANNELS)
        plan.zero_borders(xs, stages)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.copy_gmem_to_smem(
                x_ref.at[first + i, :, columns], plan.inside(xs.at[slot]), full.at[slot]
            )

        taps = [taps_ref[block, j] for j in range(10)]
        for i in range(stages):
            pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))

        @pl.loop(0, count)
        def _(i):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.loop(0, plan.height)
            def _(row):
                out.at[row][...] = plan.convolve(taps, xs.at[slot], row).astype(x.dtype)

            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, plan.image(out_ref, first + i, columns))
            pl.when(i + stages < count)(lambda: fetch(i + stages))

        plgpu.wait_smem_to_gmem(0)

    call = compat.gpu_kernel(
        depthwise_conv_forward,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM((stages, plan.tokens, CHANNELS), x.dtype),
            plgpu.SMEM((plan.height, COLUMNS, CHANNELS), x.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        **plan.launch(),
        interpret=interpret,
    )
    return call(plan.flat(x), plan.taps(kernel, bias))


@functools.partial(jax.jit, static_argnames="interpret")
def backward(x, kernel, error, interpret) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `forward` with respect to x, kernel and bias.

    Args:
      x, kernel, interpret: as of `forward`.
      error: gradient of its result, like x.

    Returns:
      (dx like x, dkernel [9, channels] float32, dbias [channels] float32).
    """
    plgpu = compat.mosaic_gpu()
    plan = _Plan(*x.shape)

    def depthwise_conv_backward(x_ref, error_ref, taps_ref, dx_ref, sums_ref, xs, es, out, full):
        block, first, count = plan.place()
        columns = pl.ds(block * CHANNELS, CHANNELS)
        plan.zero_borders(xs, 1)
        plan.zero_borders(es, 1)

        def fetch(i):
            for ref, target in ((x_ref, xs), (error_ref, es)):
                plgpu.copy_gmem_to_smem(
                    ref.at[first + i, :, columns], plan.inside(target.at[0]), full
                )

        taps = [taps_ref[block, j] for j in range(10)]
        pl.when(count > 0)(lambda: fetch(jnp.int32(0)))

        def image(i, sums):
            plgpu.barrier_wait(full)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def row(r, sums):
                out.at[r][...] = plan.convolve(taps, es.at[0], r).astype(x.dtype)
                e = plan.row(es.at[0], r, 1, 1)
                products = [e * plan.row(xs.at[0], r, *divmod(j, 3)) for j in range(9)]
                return tuple(a + b for a, b in zip(sums, (*products, e), strict=True))

            sums = lax.fori_loop(0, plan.height, row, sums)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, plan.image(dx_ref, first + i, columns))
            pl.when(i + 1 < count)(lambda: fetch(i + 1))
            return sums

        sums = lax.fori_loop(0, count, image, tuple(0 * tap for tap in taps))
        for j, value in enumerate(sums):
            sums_ref[lax.axis_index("group"), block, j] = value
        plgpu.wait_smem_to_gmem(0)

    call = compat.gpu_kernel(
        depthwise_conv_backward,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((plan.groups, plan.blocks, 10, COLUMNS, CHANNELS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((1, plan.tokens, CHANNELS), x.dtype),
            plgpu.SMEM((1, plan.tokens, CHANNELS), x.dtype),
            plgpu.SMEM((plan.height, COLUMNS, CHANNELS), x.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        **plan.launch(),
        interpret=interpret,
    )
    turned = plan.taps(kernel[::-1], jnp.zeros_like(kernel[0]))
    dx, sums = call(plan.flat(x), plan.flat(error), turned)
    sums = jnp.sum(sums, axis=0) * plan.counted()[:, :, None]
    sums = jnp.swapaxes(jnp.sum(sums, axis=2), 0, 1).reshape(10, -1)
    return dx, sums[:9], sums[9]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a launch, and where things lie."""

    batch: int
    height: int
    width: int
    channels: int

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return self.channels // CHANNELS

    @property
    def groups(self) -> int:
        """Groups of images; a block of threads takes one, for one block of channels."""
        return max(1, min(self.batch, _CTAS // self.blocks))

    @property
    def start(self) -> int:
        """The image's first token in shared memory, behind the row above and one more."""
        return -(-(self.width + 1) // COLUMNS) * COLUMNS

    @property
    def end(self) -> int:
        """The first token after the image."""
        return self.start + self.height * self.width

    @property
    def tokens(self) -> int:
        """Tokens in shared memory, those that the last row's neighbours reach included."""
        return -(-(self.end + COLUMNS + 1) // COLUMNS) * COLUMNS

    def launch(self) -> dict:
        """Grid and names of a launch."""
        return dict(grid=(self.blocks, self.groups), grid_names=("block", "group"))

    def place(self):
        """(block of channels, first image, number of images) of a block of threads."""
        group = lax.axis_index("group")
        low = lax.div(group * self.batch, self.groups)
        high = lax.div((group + 1) * self.batch, self.groups)
        return lax.axis_index("block"), low, high - low

    def flat(self, x):
        """[batch, tokens, channels] of images."""
        return x.reshape(self.batch, self.height * self.width, self.channels)

    def inside(self, ref):
        """The image's tokens in shared memory."""
        return ref.at[pl.ds(self.start, self.height * self.width)]

    def image(self, ref, index, columns):
        """What of an array's image is written; columns past its edge are not."""
        return ref.at[index, :, pl.ds(0 * index, COLUMNS), columns]

    def zero_borders(self, ref, stages: int):
        """Writes the zeros before and after the image, which no copy touches."""
        zeros = jnp.zeros((COLUMNS, CHANNELS), ref.dtype)
        begins = [*range(0, self.start, COLUMNS), *range(self.end, self.tokens - COLUMNS, COLUMNS)]
        for slot in range(stages):
            for begin in (*begins, self.tokens - COLUMNS):
                ref.at[slot, pl.ds(begin, COLUMNS)][...] = zeros
        compat.mosaic_gpu().commit_smem()

    def row(self, ref, row, down, right):
        """The neighbours (down − 1, right − 1) of a row of pixels, float32."""
        token = self.start - self.width - 1 + (row + down) * self.width + right
        return ref[pl.ds(token, COLUMNS)].astype(jnp.float32)

    def convolve(self, taps, ref, row):
        """A row of outputs, float32 [columns, 64]."""
        y = taps[9]
        for j in range(9):
            y = y + taps[j] * self.row(ref, row, *divmod(j, 3))
        return y

    def counted(self):
        """[10, columns]: which tokens of a row have that neighbour, and which are pixels."""
        column = np.arange(COLUMNS)
        inside = column < self.width
        has = [inside & (column + right - 1 >= 0) & (column + right - 1 < self.width)
               for right in range(3)]  # fmt: skip
        return np.stack([*has, *has, *has, inside]).astype(np.float32)

    def taps(self, kernel, bias):
        """[blocks, 10, columns, 64]: taps and bias by token and channel, zero where outside."""
        taps = jnp.concatenate([kernel, bias[None]]).astype(jnp.float32)
        taps = jnp.swapaxes(taps.reshape(10, self.blocks, CHANNELS), 0, 1)
        return taps[:, :, None] * self.counted()[:, :, None]
