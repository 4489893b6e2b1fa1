"""Several processes on this machine that are one run, as several hosts would be."""

import os
import pathlib
import socket
import subprocess
import sys

from tests.tiny_run import program_environment

_ROOT = pathlib.Path(__file__).parent.parent
TRAIN = (str(_ROOT / "launch" / "train.py"),)
_CONFIG = """
import json
import pathlib
from tests.tiny_run import tiny_config
from ttt_jax.config import MeshConfig


def get_config():
    config = tiny_config(pathlib.Path({text!r}), **json.loads({train!r}))
    config.mesh = MeshConfig(**json.loads({mesh!r}))
    return config
"""


def write_config(path: pathlib.Path, text: pathlib.Path, train: str, mesh: str) -> pathlib.Path:
    """Writes a configuration file: `tiny_config` on a text, with fields as JSON."""
    path.write_text(_CONFIG.format(text=str(text), train=train, mesh=mesh))
    return path


def start_hosts(commands: list[tuple[str, ...]], devices: int) -> list[subprocess.Popen]:
    """Starts the processes of a run, each with so many devices.

    Args:
      commands: of each process, a program and its arguments; the flags of the run are added.
      devices: devices of each.

    Returns:
      The processes, whose standard output is a pipe and holds the errors too.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    count = len(commands)
    run = [f"--coordinator_address={address}", f"--num_processes={count}"] if count > 1 else []
    return [
        subprocess.Popen(
            [sys.executable, *command, *run, *([f"--process_id={index}"] if run else [])],
            env=program_environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, command in enumerate(commands)
    ]


def finish(hosts: list, timeout: float = 1800.0) -> tuple[list[int], list[str]]:
    """Waits for the processes; returns their exit codes and what they wrote."""
    try:
        outputs = [host.communicate(timeout=timeout)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [host.returncode for host in hosts], outputs
