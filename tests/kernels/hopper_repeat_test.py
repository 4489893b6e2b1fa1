"""Thousands of launches of the Hopper kernels on the same inputs: equal bits each time.

A race between thread blocks shows once in many launches, and then often only where the memory that
is read too early holds something strange.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import hopper
from ttt_kernels import chunk_summaries, fast_weight_apply, fast_weight_gradients, newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS

LAUNCHES = {"chip": 10_000, "xla": 3}
DIRT = {"chip": 2**24, "xla": 2**10}  # numbers: more than the cache holds
NAMES = ("w0", "w1", "w2")
# Newton-Schulz of matrices at far scales has much the same result, unless a norm is wrong.
FAR = (2.0**-10, 2.0**10)


def repeated(function, launches, words, pairs):
    """(Launches unlike the first on the same inputs; launches with a number that is not finite).

    The two sets of inputs (the first axis of each array) come in turn, and before each launch NaN
    is written over memory that its results and buffers then take.
    """
    def inputs(i):
        return jax.tree.map(lambda x: x[i % 2], pairs)

    def launch(i, carry):
        wanted, unlike, strange = carry
        dirt = jax.lax.optimization_barrier(jnp.full((words,), jnp.nan) * i.astype(jnp.float32))
        clean = jnp.sum(jnp.isfinite(dirt).astype(jnp.int32))
        arguments, clean = jax.lax.optimization_barrier((inputs(i), clean))
        made = jax.lax.optimization_barrier(jax.tree.leaves(function(*arguments)))
        # Of the same loop: in another program XLA may take other products between the kernels.
        wanted = jax.lax.cond(
            i < 2,
            lambda: [w.at[i % 2].set(x) for w, x in zip(wanted, made, strict=True)],
            lambda: wanted,
        )
        same, finite = clean == 0, True
        for got, want in zip(made, wanted, strict=True):
            same &= jnp.array_equal(got, want[i % 2], equal_nan=True)
            finite &= jnp.isfinite(got).all()
        return wanted, unlike + ~same, strange + ~finite

    shapes = jax.tree.leaves(jax.eval_shape(lambda: function(*inputs(0))))
    wanted = [jnp.zeros((2, *x.shape), x.dtype) for x in shapes]
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.fori_loop(0, launches, launch, (wanted, zero, zero))[1:]


def check(way, function, pairs, kernels):
    sizes = LAUNCHES.get(way, 10), DIRT.get(way, 2**24)
    counts = hopper.run(way, functools.partial(repeated, function, *sizes), pairs, kernels=kernels)
    if counts is not None:
        print(f"of {sizes[0]} launches {counts[0]} differ, {counts[1]} are not finite")
        assert [int(n) for n in counts] == [0, 0]


def pair(seed, *shape, scales=(1.0, 1.0)):
    """The same random numbers at two scales, [2, *shape] bfloat16."""
    return jnp.stack([hopper.draw(seed, *shape) * scale for scale in scales])


def with_gradients(function, *arguments):
    *primals, cotangents = arguments
    made, back = jax.vjp(function, *primals)
    return made, back(jax.tree.map(lambda c, y: c.astype(y.dtype), cotangents, made))


@hopper.ways({f"{n} of {size}": (n, size) for n, size in
              ((240, 128), (64, 384), (12, 384), (20, 256), (2, 64))},
             xla=("2 of 64",))  # fmt: skip
def test_newton_schulz(case, way):
    """Alone, and with what gradients keep."""
    number, size = case
    x = pair(0, number, size, size, scales=FAR)
    options = dict(dtype=jnp.bfloat16, implementation=hopper.implementation(way))
    run = functools.partial(newton_schulz, coefficients=LACT_COEFFICIENTS, **options)
    check(way, run, (x,), {"newton_schulz_forward"})
    cotangents = pair(1, number, size, size)
    both = functools.partial(with_gradients, run)
    check(way, both, (x, cotangents), {"newton_schulz_forward", "newton_schulz_backward"})


@hopper.ways({"many heads": (80, 512, 128), "LaCT": (4, 2048, 384), "small": (2, 70, 32)},
             xla=("small",))  # fmt: skip
@pytest.mark.parametrize("operation", [fast_weight_apply, fast_weight_gradients])
def test_fast_weight(case, way, operation):
    rows, tokens, dim = case
    run = functools.partial(operation, implementation=hopper.implementation(way))
    square, token = (rows, 1, dim, dim), (rows, 1, tokens, dim)
    weights = {n: pair(i, *square, scales=(dim**-0.5,) * 2) for i, n in enumerate(NAMES)}
    x, error = pair(3, *token, scales=(dim**-0.5,) * 2), pair(4, *token)
    if operation is fast_weight_apply:
        arguments, kernels = (weights, x, error), {"swiglu_hidden", "swiglu_errors"}
    else:
        rates = jnp.abs(pair(5, *token[:3], 3)).astype(jnp.float32)
        arguments = (weights, x, error, rates, weights)
        kernels = {"swiglu_learn", "swiglu_learn_errors"}
    check(way, functools.partial(with_gradients, run), arguments, kernels)


@hopper.ways({"LaCT": (1, 8192, 4, 384), "many heads": (16, 1024, 5, 128), "small": (1, 70, 2, 32)},
             xla=("small",))  # fmt: skip
@pytest.mark.parametrize("rated", [True, False])
def test_chunk_summaries(case, way, rated):
    """With their gradients, which are chunk outputs."""
    k, v = pair(0, *case), pair(1, *case)
    batch, tokens, heads, dim = case
    chunk = min(tokens // 2, 2048)
    cotangents = pair(2, batch, heads, -(-tokens // chunk), dim, dim)
    implementation = hopper.implementation(way)

    def run(k, v, rates=None):
        return chunk_summaries(k, v, chunk, rates=rates, implementation=implementation)

    rates = (jnp.abs(pair(3, *case[:3])).astype(jnp.float32),) if rated else ()
    arguments = (k, v, *rates, cotangents)
    check(way, functools.partial(with_gradients, run), arguments,
          {"chunk_summaries", "chunk_outputs"})  # fmt: skip
