"""The Hopper kernels of the SwiGLU's hidden layer: what it is, and the errors that come back to it.

See `mosaic_gpu_common` for how a launch is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.fast_weight import mosaic_gpu_common as common
from ttt_kernels.fast_weight.mosaic_gpu_common import ROWS, WARPGROUPS, Place, Plan


def hidden(plan: Plan, x: jax.Array, weights: jax.Array, rates: jax.Array | None, interpret):
    """`rate silu(x W0) (x W2)`.

    Args:
      plan: of `choose(..., tiles=HIDDEN_TILES)`.
      x: [batch, time, heads, key_dim] bf16, time a multiple of 8 (or below 8).
      weights: of `slabs`, bf16, with one row or `batch` rows.
      rates: [batch, heads, blocks * 128] float32, or None.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, time, heads, hidden] bf16.
    """
    def swiglu_hidden(x_ref, w_ref, *refs):
        rate_ref, refs = (None, refs) if rates is None else (refs[0], refs[1:])
        out_ref, tile, *ring = refs

        def finish(acc, place):
            network = _network(plan, acc)
            value = network.activated * network.up
            if rate_ref is not None:
                value = value * common.load_rates(plan, rate_ref, place)
            _write(plan, tile, value, out_ref, place)

        common.run(plan, x_ref, w_ref, ring, finish)

    shape = jax.ShapeDtypeStruct((*x.shape[:3], plan.hidden), jnp.bfloat16)
    tiles = [common.tile_of(WARPGROUPS, ROWS, plan.slab)]
    call = common.kernel(plan, swiglu_hidden, shape, tiles, interpret)
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
      plan: of `choose(..., tiles=ERROR_TILES)`.
      x, weights, rates, interpret: as of `hidden`.
      d_hidden: [batch, time, heads, hidden] bf16.

    Returns:
      ([batch, time, heads, 2 hidden] bf16, gate's before up's; [batch, heads, slabs, blocks * 128]
      float32, whose sum over the slabs is the gradient of the rates).
    """
    def swiglu_errors(x_ref, w_ref, d_ref, *refs):
        rate_ref, refs = (None, refs) if rates is None else (refs[0], refs[1:])
        out_ref, rates_ref, *tiles = refs

        def finish(network, d, place):
            rates_ref[place.row, place.head, place.slab, place.tokens] = jnp.sum(
                d * network.activated * network.up, axis=1
            )
            if rate_ref is not None:
                d = d * common.load_rates(plan, rate_ref, place)
            _write_errors(plan, tiles, network, d, d, out_ref, place)

        _run_with_errors(plan, x_ref, w_ref, d_ref, tiles, finish)

    by_slab = (plan.batch, plan.heads, plan.slabs, plan.blocks * common.BLOCK)
    outs = [
        jax.ShapeDtypeStruct((*x.shape[:3], 2 * plan.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(by_slab, jnp.float32),
    ]
    tiles = _error_tiles(plan, common.ERROR_TILES)
    call = common.kernel(plan, swiglu_errors, outs, tiles, interpret)
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
      plan: of `choose(..., tiles=LEARNING_TILES)`.
      x, weights, interpret: as of `hidden`.
      rates: those of W0, W1 and W2, each as of `hidden`.
      d_hidden: [batch, time, heads, hidden] bf16, what arrives through W1.

    Returns:
      ([batch, time, heads, 2 hidden] bf16, gate's errors before up's; hidden activations, [batch,
      time, heads, hidden] bf16).
    """
    def swiglu_learn(x_ref, w_ref, d_ref, gate_rate, hidden_rate, up_rate, *refs):
        out_ref, hidden_ref, value_tile, *tiles = refs

        def finish(network, d, place):
            gates, hiddens, ups = (
                common.load_rates(plan, ref, place) for ref in (gate_rate, hidden_rate, up_rate)
            )
            value = network.activated * network.up * hiddens
            _write(plan, value_tile, value, hidden_ref, place)
            _write_errors(plan, tiles, network, d * gates, d * ups, out_ref, place)

        _run_with_errors(plan, x_ref, w_ref, d_ref, tiles, finish)

    outs = [
        jax.ShapeDtypeStruct((*x.shape[:3], n * plan.hidden), jnp.bfloat16) for n in (2, 1)
    ]
    tiles = _error_tiles(plan, common.LEARNING_TILES)
    call = common.kernel(plan, swiglu_learn, outs, tiles, interpret)
    return call(x, weights, d_hidden, *rates)


class _Network(NamedTuple):
    """A tile of the network's hidden layer in registers, float32."""

    gate: jax.Array
    up: jax.Array
    sigmoid: jax.Array
    activated: jax.Array


def _network(plan: Plan, acc) -> _Network:
    """What an accumulator with gate's columns before up's holds."""
    gate, up = acc[:, : plan.slab], acc[:, plan.slab :]
    # One instruction of the special function unit, where exp and a division take two and more.
    sigmoid = 0.5 + 0.5 * jnp.tanh(0.5 * gate)
    return _Network(gate, up, sigmoid, gate * sigmoid)


def _write(plan: Plan, tiles, value, out_ref, place: Place, part: int = 0) -> None:
    target = out_ref.at[place.row, place.tokens, place.head, place.columns(plan, part)]
    common.store(tiles.at[place.warpgroup], value, target)


def _error_tiles(plan: Plan, number: int) -> list:
    """Tiles, the last one for what arrives from above, and the two barriers of that."""
    plgpu = compat.mosaic_gpu()
    barriers = [plgpu.Barrier(num_arrivals=WARPGROUPS) for _ in range(2)]
    return [common.tile_of(WARPGROUPS, ROWS, plan.slab) for _ in range(number)] + barriers


def _write_errors(plan: Plan, tiles, network: _Network, d_gate, d_up, out_ref, place: Place):
    """Writes the errors of gate and up: the gradients that arrive times the slopes."""
    slope = network.sigmoid * (1 + network.gate * (1 - network.sigmoid))
    _write(plan, tiles[0], d_gate * network.up * slope, out_ref, place)
    _write(plan, tiles[1], d_up * network.activated, out_ref, place, part=1)


def _run_with_errors(plan: Plan, x_ref, w_ref, d_ref, tiles, finish) -> None:
    """`common.run` with what arrives from above: `finish(network, d, place)`."""
    plgpu = compat.mosaic_gpu()
    arriving, full, free, *ring = tiles[2:]

    def load(first, place):
        """Fetches what arrives late in the block; the one before is long used up by then."""
        @pl.when(jnp.logical_not(first))
        def _():
            plgpu.barrier_wait(free)

        for w in range(WARPGROUPS):
            own = place._replace(warpgroup=w)
            source = d_ref.at[own.row, own.tokens, own.head, own.columns(plan)]
            plgpu.copy_gmem_to_smem(source, arriving.at[w], full)

    def finish_tile(acc, place):
        network = _network(plan, acc)
        plgpu.barrier_wait(full)
        tile = arriving.at[place.warpgroup]
        d = compat.load(tile, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        plgpu.barrier_arrive(free)
        finish(network, d, place)

    common.run(plan, x_ref, w_ref, ring, finish_tile, (load, free))
