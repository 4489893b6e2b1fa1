"""Timing of jitted functions: warm-up, rotated inputs, medians and spread.

Device work is asynchronous and a call costs tens of microseconds to dispatch, so calls are
queued in batches and a batch is timed as a whole. Kernel times (CUPTI, NVIDIA GPUs) leave the
dispatch out.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
      milliseconds: median over the batches of the wall time a call.
      spread: (slowest batch - fastest batch) / median.
      calls: calls in a batch.
      kernel_milliseconds: sum of the GPU kernels' times a call, or None where CUPTI is missing.
      kernels: (name, milliseconds) of each GPU kernel, in the order of launch.
    """

    milliseconds: float
    spread: float
    calls: int
    kernel_milliseconds: float | None = None
    kernels: tuple[tuple[str, float], ...] = ()


def with_gradient(function: Callable) -> Callable:
    """`function(*arguments)` and the gradients of all arguments for a cotangent given first."""
    def forward_and_backward(cotangent, *arguments):
        out, pullback = jax.vjp(function, *arguments)
        return out, pullback(cotangent)

    return forward_and_backward


def measure(
    function: Callable,
    argument_sets: Sequence[tuple],
    *,
    seconds: float = 0.2,
    batches: int = 5,
    max_calls: int = 100,
    kernel_times: bool = False,
    wait: Callable = jax.block_until_ready,
    kernels_of: Callable | None = None,
) -> Timing:
    """Times `function(*arguments)`, going round the argument sets.

    Args:
      function: a jitted function of arrays.
      argument_sets: at least one tuple of arguments; two or more keep inputs out of the caches.
      seconds: about how long one batch shall take.
      batches: number of timed batches.
      max_calls: largest number of calls in a batch.
      kernel_times: also asks for the kernels' times, on a GPU.
      wait: returns when the results given to it are there.
      kernels_of: finds the kernels' times of `(function, argument_sets)`; None asks CUPTI.

    Raises:
      ValueError: no argument set.

    >>> import jax.numpy as jnp
    >>> measure(jax.jit(jnp.sin), [(jnp.ones(8),)], seconds=0.01, batches=2).milliseconds > 0
    True
    """
    if not argument_sets:
        raise ValueError("argument_sets is empty; give at least one tuple of arguments")
    wait([function(*arguments) for arguments in argument_sets])  # compiles
    start = time.perf_counter()
    wait(function(*argument_sets[0]))
    once = max(time.perf_counter() - start, 1e-6)
    calls = max(1, min(max_calls, int(seconds / once)))
    rotation = itertools.cycle(argument_sets)
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        results = [function(*next(rotation)) for _ in range(calls - 1)]
        del results
        wait(function(*next(rotation)))
        times.append((time.perf_counter() - start) / calls * 1e3)
    median = statistics.median(times)
    kernels = (kernels_of or _kernel_times)(function, argument_sets) if kernel_times else ()
    total = sum(milliseconds for _, milliseconds in kernels) if kernels else None
    return Timing(median, (max(times) - min(times)) / median, calls, total, kernels)


def _kernel_times(function: Callable, argument_sets: Sequence[tuple]) -> tuple:
    """Median kernel times of one call through CUPTI; empty off NVIDIA GPUs."""
    if jax.devices()[0].platform != "gpu":
        return ()
    from jax.experimental.mosaic.gpu import profiler  # needs a CUDA build of jaxlib

    runs = []
    for arguments in argument_sets:
        cupti = profiler.Cupti(finalize=False)
        measured = cupti.measure(function, aggregate=False, iterations=5)
        runs.extend(measured(*arguments)[1])
    names = [name for name, _ in runs[0]]
    columns = zip(*([milliseconds for _, milliseconds in run] for run in runs), strict=True)
    return tuple(
        (name, statistics.median(column)) for name, column in zip(names, columns, strict=True)
    )
