"""The programs, one a module with ``main()``; installed as ttt_jax.launch."""

import pathlib
import runpy
import sys


def run() -> None:
    """Runs the program that the installed command is named after: ttt-train runs train.py.

    It runs as ``__main__``, which is where absl looks for the text and the flags of ``--help``.
    """
    name = pathlib.Path(sys.argv[0]).stem.removeprefix("ttt-").replace("-", "_")
    runpy.run_module(f"{__name__}.{name}", run_name="__main__", alter_sys=True)
