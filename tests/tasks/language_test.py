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
from ttt_jax import models, sharding
from ttt_jax.tasks import language, make_task


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_config(write_text(tmp_path_factory.mktemp("text") / "words.jsonl"))


@pytest.fixture(scope="module")
def model(config):
    return models.build(config.model)


def evaluate(config, model, batches=None, **options):
    """Evaluates a model, on the given batches instead of the split if there are any."""
    task = make_task(config)
    if batches is not None:
        task.batches = lambda split, mesh: batches
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return task.evaluate(graphdef, nnx.to_pure_dict(params), {}, mesh, **options)


def plain_losses(model, batch):
    """nll of each token, from all logits at once."""
    call = jax.jit(lambda b: model(b["tokens"], segment_ids=b["segment_ids"]))
    logits = np.asarray(call({k: jnp.asarray(v) for k, v in batch.items()}), np.float64)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]


def test_perplexity_is_over_all_tokens_and_by_position(config, model):
    train = dataclasses.replace(config.train, loss_chunk=10)
    got = evaluate(dataclasses.replace(config, train=train), model)
    nll, positions = [], []
    for batch in make_task(config).batches("eval"):
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
    assert got.details["tokens"] == len(nll) > 200
    assert_close(got.metrics["loss"], np.mean(nll), limit)
    assert got.headline == ("perplexity", math.exp(got.metrics["loss"]))
    assert 1.0 < got.metrics["unigram_perplexity"] < 258.0
    nll, positions = np.array(nll), np.array(positions)
    ranges = got.details["by_position"]
    for first, last, tokens, perplexity in ranges:
        inside = (positions >= first) & (positions <= last)
        assert tokens == inside.sum()
        assert_close(perplexity, np.exp(nll[inside].mean()), limit)
    assert sum(entry[2] for entry in ranges) == got.details["tokens"]
    assert f"{ranges[0][3]:.3f}" in got.table


def test_a_part_of_the_batches_can_be_taken_and_no_token_is_refused(config, model):
    first = next(iter(make_task(config).batches("eval")))
    got = evaluate(config, model, max_batches=1)
    assert got.details["tokens"] == int(first["weights"].sum())
    empty = dict(first, weights=np.zeros_like(first["weights"]))
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(config, model, [empty])


def test_rows_as_one_text_differ_only_where_a_row_has_several_documents(config, model):
    first = next(iter(make_task(config).batches("eval")))
    single = dict(first)
    single["segment_ids"] = np.where(single["segment_ids"] == 0, 0, -1).astype(np.int32)
    single["weights"] = single["weights"] * (single["segment_ids"] == 0)
    halves = np.repeat([[0] * 16 + [1] * 16], single["tokens"].shape[0], 0).astype(np.int32)
    packed = dict(first, segment_ids=halves)
    losses = {}
    for documents in (True, False):
        data = dataclasses.replace(config.data, reset_documents=documents)
        for name, batch in {"packed": packed, "single": single}.items():
            result = evaluate(dataclasses.replace(config, data=data), model, [batch])
            losses[name, documents] = result.metrics["loss"]
    assert_close(losses["single", True], losses["single", False], tolerance(jnp.float32, 64))
    assert losses["packed", True] != losses["packed", False]


def test_example_is_the_shape_of_a_batch(config):
    task = make_task(config)
    batch = next(iter(task.batches("train")))
    example = task.example()
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (x.shape, x.dtype) for name, x in example.items()
    }


def test_an_overflowing_perplexity_is_infinite():
    sums = language.Sums()
    sums.add(np.full((1, 2), 1000.0), np.ones((1, 2)), np.zeros((1, 2), int))
    assert sums.result(unigram=2.0).metrics["perplexity"] == math.inf


def test_data_of_no_known_task_is_refused(config):
    with pytest.raises(ValueError, match="config.data is a dict; it must be: DataConfig"):
        make_task(dataclasses.replace(config, data={}))
