"""Every source gives its documents whole, and every fault is named before work starts."""

import bz2
import json
import sys
import types

import numpy as np
import pytest

from tests.data.corpora import data_config, write_texts
from ttt_jax.data import builtin, corpus, sources, text
from ttt_jax.data.tokenizers import ByteTokenizer, load_tokenizer

_TOKENIZER = ByteTokenizer()


def _read(source):
    return [text for _, text in sources.read_documents(str(source))]


def _write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts), "utf-8")


def _write_parquet(path, texts, column="text"):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({column: texts, "id": [1] * len(texts)}), path)


def test_files_of_each_kind_give_the_same_documents(tmp_path):
    texts = ["one é\nline\r\n", " two ", "三"]
    for number, document in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(document.encode())
    _write_jsonl(tmp_path / "a.jsonl", texts)
    _write_parquet(tmp_path / "a.parquet", texts)
    for name in ("*.txt", "a.jsonl", "a.parquet"):
        assert _read(tmp_path / name) == texts
        assert corpus.load(str(tmp_path / name), _TOKENIZER).hash == (
            corpus.load(str(tmp_path / "*.txt"), _TOKENIZER).hash
        )


def test_globs_cross_folders_in_order_and_names_with_brackets_are_found(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second")
    (tmp_path / "a[1].txt").write_text("first")
    assert _read(tmp_path / "**" / "*.txt") == ["first", "second"]
    assert _read(tmp_path / "a[1].txt") == ["first"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab")
    assert _read(tmp_path / "a.txt") == ["ab"]


def test_builtin_text_is_large_unique_and_cached(tmp_path, monkeypatch):
    documents = builtin.python_documents()
    texts = [t for _, t in documents]
    assert len(set(texts)) == len(texts) > 300
    assert sum(map(len, texts)) > 1_500_000
    by_name = dict(documents)
    assert "Lambda expressions" in by_name["topics/lambda"]
    module = by_name["stdlib/bisect.py"]
    assert module.startswith("bisect\n\nBisection algorithms.")
    assert "insort_right\n\nInsert item x" in module

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = builtin._cache_path()
    assert path.is_relative_to(tmp_path)
    monkeypatch.setattr(builtin, "_docstrings", lambda: [("stdlib/a.py", "from a.py")])
    monkeypatch.setattr(builtin, "_topics", lambda: [("topics/b", "topic")])
    fresh = builtin.python_documents.__wrapped__
    assert fresh() == (("stdlib/a.py", "from a.py"), ("topics/b", "topic"))
    monkeypatch.setattr(builtin, "_docstrings", lambda: pytest.fail("the cache was not read"))
    assert len(fresh()) == 2
    path.write_text(path.read_text()[:-5])  # cut off by a full disk
    monkeypatch.setattr(builtin, "_docstrings", lambda: [])
    assert fresh() == (("topics/b", "topic"),)
    assert json.loads(path.read_text()) == [["topics/b", "topic"]]


def test_builtin_text_without_a_cache_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(builtin, "_docstrings", lambda: [])
    assert len(builtin.python_documents.__wrapped__()) > 50


def _fake_gensim(tmp_path, monkeypatch, pages):
    folder = tmp_path / "gensim" / "test" / "test_data"
    folder.mkdir(parents=True)
    (tmp_path / "gensim" / "__init__.py").write_text("raise RuntimeError('imported')")
    body = "".join(
        f"<page><title>{title}</title><ns>{ns}</ns>{extra}<revision><text>{content}</text>"
        "</revision></page>"
        for title, ns, extra, content in pages
    )
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{body}</mediawiki>'
    (folder / builtin._WIKI_FILE).write_bytes(bz2.compress(xml.encode()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gensim", raising=False)


def test_wiki_reads_articles_without_importing_gensim(tmp_path, monkeypatch):
    pages = [
        ("Anarchism", 0, "", "'''Anarchism''' is &lt;ref/&gt;"),
        ("Old name", 0, '<redirect title="Anarchism"/>', "#REDIRECT"),
        ("Talk:Anarchism", 1, "", "talk"),
        ("Autism", 0, "", "text"),
    ]
    _fake_gensim(tmp_path, monkeypatch, pages)
    assert builtin.wiki_documents.__wrapped__() == (
        ("wiki/Anarchism", "Anarchism\n\n'''Anarchism''' is <ref/>"),
        ("wiki/Autism", "Autism\n\ntext"),
    )
    assert "gensim" not in sys.modules


def test_wiki_without_gensim(monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gensim"):
        builtin.wiki_documents.__wrapped__()


def _bad_files(folder):
    """name of the file -> (its bytes, what the message says)."""
    good = b'{"text": "a"}\n'
    return {
        "latin.txt": (b"caf\xe9", r"latin\.txt is not UTF-8 \(byte 3 is 0xe9\); convert"),
        "empty.txt": (b" \n", r"empty\.txt is an empty document; remove it"),
        "latin.jsonl": (good + b'{"text": "\xe9"}', r"latin\.jsonl:2 is not UTF-8"),
        "cut.jsonl": (good + b'{"text": "a', r"cut\.jsonl:2 is not JSON"),
        "field.jsonl": (b'{"body": "a"}', r"field\.jsonl:1 has no string in the field"),
        "number.jsonl": (b'{"text": 5}', r"number\.jsonl:1 has no string in the field"),
        "list.jsonl": (b"[1]", r"list\.jsonl:1 has no string in the field"),
        "empty.jsonl": (good + b'\n{"text": ""}', r"empty\.jsonl:3 is an empty document"),
        "half.jsonl": (b'{"text": "\\ud800"}', r"half\.jsonl:1 holds half of a surrogate pair"),
        "a.parquet": (b"PAR1 not so", r"a\.parquet is not a whole .*; write it again"),
    }


@pytest.mark.parametrize("name", list(_bad_files(None)))
def test_bad_files_are_named(tmp_path, name):
    content, message = _bad_files(tmp_path)[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus.load(str(tmp_path / name), _TOKENIZER)


def test_bad_parquet_columns(tmp_path):
    _write_parquet(tmp_path / "a.parquet", ["a"], column="body")
    with pytest.raises(ValueError, match=r"a\.parquet has no column \"text\", only \['body'"):
        _read(tmp_path / "a.parquet")
    _write_parquet(tmp_path / "b.parquet", ["a", None])
    with pytest.raises(ValueError, match=r"b\.parquet, row 1 has a NoneType in the column"):
        _read(tmp_path / "b.parquet")


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources.pathlib.Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read \(Permission denied\); mend"):
        _read(tmp_path / "a.txt")


def test_sources_that_are_not_there(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="no such file; give the path or glob"):
        sources.find_files(str(tmp_path / "*.txt"))
    with pytest.raises(ValueError, match="no such file .with one source there are no shares"):
        sources.find_files(str(tmp_path / "*.txt=0"))
    with pytest.raises(ValueError, match=r"a\.csv is not a \.txt"):
        sources.find_files(str(tmp_path / "a*"))
    with pytest.raises(ValueError, match="folder is a folder without metadata.json"):
        sources.find_files(str(tmp_path / "folder"))
    (tmp_path / "folder" / "metadata.json").touch()
    with pytest.raises(ValueError, match="folder holds shards .*; train from them with --config"):
        sources.find_files(str(tmp_path / "folder"))
    with pytest.raises(ValueError, match="source='' has no name .an unset shell variable"):
        sources.find_files("")


def test_a_document_of_one_token(tmp_path):
    tokenizer = types.SimpleNamespace(
        name="letters", vocab_size=128, bos_id=None, eos_id=None, unk_id=None, fingerprint="1",
        encode=lambda t: np.frombuffer(t.encode(), np.uint8).astype(np.int32),
    )  # fmt: skip
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"a\.txt is a document of 1 token"):
        corpus.load(str(tmp_path / "a.txt"), tokenizer)
    (tmp_path / "b.txt").write_text("é")
    with pytest.raises(ValueError, match=r"b\.txt has the id 195, outside the vocabulary of 128"):
        corpus.load(str(tmp_path / "b.txt"), tokenizer)


def test_unknown_tokens_are_counted_out_loud_and_refused_when_many(tmp_path, caplog):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    words = load_tokenizer(str(tmp_path / "words.json"))
    (tmp_path / "few.txt").write_text("the " * 199 + "fox")
    corpus.load(str(tmp_path / "few.txt"), words)
    assert "1 of 200 tokens are outside the vocabulary" in caplog.text
    (tmp_path / "many.txt").write_text("the fox")
    with pytest.raises(ValueError, match="vocabulary is too small for the data: 1 of 2 tokens"):
        corpus.load(str(tmp_path / "many.txt"), words)


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first = corpus.load(str(tmp_path / "a.txt"), _TOKENIZER)
    assert corpus.load(str(tmp_path / "a.txt"), _TOKENIZER) is first
    (tmp_path / "a.txt").write_text("one more")
    assert corpus.load(str(tmp_path / "a.txt"), _TOKENIZER).hash != first.hash


def test_split_is_whole_and_independent_of_the_shuffle_seed(tmp_path):
    loaded = corpus.load(write_texts(tmp_path, [9] * 20), _TOKENIZER)
    _, train, held_out = corpus.split(loaded, 0.25)
    assert len(held_out) == 5
    assert sorted([*train, *held_out]) == list(range(20))
    assert len(corpus.split(loaded, 0.001)[2]) == 1
    assert len(corpus.split(loaded, 0.999)[1]) == 1


def test_one_document_is_cut_in_two(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    config = data_config(str(tmp_path / "a.txt"))
    train, held_out = (text.split_ids(config, _TOKENIZER, s) for s in ("train", "eval"))
    whole = corpus.load(config.source, _TOKENIZER).tokens
    np.testing.assert_array_equal(np.concatenate([train, held_out]), np.delete(whole, [0, 62]))
    assert len(held_out) + 1 == 20  # a quarter of 82
    (tmp_path / "b.txt").write_text("a")
    with pytest.raises(ValueError, match="one document of 3 tokens, too short to hold out"):
        text.split_ids(data_config(str(tmp_path / "b.txt")), _TOKENIZER, "eval")
