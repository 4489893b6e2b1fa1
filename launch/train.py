"""Trains a model; see `ttt_jax.train`.

    python launch/train.py --config=configs/lact_llm.py:tiny --workdir=runs/tiny

Any field of the configuration is overridden with --config.part.field=value; a field that does not
exist is an error. The same command resumes a run that was stopped.
"""

import sys
from collections.abc import Sequence

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from ttt_jax import config_files, train
from ttt_jax.checkpoint import CheckpointError

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes: call jax.distributed.initialize()"
)


def main(argv: Sequence[str]) -> None:
    """Runs the training and exits with its code; an error is one line and code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    if _CONFIG.value is None:
        raise app.UsageError("--config is missing, for example --config=configs/lact_llm.py:tiny")
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    try:
        code = train.main(_CONFIG.value, _WORKDIR.value)
    except (ValueError, NotImplementedError, OSError, CheckpointError) as error:
        logging.debug("traceback (shown with --verbosity=1)", exc_info=True)
        sys.exit(f"error: {error}")
    sys.exit(code)


def cli() -> None:
    """Entry point of the installed program."""
    app.run(main, flags_parser=config_files.parse_flags)


if __name__ == "__main__":
    cli()
