"""Held-out examples that are trained on, too: found, counted, named and warned of."""

import json
import logging
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.data.corpora import data_config
from tests.tiny_run import tiny_config
from ttt_jax.data import corpus, duplicates, image_sources, mixture, shards, text
from ttt_jax.data.duplicates import shared_images
from ttt_jax.data.tokenize import write_shards
from ttt_jax.data.tokenizers import ByteTokenizer
from ttt_jax.tasks import make_task

_TOKENIZER = ByteTokenizer()


def _documents(count=12):
    return [f"document {number}, " * (3 + number % 4) for number in range(count)]


def _write(path, documents):
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in documents))
    return str(path)


def _split(count):
    """(training, held-out) documents, as of `data_config`."""
    offsets = np.arange(count + 1) * 2
    made = corpus.Corpus(np.zeros(2 * count), offsets, "", np.zeros(count, np.uint64))
    return corpus.split(made, 0.25)[1:]


def test_documents_that_both_splits_have_are_counted_and_named(tmp_path):
    train, held_out = _split(12)
    documents = _documents()
    source = _write(tmp_path / "a.jsonl", documents)
    assert text.shared_documents(data_config(source), _TOKENIZER) == (0, [])
    documents[held_out[1]] = documents[train[2]]
    documents[held_out[2]] = documents[train[0]]
    documents[train[3]] = documents[train[4]]  # within a split: no matter
    source = _write(tmp_path / "b.jsonl", documents)
    names = [f"{source}:{1 + held_out[i]}" for i in (1, 2)]
    assert text.shared_documents(data_config(source), _TOKENIZER) == (2, names)
    assert text.shared_documents(data_config(source), _TOKENIZER, most=1) == (2, names[:1])
    before = mixture.load(source, _TOKENIZER, 0.25)
    assert before.held_out.tolist() == held_out.tolist()  # the split stays


def test_documents_of_several_sources(tmp_path):
    """What one source trains on and another holds out."""
    train, held_out = _split(12)
    first, second = _documents(), [f"other {line}" for line in _documents()]
    second[held_out[0]] = first[train[0]]
    one, other = _write(tmp_path / "a.jsonl", first), _write(tmp_path / "b.jsonl", second)
    config = data_config(f"{one}=3;{other}=1")
    assert text.shared_documents(config, _TOKENIZER) == (1, [f"{other}:{1 + held_out[0]}"])


def test_shards_keep_the_hashes_and_those_without_are_passed_over(tmp_path):
    train, held_out = _split(12)
    documents = _documents()
    documents[held_out[0]] = documents[train[0]]
    source = _write(tmp_path / "a.jsonl", documents)
    folder = tmp_path / "shards"
    write_shards(source, _TOKENIZER, folder)
    in_memory = corpus.load(source, _TOKENIZER).hashes
    assert np.array_equal(corpus.load(str(folder), _TOKENIZER).hashes, in_memory)
    config = data_config(str(folder))
    name = f"document {held_out[0]} of {str(folder)!r}"
    assert text.shared_documents(config, _TOKENIZER) == (1, [name])
    (folder / "hashes.npy").unlink()
    assert text.shared_documents(config, _TOKENIZER) == (0, [])
    np.save(folder / "hashes.npy", in_memory[:3])
    assert text.shared_documents(config, _TOKENIZER) == (0, [])
    assert shards.hash_document(np.array([1])) != shards.hash_document(np.array([1, 0]))


def test_a_document_that_is_cut_in_two_has_no_duplicates(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50)
    assert text.shared_documents(data_config(str(tmp_path / "a.txt")), _TOKENIZER) == (0, [])


def test_a_run_warns_once_and_names_the_first(tmp_path, caplog):
    train, held_out = _split(24)
    documents = _documents(24)
    for place in held_out[:4]:
        documents[place] = documents[train[0]]
    source = _write(tmp_path / "a.jsonl", documents)
    config = tiny_config(source)
    config.data.eval_fraction = 0.25
    with caplog.at_level(logging.WARNING):
        make_task(config).describe()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("4 held-out documents are in the training split, too, with equal tok")
    assert f"({source}:{1 + held_out[0]}; " in message and "; ...): held-out scores" in message


def _folder(root, split, images):
    for number, image in enumerate(images):
        (root / split / "cat").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / split / "cat" / f"{number}.png")


@pytest.mark.parametrize("kind", ["arrays", "folders", "one folder"])
def test_images_that_both_splits_have(kind, tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 255, (12, 4, 4, 3), np.uint8)
    if kind == "arrays":
        images[5] = images[9]
        parts = np.split(images, [8])
        made = (image_sources.ArraySet(x, np.zeros(len(x)), ("cat",)) for x in parts)
        splits = list(made)
        expected = ["image 1"]
    elif kind == "folders":
        _folder(tmp_path, "train", images[:8])
        _folder(tmp_path, "val", [*images[8:], images[3]])
        splits = image_sources.open_images(str(tmp_path), 0.25)
        expected = [str(tmp_path / "val" / "cat" / "4.png")]
    else:
        cats = tmp_path / "all" / "cat"
        _folder(tmp_path, "all", images)
        for number in range(1, 12):
            shutil.copy(cats / "0.png", cats / f"{number}.png")
        splits = image_sources.open_images(str(tmp_path / "all"), 0.25)
        expected = [splits[1].content(place)[0] for place in range(3)]
    assert shared_images(*splits) == expected
    assert shared_images(splits[1], splits[1]) != []
    monkeypatch.setattr(duplicates, "_MOST", 10)
    assert shared_images(*splits) == []
    monkeypatch.undo()
    monkeypatch.setattr(image_sources, "_MANY", 4)
    assert shared_images(*splits) == (expected if kind == "arrays" else [])
