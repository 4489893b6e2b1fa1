"""The stream of batches: a function of the seed and the step, whatever happens in between."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.data.corpora import data_config, digest, write_texts
from ttt_jax.data import pipeline, text
from ttt_jax.data.pipeline import DataPositionError
from ttt_jax.data.rows import TrainRows
from ttt_jax.data.tokenizers import load_tokenizer

_LENGTHS = [5, 60, 1, 17, 33, 2, 90, 8, 8, 25, 41, 3]
_TOKENIZER = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), _LENGTHS)


def _open(source, split="train", batch_size=2, seed=3, index=0, count=1, length=16, **fields):
    return text.text_iterator(
        data_config(source, **fields),
        _TOKENIZER,
        split=split,
        sequence_length=length,
        batch_size=batch_size,
        seed=seed,
        process_index=index,
        process_count=count,
    )


def _digests(iterator, count):
    return [digest(batch) for batch in itertools.islice(iterator, count)]


@pytest.fixture(scope="module")
def stream(source):
    """The first 24 batches: the training split of 246 targets is 16 rows, so three epochs."""
    return _digests(_open(source), 24)


def test_batches_have_the_promised_arrays(source):
    batch = next(_open(source))
    kinds = {name: (value.dtype.name, value.shape) for name, value in batch.items()}
    shape = (2, 16)
    assert kinds == {
        "tokens": ("int32", shape),
        "targets": ("int32", shape),
        "segment_ids": ("int32", shape),
        "weights": ("float32", shape),
    }


def test_stream_is_a_function_of_seed_and_step(source, stream):
    assert _digests(_open(source), 24) == stream
    assert len(set(stream)) == 24
    assert _digests(_open(source, seed=4), 24) != stream
    single = _open(source)
    for step in (23, 0, 9):
        single.set_state({**single.get_state(), "step": step})
        assert digest(next(single)) == stream[step]


@pytest.mark.parametrize("pack", [True, False])
def test_each_epoch_has_every_training_token_once_in_a_new_order(source, pack):
    config = data_config(source, pack=pack)
    expected = np.sort(text.split_ids(config, _TOKENIZER, "train"))
    batches = _open(source, batch_size=1, pack=pack)
    epochs = []
    for _ in range(3):
        targets = []
        while sum(map(len, targets)) < expected.size:
            batch = next(batches)
            targets.append(batch["targets"][batch["weights"] > 0])
        epochs.append(np.concatenate(targets))
        np.testing.assert_array_equal(np.sort(epochs[-1]), expected)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


@pytest.mark.parametrize("pack", [True, False])
def test_blocks_bound_the_plans_and_an_epoch_still_has_everything_once(pack):
    """Blocks of few documents: the same promises, and never more than three plans in memory."""
    offsets = np.concatenate([[0], np.cumsum(np.arange(40) % 9 + 2)])
    documents = np.delete(np.arange(40), [3, 20])
    options = dict(sequence_length=4, seed=1, pack=pack)
    rows = TrainRows(offsets, documents, block_documents=8, **options)
    assert len(rows._rows) == 5
    slots = {int(p) for d in documents for p in range(offsets[d], offsets[d + 1] - 1)}
    epochs = []
    for epoch in range(2):
        first = epoch * rows.rows_per_epoch
        found = [rows.pieces(first + row) for row in range(rows.rows_per_epoch)]
        assert len(rows._plans) <= 3
        taken = [start + i for pieces in found for start, length in pieces for i in range(length)]
        assert len(taken) == len(slots) and set(taken) == slots
        epochs.append(found)
    assert epochs[0] != epochs[1]
    again = TrainRows(offsets, documents, block_documents=8, **options)
    for row in (rows.rows_per_epoch + 3, 0, 17, rows.rows_per_epoch - 1):
        epoch, place = divmod(row, rows.rows_per_epoch)
        assert again.pieces(row) == epochs[epoch][place]
    # One block of everything is the order without blocks.
    whole = [TrainRows(offsets, documents, block_documents=n, **options)
             for n in (38, 2**20)]  # fmt: skip
    assert [whole[0].pieces(row) for row in range(60)] == [whole[1].pieces(r) for r in range(60)]


def test_resume_at_10_and_at_15_equals_uninterrupted(source, stream):
    first = _open(source)
    seen = _digests(first, 10)
    time.sleep(0.05)  # the reader runs ahead; what it has read must not count
    second = _open(source)
    second.set_state(first.get_state())
    seen += _digests(second, 5)
    third = _open(source)
    third.set_state(second.get_state())
    seen += _digests(third, 9)
    assert seen == stream


@pytest.mark.parametrize("step", [7, 8, 9, 15, 16, 17])
def test_resume_across_the_edge_of_an_epoch(source, stream, step):
    before = _open(source)
    _digests(before, step)
    after = _open(source)
    after.set_state(before.get_state())
    assert _digests(after, 4) == stream[step : step + 4]


def test_orbax_saves_and_restores_the_position_on_another_number_of_processes(
    source, stream, tmp_path
):
    iterator = _open(source)
    _digests(iterator, 5)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(5, {"data": iterator})
        (saved,) = (tmp_path / "5" / "data").glob("process_*.json")
        for name in (saved.name, "process_0-of-7.json"):
            saved = saved.rename(saved.with_name(name))
            restored = _open(source)
            checkpointer.load_checkpointables(5, {"data": restored})
            assert _digests(restored, 3) == stream[5:8]
        other = _open(source, seed=5)
        checkpointer.load_checkpointables(5, {"data": other})
    with pytest.raises(DataPositionError, match="seed=3, and this run has seed=5"):
        next(other)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 1}, "seed"), ({"length": 8}, "sequence_length"), ({"batch_size": 3}, "rows"),
     ({"pack": False}, "pack"), ({"split": "eval"}, "split")],
)  # fmt: skip
def test_a_position_of_another_stream_is_refused(source, change, name):
    with pytest.raises(DataPositionError, match=f"is of {name}="):
        _open(source, **change).set_state(_open(source).get_state())


def test_a_position_of_other_text_is_refused(source, tmp_path):
    other = write_texts(tmp_path, _LENGTHS, seed=1)
    with pytest.raises(DataPositionError, match="is of corpus="):
        _open(other).set_state(_open(source).get_state())


def test_a_position_of_a_numpy_that_shuffles_otherwise_is_refused(source, monkeypatch):
    position = _open(source).get_state()
    monkeypatch.setattr(pipeline, "_order_drawn", lambda: "another")
    with pytest.raises(DataPositionError, match="is of order=.* NumPy that the run began with"):
        _open(source).set_state(position)


def test_an_evaluation_in_between_does_not_move_the_training_stream(source, stream):
    iterator = _open(source)
    seen = _digests(iterator, 6)
    list(_open(source, split="eval"))
    assert seen + _digests(iterator, 18) == stream


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("count", [2, 3])
def test_one_process_is_the_union_of_several(source, split, count):
    whole = itertools.islice(_open(source, split, length=8, batch_size=count), 40)
    parts = [
        _open(source, split, length=8, batch_size=1, index=i, count=count) for i in range(count)
    ]
    seen = 0
    for batch in whole:
        shares = [next(part) for part in parts]
        for name, value in batch.items():
            np.testing.assert_array_equal(value, np.concatenate([s[name] for s in shares]))
        seen += 1
    assert seen > 1
    if split == "eval":
        for part in parts:
            assert next(part, None) is None


def test_a_position_moves_to_another_number_of_processes(source):
    one = _open(source, batch_size=4)
    _digests(one, 3)
    two = [_open(source, batch_size=2, index=i, count=2) for i in range(2)]
    for part in two:
        part.set_state(one.get_state())
    expected = next(one)["tokens"]
    np.testing.assert_array_equal(expected, np.concatenate([next(p)["tokens"] for p in two]))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [1, 7, 16, 200])
def test_evaluation_has_every_target_once(source, pack, length):
    batches = list(_open(source, "eval", batch_size=3, length=length, pack=pack))
    targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    expected = text.split_ids(data_config(source), _TOKENIZER, "eval")
    np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
    assert {b["tokens"].shape for b in batches} == {(3, length)}


def test_workers_give_the_same_stream_and_take_over_its_position(source, stream):
    iterator = _open(source)
    seen = _digests(iterator, 5)
    with_workers = _open(source, num_workers=2)
    with_workers.set_state(iterator.get_state())
    seen += _digests(with_workers, 10)
    iterator.set_state(with_workers.get_state())
    with_workers.close()
    assert seen + _digests(iterator, 9) == stream


_PLAIN = """
print("main")
import jax
import sys
from ttt_jax.config import DataConfig
from ttt_jax.data.text import text_iterator
from ttt_jax.data.tokenizers import load_tokenizer
from tests.data.corpora import digest

config = DataConfig(source=sys.argv[1], num_workers=int(sys.argv[2]), eval_fraction=0.25)
batches = text_iterator(config, load_tokenizer("bytes"), split="train", sequence_length=16,
                        batch_size=2, seed=3)
print(*(digest(next(batches)) for _ in range(20)))
"""

_ABSL = """
from absl import app, flags

_NAME = flags.DEFINE_string("name", None, "for this test")

def main(argv):
    body = {body!r}
    exec(body, {{"__name__": "body"}})
    print(_NAME.value)

if __name__ == "__main__":
    app.run(main)
"""


@pytest.mark.parametrize(("kind", "workers"), [("plain", "2"), ("absl", "1")])
def test_workers_start_from_a_script(source, stream, tmp_path, kind, workers):
    script = tmp_path / "script.py"
    script.write_text(_PLAIN if kind == "plain" else _ABSL.format(body=_PLAIN))
    flag = ["--name=seen"] if kind == "absl" else []
    done = subprocess.run(
        [sys.executable, str(script), source, workers, *flag],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr and "leaked" not in done.stderr  # ended in good order
    lines = done.stdout.splitlines()
    assert lines[0] == "main"  # and once: no worker ran the script again
    assert lines[1].split() == stream[:20]
    assert lines[2:] == (["seen"] if kind == "absl" else [])


@pytest.mark.exhaustive
def test_workers_start_from_a_notebook(source, stream):
    """A kernel's main module has no file, and absl has parsed no flags."""
    import nbclient
    import nbformat

    body = _PLAIN.replace("sys.argv[1]", repr(source)).replace("sys.argv[2]", "2")
    cells = [nbformat.v4.new_code_cell(f"import sys\nsys.path[:0] = {sys.path!r}\n{body}")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    written = "".join(out["text"] for out in notebook.cells[0].outputs if out.name == "stdout")
    assert written.split() == ["main", *stream[:20]]
