"""Names of topologies, the memory of their chips, and the environment of a process for them.

`jax` is imported where it is used only: the environment has to be set before.
"""

import dataclasses
import math
import re
from typing import Any

# Memory that libtpu 0.0.42 to 0.0.50 give to a program, by device kind, in bytes: a little below
# the data sheet's. v4 and 7x have two devices a chip, each with half of its memory.
HBM_BYTES = {
    "TPU v4": int(15.25 * 2**30),
    "TPU v5 lite": int(15.75 * 2**30),
    "TPU v5": int(95.74 * 2**30),
    "TPU v6 lite": int(31.25 * 2**30),
    "TPU7x": int(94.75 * 2**30),
}

_TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
_NAME = re.compile(r"(?P<chip>[a-z]\w*):(?P<shape>[1-9]\d*(?:x[1-9]\d*){0,2})")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      chip: "cpu", or a TPU generation: "v2" to "v6e", "tpu7x".
      shape: chips along each axis of the torus; (n,) for n host devices.

    >>> str(Topology("v5e", (4, 4)))
    'v5e:4x4'
    """

    chip: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.shape))}"

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.chip != "cpu"

    def environment(self) -> dict[str, str]:
        """Returns the variables that a process needs before it imports jax.

        >>> Topology("cpu", (8,)).environment()["XLA_FLAGS"]
        '--xla_force_host_platform_device_count=8'
        """
        common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        if not self.is_tpu:
            count = math.prod(self.shape)
            flag = f"--xla_force_host_platform_device_count={count}"
            return common | {"XLA_FLAGS": flag}
        return common | {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two compilations at once, no TPU to share
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_LOG_DIR": "disabled",
            "TPU_STDERR_LOG_LEVEL": "1",  # warnings of the partitioner
            "TPU_MIN_LOG_LEVEL": "1",
        }

    def devices(self) -> list[Any]:
        """Returns the devices, in a process with `environment`.

        Raises:
          ValueError: the chip cannot be arranged so, or libtpu is not installed.
        """
        import jax

        if not self.is_tpu:
            return jax.devices()
        from jax.experimental import topologies

        one = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(self.shape) == 1 else {}
        try:
            return topologies.get_topology_desc(str(self), platform="tpu", **one).devices
        except RuntimeError as error:
            if "TPU support not installed" in str(error):
                raise ValueError(
                    f"--topology={self} needs libtpu to compile: "
                    f'pip install "jax[tpu]=={jax.__version__}" (no TPU is needed)'
                ) from error
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"--topology={self} is none that libtpu knows: {reason}; axes must divide by the "
                "2x2 chips of a host, as in v5e:4x4 or v5p:2x2x4"
            ) from error


def parse(name: str) -> Topology:
    """Reads a name such as "v5e:4x4", "v5p:4x4x4" or "cpu:8".

    Raises:
      ValueError: it is not of this form, or the chip is unknown.

    >>> parse("v5p:2x2x4").shape
    (2, 2, 4)
    >>> parse("v5e-16")
    Traceback (most recent call last):
    ...
    ValueError: --topology=v5e-16: write CHIP:AxB or CHIP:AxBxC, for example v5e:4x4, or cpu:8
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"--topology={name}: write CHIP:AxB or CHIP:AxBxC, for example v5e:4x4, or cpu:8"
        )
    chip = found["chip"]
    shape = tuple(map(int, found["shape"].split("x")))
    if chip != "cpu" and chip not in _TPUS:
        raise ValueError(f"--topology={name}: the chip must be cpu or one of {', '.join(_TPUS)}")
    if (chip == "cpu") != (len(shape) == 1):
        raise ValueError(f"--topology={name}: cpu has a number, as in cpu:8; a TPU two or three")
    return Topology(chip, shape)


def hbm_bytes(device_kind: str) -> int | None:
    """Returns the memory that a program may use on one device, None where it is not known.

    >>> hbm_bytes("TPU v5 lite") / 2**30
    15.75
    """
    return HBM_BYTES.get(device_kind)
