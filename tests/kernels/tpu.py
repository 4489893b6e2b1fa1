"""What the tests of TPU kernels share: the interpreter, lowering, and libtpu's own compiler."""

import contextlib
import io
import os
import re

import jax
import pytest

from ttt_kernels import compat

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
}


def interpreted(function, *arguments):
    """The result of a function that runs kernels in the TPU interpreter, free of races."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = jax.block_until_ready(function(*arguments))
    except Exception:
        compat.reset_tpu_interpreter()
        raise
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
    return result


def lowered(function, *arguments) -> str:
    """The program for a TPU, as far as JAX itself makes it; no libtpu needed."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


def device(chip: str):
    """A device of a chip that is not there; skips the test where libtpu is not installed."""
    from jax.experimental import topologies

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    except RuntimeError as error:
        pytest.skip(f"libtpu is not installed, say pip install 'jax[tpu]': {error}")
    return topology.devices[0]


def kernels(chip: str, function, *arguments) -> dict[str, int]:
    """Compiles for a chip; the VMEM bytes of each kernel in the program by name."""
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    traced = jax.jit(function).trace(*arguments)
    program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    found = {}
    for line in program.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name = re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call"', line).group(1)
            size = re.search(r'used_scoped_memory_configs.*?"size":"(\d+)"', line)
            found[name] = int(size.group(1)) if size else 0
    return found
