"""What both launches of glu_step share: tiles in shared memory, and the steps on a tile."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

TILE = 64  # tokens of a product, and channels of a head


def tiles(count: int):
    """`count` bf16 tiles of 64 by 64 in shared memory, as wgmma reads them."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=transforms)


def two_views(count: int, interpret):
    """The same tiles as wgmma reads them and row by row: in memory they are the same.

    A tile of 64 channels is as wide as the swizzle, so that its rows follow one another. As tiles,
    copies to and from global memory would have to begin at multiples of 8 rows. The interpreter
    knows no tiles, and one view does.
    """
    plgpu = compat.mosaic_gpu()
    rows = plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=(plgpu.SwizzleTransform(128),))
    return tiles(count) if interpret else plgpu.RefUnion(tiles(count), rows)


def views(ref, interpret) -> tuple:
    """(as tiles, row by row) of `two_views`."""
    return (ref, ref) if interpret else tuple(ref)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a launch, and the copies of an image's and head's tokens."""

    batch: int
    tokens: int
    heads: int
    dim: int

    @property
    def tiles(self) -> int:
        """Tiles of tokens, the last of which may have fewer than 64."""
        return -(-self.tokens // TILE)

    @property
    def rest(self) -> int:
        """Tokens of the last tile, if it is not whole; else 0."""
        return self.tokens % TILE

    def rows(self, x):
        """[batch · tokens, heads, dim]."""
        return x.reshape(-1, self.heads, self.dim)

    def clear(self, *refs):
        """Writes zeros where no copy does; they stay, for of zeros every product is zero."""
        if self.rest:
            for ref in refs:
                ref.at[self.tiles - 1][...] = jnp.zeros((TILE, TILE), ref.dtype)
            compat.mosaic_gpu().commit_smem()

    def fetch(self, a, b, barriers):
        """Starts to copy the tokens of pairs (array, tiles row by row); b may be None."""
        pairs = [pair for pair in (a, b) if pair is not None]

        def copy(i, count):
            for source, target in pairs:
                compat.mosaic_gpu().copy_gmem_to_smem(
                    self._part(source, i, count), _head(target, i, count), barriers.at[i]
                )

        whole = self.tokens // TILE
        if whole:
            pl.loop(0, whole)(lambda i: copy(i, TILE))
        if self.rest:
            copy(whole, self.rest)

    def write(self, i, *pairs):
        """Starts to copy tile i of pairs (tiles row by row, array)."""
        plgpu = compat.mosaic_gpu()

        def copy(count):
            for source, target in pairs:
                plgpu.copy_smem_to_gmem(_head(source, i, count), self._part(target, i, count))

        whole = self.tokens // TILE
        if whole:
            pl.when(i < whole)(lambda: copy(TILE))
        if self.rest:
            pl.when(i == whole)(lambda: copy(self.rest))

    def _part(self, ref, i, count: int):
        """The first tokens of tile i of this block's image and head."""
        row = lax.axis_index("batch") * self.tokens + i * TILE
        return ref.at[pl.ds(row, count), lax.axis_index("head")]


def _head(ref, i, count: int):
    """The first rows of a tile."""
    return ref.at[i] if count == TILE else ref.at[i, pl.ds(0, count)]


def load(ref):
    """A tile in registers, spread as accumulators are, in float32."""
    plgpu = compat.mosaic_gpu()
    x = compat.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    return x.astype(jnp.float32)


def store(refs, *values):
    """Rounds tiles to shared memory for the products that follow."""
    for n, value in enumerate(values):
        refs.at[n][...] = value.astype(jnp.bfloat16)
    compat.mosaic_gpu().commit_smem()


def two(x, weights):
    """x W1 and x W2."""
    plgpu = compat.mosaic_gpu()

    def run(a, b):
        plgpu.wgmma(a, x, weights.at[0])
        plgpu.wgmma(b, x, weights.at[1])
        return a[...], b[...]

    acc = plgpu.ACC((TILE, TILE), jnp.float32)
    return pl.run_scoped(run, acc, acc)


def _back(acc, a, b, weights):
    """Adds a W1ᵀ + b W2ᵀ to an accumulator."""
    plgpu = compat.mosaic_gpu()
    plgpu.wgmma(acc, a, weights.at[0].transpose((1, 0)))
    plgpu.wgmma(acc, b, weights.at[1].transpose((1, 0)))


def logistic(x):
    """σ(x) = (tanh(x / 2) + 1) / 2: one instruction, to 5e-4, where 1 / (1 + exp(-x)) is ten."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def gradients(ks, vs, second, weights, ready, tiles: int):
    """Σ kᵀ (v ⊙ silu(z)) and Σ kᵀ (v ⊙ a ⊙ silu'(z)) with a = k W1, z = k W2.

    Overwrites the values.
    """
    plgpu = compat.mosaic_gpu()

    def run(g1, g2):
        @pl.loop(0, tiles)
        def _(i):
            plgpu.barrier_wait(ready.at[i])
            value, gate = two(ks.at[i], weights)  # waits for all products before
            v = load(vs.at[i])
            sigmoid = logistic(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            vs.at[i][...] = (v * gate * sigmoid).astype(jnp.bfloat16)
            second.at[0][...] = (v * value * slope).astype(jnp.bfloat16)
            plgpu.commit_smem()
            turned = ks.at[i].transpose((1, 0))
            plgpu.wgmma(g1, turned, vs.at[i])
            plgpu.wgmma(g2, turned, second.at[0])

        return g1[...], g2[...]

    acc = plgpu.ACC((TILE, TILE), jnp.float32)
    return pl.run_scoped(run, acc, acc)


def move(weight, gradient, scale: float, clip: bool):
    """The weights after the step; `gradient` is that of −⟨f, v⟩, without sign and scale."""
    if clip:
        norm = jnp.sqrt(jnp.sum(gradient * gradient, axis=0))
        gradient = gradient * _columns(1 / (scale * norm + 1))
    return weight + scale * gradient


def move_backwards(error, gradient, scale: float, clip: bool):
    """Gradient with respect to `gradient` of the weights after the step, given theirs."""
    if not clip:
        return scale * error
    norm = jnp.sqrt(jnp.sum(gradient * gradient, axis=0))
    along = jnp.sum(gradient * error, axis=0) / jnp.maximum(norm, 1e-30)
    factor = scale / (scale * norm + 1)
    return _columns(factor) * (error - gradient * _columns(factor * along))


def read_backwards(q, error, spare, weights, d1, d2):
    """dq of a tile; adds qᵀ da and qᵀ dz to the gradients of the weights read.

    The output is a ⊙ silu(z) with a = q W1, z = q W2. Overwrites the error.
    """
    plgpu = compat.mosaic_gpu()
    value, gate = two(q, weights)
    wide = load(error)
    sigmoid = logistic(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    error[...] = (wide * gate * sigmoid).astype(jnp.bfloat16)
    spare[...] = (wide * value * slope).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def run(dq):
        _back(dq, error, spare, weights)
        plgpu.wgmma(d1, q.transpose((1, 0)), error)
        plgpu.wgmma(d2, q.transpose((1, 0)), spare)
        return dq[...]

    return pl.run_scoped(run, plgpu.ACC((TILE, TILE), jnp.float32))


def learn_backwards(k, v, spare, weights, errors, d1, d2):
    """dk and dv of a tile; adds kᵀ da and kᵀ dz to the gradients of the initial weights.

    With a = k W1, z = k W2 the step's gradients are kᵀ r1, kᵀ r2 of r1 = v ⊙ silu(z) and
    r2 = v ⊙ a ⊙ silu'(z); `errors` are theirs. Overwrites the values.
    """
    plgpu = compat.mosaic_gpu()
    value, gate = two(k, weights)
    e1, e2 = two(k, errors)
    wide = load(v)
    sigmoid = logistic(gate)
    silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    curve = sigmoid * (1 - sigmoid) * (2 + gate * (1 - 2 * sigmoid))
    v[...] = (wide * silu).astype(jnp.bfloat16)
    spare[...] = (wide * value * slope).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def run(dk):
        _back(dk, v, spare, errors)
        dv = e1 * silu + e2 * value * slope
        da = e2 * wide * slope
        dz = wide * (e1 * slope + e2 * value * curve)
        plgpu.wgmma_wait(0)
        v[...] = da.astype(jnp.bfloat16)
        spare[...] = dz.astype(jnp.bfloat16)
        plgpu.commit_smem()
        _back(dk, v, spare, weights)
        plgpu.wgmma(d1, k.transpose((1, 0)), v)
        plgpu.wgmma(d2, k.transpose((1, 0)), spare)
        return dk[...], dv

    return pl.run_scoped(run, plgpu.ACC((TILE, TILE), jnp.float32))


def _columns(x):
    """One value a column, over all rows."""
    return lax.broadcast_in_dim(x, (TILE, TILE), (1,))
