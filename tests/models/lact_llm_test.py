"""LaCT-LLM: sizes, variants, modes, FLOPs, learning while decoding, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.matmul_count import matmul_flops
from tests.models.small import (
    decode,
    forward,
    init_cache,
    lact_config,
    small_model,
    tokens,
    transformer_config,
)
from tests.tolerances import assert_close, tolerance
from ttt_jax.layers.attention import visible_pairs
from ttt_jax.models import build, lact_llm, transformer


def official_size(hidden, intermediate, layers=24, heads=4, rank=32, vocab=32000):
    """Parameters of the official `LaCTForCausalLM`, module by module."""
    head = hidden // heads
    low_rank = heads * rank * 2 * head
    layer = {
        "qkv and o_proj": 4 * hidden * hidden,
        "w0 and w2": 2 * low_rank,
        "w1": heads * head * head,
        "lr_proj": (hidden + 1) * 3 * heads,
        "momentum_proj and ttt_scale_proj": 2 * (hidden + 1) * heads,
        "qk_scale and qk_offset": 4 * hidden,
        "ttt_norm": head,
        "attn_norm and mlp_norm": 2 * hidden,
        "mlp": 3 * hidden * intermediate,
    }
    return layers * sum(layer.values()) + 2 * vocab * hidden + hidden


@pytest.mark.parametrize(
    ("size", "hidden", "intermediate", "total"),
    [("760m", 1536, 4096, 797_625_312), ("3b", 3072, 8192, 2_982_516_192)],
)
def test_sizes_are_those_of_the_official_models(size, hidden, intermediate, total):
    model = nnx.eval_shape(lambda: build(lact_llm.preset(size)))
    assert model.num_params() == official_size(hidden, intermediate) == total


def test_the_baseline_is_the_same_model_without_the_branch():
    lact = nnx.eval_shape(lambda: build(lact_llm.preset("760m")))
    plain = nnx.eval_shape(lambda: build(transformer.preset("760m")))
    branch = nnx.state(lact.layers.mixer.branch)
    size = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(branch))
    assert lact.num_params() - plain.num_params() == size


@pytest.mark.parametrize(
    ("variant", "weights", "rates", "momentum"),
    [
        (0, {"w0_left", "w0_right", "w1", "w2_left", "w2_right"}, 3, True),
        (1, {"w0_left", "w0_right", "w1", "w2_left", "w2_right"}, 1, True),
        (2, {"w0_left", "w0_right", "w1", "w2_left", "w2_right"}, 1, True),
        (3, {"w"}, 1, True),
        (4, {"w"}, 0, True),
        (5, {"w"}, 0, False),
        (6, {"w"}, 0, False),
    ],
)
def test_parameters_that_a_variant_does_not_use_do_not_exist(variant, weights, rates, momentum):
    model = nnx.eval_shape(lambda: build(lact_config(variant=variant)))
    branch = nnx.to_pure_dict(nnx.state(model.layers.mixer.branch))
    assert set(branch["weights"]) == weights
    assert ("rate" in branch) == (rates > 0)
    assert ("momentum" in branch) == momentum
    if rates:
        assert branch["rate"]["kernel"].shape == (2, 16, 2, rates)  # layers, hidden, heads


def test_modes_agree():
    """Recurrent and parallel: the same logits, packed and not."""
    row, ids = tokens(2, 27), jnp.array([[0] * 11 + [1] * 16, [0] * 25 + [-1] * 2], jnp.int32)
    for segment_ids in (None, ids):
        expected = forward(small_model(lact_config(variant=2, mode="recurrent")), row, segment_ids)
        found = forward(small_model(lact_config(variant=2, mode="parallel")), row, segment_ids)
        assert_close(found, expected, tolerance("float32", 64))


def test_fast_weights_are_read_only_after_their_chunk():
    """The first chunk does not depend on what is learned; from the second on everything does."""
    config = lact_config(use_newton_schulz=False)
    once = forward(small_model(config), tokens(1, 20))
    never = forward(small_model(dataclasses.replace(config, chunk_size=64)), tokens(1, 20))
    assert_close(once[:, :8], never[:, :8], tolerance("float32", 64))
    difference = jnp.max(jnp.abs(once - never), axis=-1)[0, 8:]
    assert jnp.min(difference) > 1e-2


def test_decoding_goes_on_learning_at_chunk_boundaries_only():
    """The weights change with tokens 8 and 16, and are then those of the batched forward."""
    model = small_model(lact_config(use_newton_schulz=False))
    row, cache, changed = tokens(1, 18), init_cache(model, 1), []
    before = cache.layers.state.weights
    for index in range(18):
        _, cache = decode(model, row[:, index : index + 1], cache)
        after = cache.layers.state.weights
        same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), before, after)
        if not all(jax.tree.leaves(same)):
            assert not any(jax.tree.leaves(same))
            changed.append(index + 1)
        before = after
    assert changed == [8, 16]
    _, stats = jax.jit(lambda m, x: m.features(x))(model, row)
    assert stats["state_norm"].shape == (2,)
    squares = sum(jnp.sum(w**2, axis=(3, 4)).mean(axis=(1, 2)) for w in after.values())
    assert_close(stats["state_norm"], jnp.sqrt(squares), tolerance("float32", 64))
    start = init_cache(model, 1).layers.state.weights
    squares = sum(
        jnp.sum((after[name] - start[name]) ** 2, axis=(3, 4)).mean(axis=(1, 2)) for name in after
    )
    assert_close(stats["update_norm"], jnp.sqrt(squares), tolerance("float32", 64))


@pytest.mark.parametrize("variant", [0, 2, 3, 4, 6, "transformer"])
def test_flops_are_those_of_the_traced_program(variant):
    """Exact, once the pairs that the causal mask throws away are added."""
    time = 24
    if variant == "transformer":
        config = transformer_config(window_size=None)
    else:
        config = lact_config(
            variant=variant,
            window_size=time,
            low_rank=0,
            fast_hidden_multiple=1.5 if variant < 3 else 1.0,
            mode="recurrent",
        )
    model = nnx.eval_shape(lambda: build(config))

    def run(model, ids):
        features, stats = model.features(ids)
        return model.logits(features), stats

    counted = matmul_flops(run, model, jax.ShapeDtypeStruct((1, time), jnp.int32))
    masked = time * time - visible_pairs(time, config.window_size)
    masked_flops = config.num_layers * 4 * config.hidden_size * masked
    assert counted == round(model.flops_per_token(time) * time) + masked_flops


def test_flops_of_attention_stay_constant_past_the_window():
    model = nnx.eval_shape(lambda: build(lact_llm.preset("760m")))
    assert model.flops_per_token(2**15) < 1.05 * model.flops_per_token(2**12)
    # 2 FLOPs a parameter outside the embedding is the usual estimate from below.
    assert model.flops_per_token(2**15) > 2 * (model.num_params() - 32000 * 1536)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(variant=7), "variant=7"),
        (dict(num_attention_heads=3), "num_attention_heads=3 must divide hidden_size=16"),
        (dict(num_fast_heads=3), "num_fast_heads=3 must divide hidden_size=16"),
        (dict(num_attention_heads=16), "heads of size 1"),
        (dict(mode="parallel"), "mode='parallel' cannot run variant=0"),
        (dict(mode="fast"), "mode='fast' must be one of"),
        (dict(dtype="float16"), "dtype='float16' must be one of"),
        (dict(remat=True), "remat=True must be one of"),
        (dict(chunk_size=0), "chunk_size=0 must be an integer of at least 1"),
        (dict(window_size=None), "give a number"),
        (dict(low_rank=-1), "low_rank=-1 must be an integer >= 0"),
        (dict(weight_norm="none"), "weight_norm='none' must be one of"),
        (dict(direction="up"), "direction='up'"),
        (dict(vocab_size=True), "vocab_size=True"),
        (dict(rope_theta=0.0), "rope_theta=0.0 must be positive"),
        (dict(fast_hidden_multiple=0.01), "at least one unit"),
    ],
)
def test_bad_configurations_are_refused_before_anything_is_built(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(lact_config(**overrides))


def test_unknown_presets_are_refused():
    for module in (lact_llm, transformer):
        with pytest.raises(ValueError, match="name='7b' must be one of"):
            module.preset("7b")
