"""What the benchmark suites share: shapes, options, passes, limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax

from ttt_jax.benchmark.timing import Timing, measure, with_gradient
from ttt_jax.tables import Row
from ttt_kernels import compat

# What one H200 reaches on large products and copies: measured, not the data sheet's.
H200_FLOPS = 744e12
H200_BYTES = 4.3e12


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of a run.

    Attributes:
      tokens: length of the one sequence.
      heads, dim: heads and head width of the LaCT layer.
      chunk: tokens a chunk of the LaCT layer.
      attention: (heads, dim) pairs of the token-causal suite.
      matrices: (number, rows, columns) of the Newton-Schulz suite.
      dtype: of the inputs.
    """

    tokens: int
    heads: int
    dim: int
    chunk: int
    attention: tuple[tuple[int, int], ...]
    matrices: tuple[tuple[int, int, int], ...]
    dtype: str


SIZES = {
    # LaCT-760M's layer, and the matrices of LaCT-NVS too; minutes on one H200.
    "full": Size(
        32768, 4, 384, 2048, ((12, 128), (24, 64)),
        ((64, 384, 384), (64, 128, 128), (6, 768, 1536)), "bfloat16",
    ),
    # Under two minutes on two CPU cores.
    "small": Size(8192, 2, 32, 256, ((2, 32),), ((8, 32, 32),), "float32"),
}


def show(row: Row, timing: Timing | None) -> None:
    """Prints a finished row in one line.

    >>> show({"case": "V2", "pass": "fwd", "ms": 0.5, "spread": None}, None)
      V2 fwd, ms 0.5
    """
    del timing
    names = [str(row[n]) for n in ("case", "implementation", "pass") if n in row]
    numbers = [f"{n} {x:.4g}" for n, x in row.items() if isinstance(x, float)]
    print("  " + ", ".join([" ".join(names), *numbers]), flush=True)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a suite runs: sizes, timing, what to leave out, and who hears of each finished row."""

    size: Size
    seconds: float = 0.2
    batches: int = 5
    kernel_times: bool = False
    backward: bool = True
    variants: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    report: Callable[[Row, Timing | None], None] = show


def default_size() -> str:
    """"full" on a Hopper GPU, else "small"."""
    return "full" if compat.hopper_problem() is None else "small"


def describe_device() -> str:
    """One line for the head of a table: device, JAX version, dtype rules."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({device.platform}), jax {jax.__version__}"


def passes(function: Callable, arguments: list[tuple], cotangents: list, options: Options,
         *, static: str) -> Iterator[tuple[str, Timing | str]]:
    """Times forward and forward + backward; an implementation's refusal comes as its text."""
    timed_passes: list[tuple[str, Callable, list[tuple]]] = [("fwd", function, arguments)]
    if options.backward:
        pairs = [(c, *a) for c, a in zip(cotangents, arguments, strict=True)]
        timed_passes.append(("fwd+bwd", with_gradient(function), pairs))
    for name, timed, inputs in timed_passes:
        timed.__name__ = f"{static}_{name.replace('+', '_')}"
        try:
            yield name, measure(
                jax.jit(timed), inputs, seconds=options.seconds, batches=options.batches,
                kernel_times=options.kernel_times,
            )
        except (ValueError, NotImplementedError) as error:
            yield name, str(error)
            return


def profile(row: Row, timing: Timing | None) -> list[Row]:
    """The row's GPU kernels, those of one name together, the longest first.

    >>> timing = Timing(1.0, 0.0, 1, 0.5, (("a", 0.125), ("b", 0.25), ("a", 0.125)))
    >>> [(k["kernel"], k["launches"], k["ms"]) for k in profile({"case": "V2"}, timing)]
    [('a', 2, 0.25), ('b', 1, 0.25)]
    """
    found: dict[str, list[float]] = {}
    for name, milliseconds in timing.kernels if timing is not None else ():
        found.setdefault(name, []).append(milliseconds)
    names = {n: row[n] for n in ("case", "implementation", "pass") if n in row}
    lines = [{**names, "kernel": name[:80], "launches": len(each), "ms": sum(each)}
             for name, each in found.items()]
    return sorted(lines, key=lambda line: -line["ms"])


def times(timing: Timing, tokens: int, limit_ms: float | None) -> Row:
    """The columns of a timed row; rates by the kernels' time where it was taken."""
    best = timing.kernel_milliseconds or timing.milliseconds
    return {
        "ms": timing.milliseconds,
        "spread": timing.spread,
        "kernels ms": timing.kernel_milliseconds,
        "Mtok/s": tokens / best / 1e3,
        "of limit": None if limit_ms is None else limit_ms / best,
    }


def floor_ms(flops: float, byte_count: float) -> float | None:
    """Time that the products or the bytes take at an H200's measured rates; None elsewhere."""
    if compat.hopper_problem() is not None:
        return None
    return 1e3 * max(flops / H200_FLOPS, byte_count / H200_BYTES)
