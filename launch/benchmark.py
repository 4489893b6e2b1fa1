"""Times the layers and kernels; see `ttt_jax.benchmark`.

    python launch/benchmark.py --suite=throughput_table --out=results
    python launch/benchmark.py --suite=linear_attention --kernel_times

Without --size the shapes are LaCT-760M's on a Hopper GPU and small ones anywhere else.
"""

import dataclasses
import pathlib

from absl import flags

from ttt_jax import programs, tables, workdirs
from ttt_jax.benchmark import common, suites
from ttt_jax.benchmark.plot import plot

_SUITE = flags.DEFINE_list("suite", list(suites.SUITES), "suites to run, in the default's order")
_SIZE = flags.DEFINE_enum("size", None, sorted(common.SIZES), "shapes")
_TOKENS = flags.DEFINE_integer("tokens", None, "length of the sequence", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "folder for SUITE.csv, SUITE.md and SUITE.png")
_SECONDS = flags.DEFINE_float("seconds", 0.2, "about how long one timed batch takes, s")
_BATCHES = flags.DEFINE_integer("batches", 5, "timed batches", lower_bound=1)
_VARIANTS = flags.DEFINE_list("variants", list("0123456"), "variants of throughput_table")
_BACKWARD = flags.DEFINE_bool("backward", True, "also time forward + backward")
_KERNELS = flags.DEFINE_bool(
    "kernel_times", False, "ask CUPTI for kernel times (NVIDIA GPUs); with --out also "
    "SUITE_kernels.csv and .md: where each row's time goes",
)


def main() -> None:
    """Runs the suites, prints their tables and saves them with --out."""
    unknown = set(_SUITE.value) - set(suites.SUITES)
    if unknown:
        raise ValueError(f"--suite={sorted(unknown)} must be among {sorted(suites.SUITES)}")
    name = _SIZE.value or common.default_size()
    size = common.SIZES[name]
    if _TOKENS.value is not None:
        size = dataclasses.replace(size, tokens=_TOKENS.value)
    options = common.Options(
        size=size, seconds=_SECONDS.value, batches=_BATCHES.value, kernel_times=_KERNELS.value,
        backward=_BACKWARD.value, variants=tuple(int(v) for v in _VARIANTS.value),
    )
    if _OUT.value:
        workdirs.check_output("out", _OUT.value)
    kernels: list[tables.Row] = []

    def report(row, timing):
        common.show(row, timing)
        kernels.extend(common.profile(row, timing))

    options = dataclasses.replace(options, report=report)
    for suite in (name for name in suites.SUITES if name in _SUITE.value):
        title = f"{suite}: {common.describe_device()}, {size.tokens} tokens, {size.dtype}"
        print(title, flush=True)
        kernels.clear()
        rows = suites.SUITES[suite](options)
        print(tables.text(rows), flush=True)
        if _OUT.value and rows:
            tables.save(rows, _OUT.value, suite, title)
            plot(rows, pathlib.Path(_OUT.value) / f"{suite}.png", title)
            if kernels:
                tables.save(kernels, _OUT.value, f"{suite}_kernels", title)


if __name__ == "__main__":
    programs.run(main)
