"""Perplexity against a plain sum over all tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tiny_run import tiny_config, write_text
from tests.tolerances import assert_close, tolerance
from ttt_jax import evaluate, inputs, models, sharding


@pytest.fixture(scope="module")
def model_and_batches(tmp_path_factory):
    config = tiny_config(write_text(tmp_path_factory.mktemp("text") / "words.jsonl"))
    batches = list(inputs.open_inputs(config).batches("eval"))
    return models.build(config.model), batches


def plain_losses(model, batch):
    """nll of each token, from all logits at once."""
    call = jax.jit(lambda b: model(b["tokens"], segment_ids=b["segment_ids"]))
    logits = np.asarray(call({k: jnp.asarray(v) for k, v in batch.items()}), np.float64)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]


def test_perplexity_is_over_all_tokens_and_by_position(model_and_batches):
    model, batches = model_and_batches
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    step = evaluate.make_eval_step(graphdef, mesh, loss_chunk=10)
    got = evaluate.evaluate(step, nnx.to_pure_dict(params), batches, mesh)
    assert step._cache_size() == 1
    nll, positions = [], []
    for batch in batches:
        losses = plain_losses(model, batch)
        for row in range(losses.shape[0]):
            place = 0
            for t in range(losses.shape[1]):
                ids = batch["segment_ids"][row]
                place = place + 1 if t and ids[t] == ids[t - 1] else 0
                if batch["weights"][row, t]:
                    nll.append(losses[row, t])
                    positions.append(place)
    limit = tolerance(jnp.float32, 64)
    assert got.tokens == len(nll) > 200
    assert_close(got.loss, np.mean(nll), limit)
    assert got.perplexity == math.exp(got.loss)
    nll, positions = np.array(nll), np.array(positions)
    for first, last, tokens, perplexity in got.by_position:
        inside = (positions >= first) & (positions <= last)
        assert tokens == inside.sum()
        assert_close(perplexity, np.exp(nll[inside].mean()), limit)
    assert sum(entry[2] for entry in got.by_position) == got.tokens
    assert f"{got.by_position[0][3]:.3f}" in got.table()


def test_a_part_of_the_batches_can_be_taken(model_and_batches):
    model, batches = model_and_batches
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    step = evaluate.make_eval_step(graphdef, mesh, loss_chunk=32)
    got = evaluate.evaluate(step, nnx.to_pure_dict(params), batches, mesh, max_batches=1)
    assert got.tokens == int(batches[0]["weights"].sum())


def test_no_token_at_all_is_refused(model_and_batches):
    model, batches = model_and_batches
    empty = dict(batches[0], weights=np.zeros_like(batches[0]["weights"]))
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    step = evaluate.make_eval_step(graphdef, mesh, loss_chunk=32)
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate.evaluate(step, nnx.to_pure_dict(params), [empty], mesh)


def test_rows_as_one_text_differ_only_where_a_row_has_several_documents(model_and_batches):
    model, batches = model_and_batches
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    single = dict(batches[0])
    single["segment_ids"] = np.where(single["segment_ids"] == 0, 0, -1).astype(np.int32)
    single["weights"] = single["weights"] * (single["segment_ids"] == 0)
    halves = np.repeat([[0] * 16 + [1] * 16], single["tokens"].shape[0], 0).astype(np.int32)
    packed = dict(batches[0], segment_ids=halves)
    losses = {}
    for documents in (True, False):
        step = evaluate.make_eval_step(graphdef, mesh, 32, documents)
        for name, batch in {"packed": packed, "single": single}.items():
            result = evaluate.evaluate(step, nnx.to_pure_dict(params), [batch], mesh)
            losses[name, documents] = result.loss
    assert_close(losses["single", True], losses["single", False], tolerance(jnp.float32, 64))
    assert losses["packed", True] != losses["packed", False]


def test_an_overflowing_perplexity_is_infinite():
    result = evaluate.Perplexity(tokens=1, loss=1000.0, by_position=())
    assert result.perplexity == math.inf
    assert dataclasses.replace(result, loss=0.0).perplexity == 1.0
