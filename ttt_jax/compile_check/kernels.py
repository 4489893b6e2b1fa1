"""Compiles the TPU kernels alone for chips that are not there: a table for notes and tiles.

    python -m ttt_jax.compile_check.kernels --chips=v5e,v5p,v6e --out=results

Writes kernels.md and kernels.csv (FLOPs and bytes of value and gradients against the least, by the
compiler's cost analysis; each kernel's on-chip memory) and tiles.md and tiles.csv (VLIW bundles and
spilled registers of one grid point of each kernel's schedule, tile by tile). libtpu alone is
needed. A bundle takes at least a cycle; loops and branches count once.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ttt_jax import tables
from ttt_jax.compile_check import hlo, kernel_cases, topology
from ttt_jax.compile_check.kernel_cases import Case, Tile

# The smallest slice of each chip.
SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_PASSES = ("forward", "backward")
_SPILLS = "VSTORE:SPILL"


class Schedule(NamedTuple):
    """What the compiler's own analysis says of one kernel."""

    bundles: int
    spills: int  # stores of registers that did not suffice


def compile_for(device: Any, function: Callable[..., Any], arguments: Any) -> Any:
    """Compiles for one device that need not be there.

    Args:
      device: of a topology.
      function: of `arguments`.
      arguments: a tuple of trees of `jax.ShapeDtypeStruct`.
    """
    placement = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), arguments
    )
    return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def measure(case: Case, device: Any, implementation: str) -> tables.Row:
    """One row of the first table: a case as one implementation compiles it.

    Args:
      case: what to compile.
      device: of a topology; the ambient mesh decides which kernels `implementation` may be.
      implementation: "mosaic_tpu" or "xla".
    """
    mesh = jax.sharding.Mesh([device], ("one",))
    with jax.set_mesh(mesh):
        compiled = compile_for(device, case.step(implementation), case.inputs())
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    used = {k.name: k.vmem_bytes for k in hlo.kernels(compiled.as_text())}
    vmem = [
        max((size for name, size in used.items() if f"{case.kernel}_{each}" in name), default=None)
        for each in _PASSES
    ]
    return {
        "kernel": case.kernel,
        "case": case.name,
        "implementation": implementation,
        "GFLOP": round(cost.get("flops", 0) / 1e9, 1),
        "least GFLOP": round(case.flops / 1e9, 1),
        "MB": round(cost["bytes accessed"] / 1e6),
        "least MB": round(case.bytes() / 1e6),
        "temporary MiB": round(memory.temp_size_in_bytes / 2**20),
        "VMEM MiB fwd / bwd": " / ".join(
            "-" if size is None else f"{size / 2**20:.1f}" for size in vmem
        ),
    }


def measure_tile(tile: Tile, device: Any, dump: pathlib.Path) -> tables.Row:
    """One row of the second table: the schedules of a kernel's two passes with one tile.

    Args:
      tile: what to compile.
      device: of a topology.
      dump: the folder into which libtpu writes its schedules; emptied first.
    """
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()

    def step(*arguments):
        out, pullback = jax.vjp(tile.operation, *arguments)
        return out, pullback(out)

    compile_for(device, step, tile.arguments)
    found = [schedule(dump, f"{tile.kernel}_{each}") for each in _PASSES]
    return {
        "kernel": tile.kernel,
        "tile": tile.label,
        "bundles fwd / bwd": " / ".join(str(each.bundles) for each in found),
        "spills fwd / bwd": " / ".join(str(each.spills) for each in found),
        "bundles a token and head": " / ".join(
            f"{each.bundles / tile.tokens:.2f}" for each in found
        ),
    }


def schedule(dump: pathlib.Path, kernel: str) -> Schedule:
    """Reads the final schedule of one kernel.

    Args:
      dump: the folder of `--xla_jf_dump_to`.
      kernel: a part of its name.

    Raises:
      ValueError: this libtpu wrote no such schedule.
    """
    final = sorted(dump.glob(f"*{kernel}*-schedule-analysis_final_bundles.txt"))
    use = sorted(dump.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt"))
    if not final or not use:
        raise ValueError(f"libtpu wrote no schedule of {kernel} into {dump}")
    bundles = re.search(r"total scheduled bundles:\s*(\d+)", final[0].read_text())
    lines = use[0].read_text().splitlines()
    place = next(line for line in lines if _SPILLS in line).split(", ").index(_SPILLS)
    rows = lines[lines.index("== UTILIZATION:") + 1 :]
    return Schedule(int(bundles[1]), sum(int(row.split()[place]) for row in rows if row.strip()))


def main() -> int:
    """Compiles everything for every chip and prints and saves the tables; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(SLICES), help="of " + ", ".join(SLICES))
    parser.add_argument("--xla", action="store_true", help="XLA's forms, too: minutes a chip")
    parser.add_argument("--out", help="folder for the tables, Markdown and CSV")
    options = parser.parse_args()
    unknown = set(options.chips.split(",")) - set(SLICES)
    if unknown:
        sys.exit(f"error: --chips={options.chips}: {sorted(unknown)} must be of {list(SLICES)}")
    implementations = ("mosaic_tpu", "xla") if options.xla else ("mosaic_tpu",)
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder) / "dump"
        _prepare(dump)
        made: dict[str, list[tables.Row]] = {"kernels": [], "tiles": []}
        for chip in options.chips.split(","):
            try:
                device = topology.parse(SLICES[chip]).devices()[0]
            except ValueError as error:
                sys.exit(f"error: {error}")
            for case in kernel_cases.cases():
                made["kernels"] += [
                    {"chip": chip} | measure(case, device, each) for each in implementations
                ]
            made["tiles"] += [
                {"chip": chip} | measure_tile(t, device, dump) for t in kernel_cases.tiles()
            ]
            print(f"{chip}: compiled", file=sys.stderr, flush=True)
    for name, rows in made.items():
        title = f"TPU {name}, jax {jax.__version__}, bfloat16"
        print(f"\n{title}\n{tables.text(rows)}", flush=True)
        if options.out is not None:
            tables.save(rows, options.out, name, title)
    return 0


def _prepare(dump: pathlib.Path) -> None:
    """Sets what libtpu reads when it is loaded, which is when the first topology is made."""
    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    flags += " --xla_jf_dump_llo_pass_label_regex=.*final.*"  # the last schedule, not all of them
    quiet = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "LIBTPU_INIT_ARGS": flags}
    os.environ.update(topology.parse(SLICES["v5e"]).environment() | quiet)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


if __name__ == "__main__":
    sys.exit(main())
