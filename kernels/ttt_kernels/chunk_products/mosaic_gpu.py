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
    mosaic_gpu_outputs_registers,
    mosaic_gpu_states,
    mosaic_gpu_summaries,
    tiling,
)
from ttt_kernels.chunk_products.tiling import BLOCK, OutputTiling, RegisterTiling, SummaryTiling

# What implementation=None leaves to the kernels.
_TIMED_DIMS = (128, 384, 768)
_TIMED_CHUNK = 1024
# Contracted widths at which the outputs' state is kept in registers.
_REGISTER_DIMS = (384,)


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


def states_problem(summaries: jax.Array, initial: jax.Array) -> str | None:
    """Why the kernel of the states cannot run these arguments, or None."""
    if initial.dtype != jnp.float32 or summaries.dtype not in (jnp.float32, jnp.bfloat16):
        return (
            f"initial is {initial.dtype} and summaries are {summaries.dtype}; the Mosaic GPU "
            "kernel takes float32 and float32 or bfloat16"
        )
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
    output_tiling: OutputTiling | RegisterTiling | None = None

    def summaries(self, k, v, chunk_size: int, dtype: jnp.dtype, rates=None) -> jax.Array:
        """`sum_t rate_t k_t^T v_t` over each chunk; see `ttt_kernels.chunk_summaries`."""
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        rates = _time_last(rates, chunk_size)
        (k, v), chunk_size = _pad((k, v), chunk_size)
        plan = self.summary_tiling or tiling.summary_options(
            k.shape[-1], v.shape[-1], rates is not None
        )[0]
        kernel_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        made = mosaic_gpu_summaries.summaries(
            k, v, rates, chunk_size, jnp.dtype(kernel_dtype), plan, self._interpreter()
        )
        return made[..., :key_dim, :value_dim].astype(dtype)

    def outputs(self, q, states, chunk_size: int, transposed: bool) -> jax.Array:
        """Each token times its chunk's state; see `ttt_kernels.chunk_outputs`."""
        return self.rated_outputs(q, states, None, None, chunk_size, transposed)[0]

    def rated_outputs(
        self, q, states, rates, other, chunk_size: int, transposed: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Outputs times their token's rate, and their products with `other`; see `vjp`."""
        length, value_dim = q.shape[1], states.shape[-2 if transposed else -1]
        whole = chunk_size
        rates = _time_last(rates, chunk_size)
        (q, *others), chunk_size = _pad((q,) if other is None else (q, other), chunk_size)
        widths = [(0, tiling.padded_dim(dim) - dim) for dim in states.shape[3:]]
        states = states.astype(q.dtype)
        if any(after for _, after in widths):
            states = jnp.pad(states, [(0, 0)] * 3 + widths)
        plan, dots = self._output_plan(q, states, chunk_size, transposed, other is not None), None
        interpreter = self._interpreter()
        if isinstance(plan, RegisterTiling):
            out = mosaic_gpu_outputs_registers.outputs(
                q, states, rates, chunk_size, transposed, plan, interpreter
            )
        else:
            out, dots = mosaic_gpu_outputs.outputs(
                q, states, rates, *(others or [None]), chunk_size, transposed, plan, interpreter
            )
        if dots is not None:
            dots = jnp.swapaxes(jnp.sum(dots, 0), 1, 2)[..., None]
            dots = _unpad(dots, length, whole, chunk_size, 1)[..., 0]
        return _unpad(out, length, whole, chunk_size, value_dim), dots

    def _output_plan(self, q, states, chunk_size: int, transposed: bool, dotted: bool):
        """The tiling of a call with padded arguments; only one of the forms makes dots."""
        if self.output_tiling and not (dotted and isinstance(self.output_tiling, RegisterTiling)):
            return self.output_tiling
        key_dim, value_dim = q.shape[-1], states.shape[-2 if transposed else -1]
        units = q.shape[0] * q.shape[2] * states.shape[2]
        sizes = key_dim, value_dim, units, chunk_size // BLOCK
        if key_dim in _REGISTER_DIMS and not dotted and compat.layout_problem() is None:
            return tiling.register_options(*sizes)[0]
        return tiling.output_options(*sizes)[0]

    def states(self, summaries, decay, edge, include: bool, reverse: bool, dtype: jnp.dtype):
        """Decayed running sums of summaries; see `mosaic_gpu_states.states`."""
        sizes = summaries.shape[3:]
        widths = [(0, tiling.padded_dim(dim) - dim) for dim in sizes]
        if any(after for _, after in widths):
            summaries = jnp.pad(summaries, [(0, 0)] * 3 + widths)
            edge = None if edge is None else jnp.pad(edge, [(0, 0)] * 2 + widths)
        made = mosaic_gpu_states.states(
            summaries, decay, edge, include, reverse, dtype, self._interpreter()
        )
        return tuple(x[..., : sizes[0], : sizes[1]] for x in made)

    def _interpreter(self):
        return compat.gpu_interpret_params() if self.interpret else None


def _pad(arrays, chunk_size: int):
    """Widths and chunks padded to multiples of 64, time to one of 8; and the padded chunk's size.

    Chunks of whole blocks cost no pass over memory; others are spread out by one.
    """
    length = arrays[0].shape[1]
    made = []
    for x in arrays:
        width = tiling.padded_dim(x.shape[3]) - x.shape[3]
        if width:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, width)])
        made.append(_spread(x, chunk_size, 8))
    return made, _padded_chunk(length, chunk_size)


def _padded_chunk(length: int, chunk_size: int) -> int:
    return -(-min(chunk_size, length) // BLOCK) * BLOCK


def _spread(x: jax.Array, chunk_size: int, multiple: int) -> jax.Array:
    """[batch, time, ...] with chunks padded to whole blocks, or time to a multiple."""
    length, padded = x.shape[1], _padded_chunk(x.shape[1], chunk_size)
    rest = [(0, 0)] * (x.ndim - 2)
    if chunk_size % BLOCK == 0 or chunk_size >= length:
        return jnp.pad(x, [(0, 0), (0, -length % multiple), *rest]) if length % multiple else x
    x = jnp.pad(x, [(0, 0), (0, -length % chunk_size), *rest])
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padded - chunk_size), *rest])
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _time_last(rates: jax.Array | None, chunk_size: int) -> jax.Array | None:
    """Rates [batch, time, heads] as the kernels read them, [batch, heads, time] float32."""
    if rates is None:
        return None
    return jnp.swapaxes(_spread(rates.astype(jnp.float32), chunk_size, BLOCK), 1, 2)


def _unpad(out: jax.Array, length: int, chunk_size: int, padded: int, width: int) -> jax.Array:
    """Undoes `_pad` for the outputs."""
    if chunk_size % BLOCK and chunk_size < length:
        out = out.reshape(out.shape[0], -1, padded, *out.shape[2:])[:, :, :chunk_size]
        out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, :length, :, :width]
