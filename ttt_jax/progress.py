"""Progress of a run: a line every few steps, rates, and where the time goes.

Rates count what has weight alone (real targets, not padding or document starts); model FLOP
utilisation (MFU) counts every position of the batch, because padding costs as much to compute.
Neither includes the first step of a process, which compiles.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ttt_jax.metrics import MetricsLog, note, peak_flops, peak_memory


def progress_line(
    step: int, steps: int, values: dict[str, float], counted: str, seconds_left: float
) -> str:
    """Writes one line of progress.

    Args:
      step, steps: where the run is, and its length.
      values: loss, <counted>_per_second, mfu, grad_norm, learning_rate and, if any, skipped and
        data_fraction, the part of the time spent waiting for data.
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
    if values.get("data_fraction", 0.0) >= 0.02:
        parts.append(f"waiting for data {100 * values['data_fraction']:.0f}%")
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


class Reporter:
    """Turns the metrics of steps into progress lines and log entries.

    The numbers of a step are fetched when the next one has been started, so that the device
    never waits for the host. Time is split into waiting for data, writing checkpoints, and the
    steps themselves.
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
        self._elsewhere = {"data": 0.0, "checkpoint": 0.0}
        self._whole = {"seconds": 0.0, "total": 0.0, "steps": 0} | self._elsewhere
        self._began, self._skipped = time.perf_counter(), 0
        self.skipped_in_a_row = 0
        self.restart()

    def restart(self) -> None:
        """Reports the waiting step, and begins the next measurement of time after one more."""
        self.flush()
        self._since: float | None = None
        self._total, self._count = 0.0, 0

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Counts the time inside as spent on "data" or "checkpoint"."""
        start = time.perf_counter()
        yield
        self._elsewhere[part] += time.perf_counter() - start

    def add(self, step: int, values: dict[str, jax.Array]) -> None:
        """Reports the step before and keeps this one until its numbers are ready.

        Args:
          step: the step's number.
          values: its metrics, scalars or one value a layer, that may still be being computed.
        """
        self.flush()
        self._waiting = (step, values)

    def flush(self) -> None:
        """Waits for the step that was added last and reports it."""
        if self._waiting is None:
            return
        step, values = self._waiting[0], jax.device_get(self._waiting[1])
        self._waiting = None
        numbers = {name: float(np.mean(value)) for name, value in values.items()}
        by_layer = {
            f"{name}_by_layer": np.asarray(value, float).tolist()
            for name, value in values.items()
            if np.ndim(value)
        }
        self._skipped = int(numbers["skipped"])
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
            self._line(step, numbers, by_layer)
        elif self._since is None:
            self._start_clock()

    def _line(self, step: int, numbers: dict[str, float], by_layer: dict[str, Any]) -> None:
        """Prints and logs one step, with the rates since the last line."""
        per_second = f"{self._counted}_per_second"
        rates = {per_second: math.nan, "mfu": math.nan}
        seconds_left = math.nan
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            mfu = self._count * self._flops / seconds / peak_flops()[0]
            rates = {per_second: self._total / seconds, "mfu": mfu}
            rates |= {f"{part}_fraction": s / seconds for part, s in self._elsewhere.items()}
            rates["step_seconds"] = (seconds - sum(self._elsewhere.values())) / self._count
            seconds_left = (self._steps - step) * seconds / self._count
            gained = {"seconds": seconds, "total": self._total, "steps": self._count}
            for name, value in (gained | self._elsewhere).items():
                self._whole[name] += value
        values = numbers | rates | peak_memory()
        self._log.write(step, "train", values | by_layer)
        note(progress_line(step, self._steps, values, self._counted, seconds_left))
        self._start_clock()

    def summary(self) -> str:
        """Says in one line what this process did and where its time went."""
        whole = self._whole
        parts = [f"{(time.perf_counter() - self._began) / 60:.1f} minutes"]
        if whole["seconds"]:
            mfu = whole["steps"] * self._flops / whole["seconds"] / peak_flops()[0]
            parts.append(f"{whole['total'] / whole['seconds']:,.0f} {self._counted}/s")
            parts.append(f"MFU {100 * mfu:.1f}%")
            for part in self._elsewhere:
                parts.append(f"{part} {100 * whole[part] / whole['seconds']:.1f}% of the time")
        parts += [f"peak memory {gib:.1f} GiB" for gib in peak_memory().values()]
        return ", ".join([*parts, f"{self._skipped} steps skipped"])

    def _start_clock(self) -> None:
        self._since = time.perf_counter()
        self._total, self._count = 0.0, 0
        self._elsewhere = dict.fromkeys(self._elsewhere, 0.0)
