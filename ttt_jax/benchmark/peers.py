"""Other people's kernels for the same operation, timed on the same inputs where they are installed.

* fla: flash-linear-attention (package `fla-core`), Triton kernels for PyTorch.
* jla: jax-linear-attention, Mosaic GPU kernels for JAX.

Both call it `simple_gla`: linear attention causal by token with one log decay a head.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax.benchmark.timing import Timing, measure, with_gradient

PEERS = ("fla", "jla")


def missing(peer: str) -> str | None:
    """Why a peer cannot run here, or None: it is not installed, or it has no GPU.

    Raises:
      ValueError: an unknown name.

    >>> missing("jla") is None or "not installed" in missing("jla") or "GPU" in missing("jla")
    True
    """
    if peer not in PEERS:
        raise ValueError(f"peer={peer!r} must be one of {PEERS}")
    modules = {"fla": ("torch", "fla.ops.simple_gla"), "jla": ("jla.ops",)}[peer]
    if jax.devices()[0].platform != "gpu":
        return "needs an NVIDIA GPU"
    try:
        for name in modules:
            importlib.import_module(name)
    except ImportError as error:
        return f"not installed ({error})"
    return None


def jla_attention(q, k, v, log_decay=None) -> jax.Array:
    """Outputs by jax-linear-attention's `simple_gla` kernels; shapes as `linear_attention`'s."""
    ops = importlib.import_module("jla.ops")
    if log_decay is None:  # it has no form without; as a constant XLA folds it for 20 s a program
        log_decay = jax.lax.optimization_barrier(jnp.zeros(q.shape[:3], jnp.float32))
    return ops.linear_attention("simple_gla", q, k, v, g=log_decay, scale=1.0,
                                impl="mosaic_gpu")[0]


def _torch_arrays(arrays: Sequence[jax.Array], gradients: bool) -> tuple:
    torch = importlib.import_module("torch")
    made = []
    for x in arrays:
        dtype = torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32
        tensor = torch.from_numpy(np.array(x, np.float32)).to("cuda", dtype)
        made.append(tensor.requires_grad_(gradients))
    return tuple(made)


def fla_attention(arguments: Sequence[tuple], cotangents: Sequence[jax.Array] | None) -> tuple:
    """fla's `chunk_simple_gla` as a function of PyTorch tensors, with its inputs.

    Args:
      arguments: (q, k, v) or (q, k, v, log_decay) of JAX arrays, one tuple a set.
      cotangents: gradients of the output, which make the function run backwards too, or None.

    Returns:
      (function, argument sets as tensors): the function returns the output and, with cotangents,
      the gradients.
    """
    torch = importlib.import_module("torch")
    attend = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def forward(q, k, v, log_decay=None):
        with torch.no_grad():
            return attend(q, k, v, log_decay, scale=1.0)[0]

    def both(cotangent, *inputs):
        out = attend(*inputs, *(() if len(inputs) == 4 else (None,)), scale=1.0)[0]
        return out, torch.autograd.grad(out, inputs, cotangent)

    if cotangents is None:
        return forward, [_torch_arrays(a, False) for a in arguments]
    return both, [(*_torch_arrays((c,), False), *_torch_arrays(a, True))
                  for c, a in zip(cotangents, arguments, strict=True)]


def measure_torch(function: Callable, argument_sets: Sequence[tuple], **options) -> Timing:
    """`timing.measure` for PyTorch tensors on the GPU; kernel times by PyTorch's profiler."""
    torch = importlib.import_module("torch")

    def wait(results):
        torch.cuda.synchronize()
        return results

    return measure(function, argument_sets, wait=wait, kernels_of=_torch_kernels, **options)


def _torch_kernels(function: Callable, argument_sets: Sequence[tuple]) -> tuple:
    """Median kernel times of one call, in the order of launch."""
    torch = importlib.import_module("torch")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    runs = []
    for arguments in argument_sets:
        for _ in range(3):
            with torch.profiler.profile(activities=activities) as profile:
                function(*arguments)
                torch.cuda.synchronize()
            events = [e for e in profile.events() if e.device_time_total > 0]
            runs.append([(e.name, e.device_time_total / 1e3) for e in
                         sorted(events, key=lambda e: e.time_range.start)])
    runs = [run for run in runs if len(run) == len(runs[-1])]
    columns = zip(*([ms for _, ms in run] for run in runs), strict=True)
    return tuple((name, statistics.median(column))
                 for (name, _), column in zip(runs[-1], columns, strict=True))


def attention_timing(
    peer: str,
    arguments: Sequence[tuple],
    cotangents: Sequence[jax.Array] | None,
    **options,
) -> Timing:
    """Times a peer's linear attention, forward or (with cotangents) forward and backward.

    Args:
      peer: "fla" or "jla".
      arguments: sets of (q, k, v[, log_decay]), [batch, time, heads, dim] (log_decay without dim).
      cotangents: gradients of the output, one a set, or None.
      **options: of `timing.measure`.
    """
    if peer == "fla":
        function, sets = fla_attention(arguments, cotangents)
        return measure_torch(function, sets, **options)
    if cotangents is None:
        return measure(jax.jit(jla_attention), list(arguments), **options)
    both = jax.jit(with_gradient(jla_attention))
    return measure(both, [(c, *a) for c, a in zip(cotangents, arguments, strict=True)], **options)
