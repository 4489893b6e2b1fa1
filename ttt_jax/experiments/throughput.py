"""The paper's throughput table on this machine: the layer alone, V0 to V6 in every mode."""

import dataclasses
import pathlib

from ttt_jax.benchmark import common, suites
from ttt_jax.experiments import paper
from ttt_jax.experiments.cells import Cell, Values
from ttt_jax.experiments.report import Report, compare_order, new_figure, style

# Tokens of the sequence: at "tiny" two CPU cores take about a minute.
_TOKENS = {"tiny": 2048, "small": 32768, "paper": 32768}


def cells(scale: str) -> list[Cell]:
    """One cell: the benchmark's suite `throughput_table` on this machine.

    Args:
      scale: one of `systems.SCALES`; "tiny" times small shapes, the others LaCT-760M's.
    """
    name = "small" if scale == "tiny" else "full"
    size = dataclasses.replace(common.SIZES[name], tokens=_TOKENS[scale])
    machine = common.describe_device()

    def run(_: pathlib.Path) -> Values:
        options = common.Options(
            size=size, seconds=0.2, batches=3, kernel_times=False, backward=True,
            variants=tuple(range(7)),
        )  # fmt: skip
        return {"rows": suites.throughput_table(options), "machine": machine}

    key = {"size": dataclasses.asdict(size), "machine": machine}
    return [Cell(name="throughput", key=key, run=run)]


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes the table and a picture of it.

    Args:
      results: of `run_cells`.
      out: the report.
      root: unused: all is in the results.
    """
    values = results["throughput"]
    if "failed" in values:
        return
    rows = [_beside_paper(row) for row in values["rows"]]
    out.table("throughput", rows, f"Layer alone, batch 1, on {values['machine']}.")
    forward = [row for row in rows if row["pass"] == "fwd" and row["Mtok/s"]]
    for form in ("recurrent", "parallel"):
        ours = {r["case"]: [r["Mtok/s"]] for r in forward if r["implementation"] == form}
        theirs = {case: found[form] for case, found in paper.THROUGHPUT.items() if form in found}
        out.text(f"Order of the {form} forms, forward: {compare_order(ours, theirs, 'higher')}")
    cases = list(dict.fromkeys(row["case"] for row in forward))
    figure, (axes,) = new_figure(1, width=7)
    found = {row["implementation"] for row in forward}
    forms = [form for form in ("recurrent", "parallel", "kernel") if form in found]
    for index, form in enumerate(forms):
        heights = [next((r["Mtok/s"] for r in forward if (r["case"], r["implementation"])
                         == (case, form)), 0.0) for case in cases]  # fmt: skip
        shift = (index - (len(forms) - 1) / 2) * 0.8 / len(forms)
        places = [place + shift for place in range(len(cases))]
        axes.bar(places, heights, 0.8 / len(forms), label=form, color=style(index)["color"])
    axes.set_xticks(range(len(cases)), cases)
    axes.set(xlabel="variant", ylabel="million tokens a second, forward")
    axes.legend()
    out.figure("throughput", figure, "Forward pass of one layer in each mode.")


def _beside_paper(row: Values) -> Values:
    """The row with the paper's rate, which it gives for the forward pass of some variants."""
    known = paper.THROUGHPUT.get(row["case"], {}) if row["pass"] == "fwd" else {}
    return row | {"paper Mtok/s": known.get(row["implementation"])}
