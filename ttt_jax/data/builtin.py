"""Text that is there without a download: Python's own documentation, and gensim's articles.

The text differs between versions of Python, so a perplexity on it is comparable only where
`ttt_jax.data.text.corpus_hash` is equal.
"""

import ast
import bz2
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pathlib
import sys
import sysconfig
import warnings
import xml.etree.ElementTree as ElementTree

logger = logging.getLogger(__name__)

_WIKI_FILE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@functools.cache
def python_documents() -> tuple[tuple[str, str], ...]:
    """Reads the reference topics of `pydoc` and the docstrings of the standard library.

    A document is one topic, or all docstrings of one module in the order of its source, each
    under the name of what it describes. Modules without 200 characters of docstrings and second
    copies of a text are no documents. Reading the library takes some seconds; the result is
    kept in the user's cache folder, one file for each installation of Python.

    Returns:
      (name, text) of each document, in the order of the names: about 540 documents and 2.4
      million characters.

    Raises:
      ValueError: this Python has neither `pydoc_data` nor the source of its library.

    >>> any(name == "topics/lambda" for name, _ in python_documents())
    True
    """
    path = _cache_path()
    try:
        return tuple((name, text) for name, text in json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):  # not there yet, or cut off
        pass
    found = _topics() + _docstrings()
    if not found:
        raise ValueError(
            f'source="builtin": {sys.executable} has neither pydoc_data nor the source of the '
            "standard library; give a path of text files as source"
        )
    unique = {text: name for name, text in reversed(found)}  # the first name of a text stays
    documents = tuple(sorted((name, text) for text, name in unique.items()))
    _write_cache(path, json.dumps(documents))
    return documents


def _cache_path() -> pathlib.Path:
    """Names the cache file of this Python: its version and the folder of its library."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = sysconfig.get_path("stdlib")
    key = hashlib.sha256(f"1 {sys.version} {folder}".encode()).hexdigest()[:16]
    return pathlib.Path(root) / "ttt_jax" / f"python-documents-{key}.json"


def _write_cache(path: pathlib.Path, content: str) -> None:
    """Writes the cache in one piece; a cache that cannot be written costs seconds, no more."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(content, "utf-8")
        draft.replace(path)
    except OSError as error:
        logger.warning("the built-in text is not cached in %s: %s", path, error)


def _topics() -> list[tuple[str, str]]:
    """Returns the topics of Python's reference that `help()` shows."""
    if importlib.util.find_spec("pydoc_data") is None:
        return []
    topics = importlib.import_module("pydoc_data.topics").topics
    return [(f"topics/{name}", text.strip()) for name, text in sorted(topics.items())]


def _docstrings() -> list[tuple[str, str]]:
    """Returns one document for each module of the standard library."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.intersection(name.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in strings of other people's code
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # templates and samples that are no Python
            continue
        text = "\n\n\n".join(_described(tree, name.stem))
        if len(text) >= 200:
            documents.append((f"stdlib/{name.as_posix()}", text))
    return documents


def _described(node: ast.AST, name: str) -> list[str]:
    """Returns the docstrings of a module, class or function and of all inside, each titled."""
    found = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
        found.append(f"{name}\n\n{docstring.strip()}")
    for child in ast.iter_child_nodes(node):
        found += _described(child, getattr(child, "name", None) or name)
    return found


@functools.cache
def wiki_documents() -> tuple[tuple[str, str], ...]:
    """Reads the English Wikipedia articles that the package gensim carries for its tests.

    gensim is found and not imported. The text is wikitext as it stands (CC BY-SA), long articles
    of up to 189,000 characters; redirections are no articles.

    Returns:
      (name, text) of each article, in the file's order.

    Raises:
      ValueError: gensim is not installed, or comes without the file.
    """
    spec = importlib.util.find_spec("gensim")
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = [pathlib.Path(folder) / "test" / "test_data" / _WIKI_FILE for folder in folders]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise ValueError(
            'source="wiki" is a file of the package gensim, which is not installed here or comes '
            "without it: pip install gensim==4.4.0"
        )
    documents = []
    with bz2.open(path) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag.rpartition("}")[2] != "page":
                continue
            parts = {child.tag.rpartition("}")[2]: child for child in element.iter()}
            text = (parts["text"].text or "").strip()
            if parts["ns"].text == "0" and text and "redirect" not in parts:
                title = parts["title"].text
                documents.append((f"wiki/{title}", f"{title}\n\n{text}"))
            element.clear()
    return tuple(documents)
