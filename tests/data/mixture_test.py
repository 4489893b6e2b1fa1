"""Several sources in one stream: shares, order, splits, resume, refusals."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_jax.config import DataConfig
from ttt_jax.data import mixture, text
from ttt_jax.data.tokenizers import ByteTokenizer

_TOKENIZER = ByteTokenizer()


def write(folder, letter, documents):
    path = folder / f"{letter}.jsonl"
    random = np.random.default_rng(ord(letter))
    lines = [letter * int(n) for n in random.integers(5, 40, documents)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    a, b = write(folder, "a", 40), write(folder, "b", 10)
    return DataConfig(source=f"{a}=3;{b}=1", eval_fraction=0.2)


def open_split(config, split="train", rows=8, **options):
    return text.text_iterator(
        config, _TOKENIZER, split=split, sequence_length=16, batch_size=rows, seed=1, **options
    )


def source_of(row):
    """Which of the two letters fills a row; a row has one source."""
    letters = set(row["targets"][row["weights"] > 0].tolist()) & {ord("a"), ord("b")}
    (letter,) = letters
    return chr(letter)


def test_rows_come_in_the_shares_of_the_weights(config):
    batches = open_split(config, rows=64)
    found = []
    for _ in range(16):
        batch = next(batches)
        rows = [{name: x[i] for name, x in batch.items()} for i in range(64)]
        found += [source_of(row) for row in rows]
    assert found.count("a") == 768 and found.count("b") == 256
    assert 0 < found[:32].count("b") < 32  # mixed, not one after the other


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 5.0), min_size=2, max_size=5),
    seed=st.integers(0, 5),
    start=st.integers(0, 3000),
)
def test_every_row_of_every_source_comes_once_and_in_order(weights, seed, start):
    class Rows:
        def __init__(self, source):
            self.source = source

        def pieces(self, row):
            return (self.source, row)

    rows = mixture.MixedRows([Rows(i) for i in range(len(weights))], weights, seed)
    seen = [rows.pieces(g) for g in range(1024)]
    for source, weight in enumerate(weights):
        mine = [row for s, row in seen if s == source]
        assert mine == list(range(len(mine)))
        assert abs(len(mine) - 1024 * weight / sum(weights)) < 1
    # Random access: a row does not depend on the rows that were asked for before it.
    again = mixture.MixedRows([Rows(i) for i in range(len(weights))], weights, seed)
    assert again.pieces(start) == rows.pieces(start)


def test_a_saved_position_and_other_processes_give_the_same_rows(config):
    straight = open_split(config)
    batches = [next(straight) for _ in range(6)]
    resumed = open_split(config)
    resumed.set_state({**straight.get_state(), "step": 4})
    np.testing.assert_array_equal(next(resumed)["tokens"], batches[4]["tokens"])
    halves = [open_split(config, rows=4, process_index=p, process_count=2) for p in (0, 1)]
    both = np.concatenate([next(half)["tokens"] for half in halves])
    np.testing.assert_array_equal(both, batches[0]["tokens"])


def test_evaluation_and_baseline_see_what_is_held_out_of_each(config):
    counts = {"a": 0, "b": 0}
    for batch in open_split(config, "eval"):
        targets = batch["targets"][batch["weights"] > 0]
        for letter in counts:
            counts[letter] += int(np.sum(targets == ord(letter)))
    held_out = text.split_ids(config, _TOKENIZER, "eval")
    train = text.split_ids(config, _TOKENIZER, "train")
    for letter, count in counts.items():
        assert count == np.sum(held_out == ord(letter)) > 0
    expected = text.unigram_perplexity(train, held_out, _TOKENIZER.vocab_size)
    assert text.unigram_baseline(config, _TOKENIZER) == pytest.approx(expected)


def test_other_weights_are_another_corpus(config):
    other = DataConfig(source=config.source.replace("=3;", "=2;"), eval_fraction=0.2)
    assert text.corpus_hash(config, _TOKENIZER) != text.corpus_hash(other, _TOKENIZER)
    position = open_split(config).get_state()
    with pytest.raises(ValueError, match="corpus="):
        open_split(other).set_state(position)


@pytest.mark.parametrize("source", ["a=1;b=0", "a=1;b=-2", "a=1;=3", "a=1;a=2", "a=x;b", "a=inf;b"])
def test_bad_weights_are_refused(source):
    with pytest.raises(ValueError, match="must be SOURCE=WEIGHT"):
        mixture.parse(source)


def test_a_share_too_small_to_come_is_refused():
    with pytest.raises(ValueError, match="at least 1 in 1024"):
        mixture.MixedRows([None, None], [1.0, 1e-6], 0)
