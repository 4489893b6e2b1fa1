"""What the programs in launch/ share: finding configuration files, and a quiet log."""

import dataclasses
import pathlib
import re
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from ttt_jax.config import Config


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

    The file is run once here, so that its errors are `load`'s, and the fields that other flags
    name (``--config.train.steps=7``) are looked up in what it returns.

    Raises:
      ValueError: as of `load`, or a field does not exist.

    >>> resolve_flags(["prog", "--workdir=x"])
    ['prog', '--workdir=x']
    """
    out = list(argv)
    for index, word in enumerate(out):
        if word.startswith(("--config=", "-config=")):
            value = word.partition("=")[2]
            out[index] = f"--config={resolve(value)}"
        elif word in ("--config", "-config") and index + 1 < len(out):
            value = out[index + 1]
            out[index + 1] = resolve(value)
        else:
            continue
        config = load(value)
        for field in re.findall(r"^--?(?:no)?(config\.[\w.]+)", "\n".join(argv), re.MULTILINE):
            _check_field(config, field)
    return out


def _check_field(config: Config, dotted: str) -> None:
    """Raises ValueError unless there is such a field, for example "config.train.steps"."""
    part, path = config, "config"
    for name in dotted.split(".")[1:]:
        names = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
        if name not in names:
            known = f"has {', '.join(names)}" if names else f"is {part!r}"
            raise ValueError(f"{path}.{name} does not exist: {path} {known}")
        part, path = getattr(part, name), f"{path}.{name}"


def load(value: str) -> Any:
    """Runs `get_config` of a configuration file.

    Args:
      value: as of `resolve`, with the size after the colon.

    Returns:
      The configuration, a `ttt_jax.config.Config`.

    Raises:
      ValueError: there is no such file or size, or its program fails or returns something else.

    >>> load("transformer:tiny").train.steps > 0
    True
    """
    name, _, size = resolve(value).partition(":")
    try:
        found = runpy.run_path(name)
        if not callable(found.get("get_config")):
            raise ValueError("it defines no function get_config, as those of configs/ do")
        made = found["get_config"](*([size] if size else []))
    except Exception as error:  # whatever a user's program raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"--config={value}: {kind}{error}") from error
    if not isinstance(made, Config):
        raise ValueError(
            f"--config={value}: get_config must return a ttt_jax.config.Config, not {made!r}"
        )
    return made


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses a command line for `absl.app.run(main, flags_parser=parse_flags)`.

    Finds the --config file from any folder (`resolve_flags`), ends with one line where a flag, the
    file, its size or a field does not exist, and hides other packages' INFO lines (Orbax writes
    forty for each checkpoint) unless --verbosity is given.

    Args:
      argv: the command line.

    Returns:
      The arguments that are no flags, the program's name first.
    """
    try:
        rest = flags.FLAGS(resolve_flags(argv))
    except flags.Error as error:
        missing = r"flag --(\w+)=None: Flag .* other than None\."
        text = " ".join(re.sub(missing, r"--\1 is missing,", str(error)).split())
        sys.exit(f"error: {text.rstrip('.,')}; --help lists the flags")
    except (KeyError, ValueError, AttributeError) as error:
        sys.exit(f"error: {error.args[0]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    return rest
