"""Tokenizers: bytes, SentencePiece models, and files of Hugging Face's `tokenizers` library."""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_BEGIN_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
_END_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer.

    Attributes:
      name: "bytes" or the path that it was loaded from.
      vocab_size: ids lie in [0, vocab_size).
      bos_id, eos_id: ids put before and after a document; None where the vocabulary has none.
      unk_id: id that stands for text outside the vocabulary; None where there is none.
      fingerprint: sha256 of what defines the mapping; equal only for equal mappings.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n], without bos and eos."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; bos, eos and other control ids give no text."""


class ByteTokenizer:
    """One id for each byte of UTF-8, then bos = 256 and eos = 257; it can write every text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!")
    array([195, 169,  33], dtype=int32)
    >>> tokenizer.decode([256, 195, 169, 33, 257])
    'é!'
    """

    name = "bytes"
    vocab_size = 258
    bos_id = 256
    eos_id = 257
    unk_id = None
    fingerprint = hashlib.sha256(b"ttt_jax bytes: utf-8, bos 256, eos 257").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns the bytes of `text` in UTF-8, int32 [n]; lone surrogates are kept as they are."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class SentencePieceTokenizer:
    """A SentencePiece model file (Kudo and Richardson, 2018), such as those of Llama 1 and 2."""

    def __init__(self, path: pathlib.Path):
        """Loads the model at `path`. Raises ValueError if it is not one."""
        sentencepiece = _need("sentencepiece", path)
        content = path.read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(
                f"tokenizer={str(path)!r} is not a SentencePiece model ({_first_line(error)}); "
                "give a file written by sentencepiece's trainer"
            ) from error
        self.name = str(path)
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _none_if_negative(self._processor.bos_id())
        self.eos_id = _none_if_negative(self._processor.eos_id())
        self.unk_id = _none_if_negative(self._processor.unk_id())
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n]; the model's own normalisation is applied."""
        return np.asarray(self._processor.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`."""
        return self._processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers` library.

    bos and eos are the ids of the first of the usual names that the vocabulary holds, such as
    "<s>" and "</s>"; a file that knows only "<|endoftext|>" (GPT-2) has it at both places.
    """

    def __init__(self, path: pathlib.Path):
        """Loads the file at `path`. Raises ValueError if it is not one."""
        tokenizers = _need("tokenizers", path)
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"tokenizer={str(path)!r} is not a file of Hugging Face's tokenizers library "
                f"({_first_line(error)}); give a tokenizer.json"
            ) from error
        # A file may ask for truncation or padding of single sentences, which would lose text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.eos_id = next((vocabulary[n] for n in _END_NAMES if n in vocabulary), None)
        self.bos_id = next((vocabulary[n] for n in _BEGIN_NAMES if n in vocabulary), self.eos_id)
        model = json.loads(content)["model"]
        self.unk_id = vocabulary.get(model.get("unk_token"), model.get("unk_id"))
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._known: set[str] = set()  # characters that have been found to give an id
        self._control = {i for i in (self.bos_id, self.eos_id) if i is not None}

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n].

        Raises:
          ValueError: the vocabulary has no id for a character and none for "unknown" either, so
            the library would leave the character out.
        """
        if self.unk_id is None:
            self._check_known(text)
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`."""
        kept = [int(i) for i in ids if int(i) not in self._control]
        return self._tokenizer.decode(kept, skip_special_tokens=True)

    def _check_known(self, text: str) -> None:
        """Raises ValueError naming a character, other than white space, that gives no id.

        Each character is tried alone, because the library's offsets are wrong after a gap.
        """
        normalizer = self._tokenizer.normalizer
        for character in set(text) - self._known:
            seen = normalizer.normalize_str(character) if normalizer else character
            alone = self._tokenizer.encode(character, add_special_tokens=False)
            if seen.strip() and not alone.ids:
                raise ValueError(
                    f"tokenizer={self.name!r}: its vocabulary of {self.vocab_size} ids is too "
                    f"small for the data, it has none for {character!r} and no unknown token; "
                    'give a tokenizer with byte fallback, or tokenizer="bytes"'
                )
            self._known.add(character)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Loads a tokenizer by name or by the ending of its file.

    Args:
      name_or_path: "bytes" (`ByteTokenizer`), a path that ends in .model (SentencePiece) or in
        .json (Hugging Face's tokenizers).

    Returns:
      The tokenizer.

    Raises:
      ValueError: another name, a file that cannot be read or is of another kind, or a library
        that is not installed.

    >>> load_tokenizer("bytes").vocab_size
    258
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    path = pathlib.Path(name_or_path).expanduser()
    kinds: dict[str, Any] = {".model": SentencePieceTokenizer, ".json": HuggingFaceTokenizer}
    if path.suffix not in kinds:
        raise ValueError(
            f'tokenizer={name_or_path!r}: give "bytes", the path of a SentencePiece .model or of '
            "a Hugging Face tokenizer .json"
        )
    try:
        path.open("rb").close()  # before its library is asked for
        return kinds[path.suffix](path)
    except OSError as error:
        raise ValueError(
            f"tokenizer={name_or_path!r} cannot be read ({error.strerror}); check the path"
        ) from error


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a whole document: [bos] + ids + [eos], so that its first token is predicted too.

    Returns:
      int32 [n].

    >>> encode_document(ByteTokenizer(), "a")
    array([256,  97, 257], dtype=int32)
    """
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    last = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.concatenate(
        [np.asarray(first, np.int32), tokenizer.encode(text), np.asarray(last, np.int32)]
    )


def _need(module: str, path: pathlib.Path) -> Any:
    """Imports an optional library. Raises ValueError saying how to install it."""
    try:
        return __import__(module)
    except ImportError as error:
        raise ValueError(
            f"tokenizer={str(path)!r} needs the package {module}: pip install {module}, or "
            "'ttt-jax[text]'"
        ) from error


def _none_if_negative(value: int) -> int | None:
    return None if value < 0 else value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
