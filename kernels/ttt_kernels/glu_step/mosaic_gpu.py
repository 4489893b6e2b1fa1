"""One step of a gated network on each image on Hopper GPUs, through Pallas' Mosaic GPU backend.

A block of threads holds one image and head: its keys and values stay in shared memory while the
step is taken, and its queries follow where the keys were. So every array is read or written once,
where XLA, product by product, moves about seven times as much.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

TILE = 64  # tokens of a product, and channels of a head
MAX_TOKENS = 4 * TILE  # what fits into shared memory


def unsupported(q: jax.Array) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    if q.dtype != jnp.bfloat16:
        return f"the inputs are {q.dtype}; the Mosaic GPU kernel takes bfloat16"
    if q.shape[-1] != TILE:
        return f"dim={q.shape[-1]}; the Mosaic GPU kernel has heads of {TILE}"
    if q.shape[1] > MAX_TOKENS:
        return f"{q.shape[1]} tokens; the Mosaic GPU kernel holds up to {MAX_TOKENS} of a row"
    return compat.layout_problem()


def glu_step(w1, w2, q, k, v, scale: float, clip: bool, interpret: bool = False) -> jax.Array:
    """Outputs of the step by the kernels; see `ttt_kernels.glu_step`.

    Args:
      w1, w2: [heads, 64, 64] float32.
      q, k, v: [batch, tokens, heads, 64] bfloat16.
      scale: of the loss over the sum of the tokens.
      clip: as of `ttt_kernels.glu_step`.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).

    Returns:
      Like q.
    """
    params = compat.gpu_interpret_params() if interpret else None
    return _core(w1, w2, q, k, v, scale, clip, params)


def glu_step_beside(
    w1, w2, q, k, v, beside, arrays, scale: float, clip: bool, interpret: bool = False
) -> jax.Array:
    """`glu_step` of the first heads, and `beside` of the others, without copies of their arrays.

    Args:
      w1, w2: [heads, 64, 64] float32.
      q, k, v: [batch, tokens, heads + others, 64] bfloat16.
      beside: maps (arrays, q, k, v), [batch, tokens, others, 64] each, to such an array.
      arrays: pytree of what it needs else.
      scale, clip, interpret: as of `glu_step`.

    Returns:
      Like q.
    """
    params = compat.gpu_interpret_params() if interpret else None
    return _core_beside(w1, w2, q, k, v, arrays, beside, scale, clip, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _core(w1, w2, q, k, v, scale, clip, interpret):
    return forward(w1, w2, q, k, v, scale, clip, interpret)


def _core_forward(w1, w2, q, k, v, scale, clip, interpret):
    return forward(w1, w2, q, k, v, scale, clip, interpret), (w1, w2, q, k, v)


def _core_backward(scale, clip, interpret, residuals, error):
    dw1, dw2, *rest = backward(*residuals, error, scale, clip, interpret)
    return jnp.sum(dw1, axis=0), jnp.sum(dw2, axis=0), *rest


_core.defvjp(_core_forward, _core_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _core_beside(w1, w2, q, k, v, arrays, beside, scale, clip, interpret):
    return _beside_forward(w1, w2, q, k, v, arrays, beside, scale, clip, interpret)[0]


def _beside_forward(w1, w2, q, k, v, arrays, beside, scale, clip, interpret):
    heads = w1.shape[0]
    out, pullback = jax.vjp(beside, arrays, *(x[:, :, heads:] for x in (q, k, v)))
    # The kernel leaves the other heads' places alone, and this writes nothing else.
    out = forward(w1, w2, q, k, v, scale, clip, interpret).at[:, :, heads:].set(out)
    return out, (w1, w2, q, k, v, pullback)


def _beside_backward(beside, scale, clip, interpret, residuals, error):
    *residuals, pullback = residuals
    heads = residuals[0].shape[0]
    dw1, dw2, *first = backward(*residuals, error, scale, clip, interpret)
    darrays, *others = pullback(error[:, :, heads:])
    first = [x.at[:, :, heads:].set(y) for x, y in zip(first, others, strict=True)]
    return jnp.sum(dw1, axis=0), jnp.sum(dw2, axis=0), *first, darrays


_core_beside.defvjp(_beside_forward, _beside_backward)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames=("scale", "clip", "interpret"))
def forward(w1, w2, q, k, v, scale: float, clip: bool, interpret) -> jax.Array:
    """Outputs of the step, as `ttt_kernels.glu_step`.

    Args:
      w1, w2: [heads, 64, 64] float32.
      q, k, v: [batch, tokens, at least heads, 64] bfloat16; further heads are not read.
      scale: of the loss over the sum of the tokens.
      clip: whether the gradient is divided by its norm plus one.
      interpret: None, or the interpreter's parameters.

    Returns:
      Like q; further heads are not written.
    """
    plgpu = compat.mosaic_gpu()
    plan = _Plan(*q.shape)
    tiles = plan.tiles

    def glu_step_forward(*refs):
        w1_ref, w2_ref, q_ref, k_ref, v_ref, out_ref, *rest = refs
        *views, second, weights, ready, asked = rest
        (ks, keys), (vs, values) = (_views(view, interpret) for view in views)
        h = lax.axis_index("head")
        plan.clear(ks, vs)
        plan.fetch((k_ref, keys), (v_ref, values), ready)
        _store(weights, _load(w1_ref.at[h]), _load(w2_ref.at[h]))
        g1, g2 = _gradients(ks, vs, second, weights, ready, tiles)

        plan.fetch((q_ref, keys), None, asked)  # nothing reads the keys any more
        moved = (_move(_load(w_ref.at[h]), g, scale, clip) for w_ref, g in
                 ((w1_ref, g1), (w2_ref, g2)))  # fmt: skip
        _store(weights, *moved)

        @pl.loop(0, tiles)
        def _(i):
            plgpu.barrier_wait(asked.at[i])
            value, gate = _two(ks.at[i], weights)
            vs.at[i][...] = (value * gate * _sigmoid(gate)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plan.write(i, (values, out_ref))

        plgpu.wait_smem_to_gmem(0)

    call = compat.gpu_kernel(
        glu_step_forward,
        out_type=jax.ShapeDtypeStruct(plan.rows(q).shape, q.dtype),
        scratch_types=[
            _two_views(tiles, interpret),
            _two_views(tiles, interpret),
            _tiles(1),
            _tiles(2),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles),
            plgpu.Barrier(num_arrivals=1, num_barriers=tiles),
        ],
        grid=(w1.shape[0], plan.batch),
        grid_names=("head", "batch"),
        interpret=interpret,
    )
    return call(w1, w2, *map(plan.rows, (q, k, v))).reshape(q.shape)


@functools.partial(jax.jit, static_argnames=("scale", "clip", "interpret"))
def backward(w1, w2, q, k, v, error, scale: float, clip: bool, interpret) -> tuple:
    """Gradients of `forward` with respect to its arrays.

    Args:
      w1, w2, q, k, v, scale, clip, interpret: as of `forward`.
      error: gradient of the outputs, like q; further heads are not read.

    Returns:
      (dw1, dw2: [batch, heads, 64, 64] float32, to be summed over the batch; dq, dk, dv: like q,
      further heads are not written).
    """
    plgpu = compat.mosaic_gpu()
    plan = _Plan(*q.shape)
    tiles, heads = plan.tiles, w1.shape[0]

    def glu_step_backward(*refs):
        w1_ref, w2_ref, q_ref, k_ref, v_ref, error_ref = refs[:6]
        dw1_ref, dw2_ref, dq_ref, dk_ref, dv_ref, *rest = refs[6:]
        *views, spare, weights = rest[:4]
        (left, left_rows), (right, right_rows) = (_views(view, interpret) for view in views)
        barriers = rest[4:]
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        first, second = weights.at[pl.ds(0, 2)], weights.at[pl.ds(2, 2)]

        def fetch(a_ref, b_ref, barrier):
            plan.fetch((a_ref, left_rows), (b_ref, right_rows), barrier)

        plan.clear(left, right)
        fetch(k_ref, v_ref, barriers[0])
        _store(first, _load(w1_ref.at[h]), _load(w2_ref.at[h]))
        g1, g2 = _gradients(left, right, spare, first, barriers[0], tiles)
        fetch(q_ref, error_ref, barriers[1])
        moved = [_move(_load(w_ref.at[h]), g, scale, clip)
                 for w_ref, g in ((w1_ref, g1), (w2_ref, g2))]  # fmt: skip
        _store(weights, g1, g2, *moved)

        def run(d1, d2):
            @pl.loop(0, tiles)
            def _(i):
                plgpu.barrier_wait(barriers[1].at[i])
                left.at[i][...] = _read_backwards(
                    left.at[i], right.at[i], spare.at[0], second, d1, d2
                ).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plan.write(i, (left_rows, dq_ref))

            moving = [_move_backwards(d[...], _load(g), scale, clip)
                      for d, g in ((d1, first.at[0]), (d2, first.at[1]))]  # fmt: skip
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(k_ref, v_ref, barriers[2])
            _store(weights, _load(w1_ref.at[h]), _load(w2_ref.at[h]), *moving)

            @pl.loop(0, tiles)
            def _(i):
                plgpu.barrier_wait(barriers[2].at[i])
                dk, dv = _learn_backwards(
                    left.at[i], right.at[i], spare.at[0], first, second, d1, d2
                )
                left.at[i][...] = dk.astype(jnp.bfloat16)
                right.at[i][...] = dv.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plan.write(i, (left_rows, dk_ref), (right_rows, dv_ref))

            return d1[...], d2[...]

        acc = plgpu.ACC((TILE, TILE), jnp.float32)
        dw1_ref[b, h], dw2_ref[b, h] = pl.run_scoped(run, acc, acc)
        plgpu.wait_smem_to_gmem(0)

    by_row = jax.ShapeDtypeStruct((plan.batch, heads, TILE, TILE), jnp.float32)
    like = jax.ShapeDtypeStruct(plan.rows(q).shape, q.dtype)
    call = compat.gpu_kernel(
        glu_step_backward,
        out_type=[by_row, by_row, like, like, like],
        scratch_types=[
            _two_views(tiles, interpret),
            _two_views(tiles, interpret),
            _tiles(1),
            _tiles(4),
            *(plgpu.Barrier(num_arrivals=2, num_barriers=tiles) for _ in range(3)),
        ],
        grid=(heads, plan.batch),
        grid_names=("head", "batch"),
        interpret=interpret,
    )
    dw1, dw2, *rest = call(w1, w2, *map(plan.rows, (q, k, v, error)))
    return dw1, dw2, *(x.reshape(q.shape) for x in rest)


def _tiles(count: int):
    """`count` bf16 tiles of 64 by 64 in shared memory, as wgmma reads them."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=transforms)


def _two_views(count: int, interpret):
    """The same tiles as wgmma reads them and row by row: in memory they are the same.

    A tile of 64 channels is as wide as the swizzle, so that its rows follow one another. As tiles,
    copies to and from global memory would have to begin at multiples of 8 rows. The interpreter
    knows no tiles, and one view does.
    """
    plgpu = compat.mosaic_gpu()
    rows = plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=(plgpu.SwizzleTransform(128),))
    return _tiles(count) if interpret else plgpu.RefUnion(_tiles(count), rows)


def _views(ref, interpret) -> tuple:
    """(as tiles, row by row) of `_two_views`."""
    return (ref, ref) if interpret else tuple(ref)


@dataclasses.dataclass(frozen=True)
class _Plan:
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


def _load(ref):
    """A tile in registers, spread as accumulators are, in float32."""
    plgpu = compat.mosaic_gpu()
    x = compat.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    return x.astype(jnp.float32)


def _store(refs, *values):
    """Rounds tiles to shared memory for the products that follow."""
    for n, value in enumerate(values):
        refs.at[n][...] = value.astype(jnp.bfloat16)
    compat.mosaic_gpu().commit_smem()


def _two(x, weights):
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


def _sigmoid(x):
    return 0.5 * jnp.tanh(0.5 * x) + 0.5  # one instruction, to 5e-4, where 1 / (1 + exp) is ten


def _gradients(ks, vs, second, weights, ready, tiles: int):
    """Σ kᵀ (v ⊙ silu(z)) and Σ kᵀ (v ⊙ a ⊙ silu'(z)) with a = k W1, z = k W2.

    Overwrites the values.
    """
    plgpu = compat.mosaic_gpu()

    def run(g1, g2):
        @pl.loop(0, tiles)
        def _(i):
            plgpu.barrier_wait(ready.at[i])
            value, gate = _two(ks.at[i], weights)  # waits for all products before
            v = _load(vs.at[i])
            sigmoid = _sigmoid(gate)
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


def _move(weight, gradient, scale: float, clip: bool):
    """The weights after the step; `gradient` is that of −⟨f, v⟩, without sign and scale."""
    if clip:
        norm = jnp.sqrt(jnp.sum(gradient * gradient, axis=0))
        gradient = gradient * _columns(1 / (scale * norm + 1))
    return weight + scale * gradient


def _move_backwards(error, gradient, scale: float, clip: bool):
    """Gradient with respect to `gradient` of the weights after the step, given theirs."""
    if not clip:
        return scale * error
    norm = jnp.sqrt(jnp.sum(gradient * gradient, axis=0))
    along = jnp.sum(gradient * error, axis=0) / jnp.maximum(norm, 1e-30)
    factor = scale / (scale * norm + 1)
    return _columns(factor) * (error - gradient * _columns(factor * along))


def _read_backwards(q, error, spare, weights, d1, d2):
    """dq of a tile; adds qᵀ da and qᵀ dz to the gradients of the weights read.

    The output is a ⊙ silu(z) with a = q W1, z = q W2. Overwrites the error.
    """
    plgpu = compat.mosaic_gpu()
    value, gate = _two(q, weights)
    wide = _load(error)
    sigmoid = _sigmoid(gate)
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


def _learn_backwards(k, v, spare, weights, errors, d1, d2):
    """dk and dv of a tile; adds kᵀ da and kᵀ dz to the gradients of the initial weights.

    With a = k W1, z = k W2 the step's gradients are kᵀ r1, kᵀ r2 of r1 = v ⊙ silu(z) and
    r2 = v ⊙ a ⊙ silu'(z); `errors` are theirs. Overwrites the values.
    """
    plgpu = compat.mosaic_gpu()
    value, gate = _two(k, weights)
    e1, e2 = _two(k, errors)
    wide = _load(v)
    sigmoid = _sigmoid(gate)
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
