"""One mixer for every inner loop: against `ttt` called by hand, its gradients, its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tolerances import assert_close, tolerance
from ttt_jax import ttt
from ttt_jax.inner_loop import presets
from ttt_jax.layers import InnerLoopLayer
from ttt_jax.layers.inner_loop_layer import ConvolvedAttention
from ttt_jax.layers.mixers import TokenInfo
from ttt_jax.layers.short_convolution import causal_convolution

HEADS, DIM, HIDDEN, TIME = 2, 4, 12, 11
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, TIME, HIDDEN)), jnp.float32)

# What the layers of the default suite run; the rest of the family is exhaustive.
CASES = {
    "V0": (presets.lact_llm(0, chunk_size=4), {}),
    "V6": (presets.lact_llm(6, chunk_size=4), {}),
    "mamba2": (presets.mamba2(), {"normalize": False, "tie_forget": True}),
    "gated_deltanet": (presets.gated_deltanet(), {}),
    "rwkv7": (presets.rwkv7(), {"channel_forget": True}),
}
OTHERS = {
    **{f"V{i}": (presets.lact_llm(i, chunk_size=4), {}) for i in range(1, 6)},
    "linear_attention": (presets.linear_attention(), {"normalize": False, "convolution": 0}),
    "retnet": (presets.retnet(HEADS), {}),
    "gla": (presets.gla(), {"channel_forget": True}),
    "deltanet": (presets.deltanet(), {}),
    "ttt_linear": (presets.ttt_linear(chunk_size=4), {}),
    "ttt_mlp": (presets.ttt_mlp(chunk_size=4), {}),
    "titans": (presets.titans(2), {}),
    "atlas": (presets.atlas(window=4), {}),
    "lact_nvs": (presets.lact_nvs([(0, 8, True, False), (0, TIME, False, True)]), {}),
    "vittt_glu": (presets.vittt_glu(), {}),
}


def make(spec, **options):
    options = dict(head_dim=DIM, stddev=0.3, rngs=nnx.Rngs(0)) | options
    if spec is None:
        return ConvolvedAttention(HIDDEN, HEADS, **options)
    return InnerLoopLayer(HIDDEN, HEADS, spec, **options)


def convolved(layer, x):
    """silu of the convolution of x W_qkv, token by token in NumPy; q, k, v."""
    wide = np.asarray(x, np.float64) @ np.asarray(layer.qkv.kernel[...], np.float64)
    kernel = np.asarray(layer.convolution.kernel[...], np.float64)
    out = np.zeros_like(wide)
    for t in range(x.shape[1]):
        for back in range(min(len(kernel), t + 1)):
            out[:, t] += kernel[back] * wide[:, t - back]
    out = out / (1 + np.exp(-out))
    return np.moveaxis(out.reshape(*x.shape[:2], 3, HEADS, DIM), 2, 0)


def normed(layer, mixed):
    """The norm of each head and the output projection, in NumPy."""
    mixed = np.asarray(mixed, np.float64)
    mixed = mixed / np.sqrt(np.mean(mixed**2, -1, keepdims=True) + 1e-6)
    out = np.asarray(layer.out.kernel[...], np.float64)
    return mixed.reshape(*mixed.shape[:2], -1) @ out


def gates(name, layer, x):
    """The gates of a system from the layer's projections, by its papers' formulas."""

    def affine(linear):
        kernel = np.asarray(linear.kernel[...], np.float64)
        return np.tensordot(np.asarray(x, np.float64), kernel, 1) + np.asarray(linear.bias[...])

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    def softplus(z):
        return np.log1p(np.exp(z))

    slow_to_fast = np.array([0.001, 0.1])  # −log of the forget gate of the two heads at first
    rate = np.log(np.expm1(0.1))
    if name == "V0":
        return {"lr": softplus(affine(layer.rate) + rate),
                "momentum": sigmoid(affine(layer.momentum))}  # fmt: skip
    if name == "mamba2":
        step = softplus(affine(layer.rate) + rate)
        return {"lr": step, "forget": np.exp(-step[..., 0] * slow_to_fast / 0.1)}
    if name == "gated_deltanet":
        decay = softplus(affine(layer.forget) + np.log(np.expm1(slow_to_fast)))
        return {"lr": sigmoid(affine(layer.rate)), "forget": np.exp(-decay)}
    if name == "rwkv7":
        decay = softplus(affine(layer.forget) + np.log(np.expm1(slow_to_fast))[:, None])
        key = affine(layer.removal)
        key = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-6)
        erase = (-key, key * sigmoid(affine(layer.removal_rate)))
        return {"forget": np.exp(-decay), "erase": erase}
    return {}


def by_hand(name, layer, x):
    q, k, v = convolved(layer, x)
    if layer.normalize:
        q, k = (y / (np.linalg.norm(y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    arguments = jax.tree.map(
        lambda y: jnp.asarray(y, jnp.float32), (q, k, v, gates(name, layer, x))
    )
    q, k, v, rest = arguments
    weights = layer.initial_weights()
    out = jax.jit(lambda: ttt(layer.spec, weights, q, k, v, mode="recurrent", **rest)[0])()
    return normed(layer, out)


@jax.jit
def value_and_gradient(layer, x):
    def loss(layer, x):
        y = layer(x, TokenInfo(None))[0]
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, gradient


def check_gradients(gradient, spec):
    """Finite, and not zero but where a parameter cannot matter."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
    assert jnp.abs(gradient[1]).max() > 0
    for name, leaf in gradient[0].weights.items():
        assert jnp.abs(leaf[...]).max() > 0, name


@pytest.mark.parametrize("name", CASES)
def test_layer_is_ttt_between_two_projections(name):
    spec, options = CASES[name]
    layer = make(spec, **options)
    y, gradient = value_and_gradient(layer, X)
    assert_close(y, by_hand(name, layer, X), tolerance("float32", HIDDEN * TIME), name)
    check_gradients(gradient, spec)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_every_inner_loop_of_sequences_has_gradients(name):
    spec, options = OTHERS[name]
    y, gradient = value_and_gradient(make(spec, **options), X)
    assert y.shape == X.shape
    check_gradients(gradient, spec)


def test_softmax_is_the_same_layer_with_attention():
    layer = make(None)
    q, k, v = convolved(layer, X)
    scores = np.einsum("bthd,bshd->bhts", q, k) / DIM**0.5
    scores = np.where(np.tri(TIME, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    y, _ = run_attention(layer)
    assert_close(y, normed(layer, mixed), tolerance("float32", HIDDEN * TIME), "softmax")


@jax.jit
def run_attention(layer):
    return layer(X, TokenInfo(None))


def test_documents_do_not_see_each_other():
    layer = make(presets.gated_deltanet())
    documents = jnp.asarray([[0] * 5 + [1] * (TIME - 5)] * 2)
    packed = jax.jit(lambda x: layer(x, TokenInfo(None, documents, documents))[0])(X)
    alone = jax.jit(lambda x: layer(x, TokenInfo(None))[0])(X[:, 5:])
    assert_close(packed[:, 5:], alone, tolerance("float32", HIDDEN * TIME), "second document")


def test_state_sizes():
    matrix = HEADS * DIM * DIM
    for variant, copies in enumerate((6, 2, 2, 2, 2, 1, 1)):  # momentum doubles what is trained
        layer = make(presets.lact_llm(variant, chunk_size=4))
        assert layer.state_size(tokens=99) == copies * matrix, variant
    assert make(presets.deltanet()).state_size(tokens=99) == matrix
    assert make(None).state_size(tokens=99) == 2 * 99 * HEADS * DIM


def test_a_zero_state_is_not_learned():
    layer = make(presets.deltanet())
    assert not layer.weights and not layer.initial_weights()["w"].any()
    assert set(make(presets.lact_llm(0, chunk_size=4)).weights) == {"w0", "w1", "w2"}


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (presets.deltanet(), {"tie_forget": True}, "tie_forget=True needs spec.forget"),
        (presets.deltanet(), {"channel_forget": True}, "channel_forget=True needs spec.forget"),
        (presets.gla(), {"tie_forget": True}, "needs spec.rate='per_token'"),
        (presets.mamba2(), {"tie_forget": True, "channel_forget": True}, "channel_forget=True"),
    ],
)
def test_options_that_do_not_fit_are_refused(spec, options, message):
    with pytest.raises(ValueError, match=message):
        make(spec, **options)


def test_the_defaults_are_heads_of_the_width_and_one_document_a_row():
    layer = InnerLoopLayer(HIDDEN, HEADS, presets.deltanet(), rngs=nnx.Rngs(0))
    named = make(presets.deltanet(), head_dim=HIDDEN // HEADS, stddev=0.02)
    bare = jax.jit(lambda x: layer(x)[0])(X)
    np.testing.assert_array_equal(bare, jax.jit(lambda x: named(x, TokenInfo(None))[0])(X))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": "deltanet"}, "spec='deltanet': use an InnerLoop"),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer of at least 1"),
        ({"heads": 2.0}, "heads=2.0 must be an integer"),
        ({"heads": 5}, "hidden_size=12 is no multiple of heads=5: .* head_dim="),
        ({"head_dim": 0}, "head_dim=0 must be"),
        ({"convolution": -1}, "convolution=-1 must be an integer of at least 0"),
        ({"stddev": float("nan")}, "stddev=nan must be a finite number"),
        ({"dtype": "foo"}, "dtype='foo' must name a floating dtype"),
        ({"dtype": "int8"}, "dtype='int8' must name"),
        ({"dtype": None}, "dtype=None must name"),
        ({"rngs": 0}, r"rngs=0 must be random streams; pass nnx.Rngs\(0\)"),
    ],
)
def test_arguments_that_make_no_layer_are_refused(change, message):
    arguments = dict(hidden_size=HIDDEN, heads=HEADS, spec=presets.deltanet(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        InnerLoopLayer(**arguments | change)


@pytest.mark.parametrize(
    ("x", "info", "message"),
    [
        (X[..., :-1], None, r"x.shape=\(2, 11, 11\): it must be \[batch, time, 12\]"),
        (X[0], None, r"x.shape=\(11, 12\): it must be"),
        (X[:, :0], None, "no axis may be empty"),
        (X.astype(int), None, "x has dtype int32; it must be a float"),
        ([1.0], None, "must be an array"),
        (X, X, "info is a ArrayImpl: leave it out"),
    ],
)
@pytest.mark.parametrize("spec", [presets.deltanet(), None])
def test_tokens_that_are_not_the_layers_are_refused(spec, x, info, message):
    with pytest.raises(ValueError, match=message):
        make(spec)(x, info)


def test_a_mode_that_cannot_run_is_refused():
    layer = make(presets.lact_llm(0, chunk_size=4), mode="parallel")
    with pytest.raises(ValueError, match="mode='parallel' cannot run"):
        jax.eval_shape(lambda x: layer(x, TokenInfo(None)), X)


def test_convolution_stops_at_the_document():
    x = jnp.arange(1.0, 7.0).reshape(1, 6, 1)
    documents = jnp.asarray([[0, 0, 0, 1, 1, 1]])
    y = causal_convolution(x, jnp.array([[1.0], [10.0], [100.0]]), documents)
    assert y.ravel().tolist() == [1.0, 12.0, 123.0, 4.0, 45.0, 456.0]
