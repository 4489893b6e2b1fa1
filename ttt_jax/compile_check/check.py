"""Compiles a configuration's step for a topology in a process of its own, and says what it takes.

The exit code is 0 where the program fits into the devices' memory, 1 where it does not or cannot
be compiled.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from ttt_jax import config as config_lib
from ttt_jax import tables, workdirs
from ttt_jax.compile_check import topology
from ttt_jax.compile_check.child import Request
from ttt_jax.compile_check.program import STEPS

_REMATERIALIZATION = "Involuntary full rematerialization"
_GIB = 2**30
_SHOWN = 12  # rows of a table that are printed; all are saved


def parse_mesh(text: str) -> config_lib.MeshConfig:
    """Reads a mesh such as "data:4,model:4"; an axis that is not named has one device.

    Raises:
      ValueError: an axis is unknown, named twice, or its size is no number.

    >>> parse_mesh("data:4,model:4")
    MeshConfig(data=4, fsdp=1, seq=1, model=4)
    """
    names = [field.name for field in dataclasses.fields(config_lib.MeshConfig)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition(":")
        if name not in names or name in sizes or not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ValueError(
                f"--mesh={text}: {part!r} must be AXIS:SIZE, each axis once, of {', '.join(names)}"
            )
        sizes[name] = int(size)
    mesh = config_lib.MeshConfig(**{name: 1 for name in names} | sizes)
    mesh.validate()
    return mesh


def main(
    config: Any,
    topology_name: str,
    *,
    mesh: str | None = None,
    step: str = "train",
    output: str | os.PathLike[str] | None = None,
) -> int:
    """Compiles, prints the report, and saves it.

    Args:
      config: a `ttt_jax.config.Config`; its data need not be there.
      topology_name: "v5e:4x4", "v5p:4x4x4", ..., or "cpu:8" for host devices.
      mesh: devices along each axis, as of `parse_mesh`; None takes `config.mesh`.
      step: "train" or "decode".
      output: folder for compile_check.md and the tables as CSV files.

    Returns:
      The exit code, see the head of this module.

    Raises:
      ValueError: an argument breaks a rule, `output` cannot be written to, or libtpu is missing
        and what to install.
    """
    target = topology.parse(topology_name)
    if step not in STEPS:
        raise ValueError(f"--step={step!r} must be one of {STEPS}")
    if mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(mesh))
    config.validate()
    if output is not None:
        workdirs.check_output("output", output)
    request = Request(config=config_lib.to_json(config), topology=topology_name, step=step)
    report = run_child(request, target.environment())
    if "error" in report:
        raise ValueError(report["error"])
    title = f"{type(config.model).__name__}, {report['describe']}, {topology_name}"
    row_length = getattr(config.data, "sequence_length", None)
    print(title)
    for name, rows in make_sections(report, row_length).items():
        limit = len(rows) if name == "Summary" else _SHOWN
        shown = [{key: _short(str(value)) for key, value in row.items()} for row in rows[:limit]]
        print(f"\n{name}\n{tables.text(shown)}")
    print(f"\n{verdict(report)}", flush=True)
    if output is not None:
        save(make_sections(report, row_length), title, verdict(report), pathlib.Path(output))
    return 0 if report["fits"] else 1


def run_child(request: Request, environment: dict[str, str]) -> dict[str, Any]:
    """Runs `ttt_jax.compile_check.child`.

    Args:
      request: what to compile.
      environment: variables that the process needs beside this one's.

    Returns:
      The child's report, and the partitioner's warnings from its standard error.

    Raises:
      ValueError: the process ended without a report; its last lines are in the message.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {environment.get('XLA_FLAGS', '')}".strip()
    variables = os.environ | environment | {"XLA_FLAGS": flags}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = pathlib.Path(folder) / "request.json", pathlib.Path(folder) / "report.json"
        asked.write_text(json.dumps(dataclasses.asdict(request)))
        command = [sys.executable, "-m", "ttt_jax.compile_check.child", str(asked), str(answer)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode or not answer.exists():
            last = "\n".join(done.stderr.splitlines()[-15:])
            raise ValueError(
                f"the compiling process ended with code {done.returncode} (-9: the machine's "
                f"memory was full); its last lines:\n{last}"
            )
        report = json.loads(answer.read_text())
    return report | {"rematerializations": rematerializations(done.stderr)}


def rematerializations(log: str) -> list[str]:
    """Finds the places where the partitioner gave up and made an array whole on every device.

    Args:
      log: libtpu's or XLA's log.

    Returns:
      One line each: from which sharding to which, for which operation.

    >>> rematerializations("W1 spmd.cc:1] [SPMD] Involuntary full rematerialization. It is bad.")
    ['It is bad.']
    """
    lines = (line for line in log.splitlines() if _REMATERIALIZATION in line)
    return [line.partition(_REMATERIALIZATION)[2].lstrip(". ") for line in lines]


def make_sections(report: dict[str, Any], row_length: int | None) -> dict[str, list[tables.Row]]:
    """Turns a report into tables, by title; a table without rows is left out.

    Args:
      report: of `run_child`.
      row_length: tokens of a row, by which gathered activations are known; None where the data
        has no rows of tokens.
    """
    sections = {"Summary": _summary(report)}
    if report["fits"]:
        sections["Collectives"] = _by_kind(report["collectives"])
        sections["Collectives one by one"] = _listed(report["collectives"])
        gathered = [c for c in report["collectives"] if _gathers_rows(c, row_length)]
        sections[f"Gathered floats with an axis of {row_length}"] = _listed(gathered)
        sections["Pallas kernels"] = [
            {
                "kernel": k["name"],
                "calls": k["calls"],
                "times a step": k["runs"],
                "VMEM KiB": k["vmem_bytes"] // 1024,
            }
            for k in report["kernels"]
        ]
    sections["Largest buffers"] = report["buffers"]
    sections["Involuntary full rematerialization"] = [
        {"where": line} for line in report["rematerializations"]
    ]
    return {name: rows for name, rows in sections.items() if rows}


def _listed(found: list[dict[str, Any]]) -> list[tables.Row]:
    """One collective a row, in the order given: the most bytes first."""
    return [
        {
            "kind": c["kind"],
            "MiB": round(c["bytes"] / 2**20, 3),
            "times a step": c["runs"],
            "result": c["shape"],
            "source": c["source"].replace("/while/body/eval_jaxpr", "/..."),
        }
        for c in found
    ]


def _gathers_rows(collective: dict[str, Any], row_length: int | None) -> bool:
    """Whether it makes floats of whole rows on every device, as no layer here needs."""
    arrays = re.findall(r"(b?f\d+)\[([\d,]*)\]", collective["shape"])
    return collective["kind"] == "all-gather" and any(
        str(row_length) in sizes.split(",") for _, sizes in arrays
    )


def _summary(report: dict[str, Any]) -> list[tables.Row]:
    """One quantity a row."""
    versions = report["versions"]
    quantities = {
        "devices": f"{report['devices']} x {report['device_kind']}",
        "mesh": ", ".join(f"{name} {size}" for name, size in report["mesh"].items()),
        "compiler": f"jax {versions['jax']}, libtpu {versions['libtpu']}",
        "parameters": f"{report['parameters']:,}",
        "model FLOPs a step": f"{report['model_flops']:.4g}",
    }
    if report["peak_flops"]:
        seconds = report["model_flops"] / report["devices"] / report["peak_flops"]
        quantities["shortest step at the peak of the data sheet, s"] = f"{seconds:.3f}"
    for name in ("lower_seconds", "compile_seconds"):
        quantities[name.replace("_", ", ")] = f"{report[name]:.1f}"
    if report["fits"]:
        memory = report["memory"]
        for name in ("argument", "output", "alias", "temp", "generated_code", "peak"):
            label = f"{name.replace('_', ' ')} GiB a device"
            quantities[label] = f"{memory[name] / _GIB:.3f}"
        if report["bytes_accessed"]:
            label = "GB read and written, each loop counted once"
            quantities[label] = f"{report['bytes_accessed'] / 1e9:.3f}"
        quantities["Pallas kernels"] = str(len(report["kernels"])) if report["kernels"] else "none"
    if report["hbm_bytes"]:
        quantities["memory of a device, GiB"] = f"{report['hbm_bytes'] / _GIB:.2f}"
    count = len(report["rematerializations"])
    quantities["involuntary full rematerializations"] = str(count) if count else "none"
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _by_kind(found: list[dict[str, Any]]) -> list[tables.Row]:
    """Collectives summed by kind: distinct ones, runs and bytes of one step on one device."""
    count, runs, moved = collections.Counter(), collections.Counter(), collections.Counter()
    for c in found:
        count[c["kind"]] += 1
        runs[c["kind"]] += c["runs"]
        moved[c["kind"]] += c["bytes"] * c["runs"]
    return [
        {
            "kind": kind,
            "distinct": count[kind],
            "times a step": runs[kind],
            "result MB a step": round(moved[kind] / 1e6, 3),
        }
        for kind in sorted(count)
    ]


def verdict(report: dict[str, Any]) -> str:
    """Returns one line: whether the program fits."""
    if not report["fits"]:
        return f"DOES NOT FIT: {report['message']}"
    peak, limit = report["memory"]["peak"] / _GIB, report["hbm_bytes"]
    if limit is None:
        return f"Compiles; {peak:.3f} GiB a device"
    return f"Fits: {peak:.2f} of {limit / _GIB:.2f} GiB a device"


def save(
    sections: dict[str, list[tables.Row]], title: str, line: str, folder: pathlib.Path
) -> None:
    """Writes compile_check.md, and each table as a CSV file.

    Args:
      sections: of `make_sections`.
      title: the first line.
      line: the verdict.
      folder: made where it is missing.

    Raises:
      OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", line]
    for name, rows in sections.items():
        parts.append(f"## {name}\n\n{tables.markdown(rows)}")
        tables.write_csv(rows, folder / f"{name.lower().replace(' ', '_')}.csv")
    (folder / "compile_check.md").write_text("\n\n".join(parts) + "\n")


def _short(text: str, limit: int = 64) -> str:
    """Leaves out the middle of a long text."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"
