"""Norms and activations by rows: values and gradients against the plain formulas, in float64.

The plain formulas are differentiated by JAX; the layers have backward passes of their own, which
keep little: that too is tested.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import tolerance
from ttt_jax.layers.activations import gelu, silu
from ttt_jax.layers.layer_norm import layer_normalize
from ttt_jax.layers.rms_norm import l2_normalize, rms_normalize


def _plain_layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


# name -> (layer, plain formula, whether it has a scale, a bias)
LAYERS = {
    "layer_norm": (lambda x, s, b: layer_normalize(x, s, b, 1e-5), _plain_layer_norm),
    "layer_norm_no_bias": (
        lambda x, s, b: layer_normalize(x, s, None, 1e-5),
        lambda x, s, b: _plain_layer_norm(x, s, 0),
    ),
    "rms_norm": (
        lambda x, s, b: rms_normalize(x, s, 1e-5),
        lambda x, s, b: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * s,
    ),
    "l2_norm": (
        lambda x, s, b: l2_normalize(x, 1e-5),
        lambda x, s, b: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-5),
    ),
    "gelu": (lambda x, s, b: gelu(x), lambda x, s, b: jax.nn.gelu(x, approximate=False)),
    "silu": (lambda x, s, b: silu(x), lambda x, s, b: x / (1 + jnp.exp(-x))),
}


def _inputs(rows=4, width=16):
    rng = np.random.default_rng(0)
    return 2 * rng.normal(size=(rows, 3, width)), rng.normal(size=width), rng.normal(size=width)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    layer, plain = LAYERS[name]
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x) for x in _inputs()]
        weight = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape))

        @jax.jit
        def both(*inputs):
            def of(function):
                loss = lambda *a: jnp.sum(weight * function(*a))  # noqa: E731
                return function(*inputs), jax.grad(loss, (0, 1, 2))(*inputs)

            return of(layer), of(plain)

        got, wanted = both(*inputs)
    allowed = tolerance(np.float64, inputs[0].size)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=allowed, atol=allowed),
                 got, wanted)  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_keeps_the_input_and_little_more(name):
    x, scale, bias = (jnp.asarray(x, jnp.bfloat16) for x in _inputs(width=512))
    pullback = jax.eval_shape(lambda *a: jax.vjp(LAYERS[name][0], *a)[1], x, scale, bias)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    parameters = scale.nbytes + bias.nbytes
    assert x.nbytes <= kept <= 1.05 * x.nbytes + parameters


def test_l2_norm_of_a_zero_row_has_the_gradient_of_a_constant_norm():
    gradient = jax.grad(lambda x: jnp.sum(l2_normalize(x, 1e-3)))(jnp.zeros((2, 4)))
    np.testing.assert_allclose(gradient, 1e3, rtol=1e-6)
