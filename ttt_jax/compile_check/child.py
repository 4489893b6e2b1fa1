"""The process that compiles: reads a request, writes a report, both JSON.

Apart from the program that asks, because the devices are chosen by the environment, libtpu writes
its warnings to the process's standard error, and a compiler that is killed takes only this with it.

    python -m ttt_jax.compile_check.child REQUEST REPORT
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import jax

from ttt_jax import config as config_lib
from ttt_jax import sharding
from ttt_jax.compile_check import hlo, topology
from ttt_jax.compile_check.program import Program, make_program
from ttt_jax.metrics import PEAK_FLOPS

_BUFFER = re.compile(r"\s*\S+\(\s*\d+%\);\s*(?P<size>[\d.]+\w+);[^;]*;[^;]*;\s*(?P<shapes>.*)")
_BUFFERS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile.

    Attributes:
      config: a configuration, as of `config.to_json`.
      topology: for example "v5e:4x4".
      step: "train" or "decode".
    """

    config: str
    topology: str
    step: str


def compile_request(request: Request) -> dict[str, Any]:
    """Compiles a step and measures what came out.

    Args:
      request: what to compile.

    Returns:
      JSON values: devices and versions; parameters, FLOPs, seconds; "fits", and if so memory,
      collectives and kernels, else the compiler's message; the largest buffers either way.

    Raises:
      ValueError: the configuration, topology or mesh breaks a rule.
      NotImplementedError: the chips' connections do not allow this mesh.
    """
    config = config_lib.from_json(request.config)
    config.validate()
    target = topology.parse(request.topology)
    devices = target.devices()
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    with jax.set_mesh(mesh):
        begin = time.perf_counter()
        program = make_program(config, mesh, request.step)
        lowered = program.step.lower(*program.arguments)
        traced = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
                outcome = {"fits": True} | _measure(compiled, target.is_tpu)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                outcome = {"fits": False, "message": str(error).splitlines()[0]}
            buffers = largest_buffers(pathlib.Path(folder))
        done = time.perf_counter()
    about = _about(devices, mesh, program)
    seconds = {"lower_seconds": traced - begin, "compile_seconds": done - traced}
    return about | seconds | outcome | {"buffers": buffers}


def _about(devices: list[Any], mesh: Any, program: Program) -> dict[str, Any]:
    """What was compiled, and for what."""
    kind = devices[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if kind.startswith(name)), None)
    try:
        libtpu = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        libtpu = None
    return {
        "devices": len(devices),
        "device_kind": kind,
        "mesh": dict(mesh.shape),
        "versions": {"jax": jax.__version__, "libtpu": libtpu},
        "describe": program.describe,
        "parameters": program.parameters,
        "model_flops": program.model_flops,
        "peak_flops": peak,
        "hbm_bytes": topology.hbm_bytes(kind),
    }


def _measure(compiled: jax.stages.Compiled, on_tpu: bool) -> dict[str, Any]:
    """Memory, collectives and kernels of a compiled program, for one device."""
    memory = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in names}
    # The CPU's peak leaves the temporaries out; a TPU's temporaries are not all alive at once.
    held = sizes["argument"] + sizes["output"] - sizes["alias"]
    sizes["peak"] = memory.peak_memory_in_bytes if on_tpu else held + sizes["temp"]
    text = compiled.as_text()
    return {
        "memory": sizes,
        "bytes_accessed": (compiled.cost_analysis() or {}).get("bytes accessed"),
        "collectives": [dataclasses.asdict(c) for c in hlo.collectives(text)],
        "kernels": [dataclasses.asdict(k) for k in hlo.kernels(text)],
    }


def largest_buffers(folder: pathlib.Path) -> list[dict[str, str]]:
    """Reads XLA's report of what lies in memory at its fullest, which it writes if it fails, too.

    Args:
      folder: of `xla_dump_to`.

    Returns:
      size and shapes of the largest buffers of the largest program, the largest first; nothing
      where this compiler writes no report.
    """
    reports = sorted(folder.glob("*memory-usage-report.txt"), key=lambda p: p.stat().st_size)
    if not reports:
        return []
    found = []
    for line in reports[-1].read_text().splitlines():
        if line.startswith("Memory Space:") and found:
            break  # what follows is on the chip
        match = _BUFFER.match(line)
        if match:
            shapes = re.sub(r"/\*.*?\*/", "", match["shapes"])
            found.append({"size": match["size"], "shapes": shapes})
    return found[:_BUFFERS]


def main(request_path: str, report_path: str) -> int:
    """Compiles what the first file asks for and writes the second; returns the exit code."""
    request = Request(**json.loads(pathlib.Path(request_path).read_text()))
    try:
        report = compile_request(request)
    except (ValueError, NotImplementedError) as error:
        report = {"error": str(error)}
    pathlib.Path(report_path).write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
