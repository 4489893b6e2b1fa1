"""Time of a generated token, for models with a state of constant size and for a transformer."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import nnx

from ttt_jax.benchmark.common import H200_BYTES, Options
from ttt_jax.generate import Sampling, generate
from ttt_jax.models import build, lact_llm, transformer
from ttt_jax.tables import Row
from ttt_kernels import compat


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is generated.

    Attributes:
      preset: size of the language models.
      prompts: (rows, tokens a row) pairs.
      new_tokens: tokens added to each row.
    """

    preset: str
    prompts: tuple[tuple[int, int], ...]
    new_tokens: int


_FULL = Workload("760m", ((1, 64), (1, 8192), (16, 64)), 256)
_SMALL = Workload("tiny", ((1, 64), (4, 64)), 16)


def _models(work: Workload):
    """(name, configuration) of what is compared; a transformer's cache holds the whole row."""
    longest = max(tokens for _, tokens in work.prompts) + work.new_tokens
    for variant in (0, 2, 6):
        yield f"V{variant}", lact_llm.preset(work.preset, variant=variant)
    yield "transformer", transformer.preset(work.preset, max_decode_length=longest)


def decode_suite(options: Options) -> list[Row]:
    """Models x (rows, tokens of the prompts): milliseconds a step and tokens a second.

    Times `ttt_jax.generate`: prompts of random tokens, then greedy steps in one program, the
    fastest of `options.batches` runs. The limit reads every parameter once a step. LaCT-760M on a
    Hopper GPU with bfloat16 inputs, the tiny models otherwise; of `options` nothing else counts.
    """
    full = compat.hopper_problem() is None and options.size.dtype == "bfloat16"
    return decode_rows(_FULL if full else _SMALL, options)


def decode_rows(work: Workload, options: Options) -> list[Row]:
    """`decode_suite` of a given workload."""
    rows = []
    for name, config in _models(work):
        model = build(config)
        for batch, length in work.prompts:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, config.vocab_size, length) for _ in range(batch)]
            results = [
                generate(model, prompts, max_new_tokens=work.new_tokens,
                         sampling=Sampling(temperature=0.0))
                for _ in range(options.batches)
            ]
            ms = 1e3 * min(run.decode_seconds / run.steps for run in results)
            limit = _limit_ms(model)
            rows.append({
                "case": f"{work.preset} after {length} tokens x {batch}", "implementation": name,
                "pass": "decode", "ms": ms, "tokens/s": 1e3 * batch / ms,
                "of limit": None if limit is None else limit / ms,
                "prefill ms": 1e3 * min(run.prefill_seconds for run in results),
            })
            options.report(rows[-1], None)
    return rows


def _limit_ms(model) -> float | None:
    """Time to read the parameters at an H200's measured rate; None elsewhere."""
    if compat.hopper_problem() is not None:
        return None
    byte_count = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return 1e3 * byte_count / H200_BYTES
