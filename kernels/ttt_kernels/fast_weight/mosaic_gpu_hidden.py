"""The Hopper kernels of the SwiGLU's hidden layer: what it is, and the errors that come back to it.

See `mosaic_gpu_plan` for how a launch is cut; `choose` and `slabs` are there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_kernels.fast_weight import mosaic_gpu_common as common
from ttt_kernels.fast_weight.mosaic_gpu_plan import ROWS, Plan


def hidden(plan: Plan, x: jax.Array, weights: jax.Array, rates: jax.Array | None, interpret):
    """`rate silu(x W0) (x W2)`.

    Args:
      plan: of `choose`.
      x: [batch, time, heads, key_dim] bf16, time a multiple of 8 (or below 8).
      weights: of `slabs`, bf16, with one row or `batch` rows.
      rates: [batch, heads, tiles * 64] float32, or None.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, time, heads, hidden] bf16.
    """
    def swiglu_hidden(x_ref, w_ref, *refs):
        rate_ref, refs = (None, refs) if rates is None else (refs[0], refs[1:])
        out_ref, *scratch = refs

        def finish(pieces, place, store):
            rate = None if rate_ref is None else common.load_rates(rate_ref, place)
            for start, (gate, up), _ in pieces:
                value = _network(gate, up).activated * up
                store(value if rate is None else value * rate, out_ref, place, start)

        common.run(plan, (x_ref, w_ref, None), scratch, finish)

    shape = jax.ShapeDtypeStruct((*x.shape[:3], plan.hidden), jnp.bfloat16)
    call = common.launch(plan, swiglu_hidden, shape, interpret)
    return call(x, weights, *(() if rates is None else (rates,)))


def errors(
    plan: Plan,
    x: jax.Array,
    weights: jax.Array,
    rates: jax.Array | None,
    d_hidden: jax.Array,
    interpret,
):
    """The gradient of `hidden` down to the products: gate's, up's and the rates'.

    Args:
      plan, x, weights, rates, interpret: as of `hidden`.
      d_hidden: [batch, tiles * 64, heads, hidden] bf16.

    Returns:
      ([batch, time, heads, 2 hidden] bf16, gate's before up's; [batch, heads, slabs, tiles * 64]
      float32, whose sum over the slabs is the gradient of the rates).
    """
    def swiglu_errors(x_ref, w_ref, d_ref, *refs):
        rate_ref, refs = (None, refs) if rates is None else (refs[0], refs[1:])
        out_ref, rates_ref, *scratch = refs

        def finish(pieces, place, store):
            rate = None if rate_ref is None else common.load_rates(rate_ref, place)
            total = 0.0
            for start, (gate, up), (d,) in pieces:
                network = _network(gate, up)
                total += jnp.sum(d * network.activated * up, axis=1)
                d = d if rate is None else d * rate
                store(d * network.gate_slope, out_ref, place, start)
                store(d * network.activated, out_ref, place, start, part=1)
            rates_ref[place.row, place.head, place.slab, place.tokens] = total

        common.run(plan, (x_ref, w_ref, d_ref), scratch, finish)

    by_slab = (plan.batch, plan.heads, plan.slabs, plan.tiles * ROWS)
    outs = [
        jax.ShapeDtypeStruct((*x.shape[:3], 2 * plan.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(by_slab, jnp.float32),
    ]
    call = common.launch(plan, swiglu_errors, outs, interpret)
    return call(x, weights, d_hidden, *(() if rates is None else (rates,)))


def learn(
    plan: Plan,
    x: jax.Array,
    weights: jax.Array,
    rates: tuple[jax.Array, jax.Array, jax.Array],
    d_hidden: jax.Array,
    interpret,
):
    """The factors of the gradients of all three matrices, each times its rate.

    Args:
      plan, x, weights, interpret: as of `hidden`.
      rates: those of W0, W1 and W2, each as of `hidden`.
      d_hidden: [batch, tiles * 64, heads, hidden] bf16, what arrives through W1.

    Returns:
      ([batch, time, heads, 2 hidden] bf16, gate's errors before up's; hidden activations, [batch,
      time, heads, hidden] bf16).
    """
    def swiglu_learn(x_ref, w_ref, d_ref, gate_rate, hidden_rate, up_rate, *refs):
        out_ref, hidden_ref, *scratch = refs

        def finish(pieces, place, store):
            gates, hiddens, ups = (
                common.load_rates(ref, place) for ref in (gate_rate, hidden_rate, up_rate)
            )
            for start, (gate, up), (d,) in pieces:
                network = _network(gate, up)
                store(network.activated * up * hiddens, hidden_ref, place, start)
                store(d * gates * network.gate_slope, out_ref, place, start)
                store(d * ups * network.activated, out_ref, place, start, part=1)

        common.run(plan, (x_ref, w_ref, d_ref), scratch, finish)

    outs = [
        jax.ShapeDtypeStruct((*x.shape[:3], n * plan.hidden), jnp.bfloat16) for n in (2, 1)
    ]
    call = common.launch(plan, swiglu_learn, outs, interpret)
    return call(x, weights, d_hidden, *rates)


def learn_errors(
    plan: Plan,
    x: jax.Array,
    weights: jax.Array,
    rates: tuple[jax.Array, jax.Array, jax.Array],
    above: jax.Array,
    interpret,
):
    """The gradients of what `learn` makes, and what it makes again: with `p = x C0`, `q = x C2`,
    `d = e W1^T`, `u = e C1^T` for cotangents C of the three gradients, s = silu(gate):

        d_gate = r0 p d up s'' + r2 q d s' + r1 u up s'    d_up = r0 p d s' + r1 u s
        d_d = r0 p up s' + r2 q s        d_r = (sum p d up s', sum u s up, sum q d s)

    Args:
      plan: of `choose(..., parts=4)`.
      x, rates, interpret: as of `learn`.
      weights: of `slabs`: W0, W2, C0 and C2.
      above: [batch, tiles * 64, heads, 2 hidden] bf16, d and u slab by slab side by side.

    Returns:
      (errors of gate and up; d_gate and d_up, both [batch, time, heads, 2 hidden] bf16; hidden
      activations; d_d, both [batch, time, heads, hidden]; and three of [batch, heads, slabs,
      tiles * 64] float32, whose sums over the slabs are the gradients of the rates).
    """
    def swiglu_learn_errors(x_ref, w_ref, above_ref, *refs):
        rate_refs, (errors_ref, inner_ref, hidden_ref, outer_ref) = refs[:3], refs[3:7]
        sum_refs, scratch = refs[7:10], refs[10:]

        def finish(pieces, place, store):
            r0, r1, r2 = (common.load_rates(ref, place) for ref in rate_refs)
            sums = [0.0, 0.0, 0.0]
            for start, (gate, up, p, q), (d, u) in pieces:
                sigmoid = _sigmoid(gate)
                slope = sigmoid * (1 + gate * (1 - sigmoid))
                curvature = sigmoid * (1 - sigmoid) * (2 + gate * (1 - 2 * sigmoid))
                activated = gate * sigmoid
                factors = (p * d * up * slope, u * activated * up, q * d * activated)
                sums = [s + jnp.sum(f, axis=1) for s, f in zip(sums, factors, strict=True)]
                store(d * r0 * up * slope, errors_ref, place, start)
                store(d * r2 * activated, errors_ref, place, start, part=1)
                store(activated * up * r1, hidden_ref, place, start)
                store(p * r0 * up * slope + q * r2 * activated, outer_ref, place, start)
                p, u = p * r0 * d, u * r1
                store(p * up * curvature + (q * r2 * d + u * up) * slope, inner_ref, place, start)
                store(p * slope + u * activated, inner_ref, place, start, part=1)
            for ref, total in zip(sum_refs, sums, strict=True):
                ref[place.row, place.head, place.slab, place.tokens] = total

        common.run(plan, (x_ref, w_ref, above_ref), scratch, finish)

    by_slab = (plan.batch, plan.heads, plan.slabs, plan.tiles * ROWS)
    outs = [
        jax.ShapeDtypeStruct((*x.shape[:3], n * plan.hidden), jnp.bfloat16) for n in (2, 2, 1, 1)
    ] + [jax.ShapeDtypeStruct(by_slab, jnp.float32)] * 3
    call = common.launch(plan, swiglu_learn_errors, outs, interpret)
    return call(x, weights, above, *rates)


class _Network(NamedTuple):
    """A piece of the network's hidden layer in registers, float32."""

    activated: jax.Array  # silu(gate)
    gate_slope: jax.Array  # silu'(gate) up, which carries an error to gate


def _network(gate, up) -> _Network:
    sigmoid = _sigmoid(gate)
    return _Network(gate * sigmoid, up * (sigmoid * (1 + gate * (1 - sigmoid))))


def _sigmoid(x):
    # One instruction of the special function unit, where exp and a division take two and more.
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)
