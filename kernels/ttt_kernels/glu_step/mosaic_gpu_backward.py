"""The backward launch of glu_step; see `mosaic_gpu`.

Nothing may be spilled: shared memory leaves little of the L1, and spilled registers go to the L2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.glu_step import mosaic_gpu_steps as steps
from ttt_kernels.glu_step.mosaic_gpu_common import Warpgroup, load
from ttt_kernels.glu_step.mosaic_gpu_plan import TILE, Heads, Plan, by_matrix, by_side, parts, rows


@functools.partial(jax.jit, static_argnames=("scale", "clip", "interpret"))
def backward(w1, w2, tokens, bias, error, scale: float, clip: bool, interpret) -> tuple:
    """Gradients of `mosaic_gpu.forward` with respect to its weights and tokens.

    Args:
      w1, w2, tokens, bias, scale, clip, interpret: as there.
      error: gradient of its result, [batch, tokens, at least heads, 64] bfloat16; further heads are
        not read.

    Returns:
      (dw1, dw2 like w1; gradients like `tokens`, a tuple: further heads are not written).
    """
    plgpu = compat.mosaic_gpu()
    batch, length = tokens[0].shape[:2]
    # Two pairs, as forward, leave 128 registers: 196 bytes spilled, and 5 % slower.
    plan = Plan(batch, length, w1.shape[0], phases=3, pairs=1)

    def glu_step_backward(w_ref, bias_ref, error_ref, *refs):
        (q, k, v), dw_ref, refs = parts(refs[: len(tokens)]), refs[len(tokens)], refs[1:]
        (dq, dk, dv), scratch = parts(refs[len(tokens) :][: len(tokens)]), refs[2 * len(tokens) :]
        *scratch, waiting, free = scratch
        whole = Warpgroup(plan, w_ref, bias_ref, scratch, interpret)
        error = Heads(error_ref)

        def wait_until_free(group, i):
            """Before results are written at step i: the other may still read those before."""
            pl.when((i > 0) & group.turn(i))(lambda: plgpu.barrier_wait(group.own(free)))

        def take_turns(group, image, i, pairs, target):
            """One warpgroup multiplies what both have written by their matrices, transposed."""

            @pl.when(group.turn(i))
            def _():
                plgpu.barrier_wait(group.own(waiting))
                made = steps.product(*((x, steps.turned(w)) for x, w in pairs))
                plgpu.barrier_arrive(free.at[group.other])
                steps.store((group.tile(i), made))  # neither reads it any more
                group.write_tile(target, image, i)

            @pl.when(~group.turn(i))
            def _():
                plgpu.barrier_arrive(waiting.at[group.other])

        def read_backwards(image, d):
            """dq; adds qᵀ errors to the gradient of the weights that were read."""

            @pl.loop(0, plan.tiles)
            def _(i):
                group = whole.anew()
                first = group.products[0]
                group.wait(1, i)
                y = steps.product((group.tile(i), group.moved))
                errors = steps.errors(y, load(group.half(i)))
                wait_until_free(group, i)
                steps.store((first, errors))
                group.fetch_half(error, image, i)
                plgpu.wgmma(d, steps.turned(group.tile(i)), first)
                plgpu.wgmma_wait(0)
                pairs = zip(group.both_products[0], group.both_moved, strict=True)
                take_turns(group, image, i, pairs, dq)

            wait_until_free(whole.anew(), jnp.int32(plan.tiles))

        def learn_backwards(image, d):
            """dk and dv; adds kᵀ errors to the gradient of the initial weights."""

            @pl.loop(0, plan.tiles)
            def _(i):
                group = whole.anew()
                first, second = group.products
                bias = group.value_bias()
                group.wait(2, i)
                y = steps.product((group.tile(i), group.weights.at[group.side]))
                e = steps.product((group.tile(i), group.moved))
                r, dy, dvalues = steps.errors_of_errors(y, group.values(i, bias), e)
                wait_until_free(group, i)
                steps.store((first, r), (second, dy), (group.half(i), dvalues))
                group.write_half(dv, image, i)
                plgpu.wgmma(d, steps.turned(group.tile(i)), second)
                plgpu.wgmma_wait(0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                group.fetch_half(v, image, i)
                initial = [group.weights.at[side] for side in range(2)]
                results = (*group.both_products[0], *group.both_products[1])
                take_turns(
                    group, image, i, zip(results, (*group.both_moved, *initial), strict=True), dk
                )  # fmt: skip

            wait_until_free(whole.anew(), jnp.int32(plan.tiles))

        def work(n):
            group = whole.anew()
            second = group.products[1]
            image = group.image(n)
            group.add_bias(0, 1)
            g = steps.gradient(group, lambda group, i: group.fetch_half(v, image, i))
            group.meet()  # neither reads the keys any more
            group = whole.anew()
            second = group.products[1]
            group.start(1, image, q, error)
            steps.store((group.moved, steps.move(group, g, scale, clip)), (second, g))
            group.add_bias(1, 0)

            def run(d):
                read_backwards(image, d)
                group = whole.anew()
                first, second = group.products
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                group.start(2, image, k, v)
                spares = first, group.moved
                moving = steps.move_backwards(group, d[...], load(second), spares, scale, clip)
                steps.store((group.moved, moving))
                group.add_bias(2, 1)
                learn_backwards(image, d)
                return d[...]

            made = pl.run_scoped(run, steps.accumulator())
            group = whole.anew()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(n + 1 < group.images)(lambda: group.start(0, group.image(n + 1), k, v))
            sums = dw_ref.at[group.share, group.head, group.side]

            @pl.when(n == 0)
            def _():
                sums[...] = made

            @pl.when(n > 0)
            def _():
                sums[...] = load(sums) + made

        whole.prepare()
        pl.when(whole.images > 0)(lambda: whole.start(0, whole.image(0), k, v))
        whole.wait_for_weights()
        pl.loop(0, whole.images)(work)
        plgpu.wait_smem_to_gmem(0)

    shares = (plan.pairs * plan.groups, plan.heads, 2, TILE, TILE)
    flat = [rows(x) for x in tokens]
    call = compat.gpu_kernel(
        glu_step_backward,
        out_type=[
            jax.ShapeDtypeStruct(shares, jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        ],
        scratch_types=[
            *plan.scratch(2, interpret),
            *[plgpu.Barrier(num_arrivals=1, num_barriers=2 * plan.pairs)] * 2,
        ],
        **plan.launch(interpret),
    )
    dw, *made = call(by_side(w1, w2), bias, rows(error), *flat)
    dw = jnp.sum(dw[:batch], axis=0)  # a share beyond the images has none
    made = tuple(y.reshape(x.shape) for x, y in zip(tokens, made, strict=True))
    return *by_matrix(dw), made
