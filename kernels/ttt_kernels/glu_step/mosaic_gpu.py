"""One step of a gated network on each image on Hopper GPUs, through Pallas' Mosaic GPU backend.

A block of threads holds one image and head: its keys and values stay in shared memory while the
step is taken, and its queries follow where the keys were. So every array is read or written once,
where XLA, product by product, moves about seven times as much.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.glu_step import mosaic_gpu_common as common
from ttt_kernels.glu_step.mosaic_gpu_common import TILE

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
    plan = common.Plan(*q.shape)
    tiles = plan.tiles

    def glu_step_forward(*refs):
        w1_ref, w2_ref, q_ref, k_ref, v_ref, out_ref, *rest = refs
        *views, second, weights, ready, asked = rest
        (ks, keys), (vs, values) = (common.views(view, interpret) for view in views)
        h = lax.axis_index("head")
        plan.clear(ks, vs)
        plan.fetch((k_ref, keys), (v_ref, values), ready)
        common.store(weights, common.load(w1_ref.at[h]), common.load(w2_ref.at[h]))
        g1, g2 = common.gradients(ks, vs, second, weights, ready, tiles)

        plan.fetch((q_ref, keys), None, asked)  # nothing reads the keys any more
        moved = (common.move(common.load(w_ref.at[h]), g, scale, clip) for w_ref, g in
                 ((w1_ref, g1), (w2_ref, g2)))  # fmt: skip
        common.store(weights, *moved)

        @pl.loop(0, tiles)
        def _(i):
            plgpu.barrier_wait(asked.at[i])
            value, gate = common.two(ks.at[i], weights)
            vs.at[i][...] = (value * gate * common.logistic(gate)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plan.write(i, (values, out_ref))

        plgpu.wait_smem_to_gmem(0)

    call = compat.gpu_kernel(
        glu_step_forward,
        out_type=jax.ShapeDtypeStruct(plan.rows(q).shape, q.dtype),
        scratch_types=[
            common.two_views(tiles, interpret),
            common.two_views(tiles, interpret),
            common.tiles(1),
            common.tiles(2),
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
    plan = common.Plan(*q.shape)
    tiles, heads = plan.tiles, w1.shape[0]

    def glu_step_backward(*refs):
        w1_ref, w2_ref, q_ref, k_ref, v_ref, error_ref = refs[:6]
        dw1_ref, dw2_ref, dq_ref, dk_ref, dv_ref, *rest = refs[6:]
        *views, spare, weights = rest[:4]
        (left, left_rows), (right, right_rows) = (common.views(view, interpret) for view in views)
        barriers = rest[4:]
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        first, second = weights.at[pl.ds(0, 2)], weights.at[pl.ds(2, 2)]

        def fetch(a_ref, b_ref, barrier):
            plan.fetch((a_ref, left_rows), (b_ref, right_rows), barrier)

        plan.clear(left, right)
        fetch(k_ref, v_ref, barriers[0])
        common.store(first, common.load(w1_ref.at[h]), common.load(w2_ref.at[h]))
        g1, g2 = common.gradients(left, right, spare, first, barriers[0], tiles)
        fetch(q_ref, error_ref, barriers[1])
        moved = [common.move(common.load(w_ref.at[h]), g, scale, clip)
                 for w_ref, g in ((w1_ref, g1), (w2_ref, g2))]  # fmt: skip
        common.store(weights, g1, g2, *moved)

        def run(d1, d2):
            @pl.loop(0, tiles)
            def _(i):
                plgpu.barrier_wait(barriers[1].at[i])
                left.at[i][...] = common.read_backwards(
                    left.at[i], right.at[i], spare.at[0], second, d1, d2
                ).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plan.write(i, (left_rows, dq_ref))

            moving = [common.move_backwards(d[...], common.load(g), scale, clip)
                      for d, g in ((d1, first.at[0]), (d2, first.at[1]))]  # fmt: skip
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(k_ref, v_ref, barriers[2])
            common.store(weights, common.load(w1_ref.at[h]), common.load(w2_ref.at[h]), *moving)

            @pl.loop(0, tiles)
            def _(i):
                plgpu.barrier_wait(barriers[2].at[i])
                dk, dv = common.learn_backwards(
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
            common.two_views(tiles, interpret),
            common.two_views(tiles, interpret),
            common.tiles(1),
            common.tiles(4),
            *(plgpu.Barrier(num_arrivals=2, num_barriers=tiles) for _ in range(3)),
        ],
        grid=(heads, plan.batch),
        grid_names=("head", "batch"),
        interpret=interpret,
    )
    dw1, dw2, *rest = call(w1, w2, *map(plan.rows, (q, k, v, error)))
    return dw1, dw2, *(x.reshape(q.shape) for x in rest)
