"""Speed of the training step and of the forward pass of any configuration, on made-up batches.

    python -m ttt_jax.experiments.step_speed --config=configs/vittt.py:b_imagenet \
        --config.data.batch_size=256

Nothing is read and nothing but the table is written: the batch has the task's shapes and dtypes.
Fields of the configuration are overridden as in launch/train.py. The step is the trainer's: loss,
gradient, clipping, optimizer, average of the parameters; its state is donated. Calls are queued
as in training: a window of calls is timed as a whole, to the end of its last call's work.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import config_flags

from ttt_jax import metrics, programs, sharding
from ttt_jax.config import Config
from ttt_jax.tasks import Task, make_task
from ttt_jax.train_step import TrainState, init_state, make_train_step, make_trainee
from ttt_kernels import compat

_CONFIG = config_flags.DEFINE_config_file("config", help_string="configs/NAME.py:size")
_STEPS = flags.DEFINE_integer("steps", 20, "calls in each of five timed windows", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
      what: "train" or "forward".
      milliseconds: time of a call, median of the windows.
      spread: (slowest − fastest) / median of the windows.
      per_second: what the task counts, in a second.
      mfu: model FLOP/s over the devices' peak, in [0, 1].
      peak_gib: largest memory in use so far on the first device, or NaN.
      compile_seconds: time to trace and compile.
    """

    what: str
    milliseconds: float
    spread: float
    per_second: float
    mfu: float
    peak_gib: float
    compile_seconds: float


def make_batch(task: Task, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws a batch of a task's shapes in which every row counts.

    Args:
      task: of `make_task`.
      seed: of the random bytes.

    Returns:
      Random bytes for images, unit matrices for poses, ones for other floats, zeros for other
      integers.

    >>> from ttt_jax.config_views import ViewsConfig
    >>> from ttt_jax.models import lact_nvs
    >>> task = make_task(Config(model=lact_nvs.preset("tiny"), data=ViewsConfig(batch_size=2)))
    >>> make_batch(task)["images"].shape
    (2, 8, 32, 32, 3)
    """
    random = np.random.default_rng(seed)

    def draw(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype == np.uint8:
            return random.integers(0, 256, leaf.shape, np.uint8)
        if name == "poses":
            return np.broadcast_to(np.eye(4, dtype=leaf.dtype), leaf.shape).copy()
        fill = np.ones if np.issubdtype(leaf.dtype, np.floating) else np.zeros
        return fill(leaf.shape, leaf.dtype)

    return {name: draw(name, leaf) for name, leaf in task.example().items()}


def measure(config: Config, steps: int) -> list[Row]:
    """Times the training step of a configuration and the loss alone, without its gradient.

    Args:
      config: a validated configuration; its mesh is used.
      steps: calls in each of the five windows.

    Returns:
      The rows "forward" and "train".
    """
    task = make_task(config)
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    averaged = config.train.ema_decay > 0
    trainee = make_trainee(
        config.model, config.optimizer, max(config.train.steps, 1), mesh, averaged=averaged
    )
    batch = make_batch(task)
    with jax.set_mesh(mesh):
        rows = sharding.batch_sharding(mesh, config.data.batch_size, task.rows)
        placed = sharding.place_batch(batch, rows)
        state = init_state(trainee, config.train.seed)

        def forward(state: TrainState, batch: Any) -> Any:
            model = nnx.merge(trainee.graphdef, state.params, state.buffers)
            total, stats = task.loss(model, batch, jax.random.wrap_key_data(state.key))
            return state, stats | {"loss": total}

        accumulation, decay = config.train.accumulation_steps, config.train.ema_decay
        train = make_train_step(
            trainee, task.loss, accumulation_steps=accumulation, ema_decay=decay
        )
        flops = task.flops_per_step(nnx.merge(trainee.graphdef, state.params, state.buffers))
        rows = []
        options = compat.program_options()
        evaluate = jax.jit(forward, donate_argnums=0, compiler_options=options)
        for what, step, passes in (("forward", evaluate, 1), ("train", train, 3)):
            state, count, seconds, compiling = _time(step, state, placed, steps)
            median = statistics.median(seconds)
            memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", np.nan)
            rows.append(
                Row(
                    what=what,
                    milliseconds=1e3 * median,
                    spread=(max(seconds) - min(seconds)) / median,
                    per_second=count / median,
                    mfu=passes * flops / median / (metrics.peak_flops()[0] * mesh.size),
                    peak_gib=memory / 2**30,
                    compile_seconds=compiling,
                )
            )
    return rows


def _time(
    step: Callable[..., Any], state: TrainState, batch: Any, steps: int
) -> tuple[TrainState, float, list[float], float]:
    """(state after all calls, what a step counts, seconds a call of each window, of compiling)."""
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compiling, seconds = time.perf_counter() - start, []
    gc.freeze()  # else what tracing left is gone through in the middle of a window
    for calls in (2, *[steps] * 5):  # the first window warms up
        start = time.perf_counter()
        for _ in range(calls):
            state, values = compiled(state, batch)
        jax.block_until_ready((state, values))
        seconds.append((time.perf_counter() - start) / calls)
    return state, float(values["count"]), seconds[1:], compiling


def format_table(rows: list[Row], counted: str) -> str:
    """Writes the rows as an aligned Markdown table.

    >>> row = Row(what="train", milliseconds=80.0, spread=0.01, per_second=3200.0, mfu=0.35,
    ...           peak_gib=20.0, compile_seconds=15.0)
    >>> print(format_table([row], "images"))
    | what    |       ms | spread |  images/s |    MFU | peak GiB | compile s |
    |---------|----------|--------|-----------|--------|----------|-----------|
    | train   |    80.00 |   1.0% |   3,200.0 |  35.0% |     20.0 |      15.0 |
    """
    head = f"| what    |       ms | spread | {counted + '/s':>9} |    MFU | peak GiB | compile s |"
    lines = [head, "|".join("-" * len(cell) for cell in head.split("|"))]
    for row in rows:
        lines.append(
            f"| {row.what:<7} | {row.milliseconds:8.2f} | {row.spread:6.1%} | "
            f"{row.per_second:9,.1f} | {row.mfu:6.1%} | {row.peak_gib:8.1f} | "
            f"{row.compile_seconds:9.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures the configuration of the command line and prints the table."""
    programs.require(_CONFIG, "configs/vittt.py:b_imagenet")
    config = _CONFIG.value
    config.validate()
    task = make_task(config)
    print(
        f"{type(config.model).__name__}, {config.data.batch_size} rows a step, "
        f"{config.model.dtype}, {jax.device_count()} x {jax.devices()[0].device_kind}, jax "
        f"{jax.__version__}, median of five windows of {_STEPS.value} queued calls",
        flush=True,
    )
    print(format_table(measure(config, _STEPS.value), task.counted))


if __name__ == "__main__":
    programs.run(main)
