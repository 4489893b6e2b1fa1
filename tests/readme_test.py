"""Commands and files that the documents name are there."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_DOCUMENTS = [path for path in (_ROOT / "README.md", _ROOT / "BUILD_NOTES.md") if path.exists()]
_PATH = re.compile(r"(?<![\w/.-])(?:launch|configs|tests|notebooks|kernels|ttt_jax)/[\w/.-]*\w")
_TARGET = re.compile(r"(?:^|`|\$ )make ([a-z][\w-]*)", re.MULTILINE)
_PROGRAM = re.compile(r"\bttt-(?!jax\b)[a-z-]+[a-z]\b")


def missing(text: str) -> list[str]:
    """Paths, make targets and installed programs that a text names and the tree lacks."""
    targets = re.findall(r"^([a-z][\w-]*):", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    programs = re.findall(r"^    (ttt-[\w-]+) =", (_ROOT / "setup.cfg").read_text(), re.MULTILINE)
    return [
        *(path for path in _PATH.findall(text) if not (_ROOT / path).exists()),
        *(f"make {target}" for target in _TARGET.findall(text) if target not in targets),
        *(program for program in _PROGRAM.findall(text) if program not in programs),
    ]


def test_there_is_a_readme():
    assert _ROOT / "README.md" in _DOCUMENTS


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_what_it_names_is_there(document):
    assert not missing(document.read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Run `make train` and ttt-train, see ttt_jax/inner_loop/api.py and launch/train.py.", []),
        ("pip install 'ttt-jax[test]'; make it so", []),
        ("`make nothing`", ["make nothing"]),
        ("python launch/no.py --config=configs/no.py:tiny", ["launch/no.py", "configs/no.py"]),
        ("    $ make nothing\nttt-no-such --help", ["make nothing", "ttt-no-such"]),
    ],
)
def test_what_is_not_there_is_found(text, found):
    assert missing(text) == found


def test_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
