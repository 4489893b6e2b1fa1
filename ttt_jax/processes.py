"""Several processes that run one program: how they find each other, and what they agree on.

Every process runs the same steps in the same order. What only one of them knows (a signal that
reached it, a file that it could not read) has to reach the others before any of them acts on it.
"""

import functools
import os
import sys
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A process that is silent for so long, or waits so long to leave, ends the others.
_PATIENCE_SECONDS = 60


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the run's other processes; call it before anything else of JAX.

    Without arguments they are found in Slurm's variables, in those of GKE, or in a TPU slice's
    metadata. With them the processes can be started by hand on any machines, CPUs included.

    Args:
      coordinator_address: HOST:PORT of process 0, on which it listens.
      num_processes: number of processes, P.
      process_id: this one's number, 0 .. P - 1.

    Raises:
      ValueError: some arguments are given and not all, one is out of range, or without arguments
        no cluster is found.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes,
             "process_id": process_id}  # fmt: skip
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise ValueError(
            f"{', '.join(missing)} is missing: give all of {', '.join(f'--{n}' for n in given)}, "
            "or none of them and --distributed on a cluster that JAX knows"
        )
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise ValueError(f"--coordinator_address={coordinator_address} must be HOST:PORT")
    # JAX's own watch for SIGTERM would take the signal away from the trainer.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **given,
            heartbeat_timeout_seconds=_PATIENCE_SECONDS,
            shutdown_timeout_seconds=_PATIENCE_SECONDS,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Without a cluster that JAX knows (Slurm, GKE, a TPU slice) start each "
            "process with --coordinator_address=HOST:PORT --num_processes=P --process_id=0 .. P-1"
        ) from error


def fail(message: str) -> NoReturn:
    """Ends this process with a message and code 1; at once where others may wait for it.

    The usual end of one of several processes is a barrier, which those that still compute do not
    reach; a scheduler that sees the code ends them.

    Args:
      message: written to standard error.
    """
    print(message, file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(1)
    sys.exit(1)


def is_first() -> bool:
    """Says whether this process is the one that writes the files of which there is one.

    >>> is_first()
    True
    """
    return jax.process_index() == 0


def largest(value: int) -> jax.Array | int:
    """Starts to compute the largest of all processes' values; every process calls it.

    Args:
      value: this process's, an int32.

    Returns:
      The same int32 [] on every process. It may still be under way: `int()` waits for it. With one
      process it is `value` itself.

    >>> int(largest(3))
    3
    """
    if jax.process_count() == 1:
        return value
    place, maximum = _maximum()
    values = np.full(jax.local_device_count(), value, np.int32)
    return maximum(jax.make_array_from_process_local_data(place, values))


@functools.cache
def _maximum() -> tuple[NamedSharding, Any]:
    """One int32 a device, and the program that finds the largest."""
    mesh = Mesh(np.asarray(jax.devices()), ("device",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    place = NamedSharding(mesh, PartitionSpec("device"))
    return place, jax.jit(jnp.max, out_shardings=everywhere)


def all_true(value: bool) -> bool:
    """Says whether `value` is true on every process, once all have called this.

    >>> all_true(True), all_true(False)
    (True, False)
    """
    return int(largest(int(not value))) == 0


def all_equal(values: list[int]) -> bool:
    """Says whether every process holds the same numbers, once all have called this.

    Args:
      values: integers; their number may differ too.

    >>> all_equal([1, 2])
    True
    """
    if jax.process_count() == 1:
        return True
    digest = hash(tuple(values)) % 2**31  # of integers: the same in every process
    return bool(np.ptp(multihost_utils.process_allgather(np.int32(digest))) == 0)
