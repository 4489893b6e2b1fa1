"""depthwise_conv: values and gradients against the compiler's convolution, the kernels on a CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat
from ttt_kernels.depthwise_conv import depthwise_conv, mosaic_gpu

BF16_RMS = 0.01


def make(batch, height, width, channels, dtype=jnp.float32):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(batch, height, width, channels)), dtype)
    kernel = jnp.asarray(random.normal(size=(9, channels)), jnp.float32)
    return x, kernel, jnp.asarray(random.normal(size=channels), jnp.float32)


def compilers(x, kernel, bias, stride, residual):
    y = bias + jax.lax.conv_general_dilated(
        x, kernel.reshape(3, 3, 1, -1), (stride, stride), ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1],
        precision="highest",
    )  # fmt: skip
    return x + y if residual else y


@functools.partial(jax.jit, static_argnums=3)
def results(x, kernel, bias, function):
    """Values and gradients, for a cotangent that depends on the values."""

    def loss(*arrays):
        y = function(*arrays)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, kernel, bias)
    return {"y": y} | dict(zip(("dx", "dkernel", "dbias"), gradients, strict=True))


@pytest.mark.parametrize(
    ("height", "width", "stride", "residual"),
    [(3, 5, 1, True), (3, 5, 1, False), (6, 4, 2, False), (5, 3, 2, False), (1, 1, 1, False)],
)
def test_the_same_as_the_compilers(height, width, stride, residual):
    x, kernel, bias = make(2, height, width, 4)
    options = dict(stride=stride, residual=residual)
    got = results(x, kernel, bias, functools.partial(depthwise_conv, **options))
    want = results(x, kernel, bias, functools.partial(compilers, **options))
    for name, value in want.items():
        assert_close(got[name], value, tolerance(jnp.float32, 9), name)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize(
    "shape", [(2, 3, 14, 64), pytest.param((23, 5, 16, 128), marks=pytest.mark.exhaustive)]
)
def test_the_kernels_in_the_interpreter(shape):
    """With race detection; the second case has groups of several images."""
    x, kernel, bias = make(*shape, dtype=jnp.bfloat16)

    def by_kernels(x, kernel, bias):
        return mosaic_gpu.depthwise_conv(x, kernel, bias, 1, True, interpret=True)

    try:
        got = results(x, kernel, bias, by_kernels)
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    exact = functools.partial(compilers, stride=1, residual=True)
    for name, value in results(x.astype(jnp.float32), kernel, bias, exact).items():
        value = np.asarray(value)
        error = np.asarray(got[name], np.float32) - value
        assert np.sqrt(np.mean(error**2) / np.mean(value**2)) < BF16_RMS, name


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
def test_the_kernels_lower_and_keep_the_input_and_the_taps_alone():
    shapes = [jax.ShapeDtypeStruct((32, 14, 14, 768), jnp.bfloat16),
              jax.ShapeDtypeStruct((9, 768), jnp.float32),
              jax.ShapeDtypeStruct((768,), jnp.float32)]  # fmt: skip

    def loss(*arrays):
        y = mosaic_gpu.depthwise_conv(*arrays, 1, True)
        return jnp.sum(y * y, dtype=jnp.float32)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = gradient.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    apply = functools.partial(mosaic_gpu.depthwise_conv, stride=1, residual=True)
    pullback = jax.eval_shape(lambda *a: jax.vjp(apply, *a)[1], *shapes)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    assert kept <= 2 * shapes[0].size + 4 * 3 * shapes[1].size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kernel=None), "kernel=None must be an array"),
        (dict(bias=[0.0]), "bias=\\[0.0\\] must be an array"),
        (dict(x=jnp.ones((2, 3, 4))), "x has shape \\(2, 3, 4\\)"),
        (dict(kernel=jnp.ones((3, 3, 4))), "kernel has shape \\(3, 3, 4\\)"),
        (dict(bias=jnp.ones(3)), "bias has shape \\(3,\\)"),
        (dict(stride=3), "stride=3 must be 1 or 2"),
        (dict(stride=2, residual=True), "stride=2 must be 1 or 2, and 1 with residual=True"),
        (dict(implementation="cudnn"), "implementation='cudnn' is unknown"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x, kernel, bias = make(1, 3, 5, 4)
    with pytest.raises(ValueError, match=message):
        depthwise_conv(**dict(x=x, kernel=kernel, bias=bias) | change)


@pytest.mark.parametrize(
    ("shape", "dtype", "stride", "message"),
    [
        ((1, 4, 4, 64), jnp.float32, 1, "float32"),
        ((1, 4, 4, 64), jnp.bfloat16, 2, "stride=2"),
        ((1, 4, 4, 96), jnp.bfloat16, 1, "96 channels"),
        ((1, 4, 17, 64), jnp.bfloat16, 1, "4 x 17 pixels"),
        ((1, 17, 16, 64), jnp.bfloat16, 1, "17 x 16 pixels.*256 in all"),
    ],
)
def test_the_kernel_names_what_it_cannot(shape, dtype, stride, message):
    assert re.search(message, mosaic_gpu.unsupported(jax.ShapeDtypeStruct(shape, dtype), stride))
    arguments = make(*shape, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        depthwise_conv(*arguments, stride=stride, implementation="mosaic_gpu")
