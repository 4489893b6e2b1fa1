"""Measures a trained model on its held-out split; see `ttt_jax.evaluate`.

python launch/evaluate.py --workdir=runs/tiny
python launch/evaluate.py --workdir=runs/tiny --step=200 --source='books/*.txt'
"""

from absl import flags

from ttt_jax import evaluate, programs

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_STEP = flags.DEFINE_integer("step", None, "checkpoint to evaluate; the newest by default")
_SOURCE = flags.DEFINE_string("source", None, "other data, as in config.data.source")
_PICTURES = flags.DEFINE_string("pictures", None, "folder for the pictures of the task, if any")


def main() -> None:
    """Prints the task's metrics beside its baselines."""
    step, result, paths = evaluate.evaluate_workdir(
        _WORKDIR.value, _STEP.value, _SOURCE.value, _PICTURES.value
    )
    evaluate.print_report(step, result)
    for path in paths:
        print(f"Picture: {path}")


if __name__ == "__main__":
    programs.run(main)
