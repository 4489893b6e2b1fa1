"""Runs the paper's experiments and writes a report; see `ttt_jax.experiments`.

    python launch/reproduce.py --experiment=ablation --scale=tiny --workdir=runs/reproduce
    python launch/reproduce.py --experiment=all --jobs=2 --workdir=runs/reproduce

The same command goes on where it was stopped; what one experiment has trained, another takes.
"""

import sys

from absl import flags

from ttt_jax import programs
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
_REPORT = flags.DEFINE_bool("report", True, "write reports; without, the cells are run alone")
_SET = flags.DEFINE_multi_string(
    "set", [], "field of the language models' configuration, for example data.source=books/*.txt"
)


def main() -> int:
    """Runs the experiments; the exit code is theirs."""
    return reproduce.main(
        reproduce.Options(
            experiments=tuple(_EXPERIMENT.value),
            scale=_SCALE.value,
            tasks=tuple(_TASKS.value),
            models=tuple(_MODELS.value),
            seeds=_SEEDS.value,
            fields=reproduce.parse_fields(_SET.value),
            jobs=_JOBS.value,
            report=_REPORT.value,
            command=sys.argv,
        ),
        _WORKDIR.value,
    )


if __name__ == "__main__":
    programs.run(main)
