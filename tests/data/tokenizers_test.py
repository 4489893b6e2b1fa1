"""Round trips and ids of the tokenizers; models are built here, none is downloaded."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_jax.data.tokenizers import ByteTokenizer, encode_document, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

_SENTENCES = ["the quick brown fox", "jumps over the lazy dog", "a state learns while it reads"] * 9
_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def _sentencepiece_model(byte_fallback: bool) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES), model_writer=model, minloglevel=2,
        vocab_size=300 if byte_fallback else 40, byte_fallback=byte_fallback,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, hard_vocab_limit=False,
    )  # fmt: skip
    return model.getvalue()


def _byte_level_bpe() -> "tokenizers.Tokenizer":
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.enable_truncation(4)  # as some files ask for; it must not cut documents
    return tokenizer


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "fallback.model").write_bytes(_sentencepiece_model(byte_fallback=True))
    (folder / "small.model").write_bytes(_sentencepiece_model(byte_fallback=False))
    _byte_level_bpe().save(str(folder / "bpe.json"))
    letters = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "<s>": 2}, merges=[])
    tokenizers.Tokenizer(letters).save(str(folder / "letters.json"))
    words = tokenizers.models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "words.json"))
    return folder


@given(text=_TEXT)
def test_bytes_are_utf8(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == text.encode()
    assert ByteTokenizer().decode(ids) == text


@pytest.mark.parametrize("name", ["fallback.model", "bpe.json"])
def test_files_round_trip_any_text(paths, name):
    tokenizer = load_tokenizer(str(paths / name))

    @settings(max_examples=50, deadline=None)
    @given(text=_TEXT)
    def check(text):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        # SentencePiece keeps NUL and its own space sign for itself.
        if not {"\0", "\u2581"}.intersection(text):
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(encode_document(tokenizer, text)) == text

    check()


def test_ids_are_those_of_the_library(paths):
    text = "the lazy fox reads over and over"
    model = sentencepiece.SentencePieceProcessor(model_file=str(paths / "fallback.model"))
    ours = load_tokenizer(str(paths / "fallback.model"))
    assert ours.encode(text).tolist() == model.encode(text)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.unk_id) == (
        model.vocab_size(), model.bos_id(), model.eos_id(), model.unk_id(),
    )  # fmt: skip
    whole = _byte_level_bpe()
    whole.no_truncation()
    ours = load_tokenizer(str(paths / "bpe.json"))
    assert ours.encode(text).tolist() == whole.encode(text).ids
    assert len(ours.encode(text)) > 4
    assert ours.vocab_size == whole.get_vocab_size()
    assert (ours.bos_id, ours.eos_id, ours.unk_id) == (0, 0, None)
    assert load_tokenizer(str(paths / "words.json")).unk_id == 0


def test_documents_get_bos_and_eos_where_there_are_any(paths):
    assert encode_document(ByteTokenizer(), "é").tolist() == [256, 195, 169, 257]
    letters = load_tokenizer(str(paths / "letters.json"))
    assert (letters.bos_id, letters.eos_id) == (2, None)
    assert encode_document(letters, "ab").tolist() == [2, 0, 1]


def test_fingerprint_follows_the_content_and_not_the_name(paths, tmp_path):
    copy = tmp_path / "copy.model"
    copy.write_bytes((paths / "small.model").read_bytes())
    fingerprints = {n: load_tokenizer(str(paths / n)).fingerprint for n in ("small.model",
                    "fallback.model", "bpe.json")}  # fmt: skip
    assert load_tokenizer(str(copy)).fingerprint == fingerprints["small.model"]
    assert len({*fingerprints.values(), ByteTokenizer.fingerprint}) == 4


def test_a_character_without_an_id_is_an_error_and_never_left_out(paths):
    letters = load_tokenizer(str(paths / "letters.json"))
    assert letters.encode("ab").tolist() == [0, 1]
    with pytest.raises(ValueError, match="too small for the data, it has none for 'é'"):
        letters.encode("a b\té\n")


@pytest.mark.parametrize("name", ["no.model", "no.json"])
def test_missing_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr(f"{load_tokenizer.__module__}._need", pytest.fail)
    with pytest.raises(ValueError, match=f"{name}' cannot be read .*check the path"):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize(("name", "kind"), [("a.model", "SentencePiece model"),
                                            ("a.json", "Hugging Face")])  # fmt: skip
def test_file_of_another_kind(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"\xff nothing of the kind")
    with pytest.raises(ValueError, match=f"{name}' is not a.*{kind}"):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("name", ["", "gpt2", "vocabulary.txt"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match='give "bytes"'):
        load_tokenizer(name)
