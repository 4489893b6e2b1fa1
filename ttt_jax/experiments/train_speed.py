"""Training speed of LaCT-LLM V0 and V2 and the softmax baseline at one size, in one run.

    python -m ttt_jax.experiments.train_speed --size=760m

Needs jax, flax, optax and numpy alone: random tokens instead of text, no files but the table.
Each model runs in a process of its own, so that its peak of memory is its own and a model that
does not fit costs only its row. The step is the trainer's: loss, gradient, clipping, AdamW.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from ttt_jax import metrics, sharding
from ttt_jax.config import OptimizerConfig
from ttt_jax.models import lact_llm, transformer
from ttt_jax.objective import make_token_loss
from ttt_jax.train_step import init_state, make_train_step, make_trainee

# Title -> (preset, fields of the model's configuration).
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "V0 recurrent": (lact_llm.preset, {"variant": 0, "mode": "recurrent"}),
    "V2 recurrent": (lact_llm.preset, {"variant": 2, "mode": "recurrent"}),
    "V2 parallel": (lact_llm.preset, {"variant": 2, "mode": "parallel"}),
    "V6 parallel": (lact_llm.preset, {"variant": 6, "mode": "parallel"}),
    "V0 kernel": (lact_llm.preset, {"variant": 0, "mode": "kernel"}),
    "V2 kernel": (lact_llm.preset, {"variant": 2, "mode": "kernel"}),
    "V6 kernel": (lact_llm.preset, {"variant": 6, "mode": "kernel"}),
    "softmax": (transformer.preset, {}),
}
DEFAULT_CASES = ("V0 recurrent", "V2 parallel", "softmax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """One row of the table.

    Attributes:
      case: title.
      parameters: number of parameter values.
      tokens_per_second: tokens of a step over the median time of a step.
      step_seconds: median, shortest and longest time of a step.
      mfu: model FLOP/s over the devices' peak, in [0, 1].
      peak_gib: largest memory in use on the first device; None where the backend does not say.
      compile_seconds: time to the end of the first step.
      loss: after the last step, nats per token.
      note: why there are no numbers.
    """

    case: str
    parameters: int = 0
    tokens_per_second: float = 0.0
    step_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    mfu: float = 0.0
    peak_gib: float | None = None
    compile_seconds: float = 0.0
    loss: float = 0.0
    note: str = ""


def make_batch(vocab_size: int, rows: int, length: int, documents: bool) -> dict[str, np.ndarray]:
    """Draws a batch of random tokens, every one of which counts.

    Args:
      vocab_size: tokens lie below it.
      rows, length: B and T.
      documents: whether to pass segment_ids (one document a row) to the model.

    Returns:
      tokens and targets int32, weights float32, and segment_ids int32 if asked for, each [B, T].

    >>> sorted(make_batch(10, 1, 4, documents=False))
    ['targets', 'tokens', 'weights']
    """
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if documents:
        batch["segment_ids"] = np.zeros((rows, length), np.int32)
    return batch | {"weights": np.ones((rows, length), np.float32)}


def measure(case: str, options: argparse.Namespace) -> Speed:
    """Trains one model for a few steps and times them.

    Args:
      case: a key of `CASES`.
      options: of `parse`.

    Returns:
      The row of the table.
    """
    preset, fields = CASES[case]
    config = preset(options.size, dtype=options.dtype, remat=options.remat, **fields)
    config.validate()
    mesh = sharding.make_mesh()
    trainee = make_trainee(config, OptimizerConfig(), options.steps, mesh)
    batch = make_batch(config.vocab_size, options.rows, options.length, options.documents)
    seconds = []
    with jax.set_mesh(mesh):
        state = init_state(trainee, 0)
        step = make_train_step(trainee, make_token_loss(options.loss_chunk))
        placed = sharding.place_batch(batch, sharding.batch_sharding(mesh, options.rows))
        for _ in range(options.steps + 1):
            start = time.perf_counter()
            state, values = step(state, placed)
            loss = float(jax.device_get(values["loss"]))
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    tokens = options.rows * options.length
    flops = 3 * nnx.merge(trainee.graphdef, state.params).flops_per_token(options.length)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return Speed(
        case=case,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        tokens_per_second=tokens / median,
        step_seconds=(median, min(seconds[1:]), max(seconds[1:])),
        mfu=tokens * flops / median / metrics.peak_flops()[0],
        peak_gib=None if memory is None else memory / 2**30,
        compile_seconds=seconds[0],
        loss=loss,
    )


def format_table(rows: list[Speed]) -> str:
    """Writes the rows as an aligned Markdown table.

    >>> print(format_table([Speed(case="V2", note="out of memory")]).splitlines()[2])
    | V2 | ... | out of memory |
    """
    head = ["model", "parameters", "tokens/s", "step ms (min-max)", "MFU", "peak GiB", "compile s",
            "loss", "note"]  # fmt: skip
    text = [head]
    for row in rows:
        median, low, high = (1e3 * s for s in row.step_seconds)
        numbers = [
            f"{row.parameters:,}",
            f"{row.tokens_per_second:,.0f}",
            f"{median:.1f} ({low:.1f}-{high:.1f})",
            f"{100 * row.mfu:.1f}%",
            "-" if row.peak_gib is None else f"{row.peak_gib:.1f}",
            f"{row.compile_seconds:.1f}",
            f"{row.loss:.3f}",
        ]
        text.append([row.case, *(["-"] * 7 if row.note else numbers), row.note])
    widths = [max(len(line[i]) for line in text) for i in range(len(head))]
    text.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)) + " |"
        for line in text
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="760m", choices=["tiny", "125m", "760m", "3b"])
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help="titles, with commas")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=8, help="timed steps after one that compiles")
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype")
    parser.add_argument("--remat", default="full", help="none, full or dots")
    parser.add_argument("--loss-chunk", type=int, default=2048, help="positions with logits")
    parser.add_argument("--documents", action="store_true", help="pass document boundaries")
    parser.add_argument("--out", type=pathlib.Path, help="folder for train_speed.md and .json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [case for case in options.cases.split(",") if case not in CASES]
    if unknown:
        parser.error(f"--cases: {unknown[0]!r} is not one of {list(CASES)}")
    return options


def run_in_process(case: str, arguments: list[str]) -> Speed:
    """Measures one case in a new process; what goes wrong there becomes the row's note."""
    command = [sys.executable, "-m", "ttt_jax.experiments.train_speed", *arguments, "--one", case]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {done.returncode}"
        reason = next((line for line in lines if "RESOURCE_EXHAUSTED" in line), last)
        return Speed(case=case, note=f"FAILED: {reason[:120]}")
    record = json.loads(done.stdout.splitlines()[-1])
    return Speed(**{**record, "step_seconds": tuple(record["step_seconds"])})


def main() -> int:
    """Measures all cases and prints the table; 1 if one of them failed."""
    options = parse()
    if options.one:
        print(json.dumps(dataclasses.asdict(measure(options.one, options))))
        return 0
    print(
        f"Training speed, {options.size}, {options.rows} x {options.length} tokens a step, "
        f"{options.dtype}, remat {options.remat}, median of {options.steps} steps after one, "
        f"jax {jax.__version__}, documents {'on' if options.documents else 'off'}",
        flush=True,
    )
    rows = []
    for case in options.cases.split(","):
        rows.append(run_in_process(case, sys.argv[1:]))
        print(json.dumps(dataclasses.asdict(rows[-1])), flush=True)
    print(f"\n{format_table(rows)}\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "train_speed.md").write_text(format_table(rows) + "\n")
        record = [dataclasses.asdict(row) for row in rows]
        (options.out / "train_speed.json").write_text(json.dumps(record, indent=2) + "\n")
    return int(any(row.note for row in rows))


if __name__ == "__main__":
    sys.exit(main())
