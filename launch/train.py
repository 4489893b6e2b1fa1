"""Trains a model; see `ttt_jax.train`.

    python launch/train.py --config=configs/lact_llm.py:tiny --workdir=runs/tiny

Any field of the configuration is overridden with --config.part.field=value; a field that does not
exist is an error. The same command resumes a run that was stopped.

On several hosts every one of them runs this command with --distributed added; Slurm, GKE and TPU
slices are found. Elsewhere, processes started by hand (here two, on one machine):

    python launch/train.py ... --coordinator_address=localhost:9911 --num_processes=2 --process_id=0
    python launch/train.py ... --coordinator_address=localhost:9911 --num_processes=2 --process_id=1
"""

import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from ttt_jax import config_files, processes, train
from ttt_jax.checkpoint import CheckpointError

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes of a cluster that JAX knows"
)
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0")
_COUNT = flags.DEFINE_integer("num_processes", None, "number of processes", lower_bound=1)
_INDEX = flags.DEFINE_integer("process_id", None, "number of this process", lower_bound=0)


def main(argv: Sequence[str]) -> None:
    """Runs the training and exits with its code; an error is one line and code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    if _CONFIG.value is None:
        raise app.UsageError("--config is missing, for example --config=configs/lact_llm.py:tiny")
    by_hand = (_COORDINATOR.value, _COUNT.value, _INDEX.value)
    try:
        if _DISTRIBUTED.value or by_hand != (None, None, None):
            processes.start(*by_hand)
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
