"""Runs the paper's experiments and writes a report; see `ttt_jax.experiments`.

    python launch/reproduce.py --experiment=ablation --scale=tiny --workdir=runs/reproduce
    python launch/reproduce.py --experiment=all --jobs=2 --workdir=runs/reproduce

The same command goes on where it was stopped; what one experiment has trained, another takes.
"""

import sys
from collections.abc import Sequence

from absl import app, flags, logging

from ttt_jax import config_files
from ttt_jax.experiments import reproduce
from ttt_jax.experiments.systems import SCALES, TASKS

_NAMES = ", ".join(reproduce.EXPERIMENTS)
_EXPERIMENT = flags.DEFINE_list("experiment", ["ablation"], f"{_NAMES}, or all")
_SCALE = flags.DEFINE_enum("scale", "tiny", SCALES, "size of the models")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the experiments", required=True)
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "tasks of ablation and paradoxes")
_MODELS = flags.DEFINE_list("models", [], "models of the ablation, for example V0,V6,softmax")
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds of each model", lower_bound=1)
_JOBS = flags.DEFINE_integer("jobs", 1, "processes side by side", lower_bound=1)
_PART = flags.DEFINE_list("part", ["0", "1"], "index, count: this process's share of the cells")
_SET = flags.DEFINE_multi_string(
    "set", [], "field of the language models' configuration, for example data.source=books/*.txt"
)


def main(argv: Sequence[str]) -> None:
    """Runs the experiments and exits with their code; an error is one line and code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    try:
        code = reproduce.main(
            reproduce.Options(
                experiments=tuple(_EXPERIMENT.value),
                scale=_SCALE.value,
                tasks=tuple(_TASKS.value),
                models=tuple(_MODELS.value),
                seeds=_SEEDS.value,
                fields=reproduce.parse_fields(_SET.value),
                jobs=_JOBS.value,
                part=tuple(int(number) for number in _PART.value),
                command=sys.argv,
            ),
            _WORKDIR.value,
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
