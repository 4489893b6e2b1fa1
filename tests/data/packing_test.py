"""Packing against the definition: every token but a document's first is a target exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_jax.data import packing

_lengths = st.lists(st.integers(2, 40), min_size=1, max_size=12)
_length = st.integers(1, 17)


def _rows(plan: packing.RowPlan, tokens: np.ndarray, sequence_length: int):
    """All rows of a plan as one batch."""
    batch = packing.empty_batch(plan.num_rows, sequence_length)
    for row in range(plan.num_rows):
        packing.fill_row(tokens, plan.pieces(row), batch, row)
    return batch


def _plan(kind: str, offsets: np.ndarray, documents: np.ndarray, sequence_length: int):
    if kind == "dense":
        return packing.dense_plan(offsets, documents, sequence_length)
    return packing.aligned_plan(offsets, documents, sequence_length, pack=kind == "packed")


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize("kind", ["dense", "packed", "alone"])
@settings(max_examples=60, deadline=None)
@given(lengths=_lengths, sequence_length=_length, seed=st.integers(0, 99))
def test_every_token_is_a_target_exactly_once(kind, lengths, sequence_length, seed):
    offsets = _offsets(lengths)
    documents = np.random.default_rng(seed).permutation(len(lengths))
    tokens = np.arange(offsets[-1])  # a token's id is its place in the stream
    batch = _rows(_plan(kind, offsets, documents, sequence_length), tokens, sequence_length)
    real = batch["weights"] > 0

    firsts = offsets[:-1]
    expected = np.setdiff1d(tokens, firsts)
    np.testing.assert_array_equal(np.sort(batch["targets"][real]), expected)
    # A target follows its token in the stream and is no document's first: one document.
    np.testing.assert_array_equal(batch["targets"][real], batch["tokens"][real] + 1)
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}


@pytest.mark.parametrize("kind", ["dense", "packed", "alone"])
@settings(max_examples=60, deadline=None)
@given(lengths=_lengths, sequence_length=_length)
def test_segments_are_runs_of_one_document_and_padding_comes_last(kind, lengths, sequence_length):
    offsets = _offsets(lengths)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    plan = _plan(kind, offsets, np.arange(len(lengths)), sequence_length)
    batch = _rows(plan, np.arange(offsets[-1]), sequence_length)
    for row in range(plan.num_rows):
        segments = batch["segment_ids"][row]
        used = int((segments >= 0).sum())
        assert used > 0
        assert (segments[used:] == -1).all()
        np.testing.assert_array_equal(batch["weights"][row], segments >= 0)
        steps = np.diff(segments[:used])
        assert segments[0] == 0 and set(steps) <= {0, 1}
        tokens = batch["tokens"][row, :used]
        # The segment changes exactly where the run of the stream breaks.
        np.testing.assert_array_equal(steps == 0, np.diff(tokens) == 1)
        for segment in range(segments[used - 1] + 1):
            assert len(set(document_of[tokens[segments[:used] == segment]])) == 1
        if kind == "alone":
            assert segments[used - 1] == 0


@settings(max_examples=60, deadline=None)
@given(lengths=_lengths, sequence_length=_length)
def test_dense_rows_are_full_but_the_last(lengths, sequence_length):
    offsets = _offsets(lengths)
    plan = packing.dense_plan(offsets, np.arange(len(lengths)), sequence_length)
    filled = _rows(plan, np.arange(offsets[-1]), sequence_length)["weights"].sum(axis=1)
    slots = sum(length - 1 for length in lengths)
    assert plan.num_rows == -(-slots // sequence_length)
    assert (filled[:-1] == sequence_length).all()


@settings(max_examples=60, deadline=None)
@given(lengths=_lengths, sequence_length=_length, pack=st.booleans())
def test_aligned_rows_cut_no_document_that_fits(lengths, sequence_length, pack):
    offsets = _offsets(lengths)
    plan = packing.aligned_plan(offsets, np.arange(len(lengths)), sequence_length, pack)
    pieces = [piece for row in range(plan.num_rows) for piece in plan.pieces(row)]
    for start, length in zip(offsets, lengths, strict=False):
        mine = sorted(p for p in pieces if start <= p[0] < start + length)
        whole, rest = divmod(length - 1, sequence_length)
        expected = [sequence_length] * whole + [rest] * (rest > 0)
        assert [n for _, n in mine] == expected
        assert [s for s, _ in mine] == [start + i * sequence_length for i in range(len(mine))]
