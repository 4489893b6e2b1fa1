"""Compiles a training or decoding step for TPUs that are not there; see `ttt_jax.compile_check`.

    python launch/compile_check.py --config=configs/lact_llm.py:760m --topology=v5e:4x4 \\
        --mesh=fsdp:16
    python launch/compile_check.py --config=configs/lact_llm.py:tiny --topology=cpu:8

Fields of the configuration are overridden as in training, --config.part.field=value. The exit code
is 1 where the program does not fit.
"""

import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from ttt_jax import config_files
from ttt_jax.compile_check import check
from ttt_jax.compile_check.program import STEPS

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "v5e:4x4, v5p:4x4x4, v6e:8x8, ...; cpu:8 for host devices", required=True
)
_MESH = flags.DEFINE_string("mesh", None, "data:4,model:4; config.mesh by default")
_STEP = flags.DEFINE_enum("step", "train", STEPS, "what to compile")
_OUTPUT = flags.DEFINE_string("output", None, "folder for the report, Markdown and CSV")


def main(argv: Sequence[str]) -> None:
    """Compiles, prints the report and exits with its code; an error is one line and code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {list(argv[1:])}")
    if _CONFIG.value is None:
        raise app.UsageError("--config is missing, for example --config=configs/lact_llm.py:760m")
    try:
        code = check.main(
            _CONFIG.value,
            _TOPOLOGY.value,
            mesh=_MESH.value,
            step=_STEP.value,
            output=_OUTPUT.value,
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
