"""Measures a trained model on its held-out split; see `ttt_jax.evaluate`.

python launch/evaluate.py --workdir=runs/tiny
python launch/evaluate.py --workdir=runs/tiny --step=200 --source='books/*.txt'
"""

import sys
from collections.abc import Sequence

from absl import app, flags, logging

from ttt_jax import config_files, evaluate
from ttt_jax.checkpoint import CheckpointError

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_STEP = flags.DEFINE_integer("step", None, "checkpoint to evaluate; the newest by default")
_SOURCE = flags.DEFINE_string("source", None, "other data, as in config.data.source")
_PICTURES = flags.DEFINE_string("pictures", None, "folder for the pictures of the task, if any")


def main(argv: Sequence[str]) -> None:
    """Prints the task's metrics beside its baselines."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    try:
        step, result, paths = evaluate.evaluate_workdir(
            _WORKDIR.value, _STEP.value, _SOURCE.value, _PICTURES.value
        )
    except (ValueError, OSError, CheckpointError) as error:
        logging.debug("traceback (shown with --verbosity=1)", exc_info=True)
        sys.exit(f"error: {error}")
    evaluate.print_report(step, result)
    for path in paths:
        print(f"Picture: {path}")


def cli() -> None:
    """Entry point of the installed program."""
    app.run(main, flags_parser=config_files.parse_flags)


if __name__ == "__main__":
    cli()
