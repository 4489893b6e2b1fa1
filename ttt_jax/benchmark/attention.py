"""Token-causal linear attention: shapes x implementations, peers where they are installed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttt_jax.benchmark import peers
from ttt_jax.benchmark.common import Options, Size, floor_ms, passes, times
from ttt_jax.benchmark.timing import Timing
from ttt_jax.tables import Row
from ttt_kernels import linear_attention

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")


def linear_attention_suite(options: Options) -> list[Row]:
    """Shapes, without and with decays, x implementations and peers x passes.

    Every implementation gets the same inputs. What cannot run here has one row that says so.
    fla comes after all others: PyTorch's profiler does not give CUPTI back in its process.
    """
    rows: list[Row] = []
    cases = [(heads, dim, decays) for heads, dim in options.size.attention
             for decays in (False, True)]
    for names in ((*IMPLEMENTATIONS, "jla"), ("fla",)):
        for case in cases:
            rows += _case_rows(case, names, options)
    order = list(dict.fromkeys(row["case"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["case"]))


def _case_rows(case: tuple[int, int, bool], names: tuple[str, ...], options: Options) -> list[Row]:
    """The rows of some implementations of one case: heads, their width, with decays or not."""
    heads, dim, decays = case
    tokens = options.size.tokens
    title = f"{heads}x{dim}" + (" decays" if decays else "")
    limit = floor_ms(4 * tokens * heads * dim * dim, 8 * tokens * heads * dim)
    arguments = [_inputs(options.size, heads, dim, decays, seed) for seed in (0, 1)]
    cotangents = [_inputs(options.size, heads, dim, False, seed)[0] for seed in (2, 3)]
    rows = []
    for name in names:
        run = _peer if name in peers.PEERS else _ours
        for direction, timing in run(name, arguments, cotangents, options):
            rows.append(_row(title, name, direction, timing, tokens, limit))
            if isinstance(timing, Timing):
                options.report(rows[-1], timing)
    return rows


def _row(case: str, name: str, direction: str, timing: Timing | str, tokens: int, limit) -> Row:
    if isinstance(timing, str):
        print(f"linear_attention {case} {name}: {timing}", flush=True)
        missing = dict.fromkeys(("ms", "spread", "kernels ms", "Mtok/s", "of limit"))
        why = "not installed" if "not installed" in timing else "cannot run here"
        return {"case": case, "implementation": f"{name} ({why})", "pass": direction, **missing}
    return {"case": case, "implementation": name, "pass": direction,
            **times(timing, tokens, limit if direction == "fwd" else None)}


def _inputs(size: Size, heads: int, dim: int, decays: bool, seed: int) -> tuple:
    """Random q, k, v and log decays between -0.02 and 0."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (1, size.tokens, heads, dim)
    arrays = tuple(jax.random.normal(key, shape).astype(size.dtype) for key in keys[:3])
    if not decays:
        return arrays
    return (*arrays, -0.02 * jax.random.uniform(keys[3], shape[:3], jnp.float32))


def _ours(name: str, arguments, cotangents, options: Options) -> Iterator:
    def attend(q, k, v, log_decay=None):
        return linear_attention(q, k, v, log_decay, implementation=name)[0]

    return passes(attend, arguments, cotangents, options, static=f"linear_attention_{name}")


def _peer(name: str, arguments, cotangents, options: Options) -> Iterator[tuple]:
    reason = peers.missing(name)
    if reason is not None:
        yield "fwd", reason
        return
    time = functools.partial(
        peers.attention_timing, name, arguments, seconds=options.seconds,
        batches=options.batches, kernel_times=options.kernel_times,
    )
    try:
        yield "fwd", time(None)
        if options.backward:
            yield "fwd+bwd", time(cotangents)
    except Exception as error:  # other people's code: its failure is a row of the table
        yield "fwd+bwd", f"{type(error).__name__}: {error}"[:300]
