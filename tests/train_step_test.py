"""The step against plain formulas: loss, gradient, accumulation, skipping, donation, compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.tiny_run import assert_equal_states
from tests.tolerances import assert_close, tolerance
from ttt_jax import sharding, train_step
from ttt_jax.config import OptimizerConfig
from ttt_jax.models import lact_llm
from ttt_jax.objective import make_token_loss

_VOCAB, _ROWS, _LENGTH = 32, 4, 24


@functools.cache
def trainee(optimizer="adamw"):
    config = lact_llm.preset(
        "tiny", vocab_size=_VOCAB, hidden_size=16, num_layers=1, num_attention_heads=2,
        intermediate_size=16, chunk_size=8, window_size=8, low_rank=4, variant=6,
        scan_layers=False,
    )  # fmt: skip
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return train_step.make_trainee(
        config, OptimizerConfig(name=optimizer, warmup_steps=2), 10, mesh
    )


def make_batch(seed=0):
    """Rows with two documents, a padded tail of another length in each, and their weights."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, _VOCAB, (_ROWS, _LENGTH + 1)).astype(np.int32)
    segments = np.zeros((_ROWS, _LENGTH), np.int32)
    segments[:, 9:] = 1
    for row, tail in enumerate((0, 3, 11, 1)):
        segments[row, _LENGTH - tail :] = -1
    weights = (segments >= 0).astype(np.float32)
    weights[:, 8] = 0.0
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segments}
    return {name: jnp.asarray(x) for name, x in (batch | {"weights": weights}).items()}


def loss_and_gradient(params, batch, accumulation, chunk):
    return train_step.loss_and_gradient(
        make_token_loss(chunk), trainee().graphdef, params, {}, batch, jax.random.key(0),
        accumulation,
    )  # fmt: skip


@functools.cache
def plain_loss_and_gradient():
    """The definition: all logits at once, one mean over the real tokens."""
    state, batch = train_step.init_state(trainee(), 0), make_batch()

    def loss(params):
        model = nnx.merge(trainee().graphdef, params)
        logits = model(batch["tokens"], segment_ids=batch["segment_ids"])
        nll = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
        )[..., 0]
        return jnp.sum(batch["weights"] * nll) / jnp.sum(batch["weights"])

    return jax.jit(jax.value_and_grad(loss))(state.params)


@pytest.mark.parametrize("accumulation, chunk", [(1, 100), (1, 7), (4, 8)])
def test_loss_and_gradient_are_those_of_the_whole_batch(accumulation, chunk):
    state, batch = train_step.init_state(trainee(), 0), make_batch()
    loss, gradient, stats = jax.jit(
        lambda p, b: loss_and_gradient(p, b, accumulation, chunk)[:3]
    )(state.params, batch)
    expected_loss, expected_gradient = plain_loss_and_gradient()
    limit = tolerance(jnp.float32, _ROWS * _LENGTH)
    assert_close(loss, expected_loss, limit, "loss")
    leaves = jax.tree_util.tree_leaves_with_path(expected_gradient)
    for (path, expected), got in zip(leaves, jax.tree.leaves(gradient), strict=True):
        assert_close(got, expected, limit, jax.tree_util.keystr(path))
    assert float(stats["count"]) == float(batch["weights"].sum())
    assert np.all(np.isfinite(stats["state_norm"]))


def test_the_logits_never_exist_whole():
    state, batch = train_step.init_state(trainee(), 0), make_batch()

    def shapes(chunk):
        jaxpr = jax.make_jaxpr(
            lambda p, b: loss_and_gradient(p, b, 1, chunk)
        )(state.params, batch)
        return str(jaxpr)

    whole = f"f32[{_ROWS},{_LENGTH},{_VOCAB}]"
    assert whole in shapes(100)
    assert whole not in shapes(8)
    assert f"f32[{_ROWS},8,{_VOCAB}]" in shapes(8)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_step_is_the_optimizers_update(optimizer):
    whole = trainee(optimizer)
    state, batch = train_step.init_state(whole, 0), make_batch()
    _, gradient = plain_loss_and_gradient()
    updates, _ = whole.optimizer.update(gradient, whole.optimizer.init(state.params), state.params)
    expected = optax.apply_updates(state.params, updates)
    with jax.set_mesh(whole.mesh):
        new, metrics = train_step.make_train_step(whole, make_token_loss(100))(state, batch)
    limit = 1e-3  # Adam's first update is lr * sign(g): a rounding of a tiny g may show
    for got, want in zip(jax.tree.leaves(new.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=limit * float(whole.learning_rate(0)) + 1e-6)
    assert int(new.step) == 1
    assert_close(metrics["learning_rate"], whole.learning_rate(0), 1e-6)
    assert_close(metrics["grad_norm"], optax.global_norm(gradient), tolerance(jnp.float32, 99))


def test_many_steps_compile_once_donate_the_state_and_move_every_parameter():
    state, batch = train_step.init_state(trainee(), 0), make_batch()
    before = jax.tree.map(np.array, state.params)
    step = train_step.make_train_step(trainee(), make_token_loss(8), accumulation_steps=2)
    placement = sharding.batch_sharding(trainee().mesh, _ROWS)
    losses = []
    with jax.set_mesh(trainee().mesh):
        for _ in range(4):
            old = state
            placed = sharding.place_batch(jax.tree.map(np.asarray, batch), placement)
            state, metrics = step(state, placed)
            losses.append(float(metrics["loss"]))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert step._cache_size() == 1
    assert losses[-1] < losses[0]
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(state.params), strict=True
    ):
        assert np.any(a != np.asarray(b)), f"{jax.tree_util.keystr(path)} did not move"


class Counter(nnx.Module):
    """A parameter, and a running mean of what the model has seen."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros((3,)))
        self.mean = nnx.BatchStat(jnp.zeros((3,)))


def counter_loss(model, batch, key):
    """Pulls w to the rows; the running mean moves a tenth of the way; draws from the key."""
    x = batch["x"]
    model.mean[...] = 0.9 * model.mean[...] + 0.1 * jnp.mean(x, 0)
    drawn = jax.random.uniform(key)
    loss = jnp.sum((model.w[...] - x) ** 2)
    return loss, {"count": jnp.float32(x.shape[0]), "drawn": drawn}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_running_statistics_average_and_keys(accumulation):
    """Buffers move with the batch, the average lags by its decay, a key is that of its step."""
    whole = train_step.make_trainee(
        None, OptimizerConfig(warmup_steps=0, learning_rate=0.1), 10, trainee().mesh,
        build=lambda _, rngs: Counter(), averaged=True,
    )  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    options = dict(accumulation_steps=accumulation, ema_decay=0.75)
    step = train_step.make_train_step(whole, counter_loss, **options)
    state, average, drawn = train_step.init_state(whole, 0), np.zeros(3), []
    with jax.set_mesh(whole.mesh):
        for _ in range(2):
            state, metrics = step(state, {"x": x})
            average = 0.75 * average + 0.25 * np.asarray(state.params["w"])
            drawn.append(float(metrics["drawn"]))
        limit = tolerance(jnp.float32, 16)
        assert_close(state.buffers["mean"], (1 - 0.9**2) * np.mean(x, 0), limit)
        assert_close(state.best_params()["w"], average, limit)
        assert drawn[0] != drawn[1]
        _, metrics = step(train_step.init_state(whole, 1), {"x": x})
        assert float(metrics["drawn"]) not in drawn  # another seed
        again, metrics = step(train_step.init_state(whole, 0), {"x": x})
        assert float(metrics["drawn"]) == drawn[0]
        kept = jax.tree.map(np.array, again)
        bad, _ = step(again, {"x": x.at[0].set(jnp.nan)})
    assert_equal_states((bad.buffers, bad.average), (kept.buffers, kept.average))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_non_finite_step_changes_nothing_but_the_counters(value):
    whole = trainee()
    state, batch = train_step.init_state(whole, 0), make_batch()
    bad = batch | {"weights": batch["weights"].at[1, 2].set(value)}
    step = train_step.make_train_step(whole, make_token_loss(100))
    with jax.set_mesh(whole.mesh):
        state, _ = step(state, batch)
        kept = jax.tree.map(np.array, state)
        state, metrics = step(state, bad)
        assert_equal_states((state.params, state.optimizer), (kept.params, kept.optimizer))
        assert [int(x) for x in (state.step, state.skipped, state.skipped_in_a_row)] == [2, 1, 1]
        assert int(metrics["skipped_in_a_row"]) == 1
        state, _ = step(state, bad)
        assert int(state.skipped_in_a_row) == 2
        state, metrics = step(state, batch)
    assert [int(x) for x in (state.step, state.skipped, state.skipped_in_a_row)] == [4, 2, 0]
    # The schedule counts updates, not batches: this was the second update.
    assert_close(metrics["learning_rate"], whole.learning_rate(1), 1e-6)


def test_a_batch_without_a_real_token_is_harmless():
    batch = make_batch() | {"weights": jnp.zeros((_ROWS, _LENGTH))}
    state = train_step.init_state(trainee(), 0)
    loss, gradient, *_ = jax.jit(lambda p, b: loss_and_gradient(p, b, 1, 100))(state.params, batch)
    assert float(loss) == 0.0
    assert float(optax.global_norm(gradient)) == 0.0


def test_parameters_in_bfloat16_are_refused():
    class Half(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((2, 2), jnp.bfloat16))

    with pytest.raises(ValueError, match="parameter w is bfloat16"):
        train_step.abstract_params(None, trainee().mesh, build=lambda _, rngs: Half())


def test_compute_in_bfloat16_keeps_float32_masters():
    config = dataclasses.replace(
        lact_llm.preset("tiny", num_layers=1, scan_layers=False), dtype="bfloat16"
    )
    whole = train_step.make_trainee(config, OptimizerConfig(), 10, trainee().mesh)
    for leaf in jax.tree.leaves((whole.abstract.params, whole.abstract.optimizer)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
