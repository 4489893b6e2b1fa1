"""The baseline, the ids of a split, and the arguments of the batch stream."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpora import data_config, write_texts
from ttt_jax.data import text
from ttt_jax.data.tokenizers import ByteTokenizer

_TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), [3, 50, 8, 20, 11, 7, 30])


@given(
    train=st.lists(st.integers(0, 4), max_size=30),
    held_out=st.lists(st.integers(0, 4), min_size=1, max_size=30),
)
def test_unigram_perplexity_is_its_formula(train, held_out):
    total = sum(math.log((train.count(i) + 1) / (len(train) + 5)) for i in held_out)
    value = text.unigram_perplexity(np.array(train, np.int32), np.array(held_out, np.int32), 5)
    assert value == pytest.approx(math.exp(-total / len(held_out)), rel=1e-12)


def test_unigram_perplexity_of_equal_counts_is_the_vocabulary():
    assert text.unigram_perplexity(np.arange(6), np.arange(6), 6) == pytest.approx(6.0)


def test_baseline_block_by_block_equals_that_of_the_ids(source):
    config = data_config(source)
    train, held_out = (text.split_ids(config, _TOKENIZER, s) for s in ("train", "eval"))
    expected = text.unigram_perplexity(train, held_out, 258)
    assert text.unigram_baseline(config, _TOKENIZER) == pytest.approx(expected, rel=1e-12)


def test_bad_ids():
    ids = np.array([0, 5])
    with pytest.raises(ValueError, match=r"train_ids holds ids outside \[0, vocab_size=5\)"):
        text.unigram_perplexity(ids, ids[:1], 5)
    with pytest.raises(ValueError, match="eval_ids holds ids outside"):
        text.unigram_perplexity(ids[:1], -ids, 5)
    with pytest.raises(ValueError, match="eval_ids is empty"):
        text.unigram_perplexity(ids, ids[:0], 6)


def test_targets_of_both_splits_are_all_tokens_but_the_first_of_each_document(source):
    config = data_config(source)
    ids = np.concatenate([text.split_ids(config, _TOKENIZER, s) for s in ("train", "eval")])
    letters = [3, 50, 8, 20, 11, 7, 30]
    assert ids.dtype == np.int32
    assert ids.size == sum(letters) + len(letters)  # eos is a target, bos is none
    assert (ids == _TOKENIZER.eos_id).sum() == len(letters)
    assert not (ids == _TOKENIZER.bos_id).any()


def test_hash_is_that_of_the_text(source, tmp_path):
    same = write_texts(tmp_path, [3, 50, 8, 20, 11, 7, 30])
    ours = text.corpus_hash(data_config(source), _TOKENIZER)
    assert re.fullmatch("[0-9a-f]{16}", ours)
    assert ours == text.corpus_hash(data_config(same), _TOKENIZER)
    (tmp_path / "0000.txt").write_text("abd")
    assert ours != text.corpus_hash(data_config(same), _TOKENIZER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, 'split=\'test\' must be "train" or "eval"'),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"process_index": 2, "process_count": 2}, "process_index=2 must be in"),
        ({"process_count": 0}, "process_count=0 must be at least 1"),
        ({"sequence_length": 1000}, "sequence_length=1000 is longer than the whole training text"),
    ],
)
def test_bad_arguments(source, change, message):
    arguments = {"split": "train", "sequence_length": 8, "batch_size": 2, "seed": 0, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        text.text_iterator(data_config(source), _TOKENIZER, **arguments)


def test_the_longest_sequence_that_is_allowed_is_one_row(source):
    config = data_config(source)
    targets = text.split_ids(config, _TOKENIZER, "train").size
    arguments = {"split": "train", "batch_size": 1, "seed": 0}
    batches = text.text_iterator(config, _TOKENIZER, sequence_length=targets, **arguments)
    assert next(batches)["weights"].sum() == targets
    with pytest.raises(ValueError, match=f"has {targets} tokens to predict"):
        text.text_iterator(config, _TOKENIZER, sequence_length=targets + 1, **arguments)
