"""Trains a model; see `ttt_jax.train`.

    python launch/train.py --config=configs/lact_llm.py:tiny --workdir=runs/tiny

Any field of the configuration is overridden with --config.part.field=value; a field that does not
exist is an error. The same command resumes a run that was stopped.

On several hosts every one of them runs this command with --distributed added; Slurm, GKE and TPU
slices are found. Elsewhere, processes started by hand (here two, on one machine):

    python launch/train.py ... --coordinator_address=localhost:9911 --num_processes=2 --process_id=0
    python launch/train.py ... --coordinator_address=localhost:9911 --num_processes=2 --process_id=1
"""

from absl import flags
from ml_collections import config_flags

from ttt_jax import processes, programs, train

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes of a cluster that JAX knows"
)
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0")
_COUNT = flags.DEFINE_integer("num_processes", None, "number of processes", lower_bound=1)
_INDEX = flags.DEFINE_integer("process_id", None, "number of this process", lower_bound=0)


def main() -> int:
    """Runs the training; the exit code is that of `train.main`."""
    programs.require(_CONFIG, "configs/lact_llm.py:tiny")
    by_hand = (_COORDINATOR.value, _COUNT.value, _INDEX.value)
    if _DISTRIBUTED.value or by_hand != (None, None, None):
        processes.start(*by_hand)
    return train.main(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    programs.run(main)
