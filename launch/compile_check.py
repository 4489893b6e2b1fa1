"""Compiles a training or decoding step for TPUs that are not there; see `ttt_jax.compile_check`.

    python launch/compile_check.py --config=configs/lact_llm.py:760m --topology=v5e:4x4 \\
        --mesh=fsdp:16
    python launch/compile_check.py --config=configs/lact_llm.py:tiny --topology=cpu:8 \\
        --mesh=data:2,seq:4

Fields of the configuration are overridden as in training, --config.part.field=value. The exit code
is 1 where the program does not fit.
"""

from absl import flags
from ml_collections import config_flags

from ttt_jax import programs
from ttt_jax.compile_check import check
from ttt_jax.compile_check.program import STEPS

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "v5e:4x4, v5p:4x4x4, v6e:8x8, ...; cpu:8 for host devices", required=True
)
_MESH = flags.DEFINE_string("mesh", None, "data:4,model:4; config.mesh by default")
_STEP = flags.DEFINE_enum("step", "train", STEPS, "what to compile")
_OUTPUT = flags.DEFINE_string("output", None, "folder for the report, Markdown and CSV")


def main() -> int:
    """Compiles and prints the report; the exit code is 0 where the program fits."""
    programs.require(_CONFIG, "configs/lact_llm.py:760m")
    return check.main(
        _CONFIG.value,
        _TOPOLOGY.value,
        mesh=_MESH.value,
        step=_STEP.value,
        output=_OUTPUT.value,
    )


if __name__ == "__main__":
    programs.run(main)
