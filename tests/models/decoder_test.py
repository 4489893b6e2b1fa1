"""What every decoder promises, whatever mixes its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small import (
    decode,
    forward,
    init_cache,
    lact_config,
    logits_alone,
    small_model,
    tokens,
    transformer_config,
)
from tests.tolerances import assert_close, tolerance
from ttt_jax.models import build
from ttt_jax.models.decoder import stack_layers, unstack_layers

# Without Newton-Schulz, whose compilation would take most of the time; "v5" has it.
CONFIGS = {
    "v0": lact_config(variant=0, use_newton_schulz=False),
    "v5": lact_config(variant=5),
    "full": transformer_config(window_size=None, max_decode_length=64),
    "window": transformer_config(),
}

# Attention in one block: quicker to compile, for tests of other parts.
WIDE = {name: dataclasses.replace(CONFIGS[name], window_size=32) for name in ("v0", "full")}


@jax.jit
def loss_and_gradients(model, ids):
    def loss(model):
        logits = model(ids[:, :-1])
        return jnp.mean(
            jax.nn.logsumexp(logits, -1)
            - jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        )

    value, gradients = jax.value_and_grad(loss)(model)
    return value, nnx.to_pure_dict(nnx.state(gradients, nnx.Param))


@pytest.mark.parametrize(
    "scan, remat", [(True, "full"), pytest.param(False, "dots", marks=pytest.mark.exhaustive)]
)
def test_scan_and_remat_change_neither_loss_nor_gradients(scan, remat):
    """The same weights give the same training step, however the layers are run."""
    ids = tokens(2, 22)
    loss, gradients = loss_and_gradients(small_model(WIDE["v0"]), ids)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))
    params = nnx.to_pure_dict(nnx.state(small_model(WIDE["v0"]), nnx.Param))
    config = dataclasses.replace(WIDE["v0"], scan_layers=scan, remat=remat)
    model = nnx.eval_shape(lambda: build(config))
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, params if scan else unstack_layers(params))
    model = nnx.merge(nnx.graphdef(model), state)
    other_loss, other = loss_and_gradients(model, ids)
    assert_close(other_loss, loss, tolerance("float32", 16))
    other = other if scan else stack_layers(other)
    assert jax.tree.structure(gradients) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(gradients), strict=True):
        assert_close(a, b, tolerance("float32", 64))


def test_layers_convert_between_the_two_forms():
    """Unscanned parameters, stacked, are those of the scanned model of the same seed; and back."""
    jitted_build = jax.jit(build, static_argnums=0)
    scanned, plain = (
        nnx.to_pure_dict(nnx.state(jitted_build(lact_config(scan_layers=scan)), nnx.Param))
        for scan in (True, False)
    )
    for ours, theirs in ((stack_layers(plain), scanned), (unstack_layers(scanned), plain)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)


def test_scanned_parameters_name_the_axis_of_layers():
    """Every parameter names all its axes; stacking adds "layers" in front."""
    scanned, plain = (
        nnx.eval_shape(lambda scan=scan: build(lact_config(scan_layers=scan)))
        for scan in (True, False)
    )
    names = {}
    for path, variable in nnx.to_flat_state(nnx.state(scanned)):
        names[path] = variable.get_metadata()["out_sharding"]
        assert len(names[path]) == len(variable.shape), path
    for path, variable in nnx.to_flat_state(nnx.state(plain)):
        expected = variable.get_metadata()["out_sharding"]
        if path[0] == "layers":
            assert names[("layers", *path[2:])] == ("layers", *expected)
        else:
            assert names[path] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_documents_alone(name):
    """Documents off the chunk and the window, padding between and after them."""
    model = small_model(CONFIGS[name])
    lengths = [5, 1, 13, 9]
    ids = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [[-1] * 3])[None]
    ids = np.insert(ids, 6, -1, axis=1)
    row = tokens(1, ids.shape[1])
    packed = forward(model, row, jnp.asarray(ids, jnp.int32))
    assert np.all(np.isfinite(packed))
    places = [np.flatnonzero(ids[0] == document) for document in range(len(lengths))]
    alone = logits_alone(model, [row[0, p] for p in places])
    for document in range(len(lengths)):
        limit = tolerance("float32", 64)
        assert_close(packed[0, places[document]], alone[document], limit, f"document {document}")


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_full_forward(name):
    """Calls of 1 and 8 tokens, across chunk boundaries, give the logits of the whole."""
    model = small_model(CONFIGS[name])
    row = tokens(4, 32)
    cache = init_cache(model, 4)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    start, out = 0, []
    for size in (1, 1, 8, 1, 1, 1, 8, 8, 1, 1, 1):
        logits, cache = decode(model, row[:, start : start + size], cache)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == shapes
        out.append(logits)
        start += size
    assert start == 32
    assert_close(jnp.concatenate(out, axis=1), forward(model, row), tolerance("float32", 64))


@pytest.mark.parametrize("name", ["v0", "full"])
def test_padding_may_stand_anywhere_in_a_prompt(name):
    """Left, right and inner padding: each row goes on as if its tokens had come alone."""
    model = small_model(CONFIGS[name])
    row, step = tokens(4, 14), tokens(4, 1, seed=1)
    ids = jnp.array(
        [
            [-1] * 4 + [0] * 10,
            [0] * 9 + [-1] * 5,
            [0] * 3 + [-1] * 2 + [0] * 9,
            [-1] + [0] * 12 + [-1],
        ],
        jnp.int32,
    )
    logits, cache = decode(model, row, init_cache(model, 4), ids)
    assert np.all(np.isfinite(logits))
    assert cache.position.tolist() == [10, 9, 12, 12]
    nothing = jnp.full((4, 1), -1, jnp.int32)
    _, cache = decode(model, row[:, :1], cache, nothing)
    after, cache = decode(model, step, cache, jnp.zeros((4, 1), jnp.int32))
    places = [np.flatnonzero(ids[index] >= 0) for index in range(4)]
    rows = [np.append(row[index, p], step[index]) for index, p in enumerate(places)]
    for index, expected in enumerate(logits_alone(model, rows)):
        limit = tolerance("float32", 64)
        assert_close(logits[index, places[index]], expected[:-1], limit, f"row {index}")
        assert_close(after[index, 0], expected[-1], limit, f"row {index}, next token")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_reset_row_forgets(scan):
    """Request B in the slot of request A equals B alone; the other rows go on."""
    model = small_model(dataclasses.replace(CONFIGS["v0"], scan_layers=scan))
    reset = jax.jit(lambda model, cache, rows: model.reset_cache(cache, rows))
    first, second = tokens(4, 8), tokens(4, 8, seed=1)
    empty = init_cache(model, 4)
    on, cache = decode(model, second, decode(model, first, empty)[1])
    cache = reset(model, cache, jnp.array([True, False, True, False]))
    logits, _ = decode(model, second, cache)
    fresh, _ = decode(model, second, empty)
    np.testing.assert_array_equal(logits[::2], fresh[::2])
    assert not np.allclose(logits[1::2], fresh[1::2])
    assert not np.allclose(logits[1::2], on[1::2])


def test_half_precision_keeps_float32_parameters_and_logits():
    """bfloat16 compute: float32 parameters, gradients and logits, near the float32 model."""
    config = dataclasses.replace(WIDE["v0"], dtype="bfloat16")
    ids = tokens(2, 22)
    loss, gradients = loss_and_gradients(small_model(config), ids)
    expected, _ = loss_and_gradients(small_model(WIDE["v0"]), ids)
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32
        assert np.all(np.isfinite(leaf))
    features, _ = jax.eval_shape(lambda m, x: m.features(x), small_model(config), ids)
    assert features.dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32
    assert_close(loss, expected, tolerance("bfloat16"))


def test_compile_time_does_not_grow_with_the_layers():
    """The traced program of a scanned model has one copy of the block, whatever its depth."""

    def size(layers):
        config = dataclasses.replace(CONFIGS["v0"], num_layers=layers, remat="full")
        model = nnx.eval_shape(lambda: build(config))
        ids = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        step = jax.jit(jax.grad(lambda model, ids: jnp.mean(model(ids))))
        return len(step.lower(model, ids).as_text())

    assert size(24) <= 1.05 * size(2)


def test_bad_tokens_are_refused():
    model = small_model(CONFIGS["v0"])
    with pytest.raises(ValueError, match="time >= 1"):
        model(jnp.zeros((2, 0), jnp.int32))
    with pytest.raises(ValueError, match="integer dtype"):
        model(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="must be the shape of tokens"):
        model(jnp.zeros((2, 3), jnp.int32), segment_ids=jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="time >= 1"):
        model.decode(jnp.zeros(3, jnp.int32), init_cache(model, 3))
    with pytest.raises(ValueError, match="model_config is a dict; it must be: "):
        build({"hidden_size": 3})
