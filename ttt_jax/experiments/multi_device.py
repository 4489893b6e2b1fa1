"""What several devices of one host are worth: training on each mesh, one long layer, checkpoints.

    python -m ttt_jax.experiments.multi_device --devices=2 --size=125m --out=DIR

Random tokens instead of text; the batch is the same on every mesh, so that the losses compare and
two devices have half the work each. Every measurement runs in a process of its own, so that its
peak of memory is its own and one that fails costs its row alone. All compile side by side, then
run one after the other. Rehearsal without accelerators:
`XLA_FLAGS=--xla_force_host_platform_device_count=2` and ``--size=tiny --length=256
--layer-lengths=1024 --dtype=float32 --remat=none``.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax import sharding, tables
from ttt_jax.compile_check import hlo
from ttt_jax.config import OptimizerConfig
from ttt_jax.experiments.train_speed import make_batch
from ttt_jax.inner_loop import presets
from ttt_jax.inner_loop.sequence_parallel_cost import cost
from ttt_jax.layers.sharded import sharded_ttt
from ttt_jax.models import lact_llm
from ttt_jax.objective import make_token_loss
from ttt_jax.train_step import make_train_step, make_trainee

Row = dict[str, Any]
_ONE = "one device"


def meshes(devices: int) -> dict[str, dict[str, int]]:
    """The meshes to compare: one device, and all of them along each axis.

    >>> list(meshes(2))
    ['one device', 'data 2', 'fsdp 2', 'seq 2', 'model 2']
    """
    axes = ("data", "fsdp", "seq", "model")
    return {_ONE: {"data": 1}} | {f"{a} {devices}": {"data": 1} | {a: devices} for a in axes}


class Turns:
    """Processes compile together, and run alone once none compiles any more.

    A lock on a file, shared while compiling and exclusive while running.

    >>> with tempfile.NamedTemporaryFile() as file:
    ...     turns = Turns(file.name)
    ...     with turns.compiling():
    ...         pass
    ...     with turns.running():
    ...         pass
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        """Takes the lock's file; None where no other process is there."""
        self._path = path or os.devnull

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with open(self._path, "rb") as file:
            if self._path != os.devnull:
                fcntl.flock(file, kind)
            yield

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """The time of compiling: with others."""
        return self._locked(fcntl.LOCK_SH)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """The time of measuring: alone."""
        return self._locked(fcntl.LOCK_EX)


class Trainer:
    """A model on a mesh, with the trainer's step and a batch of random tokens."""

    def __init__(self, options: argparse.Namespace, name: str):
        """Builds it, and compiles its programs.

        Args:
          options: of `parse`.
          name: of a mesh of `meshes`.
        """
        sizes = meshes(options.devices)[name]
        used = jax.devices()[: int(np.prod(list(sizes.values())))]
        fields = dict(variant=options.variant, dtype=options.dtype, remat=options.remat)
        config = lact_llm.preset(options.size, **fields)
        self.mesh = sharding.make_mesh(**sizes, devices=used)
        self.trainee = make_trainee(config, OptimizerConfig(), options.steps, self.mesh)
        step = make_train_step(self.trainee, make_token_loss(options.loss_chunk))
        batch = make_batch(config.vocab_size, options.rows, options.length, documents=False)
        place = sharding.batch_sharding(self.mesh, options.rows)
        self.batch = sharding.place_batch(batch, place)
        self.seed = jax.device_put(jnp.zeros((), jnp.int32), jax.NamedSharding(self.mesh, jax.P()))
        init = jax.jit(self.trainee.init, out_shardings=self.trainee.shardings)
        begin = time.perf_counter()
        with jax.set_mesh(self.mesh):
            self.init = init.lower(self.seed).compile()
            self.step = step.lower(self.trainee.abstract, self.batch).compile()
        self.compile_seconds = time.perf_counter() - begin

    def start(self) -> Any:
        """A fresh training state."""
        return self.init(self.seed)

    def run(self, state: Any, steps: int) -> tuple[Any, list[float], list[float]]:
        """Trains; returns the state, the loss of each step and its seconds."""
        losses, seconds = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            state, values = self.step(state, self.batch)
            losses.append(float(jax.device_get(values["loss"])))
            seconds.append(time.perf_counter() - begin)
        return state, losses, seconds


def peak_gib() -> float | None:
    """Largest memory in use on one device so far, GiB; None where the backend does not say."""
    stats = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()]
    return None if None in stats else max(stats) / 2**30


def measure_training(options: argparse.Namespace, mesh: str) -> Row:
    """Times training steps on a mesh.

    Args:
      options: of `parse`.
      mesh: a key of `meshes`.
    """
    turns = Turns(options.turns)
    with turns.compiling():
        trainer = Trainer(options, mesh)
    with turns.running():
        _, losses, seconds = trainer.run(trainer.start(), options.steps + 1)
    median = statistics.median(seconds[1:])
    return {
        "mesh": mesh,
        "tokens/s": options.rows * options.length / median,
        "step ms": 1e3 * median,
        "peak GiB a device": peak_gib(),
        "compile s": trainer.compile_seconds,
        "losses": losses[:5],
    }


def measure_layer(options: argparse.Namespace, case: str) -> Row:
    """Times the forward pass of one inner loop, 4 heads of 384 at full size.

    Args:
      options: of `parse`.
      case: "LENGTH:DEVICES", the latter along mesh.seq.
    """
    length, devices = map(int, case.split(":"))
    heads, dim, chunk = (2, 16, 64) if options.size == "tiny" else (4, 384, 2048)
    spec = presets.lact_llm(options.variant, chunk_size=chunk)
    mesh = sharding.make_mesh(data=1, seq=devices, devices=jax.devices()[:devices])
    dtype = jnp.dtype(options.dtype)
    cut = jax.NamedSharding(mesh, jax.P(None, "seq"))

    def inputs(key):
        keys = jax.random.split(key, 5)
        shape = (1, length, heads, dim)
        q, k, v = (jax.random.normal(each, shape, dtype) * dim**-0.5 for each in keys[:3])
        gates = {"momentum": jnp.full(shape[:3], 0.9)} if spec.momentum else {}
        if spec.rate == "per_token":
            gates["lr"] = jax.random.uniform(keys[3], (*shape[:3], len(spec.trained))) * 1e-2
        return {"q": q, "k": k, "v": v, **gates}

    def layer(weights, tokens):
        return sharded_ttt(spec, weights, **tokens)[0]

    turns = Turns(options.turns)
    with turns.compiling(), jax.set_mesh(mesh):
        make = jax.jit(inputs, out_shardings=cut).lower(jax.random.key(0)).compile()
        weights = spec.init(jax.random.key(1), heads, dim)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), make.out_info
        )
        compiled = jax.jit(layer, out_shardings=cut).lower(weights, shapes).compile()
    with turns.running():
        tokens, seconds = make(jax.random.key(0)), []
        for _ in range(options.steps + 1):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(weights, tokens))
            seconds.append(time.perf_counter() - begin)
    sizes = dict(batch=1, heads=heads, length=length // devices, key_dim=dim, dtype=dtype)
    stated = cost(spec, devices=devices, **sizes).bytes_received if devices > 1 else 0
    shares = {"all-gather": (devices - 1) / devices, "collective-permute": 1}
    collectives = hlo.collectives(compiled.as_text())
    moved = sum(shares.get(found.kind, 2) * found.bytes * found.runs for found in collectives)
    return {
        "tokens": length,
        "devices": devices,
        "ms": 1e3 * statistics.median(seconds[1:]),
        "MB received (stated)": stated / 1e6,
        "MB received (compiled)": moved / 1e6,
        "peak GiB a device": peak_gib(),
    }


class _Nowhere:
    """Stands for a data iterator in a checkpoint."""

    def get_state(self) -> dict[str, int]:
        return {"step": 0}

    def set_state(self, state: dict[str, int]) -> None:
        del state


def measure_checkpoint(options: argparse.Namespace, case: str) -> Row:
    """Writes a checkpoint on one mesh and goes on on another.

    Args:
      options: of `parse`.
      case: "FROM:TO", keys of `meshes`.
    """
    from ttt_jax.checkpoint import Checkpoints
    from ttt_jax.config import Config

    turns = Turns(options.turns)
    with turns.compiling():
        written, resumed = (Trainer(options, name) for name in case.split(":"))
    with turns.running(), tempfile.TemporaryDirectory() as folder:
        state, _, _ = written.run(written.start(), 2)
        checkpoints = Checkpoints(folder, keep=2)
        config = Config(model=lact_llm.preset(options.size, variant=options.variant))
        begin = time.perf_counter()
        checkpoints.save(2, state, _Nowhere(), config)
        checkpoints.close()
        saved = time.perf_counter() - begin
        checkpoints = Checkpoints(folder)
        begin = time.perf_counter()
        restored = checkpoints.restore(resumed.trainee.abstract, _Nowhere())
        loaded = time.perf_counter() - begin
        checkpoints.close()
        _, (expected,), _ = written.run(state, 1)
        _, (found,), _ = resumed.run(restored, 1)
    row = {"written on": case.split(":")[0], "resumed on": case.split(":")[1]}
    row |= {"save s": saved, "restore s": loaded, "next loss": expected, "resumed loss": found}
    return row | {"relative difference": abs(found - expected) / abs(expected)}


MEASURES = {
    "training": measure_training,
    "layer": measure_layer,
    "checkpoint": measure_checkpoint,
}


def cases(options: argparse.Namespace) -> dict[str, list[str]]:
    """What is measured, by the name in `MEASURES`.

    >>> cases(parse(["--devices=2", "--layer-lengths=1024"]))["layer"]
    ['1024:1', '1024:2']
    """
    lengths = options.layer_lengths.split(",")
    ring = [1, options.devices]
    fsdp = f"fsdp {options.devices}"
    return {
        "training": list(meshes(options.devices)),
        "layer": [f"{length}:{n}" for length in lengths for n in ring],
        "checkpoint": [f"{fsdp}:{_ONE}", f"{_ONE}:{fsdp}"],
    }


def add_scaling(rows: list[Row]) -> list[Row]:
    """Adds to each training row its speed over one device's and its losses' distance from them.

    >>> rows = [{"mesh": "one device", "tokens/s": 2.0, "losses": [4.0]},
    ...         {"mesh": "seq 2", "tokens/s": 3.0, "losses": [4.0]}]
    >>> [(row["speed-up"], row["loss difference"]) for row in add_scaling(rows)]
    [(1.0, 0.0), (1.5, 0.0)]
    """
    one = next((row for row in rows if row.get("mesh") == _ONE), None)
    out = []
    for row in rows:
        row = dict(row)
        losses = row.pop("losses")
        row["speed-up"] = row["tokens/s"] / one["tokens/s"] if one else None
        pairs = zip(losses, one["losses"], strict=True) if one else ()
        row["loss difference"] = max((abs(a - b) / abs(b) for a, b in pairs), default=None)
        out.append(row)
    return out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="devices to compare with one")
    parser.add_argument("--size", default="125m", choices=list(lact_llm.PRESETS))
    parser.add_argument("--variant", type=int, default=2)
    parser.add_argument("--length", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch, on every mesh")
    parser.add_argument("--steps", type=int, default=8, help="timed runs after one that compiles")
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype")
    parser.add_argument("--remat", default="full", help="none, full or dots")
    parser.add_argument("--loss-chunk", type=int, default=2048, help="positions with logits")
    parser.add_argument("--layer-lengths", default="262144,1048576", help="tokens, with commas")
    parser.add_argument("--seconds", type=float, default=600, help="what is not done then, fails")
    parser.add_argument("--only", default=",".join(MEASURES), help="of these, with commas")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the tables")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--turns", help="file of the lock, to measure apart from other programs")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only.split(",") if name not in MEASURES]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is not one of {list(MEASURES)}")
    return options


def run_in_process(kind: str, case: str, arguments: list[str], seconds: float = 600.0) -> Row:
    """Takes one measurement in a new process and prints it; what goes wrong there is the row."""
    command = [sys.executable, "-m", "ttt_jax.experiments.multi_device", *arguments]
    command += ["--one", kind, case]
    # The processes wait for each other with their programs loaded: none may take all memory.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
        failed = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"not done after {seconds:.0f} seconds"
    else:
        if failed:
            sys.stderr.write(done.stderr[-5000:])
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            failed = lines[-1][:200] if lines else failed
    row = {"case": case, "failed": failed} if failed else json.loads(done.stdout.splitlines()[-1])
    print(f"{kind} {case}: {json.dumps(row)}", flush=True)
    return row


def main() -> int:
    """Takes all measurements and prints a table of each kind; 1 if one of them failed."""
    options = parse()
    if options.one:
        print(json.dumps(MEASURES[options.one[0]](options, options.one[1])))
        return 0
    todo = [(kind, case) for kind in options.only.split(",") for case in cases(options)[kind]]
    print(f"{len(todo)} measurements: all compile side by side, then run one by one", flush=True)
    with (
        tempfile.NamedTemporaryFile() as lock,
        concurrent.futures.ThreadPoolExecutor(len(todo)) as pool,
    ):
        arguments = [*sys.argv[1:], f"--turns={options.turns or lock.name}"]
        jobs = [pool.submit(run_in_process, *each, arguments, options.seconds) for each in todo]
        found = [(kind, job.result()) for (kind, _), job in zip(todo, jobs, strict=True)]
    for kind in options.only.split(","):
        _show(kind, [row for of, row in found if of == kind], options)
    return int(any("failed" in row for _, row in found))


def _show(kind: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Prints and writes the table of one kind, and names what failed."""
    done = [row for row in rows if "failed" not in row]
    done = add_scaling(done) if kind == "training" else done
    title = f"{kind}: LaCT-LLM {options.size} V{options.variant}, {options.rows} x "
    title += f"{options.length} tokens, {options.dtype}, jax {jax.__version__}"
    print(f"\n{title}\n{tables.text(done)}", flush=True)
    for row in rows:
        if "failed" in row:
            print(f"{row['case']}: FAILED: {row['failed']}", flush=True)
    if options.out is not None and done:
        tables.save(done, options.out, f"multi_device_{kind}", title)


if __name__ == "__main__":
    sys.exit(main())
