"""Imports run one way, from the kernels to the programs, and JAX's versions concern one file."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import ttt_jax

_ROOT = pathlib.Path(__file__).parent.parent

# A module of ttt_jax imports modules of the groups before its own, and of its own folder.
_ORDER = (
    {"config_checks"},
    {"array_types", "config", "config_images", "config_views"}
    | {"processes", "sharding", "tables"},
    {"config_files", "recipes"},
    {"inner_loop"},
    {"layers"},
    {"models"},
    {"data", "metrics", "optim", "workdirs"},
    {"progress"},
    {"objective"},
    {"train_step"},
    {"tasks"},
    {"checkpoint"},
    {"compile_check", "convert", "evaluate", "generate"},
    {"train"},
    {"programs"},
    {"benchmark"},
    {"experiments"},
    {"configs", "launch"},
)
_RANK = {name: rank for rank, group in enumerate(_ORDER) for name in group}
_FOLDERS = {
    "ttt_jax": _ROOT / "ttt_jax",
    "ttt_jax.launch": _ROOT / "launch",
    "ttt_jax.configs": _ROOT / "configs",
    "ttt_kernels": _ROOT / "kernels" / "ttt_kernels",
}


def _modules() -> Iterator[tuple[str, pathlib.Path]]:
    """Pairs of a module's installed name and its file."""
    for package, folder in _FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join((package, *parts)), path


_MODULES = dict(_modules())


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names of all imported modules, those of ``from package import module`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: relative import; imports are absolute here")
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in _MODULES else node.module


def _group(module: str) -> str:
    """Name in ``_ORDER``; the package ``ttt_jax`` itself shows what ``inner_loop`` has."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "inner_loop"


def _import_problems(module: str, tree: ast.AST) -> list[str]:
    """The imports of a module that run the wrong way."""
    problems = []
    for name in _imports(tree):
        if name.split(".")[0] in ("configs", "kernels", "launch", "tests"):
            problems.append(f"{name} is not installed under this name")
        elif name.split(".")[0] != "ttt_jax":
            continue
        elif module.startswith("ttt_kernels"):
            problems.append(f"{name}: ttt_kernels depends on jax alone")
        elif _group(name) not in _RANK:
            problems.append(f"{name} has no place in the order; give it one in {__file__}")
        elif _group(name) != _group(module) and _RANK[_group(name)] >= _RANK[_group(module)]:
            problems.append(f"{name} comes after {module}")
    return problems


def _version_problems(tree: ast.AST) -> list[str]:
    """Uses of JAX's private modules, and comparisons with its version."""
    problems = [f"imports {name}" for name in _imports(tree) if name.startswith("jax._src")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"jax\._src[\w.]*", str(node.value)):
            problems.append(f"line {node.lineno}: names {node.value}")
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src"):
            problems.append(f"line {node.lineno}: uses {ast.unparse(node)}")
        if isinstance(node, ast.Compare) and re.search(
            r"__version(_info)?__|JAX_VERSION", ast.unparse(node)
        ):
            problems.append(f"line {node.lineno}: {ast.unparse(node)}")
    return problems


@pytest.mark.parametrize("module", _MODULES)
def test_imports_run_one_way(module):
    group = _group(module)
    assert module.startswith("ttt_kernels") or group in _RANK, f"place {group!r} in {__file__}"
    assert not _import_problems(module, ast.parse(_MODULES[module].read_text()))


def test_no_module_takes_the_place_of_a_public_name():
    """Importing ttt_jax.x would replace the attribute x of the package."""
    assert not [name for name in ttt_jax.__all__ if f"ttt_jax.{name}" in _MODULES]


@pytest.mark.parametrize("module", [m for m in _MODULES if m != "ttt_kernels.compat"])
def test_only_compat_knows_jax_versions(module):
    assert not _version_problems(ast.parse(_MODULES[module].read_text()))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ttt_kernels.newton_schulz.api", "import ttt_jax"),
        ("ttt_jax.config", "from ttt_jax import models"),
        ("ttt_jax.sharding", "from ttt_jax.config import Config"),
        ("ttt_jax.layers.linear", "from ttt_jax.models.decoder import Decoder"),
        ("ttt_jax.inner_loop.api", "from ttt_jax.layers import rotary"),
        ("ttt_jax.evaluate", "def f():\n    from ttt_jax.train import main"),
        ("ttt_jax.train", "import ttt_jax.launch.train"),
        ("ttt_jax.train", "from launch import train"),
        ("ttt_jax.config", "import ttt_jax"),
    ],
)
def test_wrong_way_is_found(module, line):
    assert len(_import_problems(module, ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.core",
        "from jax._src import core",
        "x = jax._src",
        "importlib.import_module('jax._src.core')",
        "if jax.__version_info__ < (0, 11): pass",
        "ok = compat.JAX_VERSION >= (0, 12)",
    ],
)
def test_version_check_is_found(line):
    assert len(_version_problems(ast.parse(line))) == 1
