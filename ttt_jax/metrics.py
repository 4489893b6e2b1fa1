"""What a run reports: a progress line, JSON lines, TensorBoard if it is installed, a plot.

Rates count what has weight alone (real targets, not padding or document starts); model FLOP
utilisation (MFU) counts every position of the batch, because padding costs as much to compute.
Neither includes the first step of a process, which compiles.
"""

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


def progress_line(
    step: int, steps: int, values: dict[str, float], counted: str, seconds_left: float
) -> str:
    """Writes one line of progress.

    Args:
      step, steps: where the run is, and its length.
      values: loss, <counted>_per_second, mfu, grad_norm, learning_rate and, if any, skipped.
      counted: what the rate counts, a plural noun.
      seconds_left: estimate of the time to the end, NaN if unknown.

    >>> values = {"loss": 2.0, "tokens_per_second": 1234.0, "mfu": 0.5, "grad_norm": 1.0,
    ...           "learning_rate": 1e-3, "skipped": 0}
    >>> progress_line(5, 10, values, "tokens", 65.0)
    'step   5/10  loss 2.0000  1,234 tokens/s  MFU 50.0%  grad 1.00  lr 1.00e-03  ETA 1:05'
    """
    parts = [
        f"step {step:>{len(str(steps)) + 1}}/{steps}",
        f"loss {values['loss']:.4f}",
    ]
    rate = values[f"{counted}_per_second"]
    if math.isfinite(rate):
        parts.append(f"{rate:,.{0 if rate >= 100 else 1}f} {counted}/s")
        parts.append(f"MFU {100 * values['mfu']:.1f}%")
    parts.append(f"grad {values['grad_norm']:.2f}")
    parts.append(f"lr {values['learning_rate']:.2e}")
    if values.get("skipped"):
        parts.append(f"skipped {values['skipped']:.0f}")
    if math.isfinite(seconds_left):
        minutes, seconds = divmod(int(seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(
            f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}"
        )
    return "  ".join(parts)


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

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Appends one line and flushes it.

        Args:
          step: the run's step.
          kind: "train" or "eval".
          values: plain numbers by name.
        """
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "kind": kind, "time": time.time()} | finite
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard_writer(folder: pathlib.Path) -> Any:
    """Returns a TensorBoard writer, or None where tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        return None
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder))


class Reporter:
    """Turns the metrics of steps into progress lines and log entries.

    The numbers of a step are fetched when the next one has been started, so that the device
    never waits for the host.
    """

    def __init__(self, log: MetricsLog, steps: int, every: int, counted: str, flops: float):
        """Makes a reporter.

        Args:
          log: where to write.
          steps: length of the run.
          every: steps between two lines.
          counted: what the metric "count" counts, a plural noun ("tokens").
          flops: model FLOPs of a training step.
        """
        self._log, self._steps, self._every = log, steps, every
        self._counted, self._flops = counted, flops
        self._waiting: tuple[int, dict[str, jax.Array]] | None = None
        self.skipped_in_a_row = 0
        self.restart()

    def restart(self) -> None:
        """Reports the waiting step, and begins the next measurement of time after one more."""
        self.flush()
        self._since: float | None = None
        self._total, self._count = 0.0, 0

    def add(self, step: int, values: dict[str, jax.Array]) -> None:
        """Reports the step before and keeps this one until its numbers are ready.

        Args:
          step: the step's number.
          values: its metrics, scalars that may still be being computed.
        """
        self.flush()
        self._waiting = (step, values)

    def flush(self) -> None:
        """Waits for the step that was added last and reports it."""
        if self._waiting is None:
            return
        step, values = self._waiting[0], jax.device_get(self._waiting[1])
        self._waiting = None
        numbers = {name: float(value) for name, value in values.items()}
        self.skipped_in_a_row = int(numbers.pop("skipped_in_a_row"))
        if self.skipped_in_a_row:
            note(
                f"step {step}: loss or gradient is not finite; the step is skipped "
                f"({self.skipped_in_a_row} in a row, {numbers['skipped']:.0f} in all)"
            )
        numbers[self._counted] = numbers.pop("count")
        self._total += numbers[self._counted]
        self._count += 1
        if step % self._every == 0 or step == self._steps:
            self._line(step, numbers)
        elif self._since is None:
            self._start_clock()

    def _line(self, step: int, numbers: dict[str, float]) -> None:
        """Prints and logs one step, with the rates since the last line."""
        per_second = f"{self._counted}_per_second"
        rates = {per_second: math.nan, "mfu": math.nan}
        seconds_left = math.nan
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            mfu = self._count * self._flops / seconds / peak_flops()[0]
            rates = {per_second: self._total / seconds, "mfu": mfu}
            seconds_left = (self._steps - step) * seconds / self._count
        self._log.write(step, "train", numbers | rates)
        values = numbers | rates
        note(progress_line(step, self._steps, values, self._counted, seconds_left))
        self._start_clock()

    def _start_clock(self) -> None:
        self._since = time.perf_counter()
        self._total, self._count = 0.0, 0


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
    axes.grid(alpha=0.3)
    axes.legend()
    path = workdir / "loss.png"
    figure.savefig(path, dpi=120)
    return path
