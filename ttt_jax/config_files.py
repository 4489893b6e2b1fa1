"""What the programs in launch/ share: finding configuration files, and a quiet log."""

import pathlib
import runpy
from collections.abc import Sequence
from typing import Any

from absl import flags, logging


def config_folder() -> pathlib.Path:
    """Returns the folder of the project's configurations: installed, or in the source tree."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def resolve(value: str) -> str:
    """Turns "lact_llm:tiny", "lact_llm.py:tiny" or "configs/lact_llm.py:tiny" into a real path.

    Args:
      value: what the flag says: a path that exists is taken as it is, else the file of that name
        among the project's configurations. What follows the colon is kept.

    Returns:
      The path of a Python file, with the part after the colon.

    Raises:
      ValueError: there is no such file.

    >>> resolve("transformer:tiny").endswith("configs/transformer.py:tiny")
    True
    """
    name, colon, size = value.partition(":")
    if pathlib.Path(name).is_file():
        return value
    path = config_folder() / pathlib.Path(name).with_suffix(".py").name
    if not path.is_file():
        known = sorted(p.stem for p in config_folder().glob("[!_]*.py"))
        raise ValueError(f"--config={value}: no such file; the project's own are {known}")
    return f"{path}{colon}{size}"


def resolve_flags(argv: Sequence[str]) -> list[str]:
    """Applies `resolve` to the ``--config`` flag of a command line, in both of its spellings.

    >>> resolve_flags(["prog", "--workdir=x"])
    ['prog', '--workdir=x']
    """
    out = list(argv)
    for index, word in enumerate(out):
        if word.startswith(("--config=", "-config=")):
            out[index] = "--config=" + resolve(word.partition("=")[2])
        elif word in ("--config", "-config") and index + 1 < len(out):
            out[index + 1] = resolve(out[index + 1])
    return out


def load(value: str) -> Any:
    """Runs `get_config` of a configuration file.

    Args:
      value: as of `resolve`, with the size after the colon.

    Returns:
      The configuration, a `ttt_jax.config.Config`.

    Raises:
      ValueError: there is no such file or no such size.

    >>> load("transformer:tiny").train.steps > 0
    True
    """
    name, _, size = resolve(value).partition(":")
    return runpy.run_path(name)["get_config"](*([size] if size else []))


def warnings_only() -> None:
    """Hides other packages' INFO lines (Orbax writes forty a checkpoint) unless --verbosity is set.

    Call it in `main`, after absl has read the flags.
    """
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
