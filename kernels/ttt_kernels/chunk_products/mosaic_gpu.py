"""The chunk products on Hopper GPUs through Pallas' Mosaic GPU backend.

bf16 tokens, token-major as models have them: the kernels read and write slices of heads by
strided copies, so that nothing is transposed. float32 accumulators. The rules of what they run
are in `unsupported`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.chunk_products import (
    mosaic_gpu_outputs,
    mosaic_gpu_states,
    mosaic_gpu_summaries,
    tiling,
)
from ttt_kernels.chunk_products.tiling import BLOCK, OutputTiling, SummaryTiling

# What implementation=None leaves to the kernels.
_TIMED_DIMS = (128, 384, 768)
_TIMED_CHUNK = 1024


def unsupported(dtype: jnp.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why these kernels cannot run tokens of this dtype and these widths, or None.

    >>> unsupported(jnp.dtype(jnp.bfloat16), 384, 384) is None
    True
    """
    if dtype != jnp.bfloat16:
        return f"the tokens are {dtype}; the Mosaic GPU kernels take bfloat16"
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim > tiling.MAX_HEAD_DIM:
            return f"{name}={dim} is above the Mosaic GPU kernels' limit {tiling.MAX_HEAD_DIM}"
    return None


def untimed(length: int, chunk_size: int, *dims: int) -> str | None:
    """Why these kernels are not known to be the fastest for a call that they can run, or None.

    They were at least twice as fast as XLA, forwards and backwards, where they have been timed:
    on one H200, 32,768 tokens in chunks of 2048.

    >>> untimed(32768, 2048, 384, 384) is None
    True
    """
    if not set(dims) <= set(_TIMED_DIMS):
        return f"the Mosaic GPU kernels have been timed at widths of {_TIMED_DIMS}, not {dims}"
    if chunk_size < _TIMED_CHUNK or (chunk_size % BLOCK and chunk_size < length):
        return (
            f"the Mosaic GPU kernels have been timed at multiples of {BLOCK} tokens a chunk from "
            f"{_TIMED_CHUNK} on, not {chunk_size}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend of `vjp`: both kernels, with the overrides of tests and measurements.

    Under a mesh, call the operation inside `jax.shard_map(..., check_vma=False)` over batch and
    heads.

    Attributes:
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).
      summary_tiling, output_tiling: override the tiling's choice; None chooses.
    """

    interpret: bool = False
    summary_tiling: SummaryTiling | None = None
    output_tiling: OutputTiling | None = None

    def summaries(self, k, v, chunk_size: int, dtype: jnp.dtype) -> jax.Array:
        """`k^T v` over each chunk; see `ttt_kernels.chunk_summaries`."""
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        (k, v), chunk_size = _pad((k, v), chunk_size)
        plan = self.summary_tiling or tiling.summary_options(k.shape[-1], v.shape[-1])[0]
        kernel_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        made = mosaic_gpu_summaries.summaries(
            k, v, chunk_size, jnp.dtype(kernel_dtype), plan, self._interpreter()
        )
        return made[..., :key_dim, :value_dim].astype(dtype)

    def outputs(self, q, states, chunk_size: int, transposed: bool) -> jax.Array:
        """Each token times its chunk's state; see `ttt_kernels.chunk_outputs`."""
        length, value_dim = q.shape[1], states.shape[-2 if transposed else -1]
        whole = chunk_size
        (q,), chunk_size = _pad((q,), chunk_size)
        sizes = [tiling.padded_dim(dim) - dim for dim in states.shape[3:]]
        states = states.astype(q.dtype)
        if any(sizes):
            states = jnp.pad(states, [(0, 0)] * 3 + [(0, size) for size in sizes])
        units = q.shape[0] * q.shape[2] * states.shape[2]
        plan = self.output_tiling or tiling.output_options(
            q.shape[-1], tiling.padded_dim(value_dim), units, chunk_size // BLOCK
        )[0]
        out = mosaic_gpu_outputs.outputs(
            q, states, chunk_size, transposed, plan, self._interpreter()
        )
        return _unpad(out, length, whole, chunk_size, value_dim)

    def states(self, summaries, edge, include: bool, reverse: bool, dtype: jnp.dtype):
        """Running sums of float32 summaries; see `mosaic_gpu_states.states`."""
        sizes = summaries.shape[3:]
        widths = [(0, tiling.padded_dim(dim) - dim) for dim in sizes]
        if any(after for _, after in widths):
            summaries = jnp.pad(summaries, [(0, 0)] * 3 + widths)
            edge = jnp.pad(edge, [(0, 0)] * 2 + widths)
        made = mosaic_gpu_states.states(
            summaries, edge, include, reverse, dtype, self._interpreter()
        )
        return tuple(x[..., : sizes[0], : sizes[1]] for x in made)

    def _interpreter(self):
        return compat.gpu_interpret_params() if self.interpret else None


def _pad(arrays, chunk_size: int):
    """Widths and chunks padded to multiples of 64, time to one of 8; and the padded chunk's size.

    Chunks of whole blocks cost no pass over memory; others are spread out by one.
    """
    length = arrays[0].shape[1]
    padded = -(-min(chunk_size, length) // BLOCK) * BLOCK
    made = []
    for x in arrays:
        batch, _, heads, dim = x.shape
        width = tiling.padded_dim(dim) - dim
        if chunk_size % BLOCK and chunk_size < length:
            x = jnp.pad(x, ((0, 0), (0, -length % chunk_size), (0, 0), (0, 0)))
            x = x.reshape(batch, -1, chunk_size, heads, dim)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - chunk_size), (0, 0), (0, width)))
            x = x.reshape(batch, -1, heads, dim + width)
        elif width or length % 8:
            x = jnp.pad(x, ((0, 0), (0, -length % 8), (0, 0), (0, width)))
        made.append(x)
    return made, padded


def _unpad(out: jax.Array, length: int, chunk_size: int, padded: int, width: int) -> jax.Array:
    """Undoes `_pad` for the outputs."""
    if chunk_size % BLOCK and chunk_size < length:
        out = out.reshape(out.shape[0], -1, padded, *out.shape[2:])[:, :, :chunk_size]
        out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, :length, :, :width]
