"""Sizes of glu_step's launches, their shared memory, and arrays as they take them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ttt_kernels import compat

TILE = 64  # tokens of a product, and channels of a head
HALF = TILE // 2
SLOTS = 2  # of a warpgroup's ring of tiles with half the channels
CTAS = 132  # multiprocessors of a Hopper GPU


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a launch."""

    batch: int
    tokens: int
    heads: int
    phases: int  # times that an image's tiles pass
    pairs: int  # of warpgroups in a block of threads, each with an image of its own

    @property
    def groups(self) -> int:
        """Blocks of threads for a head, each with its share of the images."""
        return max(1, min(-(-self.batch // self.pairs), CTAS // self.heads))

    @property
    def tiles(self) -> int:
        """Tiles of tokens, the last of which may have fewer than 64."""
        return -(-self.tokens // TILE)

    @property
    def rest(self) -> int:
        """Tokens of the last tile, if it is not whole; else 0."""
        return self.tokens % TILE

    def launch(self, interpret) -> dict:
        """Grid, threads and names of a launch."""
        return dict(
            grid=(self.heads, self.groups),
            grid_names=("head", "group"),
            num_threads=2 * self.pairs,
            thread_name="warpgroup",
            interpret=interpret,
        )

    def scratch(self, products: int, interpret) -> list:
        """Shared memory and barriers of a `Warpgroup`, with so many results a warpgroup."""
        barrier, warpgroups = compat.mosaic_gpu().Barrier, 2 * self.pairs
        steps = self.pairs * self.phases * self.tiles
        return [
            _two_views(self.pairs * self.tiles, TILE, interpret),
            _two_views(warpgroups * SLOTS, HALF, interpret),
            _tiles(2),
            _tiles(warpgroups),
            _tiles(products * warpgroups),
            _tiles(1),
            compat.mosaic_gpu().SMEM((warpgroups, TILE), jnp.float32),
            barrier(num_arrivals=warpgroups),
            barrier(num_arrivals=2, num_barriers=self.pairs),
            barrier(num_arrivals=1, num_barriers=steps),
            barrier(num_arrivals=1, num_barriers=steps),
            barrier(num_arrivals=1, num_barriers=warpgroups * SLOTS),
        ]


def _tiles(count: int):
    """`count` bf16 tiles of 64 by 64 in shared memory, as wgmma reads them."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=transforms)


def _two_views(count: int, columns: int, interpret):
    """Tiles of 64 rows as wgmma and registers read them and row by row: in memory the same.

    A tile of 64 (32) channels is as wide as a swizzle of 128 (64) bytes, so that its rows follow
    one another. As tiles, copies to and from global memory would have to begin at multiples of 8
    rows. The interpreter knows no tiles, and one view does.
    """
    plgpu = compat.mosaic_gpu()
    shape, swizzle = (count, TILE, columns), plgpu.SwizzleTransform(2 * columns)
    tiling = plgpu.TilingTransform((8, columns))
    tiled = plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzle))
    rows = plgpu.SMEM(shape, jnp.bfloat16, transforms=(swizzle,))
    return tiled if interpret else plgpu.RefUnion(tiled, rows)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of an array [rows, heads, channels] in global memory, from `first` on."""

    array: jax.Array
    first: int = 0


def rows(x):
    """[batch, tokens, ..., channels] as [batch · tokens, heads, channels]."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def parts(refs) -> list[Heads]:
    """q, k and v of three references, or of one that has them side by side."""
    if len(refs) == 1:
        return [Heads(refs[0], n * (refs[0].shape[1] // 3)) for n in range(3)]
    return [Heads(ref) for ref in refs]


def by_side(w1, w2):
    """[..., 64, 64] twice as [..., 2, 64, 64]: the columns that each warpgroup has of both."""
    w = jnp.stack([w1, w2], axis=-2).reshape(*w1.shape[:-1], 2, 2, HALF)  # in, which, side, out
    return jnp.moveaxis(w, -2, -4).reshape(*w1.shape[:-2], 2, TILE, TILE)


def by_matrix(w):
    """(w1, w2) of `by_side`."""
    w = jnp.moveaxis(w.reshape(*w.shape[:-1], 2, HALF), -4, -2)  # in, which, side, out
    w = w.reshape(*w.shape[:-2], TILE)
    return w[..., 0, :], w[..., 1, :]
