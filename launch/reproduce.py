"""Runs an experiment that makes a table; see `ttt_jax.experiments`.

    python launch/reproduce.py --experiment=ablation --scale=tiny --workdir=runs/ablation

The same command goes on where it was stopped.
"""

import sys
from collections.abc import Sequence

from absl import app, flags, logging

from ttt_jax import config_files
from ttt_jax.experiments import ablation

_EXPERIMENT = flags.DEFINE_enum("experiment", "ablation", ["ablation"], "which table")
_SCALE = flags.DEFINE_enum("scale", "tiny", sorted(ablation.SCALES), "size of the models")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the experiment", required=True)
_CELLS = flags.DEFINE_list("cells", list(ablation.CELLS), "models of the table")
_STEPS = flags.DEFINE_integer("steps", None, "optimizer steps of each model")
_SOURCE = flags.DEFINE_string("source", None, "text, as in config.data.source")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "as in config.data.tokenizer")


def main(argv: Sequence[str]) -> None:
    """Runs the experiment and exits with its code; an error is one line and code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    data = {"source": _SOURCE.value, "tokenizer": _TOKENIZER.value}
    data = {name: value for name, value in data.items() if value is not None}
    try:
        code = ablation.main(
            _SCALE.value, _WORKDIR.value, cells=_CELLS.value, steps=_STEPS.value, data=data
        )
    except (ValueError, OSError) as error:
        logging.debug("traceback (shown with --verbosity=1)", exc_info=True)
        sys.exit(f"error: {error}")
    sys.exit(code)


def cli() -> None:
    """Entry point of the installed program."""
    app.run(main, flags_parser=config_files.parse_flags)


if __name__ == "__main__":
    cli()
