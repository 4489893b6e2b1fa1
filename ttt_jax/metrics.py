"""What a run writes: JSON lines, TensorBoard where it is installed, a plot; and devices' limits."""

import functools
import importlib.util
import json
import math
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one device, from the vendors' data sheets.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def note(message: str) -> None:
    """Prints a line for the person who watches the run, from the first process alone."""
    if jax.process_index() == 0:
        print(message, flush=True)


@functools.cache
def peak_flops() -> tuple[float, str]:
    """Returns the FLOP/s that all devices together can reach, and where the number is from.

    GPUs and TPUs: the data sheet's dense bfloat16 number. Any other device (a CPU): a float32
    product of two 1024x1024 matrices, measured once, which all host devices share.

    >>> flops, source = peak_flops()
    >>> flops > 0
    True
    """
    kind = jax.devices()[0].device_kind
    for name, flops in PEAK_FLOPS.items():
        if kind.startswith(name):
            return flops * jax.device_count(), f"data sheet of {name}, bfloat16"
    size = 1024
    product = jax.jit(jnp.dot)
    x = jnp.ones((size, size), jnp.float32)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds), f"measured {size}x{size} float32 product on {kind}"


def peak_memory() -> dict[str, float]:
    """Returns {"peak_memory_gib": ...} of the first local device; {} where it does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_memory_gib": peak / 2**30}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl; a last line cut by a killed process is left out.

    >>> read_metrics("/no/such/file")
    []
    """
    path = pathlib.Path(path)
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class MetricsLog:
    """Writes metrics.jsonl, one object a line, and TensorBoard events if that is installed.

    Each object has "step", "kind" ("train" or "eval") and numbers; a number that is not finite
    is written as null, which is what JSON has for it. Only the first process writes.
    """

    def __init__(self, workdir: str | os.PathLike[str], step: int):
        """Opens the log for a run that stands at `step`.

        Args:
          workdir: the run's folder.
          step: lines of later steps, which the resumed run will write again, are dropped.
        """
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self._file, self._board = None, None
        if jax.process_index() > 0:
            return
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        draft = self.path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(record) + "\n" for record in kept))
        draft.replace(self.path)
        self._file = self.path.open("a")
        self._board = _tensorboard_writer(pathlib.Path(workdir) / "tensorboard")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Appends one line and flushes it.

        Args:
          step: the run's step.
          kind: "train" or "eval".
          values: plain numbers by name, or lists with one number a layer.
        """
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        record = {"step": step, "kind": kind, "time": time.time()} | finite
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if not isinstance(value, list):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    """Puts None, which JSON has, for numbers that are not finite."""
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return value if math.isfinite(value) else None


def _tensorboard_writer(folder: pathlib.Path) -> Any:
    """Returns a TensorBoard writer, or None where tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        return None
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder))


def plot_loss(
    workdir: str | os.PathLike[str], title: str, loss_name: str
) -> pathlib.Path | None:
    """Draws the training loss, and the held-out loss where it was measured, as loss.png.

    Args:
      workdir: the run's folder, with metrics.jsonl.
      title: of the plot.
      loss_name: label of the loss with its unit.

    Returns:
      The path of the PNG, or None where there is nothing to draw or matplotlib is missing.
    """
    workdir = pathlib.Path(workdir)
    records = [r for r in read_metrics(workdir / "metrics.jsonl") if r.get("loss") is not None]
    if not records or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", {"linewidth": 1.2}), ("eval", {"marker": "o"})):
        points = [(r["step"], r["loss"]) for r in records if r["kind"] == kind]
        if points:
            label = {"train": "training batches", "eval": "held-out data"}[kind]
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel=loss_name, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    path = workdir / "loss.png"
    figure.savefig(path, dpi=120)
    return path
