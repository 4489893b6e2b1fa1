"""Recall tasks: what a row holds, exact answers, and the two ends of the scale of accuracy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_jax.experiments.recall_tasks import (
    BLANK,
    RecallTask,
    accuracy,
    accuracy_by_distance,
)


@st.composite
def tasks(draw):
    pairs = tuple(sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))))
    more = st.integers(0, 5)
    return RecallTask(
        pairs=pairs,
        slots=pairs[-1] + draw(more),
        keys=pairs[-1] + draw(more),
        values=2 + draw(more),
        hay=draw(more),
    )


def oracle(task, batch):
    """Answers by reading each row token by token, sure of nothing but the vocabulary's order."""
    answers = np.full(batch.targets.shape, BLANK)
    for row, tokens in enumerate(batch.tokens.tolist()):
        context, queries = tokens[: task.context], tokens[task.context :]
        bound = {}
        for place, token in enumerate(context[:-1]):
            if 1 <= token <= task.keys:
                assert token not in bound, "a key stands twice in a context"
                bound[token] = context[place + 1]
        for place, query in enumerate(queries):
            answers[row, place] = bound[query] if query != BLANK else BLANK
        assert len(bound) == batch.pairs[row]
    return answers


@settings(max_examples=60, deadline=None)
@given(task=tasks(), seed=st.integers(0, 2**32 - 1), step=st.integers(0, 10**6))
def test_every_answer_is_in_the_context(task, seed, step):
    batch = task.batch(seed, step, rows=7)
    assert batch.tokens.shape == (7, task.time) and batch.targets.shape == (7, task.max_pairs)
    assert batch.tokens.min() >= 0 and batch.tokens.max() < task.vocab_size
    answers = oracle(task, batch)
    np.testing.assert_array_equal(answers, batch.targets)
    assert accuracy(batch, answers) == dict.fromkeys(np.unique(batch.pairs).tolist(), 1.0)
    assert {share for _, share in accuracy_by_distance(batch, answers, 3)} == {1.0}


@settings(max_examples=60, deadline=None)
@given(task=tasks(), seed=st.integers(0, 1000))
def test_queries_are_all_keys_once_and_distances_lead_to_their_values(task, seed):
    batch = task.batch(seed, 0, rows=5)
    for tokens, targets, pairs, distance in zip(*batch, strict=True):
        queries = tokens[task.context :]
        keys = queries[queries != BLANK]
        assert len(set(keys.tolist())) == len(keys) == pairs
        np.testing.assert_array_equal(queries != BLANK, targets != BLANK)
        for place in np.flatnonzero(queries != BLANK):
            value = task.context + place - distance[place]
            assert value % 2 == 1 and value < task.context
            assert (tokens[value - 1], tokens[value]) == (queries[place], targets[place])


def test_rows_take_the_numbers_of_pairs_in_turn_and_hay_fills_what_is_left():
    task = RecallTask(pairs=(1, 3), slots=8, keys=5, values=4, hay=6)
    batch = task.batch(0, 0, rows=5)
    assert batch.pairs.tolist() == [1, 3, 1, 3, 1]
    context = batch.tokens[:, : task.context]
    hay = context >= 1 + task.keys + task.values
    assert (hay.sum(1) == task.context - 2 * batch.pairs).all() and (context != BLANK).all()


def test_a_batch_is_a_function_of_seed_and_step():
    task = RecallTask(pairs=(4,), slots=6, keys=9, values=9)
    first = task.batch(3, 5, 4)
    for again, same in ((task.batch(3, 5, 4), True), (task.batch(3, 6, 4), False),
                        (task.batch(4, 5, 4), False)):  # fmt: skip
        assert np.array_equal(first.tokens, again.tokens) == same


def test_a_guess_is_right_by_chance():
    task = RecallTask(pairs=(8,), slots=8, keys=16, values=10)
    batch = task.batch(0, 0, rows=2000)
    guess = np.random.default_rng(1).integers(1 + task.keys, task.vocab_size, (2000, 8))
    deviation = (0.1 * 0.9 / 16000) ** 0.5
    assert abs(accuracy(batch, guess)[8] - 0.1) < 5 * deviation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 7}, "slots=7"),
        ({"keys": 7}, "keys=7"),
        ({"values": 1}, "values=1"),
        ({"hay": -1}, "hay=-1"),
        ({"pairs": ()}, "pairs="),
        ({"pairs": (8, 4)}, "ascending"),
        ({"pairs": (0, 8)}, "positive"),
    ],
)
def test_impossible_tasks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**{"pairs": (4, 8), "slots": 8, "keys": 8, "values": 8, **changes})
