"""Shards hold what was encoded, and are complete or not there."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import data_config, digest, write_texts
from ttt_jax.data import corpus, shards, text
from ttt_jax.data.tokenize import leftovers, write_shards
from ttt_jax.data.tokenizers import ByteTokenizer, load_tokenizer

_TOKENIZER = ByteTokenizer()
_PROGRAM = pathlib.Path(__file__).parents[2] / "launch" / "tokenize_text.py"
_LENGTHS = [5, 9000, 1, 20_000, 300, 8190, 40]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), _LENGTHS)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "shards"
    write_shards(source, _TOKENIZER, folder, shard_tokens=10_000)
    return folder


def test_shards_are_the_corpus_in_memory(source, folder):
    ours, theirs = corpus.load(str(folder), _TOKENIZER), corpus.load(source, _TOKENIZER)
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    np.testing.assert_array_equal(ours.tokens[: len(ours.tokens)], theirs.tokens)
    assert ours.hash == theirs.hash
    metadata = json.loads((folder / "metadata.json").read_text())
    expected = {"tokenizer": "bytes", "vocab_size": 258, "documents": 7, "skipped": 0,
                "hash": ours.hash, "tokens": sum(_LENGTHS) + 2 * len(_LENGTHS),
                "tokenizer_fingerprint": _TOKENIZER.fingerprint}  # fmt: skip
    assert {name: metadata[name] for name in expected} == expected
    assert len(metadata["shards"]) == 3  # five records of 8192, two a file
    assert {p.name for p in folder.iterdir()} == {*metadata["shards"], "metadata.json",
                                                  "documents.npy", "hashes.npy"}  # fmt: skip


def test_any_range_of_the_stream(source, folder):
    ours = corpus.load(str(folder), _TOKENIZER).tokens
    theirs = corpus.load(source, _TOKENIZER).tokens

    @settings(max_examples=40, deadline=None)
    @given(start=st.integers(0, len(theirs)), length=st.integers(0, 17_000))
    def check(start, length):
        np.testing.assert_array_equal(ours[start : start + length], theirs[start : start + length])

    check()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_batches_from_shards_are_those_from_text(source, folder, split):
    arguments = {"split": split, "sequence_length": 32, "batch_size": 2, "seed": 1}
    ours, theirs = (
        text.text_iterator(data_config(str(s)), _TOKENIZER, **arguments) for s in (folder, source)
    )
    for _ in range(5):
        assert digest(next(ours)) == digest(next(theirs))
    ours.set_state(theirs.get_state())  # one corpus, so one position


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 70_000
    (tmp_path / "draft").mkdir()
    writer = shards.ShardWriter(tmp_path / "draft", tokenizer, 10)
    ids = np.array([1, 69_999, 65_536], np.int32)
    writer.add(ids)
    metadata = writer.close("none")
    assert metadata["dtype"] == "<u4"
    np.testing.assert_array_equal(shards.ShardTokens(tmp_path / "draft", metadata)[0:3], ids)


def test_another_tokenizer_is_an_error(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "words.json"))
    other = load_tokenizer(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="tokenizer 'bytes' of 258 ids .* this run has .*words"):
        text.text_iterator(
            data_config(str(folder)), other, split="eval", sequence_length=8, batch_size=1, seed=0
        )


def _copy(folder, target):
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_damaged_folders_are_errors(folder, tmp_path):
    cut = _copy(folder, tmp_path / "cut")
    shard = sorted(cut.glob("*.array_record"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{shard.name} has {len(content) - 1} bytes and should"):
        corpus.load(str(cut), _TOKENIZER)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing"):
        corpus.load(str(cut), _TOKENIZER)

    bounds = _copy(folder, tmp_path / "bounds")
    np.save(bounds / "documents.npy", np.arange(3))
    with pytest.raises(ValueError, match="documents.npy does not fit"):
        corpus.load(str(bounds), _TOKENIZER)
    (bounds / "documents.npy").unlink()
    with pytest.raises(ValueError, match="documents.npy cannot be read"):
        corpus.load(str(bounds), _TOKENIZER)

    for content, message in (("{", "cannot be read"), ("[]", "is not of the format")):
        (bounds / "metadata.json").write_text(content)
        with pytest.raises(ValueError, match=f"metadata.json {message}.*tokenize_text.py again"):
            corpus.load(str(bounds), _TOKENIZER)


def test_output_that_holds_something_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    with pytest.raises(ValueError, match="is a folder that is not empty; give a new folder"):
        write_shards(source, _TOKENIZER, tmp_path / "out")
    with pytest.raises(ValueError, match="is a file; give a new folder"):
        write_shards(source, _TOKENIZER, tmp_path / "out" / "precious")
    with pytest.raises(ValueError, match="cannot be made"):  # before any document is read
        write_shards("none.txt", _TOKENIZER, tmp_path / "out" / "precious" / "below")
    with pytest.raises(ValueError, match="output='' has no name"):
        write_shards(source, _TOKENIZER, "")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]
    with pytest.raises(ValueError, match="shard_tokens=0 must be at least 1"):
        write_shards(source, _TOKENIZER, tmp_path / "new", shard_tokens=0)


def test_an_empty_folder_is_taken(source, tmp_path):
    (tmp_path / "out").mkdir()
    write_shards(source, _TOKENIZER, tmp_path / "out")
    assert shards.is_shard_folder(str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_fault_in_the_last_file_shows_before_anything_is_encoded(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda _: pytest.fail("encoded before all was checked")
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8"):
        write_shards(str(tmp_path / "*.txt"), tokenizer, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "b.txt"}


def test_empty_documents_are_refused_or_counted(tmp_path):
    lines = [{"text": "a"}, {"text": " "}, {"text": "b"}, {"text": ""}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is an empty document; .*--skip_empty"):
        write_shards(str(path), _TOKENIZER, tmp_path / "out")
    metadata = write_shards(str(path), _TOKENIZER, tmp_path / "out", skip_empty=True)
    assert (metadata["documents"], metadata["skipped"]) == (2, 2)
    path.write_text('{"text": ""}')
    with pytest.raises(ValueError, match="has no document with text"):
        write_shards(str(path), _TOKENIZER, tmp_path / "other", skip_empty=True)


def test_a_failure_in_the_middle_leaves_nothing(source, tmp_path, monkeypatch):
    add, calls = shards.ShardWriter.add, []

    def full_disk(self, ids):
        calls.append(ids)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        add(self, ids)

    monkeypatch.setattr(shards.ShardWriter, "add", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shards(source, _TOKENIZER, tmp_path / "out", shard_tokens=1)
    assert list(tmp_path.iterdir()) == []


def _run(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **options,
    )  # fmt: skip


def test_program_killed_then_run_again(tmp_path):
    lines = (json.dumps({"text": "a line of text " * 40}) for _ in range(60_000))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out"
    killed = _run(f"--source={tmp_path / 'a.jsonl'}", f"--output={output}")
    deadline = time.monotonic() + 200
    while not leftovers(output) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert not output.exists()
    (left,) = leftovers(output)
    assert not (left / "metadata.json").exists()

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "short"}))
    again = _run(f"--source={tmp_path / 'a.jsonl'}", f"--output={output}")
    stdout, stderr = again.communicate(timeout=200)
    assert again.returncode == 0, stderr
    assert f"{left} was left behind" in stdout
    assert "1 documents, 7 tokens in 1 shards; corpus " in stdout
    assert "encoding" in stderr  # the progress bar
    assert corpus.load(str(output), _TOKENIZER).tokens[1:6].tobytes() == (
        np.frombuffer(b"short", np.uint8).astype(np.int32).tobytes()
    )


def test_program_reports_a_fault_in_one_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    done = _run(f"--source={tmp_path / 'a.txt'}", f"--output={tmp_path / 'out'}")
    _, stderr = done.communicate(timeout=200)
    assert done.returncode == 1
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("error: ") and "a.txt is not UTF-8" in stderr
