"""The kernels of the vision models on a Hopper GPU: values and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import bias_gelu_test, depthwise_conv_test, glu_step_test, hopper
from tests.kernels import norm_parts_test as parts_test
from tests.kernels import residual_norm_test as norm_test
from ttt_kernels.bias_gelu import bias_gelu
from ttt_kernels.depthwise_conv import depthwise_conv
from ttt_kernels.glu_step import glu_step, glu_step_beside
from ttt_kernels.norm_parts import norm_parts
from ttt_kernels.residual_norm import add_branch, residual_norm


def check(way, results, x, function, kernels, gather=None, steep=False):
    """Results of `function(implementation)` by kernels in bfloat16 and by XLA in float32.

    Args:
      results: of (arguments, function) with arguments as a dict.
      x: arguments.
      steep: they amplify bfloat16's roundings: held to XLA's error.
    """
    def program(name, x):
        return results(x if gather is None else gather(x), function(name))

    by_kernels = functools.partial(program, hopper.implementation(way))
    got = hopper.run(way, by_kernels, x, kernels=kernels)
    if got is not None:
        by_xla = functools.partial(program, "xla")
        hopper.check(got, hopper.exact(by_xla, x), jax.jit(by_xla)(x) if steep else None)


GLU = {  # batch, tokens, heads, clip
    "ViTTT-B": (5, 196, 6, True),
    "whole tiles": (2, 256, 1, True),
    "no clip": (2, 130, 2, False),
    "70 tokens": (3, 70, 2, True),
    "one token": (4, 1, 2, True),
    "many images": (140, 49, 2, True),
}


@hopper.ways(GLU, ordinary=("one token",), xla=("70 tokens",))
@pytest.mark.parametrize("zero", [False, True], ids=["random", "zeros"])
def test_glu_step(case, way, zero):
    *sizes, clip = case
    x = glu_step_test.make(*sizes, 64, jnp.bfloat16)
    if zero:
        x |= {n: jnp.zeros_like(x[n]) for n in "qkv"}

    def function(name):
        def run(w1, w2, q, k, v):
            weights = {"w1": w1, "w2": w2}
            return glu_step(weights, q, k, v, scale=20.0, clip=clip, implementation=name)

        return run

    kernels, results = {"glu_step_forward", "glu_step_backward"}, glu_step_test.results.__wrapped__
    check(way, results, x, function, kernels, steep=sizes[1] == 1)


@hopper.ways({n: GLU[n] for n in ("ViTTT-B", "70 tokens")}, xla=("70 tokens",))
@pytest.mark.parametrize("apart", [False, True], ids=["in a row", "apart"])
def test_glu_step_beside(case, way, apart):
    *sizes, clip = case
    x = glu_step_test.make(*sizes, 64, jnp.bfloat16)
    x |= {n: x[n][: sizes[-1] - 1] for n in ("w1", "w2")} | {"a": jnp.linspace(-1, 1, 64)}
    bias = 0.3 * np.random.default_rng(2).normal(size=(3, sizes[-1], 64))
    x["bias"] = jnp.asarray(bias, jnp.bfloat16)
    gather = None
    if apart:
        x |= hopper.scattered({n: x[n] for n in "qkv"})

        def gather(x):
            return x | hopper.gathered({n: x[n] for n in "qkv"})

    def function(name):
        def run(w1, w2, q, k, v, bias, a):
            weights, qkv = {"w1": w1, "w2": w2}, jnp.stack([q, k, v], axis=2)
            return glu_step_beside(weights, qkv, bias, glu_step_test.beside, a, scale=20.0,
                                   clip=clip, implementation=name)  # fmt: skip

        return run

    kernels = {"glu_step_forward", "glu_step_backward"}
    check(way, glu_step_test.results.__wrapped__, x, function, kernels, gather=gather)


CONV = {  # batch, height, width, channels, residual
    "ViTTT-B": (9, 14, 14, 768, True),
    "largest": (3, 32, 8, 128, False),
    "square": (3, 16, 16, 64, True),
    "one pixel": (2, 1, 1, 64, False),
    "a row": (5, 1, 16, 64, True),
    "a column": (5, 32, 1, 64, True),
    "odd": (4, 7, 5, 192, False),
    "groups of images": (300, 4, 4, 64, True),
}


@hopper.ways(CONV, ordinary=("one pixel",))
@pytest.mark.parametrize("zero", [False, True], ids=["random", "zeros"])
def test_depthwise_conv(case, way, zero):
    *sizes, residual = case
    x, kernel, bias = depthwise_conv_test.make(*sizes, jnp.bfloat16)
    x = jnp.zeros_like(x) if zero else x

    def function(name):
        return functools.partial(depthwise_conv, residual=residual, implementation=name)

    def results(x, function):
        y, pullback = jax.vjp(function, *x)
        gradients = pullback(hopper.draw(5, *y.shape).astype(y.dtype))
        return {"y": y} | dict(zip(("dx", "dkernel", "dbias"), gradients, strict=True))

    kernels = {"depthwise_conv_forward", "depthwise_conv_backward"}
    check(way, results, (x, kernel, bias), function, kernels)


NORM = {f"{name}, {features}": (arrays, features) for features in (768, 192, 64, 1024, 960)
        for name, arrays in norm_test.CASES.items()}  # fmt: skip


@hopper.ways(NORM, ordinary=("all, 64",), xla=("no norm, 64",))
def test_residual_norm(case, way):
    names, features = case
    x = norm_test.make(names, features, jnp.bfloat16)

    def function(name):
        def run(x, branch=None, branch_bias=None, factor=None, scale=None, bias=None):
            if scale is None:
                return (add_branch(x, branch, branch_bias, factor, implementation=name),)
            arrays = (x, branch, branch_bias, factor, scale, bias)
            return residual_norm(*arrays, epsilon=1e-5, implementation=name)

        return run

    kernels = {"residual_norm_forward", "residual_norm_backward"}
    check(way, norm_test.results.__wrapped__, x, function, kernels)


@hopper.ways({name: name for name in parts_test.CASES}, xla=("query",))
def test_norm_parts(case, way):
    def function(name):
        def run(x, scales, kinds, size, epsilon):
            return norm_parts(x, scales, kinds=kinds, size=size, epsilon=epsilon,
                              implementation=name)  # fmt: skip

        return run

    def results(x, function):
        return parts_test.results.__wrapped__(*x, function, case)

    x = parts_test.make(case, jnp.bfloat16)
    check(way, results, x, function, {"norm_parts_forward", "norm_parts_backward"})


GELU = {f"{rows} x {features}": (rows, features)
        for rows, features in ((8, 128), (8 * 500, 3072), (24, 768), (8 * 397, 640), (64, 512))}


@hopper.ways(GELU, ordinary=("8 x 128",))
def test_bias_gelu(case, way):
    def function(name):
        return functools.partial(bias_gelu, implementation=name)

    def results(x, function):
        return bias_gelu_test.results.__wrapped__(*x, function)

    x = bias_gelu_test.make(*case, jnp.bfloat16)
    kernels = {"bias_gelu_forward", "bias_gelu_backward"}
    check(way, results, x, function, kernels)
