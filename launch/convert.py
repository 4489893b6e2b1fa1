"""Converts weights of the official PyTorch code, both ways; see `ttt_jax.convert`.

    python launch/convert.py --config=configs/lact_llm.py:760m --official=DIR --workdir=runs/lact
    python launch/convert.py --workdir=runs/tiny --export=tiny.safetensors

DIR is a Hugging Face folder, or a .safetensors, .pt or .pth file. With --official the workdir is
new: evaluate.py and generate.py read it, and train.py with the same --config goes on from its
weights. With --export it is a run's, and the file (or folder, for a language model) is new.
"""

from absl import flags
from ml_collections import config_flags

from ttt_jax import convert, programs

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_OFFICIAL = flags.DEFINE_string("official", None, "official weights to read")
_EXPORT = flags.DEFINE_string("export", None, "file or folder to write in the official form")
_STEP = flags.DEFINE_integer("step", None, "checkpoint to export; the newest by default")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "of --export")


def main() -> None:
    """Converts and says how much; after an error nothing is written."""
    if (_OFFICIAL.value is None) == (_EXPORT.value is None):
        raise ValueError("give one of --official (to read) and --export (to write)")
    if _OFFICIAL.value is not None:
        programs.require(_CONFIG, "configs/lact_llm.py:760m")
        count = convert.import_weights(_CONFIG.value, _OFFICIAL.value, _WORKDIR.value)
        print(f"{_WORKDIR.value}: {count:,} numbers of {_OFFICIAL.value}, as step 0")
    else:
        count = convert.export_weights(_WORKDIR.value, _EXPORT.value, _STEP.value, _DTYPE.value)
        print(f"{_EXPORT.value}: {count} tensors of {_WORKDIR.value} in {_DTYPE.value}")


if __name__ == "__main__":
    programs.run(main)
