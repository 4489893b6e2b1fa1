"""What both launches of glu_step share: the warpgroups' work, its tiles, and steps on a tile.

Two warpgroups hold an image and a head, in shared memory. Each has half of the columns of W1 and
the same half of W2, side by side as one matrix of 64 columns, so that what it computes fits into
its registers. What is computed by elements, and the step's norms, go by columns. Where all columns
meet, in products with transposed weights, the two take turns: one makes the product for a tile, the
other that for the next.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.glu_step.mosaic_gpu_plan import HALF, SLOTS, TILE, Heads, Plan


class Warpgroup:
    """A warpgroup's place in a launch, and where what it works on lies.

    `tile` are the tokens of an image in turn: keys, queries, keys. `half` are its values or errors,
    the warpgroup's columns of them.
    """

    def __init__(self, plan: Plan, w_ref, bias_ref, scratch, interpret):
        self._arguments = plan, w_ref, bias_ref, scratch, interpret
        tiles, halves, self.weights, moved, products, eighths, vectors, *barriers = scratch
        self._shared, self._met, self._tile, self._added, self._half = barriers
        self._tiles, self._tile_rows = (tiles, tiles) if interpret else tiles
        self._halves, self._half_rows = (halves, halves) if interpret else halves
        self.plan, self._bias = plan, bias_ref
        self._index = index = lax.axis_index("warpgroup")
        self._pair = pair = lax.div(index, jnp.int32(2))
        self.side = lax.rem(index, jnp.int32(2))
        self.other = index + 1 - 2 * self.side
        self.head = lax.axis_index("head")
        self.initial = w_ref.at[self.head, self.side]
        self.share = lax.axis_index("group") * plan.pairs + pair
        shares = plan.pairs * plan.groups
        self.images = lax.div(plan.batch - self.share + shares - 1, jnp.int32(shares))
        self._eighths, self.eighths = eighths.at[0], eighths.at[0, pl.ds(0, 8)]
        self.moved, self.vector = moved.at[index], vectors.at[index]
        # By which of the two warpgroups has them.
        self.both_moved = [moved.at[2 * pair + side] for side in range(2)]
        warpgroups = 2 * plan.pairs
        count = products.shape[0] // warpgroups
        self.products = [products.at[n * warpgroups + index] for n in range(count)]
        self.both_products = [
            [products.at[n * warpgroups + 2 * pair + side] for side in range(2)]
            for n in range(count)
        ]

    def anew(self):
        """The same, for the body of a loop.

        Addresses are then computed there. Else the compiler computes all of them before all loops,
        has no registers for them, and reads them again from where spilled registers go: the L2.
        """
        return Warpgroup(*self._arguments)

    def image(self, n):
        """The image that is this pair's n-th."""
        return self.share + n * (self.plan.pairs * self.plan.groups)

    def own(self, barriers):
        """A warpgroup's barrier."""
        return barriers.at[self._index]

    def turn(self, i):
        """Whether tile i is this warpgroup's, and not the other's."""
        return lax.rem(i, jnp.int32(2)) == self.side

    def tile(self, i):
        """Tile i of the image."""
        return self._tiles.at[self._pair * self.plan.tiles + i]

    def half(self, i):
        """This warpgroup's half of tile i of what it reads beside."""
        return self._halves.at[self._slot(i)]

    def value_bias(self):
        """The bias of this warpgroup's half of the values, in registers."""
        return _load_row(self._bias.at[2, self.head, pl.ds(self.side * HALF, HALF)])

    def values(self, i, bias):
        """Tile i of the values with their bias, in registers, bfloat16."""
        return _load(self.half(i)) + lax.broadcast_in_dim(bias, (TILE, HALF), (1,))

    def prepare(self):
        """Shares the initial weights, and writes zeros where no copy does.

        They stay zero, for of zeros every product is.
        """
        plgpu, last = compat.mosaic_gpu(), jnp.int32(self.plan.tiles - 1)
        if self.plan.rest:
            self.half(last)[...] = jnp.zeros((TILE, HALF), jnp.bfloat16)

            @pl.when(self.turn(last))
            def _():
                self.tile(last)[...] = jnp.zeros((TILE, TILE), jnp.bfloat16)

        @pl.when(self._pair == 0)
        def _():
            self.weights.at[self.side][...] = load(self.initial).astype(jnp.bfloat16)

        @pl.when(self._index == 0)
        def _():
            self._eighths[...] = jnp.full((TILE, TILE), 1 / 8, jnp.bfloat16)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self._shared)

    def wait_for_weights(self):
        """Waits until all have prepared."""
        compat.mosaic_gpu().barrier_wait(self._shared)

    def meet(self):
        """Waits for the other warpgroup of the pair."""
        compat.mosaic_gpu().barrier_arrive(self._met.at[self._pair])
        compat.mosaic_gpu().barrier_wait(self._met.at[self._pair])

    def start(self, phase: int, image, source: Heads, beside: Heads | None):
        """Starts to copy all tiles of an image, by turns, and the first halves of another array."""

        def fetch(i):
            barrier = self._tile.at[self._step(phase, i)]
            self._fetch(source, image, i, self._tile_rows, self._place(i), barrier)

        pl.loop(0, self.plan.tiles)(lambda i: pl.when(self.turn(i))(lambda: fetch(i)))
        if beside is not None:
            for i in range(SLOTS):
                self.fetch_half(beside, image, i - SLOTS)

    def fetch_half(self, source: Heads, image, i):
        """Starts to copy what follows half i in its slot, if anything does."""
        following = jnp.int32(i + SLOTS)
        slot = self._slot(following)

        @pl.when(following < self.plan.tiles)
        def _():
            barrier = self._half.at[slot]
            self._fetch(source, image, following, self._half_rows, slot, barrier)

    def add_bias(self, phase: int, which: int):
        """Adds the bias of queries (0) or keys (1) to the tiles of a phase, by turns."""
        plgpu = compat.mosaic_gpu()
        bias = lax.broadcast_in_dim(_load_row(self._bias.at[which, self.head]), (TILE, TILE), (1,))

        def add(i):
            plgpu.barrier_wait(self._tile.at[self._step(phase, i)])

            def write(count):
                x = _load(self.tile(i)) + bias
                if count < TILE:  # zeros stay
                    token = lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
                    x = jnp.where(token < count, x, jnp.zeros_like(x))
                self.tile(i)[...] = x

            self._by_count(i, write)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self._added.at[self._step(phase, i)])

        pl.loop(0, self.plan.tiles)(lambda i: pl.when(self.turn(i))(lambda: add(i)))

    def wait(self, phase: int, i, half: bool = True):
        """Waits for tile i of a phase and its half of the other array."""
        compat.mosaic_gpu().barrier_wait(self._added.at[self._step(phase, i)])
        if half:
            compat.mosaic_gpu().barrier_wait(self._half.at[self._slot(i)])

    def write_tile(self, target: Heads, image, i):
        """Starts to write tile i to global memory."""
        self._write(self._tile_rows, self._place(i), target, image, i)

    def write_half(self, target: Heads, image, i):
        """Starts to write half i to global memory."""
        self._write(self._half_rows, self._slot(i), target, image, i)

    def _place(self, i):
        return self._pair * self.plan.tiles + i

    def _slot(self, i):
        return self._index * SLOTS + lax.rem(i, jnp.int32(SLOTS))

    def _step(self, phase: int, i):
        return (self._pair * self.plan.phases + phase) * self.plan.tiles + i

    def _fetch(self, source, image, i, target, slot, barrier):
        def copy(count):
            part = self._part(source, image, i, count, target.shape[-1])
            compat.mosaic_gpu().copy_gmem_to_smem(part, _head(target, slot, count), barrier)

        self._by_count(i, copy)

    def _write(self, source, slot, target, image, i):
        def copy(count):
            part = self._part(target, image, i, count, source.shape[-1])
            compat.mosaic_gpu().copy_smem_to_gmem(_head(source, slot, count), part)

        self._by_count(i, copy)

    def _by_count(self, i, do):
        """Calls `do` with the number of tokens of tile i."""
        whole = self.plan.tokens // TILE
        if whole:
            pl.when(i < whole)(lambda: do(TILE))
        if self.plan.rest:
            pl.when(i == whole)(lambda: do(self.plan.rest))

    def _part(self, heads: Heads, image, i, count: int, columns: int):
        """The tokens of tile i, all channels or this warpgroup's."""
        rows = pl.ds(image * self.plan.tokens + i * TILE, count)
        channels = slice(None) if columns == TILE else pl.ds(self.side * HALF, HALF)
        return heads.array.at[rows, heads.first + self.head, channels]


def _head(ref, i, count: int):
    """The first rows of a tile."""
    return ref.at[i] if count == TILE else ref.at[i, pl.ds(0, count)]


def load(ref):
    """A tile in registers, spread as accumulators are, in float32."""
    return _load(ref).astype(jnp.float32)


def _load(ref):
    return compat.load(ref, layout=compat.mosaic_gpu().Layout.WGMMA, optimized=False)


def _load_row(ref):
    """A vector in registers, as `load` has a tile's row."""
    layout = compat.mosaic_gpu().Layout.WGMMA.reduce(0)
    return compat.load(ref, layout=layout, optimized=False)
