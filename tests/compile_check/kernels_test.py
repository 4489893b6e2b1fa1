"""The tables of kernels compiled alone: least work by hand, schedules read, one kernel compiled."""

import importlib.util
import os
import sys

import pytest

from ttt_jax.compile_check import kernel_cases, kernels, topology

_CASES = {case.name: case for case in kernel_cases.cases()}


def test_least_work_is_that_of_the_formulas():
    attention = _CASES["12 x 128, 32,768 tokens"]
    numbers = 32768 * 12 * 128  # of q, k, v, their gradients, the output and its cotangent
    assert attention.bytes() == 8 * 2 * numbers
    assert attention.flops == 6 * 2 * numbers * 128
    matrices = _CASES["12 x 128, 192 of 128 x 128"]
    assert matrices.bytes() == 4 * 4 * 192 * 128**2 and matrices.flops == 5 * 14 * 192 * 128**3


def test_a_schedule_is_read(tmp_path):
    for kernel, bundles in (("some_forward", 12), ("some_backward", 34)):
        name = f"17-jvp_{kernel}.1-02"
        text = f"Schedule analysis:\n\ttotal scheduled bundles:    {bundles}\n"
        (tmp_path / f"{name}-schedule-analysis_final_bundles.txt").write_text(text)
        use = "== CAPACTIY:\nMXU, VSTORE, VSTORE:SPILL, SALU\n    4     1     1     2\n"
        use += "== UTILIZATION:\n0 0 1 0\n2 1 0 0\n0 1 2 0\n"
        name = f"17-jvp_{kernel}.1-01-final_hlo-static-per-bundle-utilization.txt"
        (tmp_path / name).write_text(use)
    assert kernels.schedule(tmp_path, "some_forward") == (12, 3)
    assert kernels.schedule(tmp_path, "some_backward") == (34, 3)
    with pytest.raises(ValueError, match="no schedule of other_forward"):
        kernels.schedule(tmp_path, "other_forward")


def test_an_unknown_chip_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernels", "--chips=v5e,h100"])
    with pytest.raises(SystemExit, match=r"error: --chips=v5e,h100: \['h100'\] must be of"):
        kernels.main()


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu is missing: pip install "jax[tpu]"'
)
def test_a_kernel_is_measured():
    for name, value in topology.parse("v5e:2x2").environment().items():
        if name.startswith(("TPU", "ALLOW")):
            os.environ.setdefault(name, value)
    device = topology.parse(kernels.SLICES["v5e"]).devices()[0]
    case = _CASES["12 x 128, 192 of 128 x 128"]
    row = kernels.measure(case, device, "mosaic_tpu")
    assert row["least GFLOP"] < row["GFLOP"] < 2 * row["least GFLOP"]
    assert row["least MB"] < row["MB"] < 3 * row["least MB"]
    assert [float(size) > 0 for size in row["VMEM MiB fwd / bwd"].split(" / ")] == [True, True]
