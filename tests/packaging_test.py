"""A wheel built from the tree holds every package and works from another folder."""

import ast
import configparser
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_FOLDERS = {
    "ttt_jax": _ROOT / "ttt_jax",
    "ttt_jax.configs": _ROOT / "configs",
    "ttt_jax.launch": _ROOT / "launch",
    "ttt_kernels": _ROOT / "kernels" / "ttt_kernels",
}
_SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "ttt_jax", "launch", "configs", "kernels")


def _setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(_ROOT / "setup.cfg")
    return parser


_PROGRAMS = sorted(path for path in (_ROOT / "launch").glob("*.py") if path.stem != "__init__")


def _run(*command, code: int = 0, **options) -> str:
    """Standard output and error of a command, which has to end with ``code``."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, **options
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> pathlib.Path:
    """Folder into which a wheel of a copy of the tree is installed, without its requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "tree").mkdir()
    for name in _SOURCES:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(source, folder / "tree" / name)
    python = sys.executable
    _run(python, "-m", "build", "--wheel", "--no-isolation", "-o", folder, folder / "tree")
    (wheel,) = folder.glob("ttt_jax-*.whl")
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    _run(*pip, "--target", folder / "site", wheel)
    shutil.rmtree(folder / "tree")
    return folder / "site"


@pytest.fixture
def run(installed, tmp_path):
    """Runs a command in an empty folder, with the installed wheel before everything else."""
    environment = dict(os.environ, PYTHONPATH=str(installed), JAX_PLATFORMS="cpu")

    def run(*command, code: int = 0) -> str:
        return _run(*command, code=code, cwd=tmp_path, env=environment)

    return run


def test_every_package_is_listed():
    listed = _setup_cfg()["options"]["packages"].split()
    found = set()
    for package, folder in _FOLDERS.items():
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"
            found.add(".".join((package, *path.parent.relative_to(folder).parts)))
    assert listed == sorted(found)


def test_every_program_is_installed():
    lines = _setup_cfg()["options.entry_points"]["console_scripts"].split("\n")
    names = (f"ttt-{path.stem.replace('_', '-')}" for path in _PROGRAMS)
    assert sorted(filter(None, lines)) == [f"{name} = ttt_jax.launch:run" for name in names]


def test_packages_come_from_the_wheel(run, installed):
    names = ", ".join(_FOLDERS)
    code = f"import {names}\nfor module in ({names}): print(module.__file__)"
    for line in run(sys.executable, "-c", code).splitlines():
        assert pathlib.Path(line).is_relative_to(installed)


def test_inner_loop_runs_from_the_wheel(run):
    code = """
import jax, jax.numpy as jnp, ttt_jax
spec = ttt_jax.presets.lact_llm(variant=6)
weights = spec.init(jax.random.key(0), heads=1, key_dim=2)
x = jnp.ones((1, 3, 1, 2))
print(ttt_jax.ttt(spec, weights, x, x, x)[0].shape)
"""
    assert run(sys.executable, "-c", code).splitlines()[-1] == "(1, 3, 1, 2)"


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda path: path.stem)
def test_programs_show_their_flags(program, run, installed):
    command = installed / "bin" / f"ttt-{program.stem.replace('_', '-')}"
    shown = run(command, "--help", code=1)  # absl's exit code after a help
    first_line = ast.get_docstring(ast.parse(program.read_text())).splitlines()[0]
    assert first_line in shown
    assert "\n  --" in shown
    assert "Traceback" not in shown


def test_configuration_is_found_by_name(run, installed, tmp_path):
    train = (installed / "bin" / "ttt-train", "--config=lact_llm:tiny", "--workdir=new")
    shown = run(*train, "--config.train.no_such_field=1", code=1)
    assert "no_such_field" in shown
    assert not (tmp_path / "new").exists()
    find = "import ttt_jax.config_files as c; print(c.resolve('lact_llm:tiny'))"
    path = run(sys.executable, "-c", find).splitlines()[-1]
    assert pathlib.Path(path).is_relative_to(installed / "ttt_jax" / "configs")
