"""One step of a gated network on each image on Hopper GPUs, through Pallas' Mosaic GPU backend.

Two warpgroups hold one image and head: its keys stay in shared memory while the step is taken, and
its queries follow where the keys were. So every array is read or written once (backwards the keys
and values twice), where XLA, product by product, moves about seven times as much.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.glu_step import mosaic_gpu_steps as steps
from ttt_kernels.glu_step.mosaic_gpu_backward import backward
from ttt_kernels.glu_step.mosaic_gpu_common import Warpgroup
from ttt_kernels.glu_step.mosaic_gpu_plan import SLOTS, TILE, Heads, Plan, by_side, parts, rows

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
    return _core(w1, w2, (q, k, v), scale, clip, params)


def glu_step_beside(
    w1, w2, qkv, bias, beside, arrays, scale: float, clip: bool, interpret: bool = False
) -> jax.Array:
    """`glu_step` of the first heads, and `beside` of the others, without copies of their arrays.

    Args:
      w1, w2: [heads, 64, 64] float32.
      qkv: [batch, tokens, 3, heads + others, 64] bfloat16.
      bias: [3, heads + others, 64], rounded to bfloat16 before it is added.
      beside: maps (arrays, q, k, v), [batch, tokens, others, 64] each, to such an array.
      arrays: pytree of what it needs else.
      scale, clip, interpret: as of `glu_step`.

    Returns:
      [batch, tokens, heads + others, 64] bfloat16.
    """
    params = compat.gpu_interpret_params() if interpret else None
    return _core_beside(w1, w2, qkv, bias, arrays, beside, scale, clip, params)


def _no_bias(heads: int):
    return jnp.zeros((3, heads, TILE), jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _core(w1, w2, tokens, scale, clip, interpret):
    return forward(w1, w2, tokens, _no_bias(len(w1)), scale, clip, interpret)


def _core_forward(w1, w2, tokens, scale, clip, interpret):
    return _core(w1, w2, tokens, scale, clip, interpret), (w1, w2, tokens)


def _core_backward(scale, clip, interpret, residuals, error):
    w1, w2, tokens = residuals
    return backward(w1, w2, tokens, _no_bias(len(w1)), error, scale, clip, interpret)


_core.defvjp(_core_forward, _core_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _core_beside(w1, w2, qkv, bias, arrays, beside, scale, clip, interpret):
    return _beside_forward(w1, w2, qkv, bias, arrays, beside, scale, clip, interpret)[0]


def _beside_forward(w1, w2, qkv, bias, arrays, beside, scale, clip, interpret):
    heads, rounded = len(w1), bias.astype(qkv.dtype)
    others = (qkv[:, :, n, heads:] + rounded[n, heads:] for n in range(3))
    made, pullback = jax.vjp(beside, arrays, *others)
    # The kernel leaves the other heads' places alone, and this writes nothing else.
    out = forward(w1, w2, (_flat(qkv),), rounded, scale, clip, interpret)
    return out.at[:, :, heads:].set(made), (w1, w2, qkv, bias, pullback)


def _beside_backward(beside, scale, clip, interpret, residuals, error):
    w1, w2, qkv, bias, pullback = residuals
    heads, rounded = len(w1), bias.astype(qkv.dtype)
    dw1, dw2, (d,) = backward(w1, w2, (_flat(qkv),), rounded, error, scale, clip, interpret)
    darrays, *others = pullback(error[:, :, heads:])
    d = d.reshape(qkv.shape)
    for n, other in enumerate(others):
        d = d.at[:, :, n, heads:].set(other)
    dbias = jnp.sum(d, axis=(0, 1), dtype=jnp.float32).astype(bias.dtype)
    return dw1, dw2, d, dbias, darrays


_core_beside.defvjp(_beside_forward, _beside_backward)


def _flat(qkv):
    """[batch, tokens, heads of all three, channels]."""
    return qkv.reshape(*qkv.shape[:2], -1, TILE)


# Jitted by itself, as `backward` is: a model of many layers lowers and compiles it once.
@functools.partial(jax.jit, static_argnames=("scale", "clip", "interpret"))
def forward(w1, w2, tokens, bias, scale: float, clip: bool, interpret) -> jax.Array:
    """Outputs of the step, as `ttt_kernels.glu_step`.

    Args:
      w1, w2: [heads, 64, 64] float32.
      tokens: (q, k, v), [batch, tokens, at least heads, 64] bfloat16 each; or one array of the
        three side by side, with three times as many heads. Further heads are not read.
      bias: of queries, keys and values, [3, at least heads, 64] bfloat16.
      scale: of the loss over the sum of the tokens.
      clip: whether the gradient is divided by its norm plus one.
      interpret: None, or the interpreter's parameters.

    Returns:
      Like q; further heads are not written.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, out_heads = tokens[0].shape[:3]
    if len(tokens) == 1:
        out_heads //= 3
    plan = Plan(batch, length, w1.shape[0], phases=2, pairs=2)

    def glu_step_forward(w_ref, bias_ref, *refs):
        q, k, v = parts(refs[: len(tokens)])
        out, *scratch = refs[len(tokens) :]
        whole, out = Warpgroup(plan, w_ref, bias_ref, scratch, interpret), Heads(out)

        def work(n):
            group = whole.anew()
            image = group.image(n)
            group.add_bias(0, 1)
            g = steps.gradient(group, lambda group, i: group.fetch_half(v, image, i))
            group.meet()  # neither reads the keys any more
            group.start(1, image, q, None)
            steps.store((group.moved, steps.move(group, g, scale, clip)))
            group.add_bias(1, 0)

            @pl.loop(0, plan.tiles)
            def _(i):
                group = whole.anew()
                group.wait(1, i, half=False)
                y = steps.outputs(steps.product((group.tile(i), group.moved)))
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                steps.store((group.half(i), y))
                group.write_half(out, image, i)

            group.meet()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(n + 1 < group.images)(lambda: group.start(0, group.image(n + 1), k, v))

        whole.prepare()
        pl.when(whole.images > 0)(lambda: whole.start(0, whole.image(0), k, v))
        whole.wait_for_weights()
        pl.loop(0, whole.images)(work)
        plgpu.wait_smem_to_gmem(0)

    made = jax.ShapeDtypeStruct((batch * length, out_heads, TILE), jnp.bfloat16)
    call = compat.gpu_kernel(
        glu_step_forward,
        out_type=made,
        scratch_types=plan.scratch(1, interpret),
        **plan.launch(interpret),
    )
    out = call(by_side(w1, w2), bias, *map(rows, tokens))
    return out.reshape(batch, length, out_heads, TILE)
