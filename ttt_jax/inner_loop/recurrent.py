"""``mode="recurrent"``: chunk after chunk in a ``lax.scan``. Any specification runs here.

In training each chunk is recomputed in the backward pass, so memory grows with the number of
chunks (one state each) and not with what happens inside them; long scans of small chunks are
checkpointed in groups, so that about ``2 sqrt(n)`` states are kept for ``n`` chunks.
"""

import functools
import math

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import token_causal
from ttt_jax.inner_loop.chunks import Chunks
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Slot, State, apply, select, update

_PLAIN_SCAN = 64  # chunks up to which every state is kept


def run(
    spec: InnerLoop,
    static: Weights,
    chunks: Chunks,
    initial: State,
    start: State,
    backend: str | None = "xla",
) -> tuple[jax.Array, State]:
    """Output and final state of the inner loop over ``chunks``.

    Args:
      spec: the inner loop.
      static: matrices that are not trained, ``[heads, in, out]`` or with a leading batch axis.
      chunks: the arranged tokens.
      initial: the state before the first chunk, without its buffer.
      start: the state from which a new document starts.
      backend: of the operations of ``ttt_kernels``; ``None`` lets each of them pick.

    Returns:
      ``[batch, heads, time, value_dim]`` and the state, with the unfinished chunk.
    """
    base = read_base(spec, static, chunks, initial, start, backend)
    state, outputs = initial, None
    if chunks.reads:
        read = jax.tree.map(lambda x: x[: chunks.reads], chunks.slots)
        state, outputs = _walk(spec, static, state, read, start, backend)
    out = chunks.collect(base, outputs)
    if chunks.slots is not None and chunks.slots.k.shape[0] > chunks.reads:
        last = jax.tree.map(lambda x: x[-1], chunks.slots)
        state = update(spec, static, state, last, start, backend)
    return out, finish(chunks, state, start)


# A call outside of any `jax.jit` would else trace and compile the scan anew each time.
@functools.partial(jax.jit, static_argnames=("spec", "backend"), inline=True)
def _walk(
    spec: InnerLoop,
    static: Weights,
    state: State,
    slots: Slot,
    start: State,
    backend: str | None,
) -> tuple[State, jax.Array]:
    """The state after all slots, and each one's outputs."""

    def step(state, slot):
        if spec.order == "token_causal":
            return token_causal.step(spec, static, state, slot, start)
        state = update(spec, static, state, slot, start, backend)
        return state, apply(spec, static, state, slot.q, backend)

    return scan_checkpointed(step, state, slots)


def read_base(
    spec: InnerLoop,
    static: Weights,
    chunks: Chunks,
    initial: State,
    start: State,
    backend: str | None = "xla",
) -> jax.Array | None:
    """Outputs of the queries that come before any update of their document."""
    if chunks.base is None:
        return None
    out = apply(spec, static, initial, chunks.base, backend)
    if chunks.continues is None:
        return out
    fresh = apply(spec, static, start, chunks.base, backend)
    return jnp.where(chunks.continues[:, None, :, None], out, fresh)


def finish(chunks: Chunks, state: State, start: State) -> State:
    """The state to hand out: the last document's, with its unfinished chunk."""
    if chunks.restart is not None:
        state = select(chunks.restart, start, state)
    return state._replace(buffer=chunks.buffer)


def scan_checkpointed(step, carry, xs):
    """``lax.scan`` that keeps the carries only: all of up to 64 steps, else about ``2 sqrt(n)``."""
    step = jax.checkpoint(step, prevent_cse=False)
    length = jax.tree.leaves(xs)[0].shape[0]
    if length <= _PLAIN_SCAN:
        return jax.lax.scan(step, carry, xs)
    group = math.isqrt(length)
    whole = length // group * group

    @jax.checkpoint
    def run_group(carry, xs):
        return jax.lax.scan(step, carry, xs)

    grouped = jax.tree.map(lambda x: x[:whole].reshape(-1, group, *x.shape[1:]), xs)
    carry, outputs = jax.lax.scan(run_group, carry, grouped)
    outputs = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), outputs)
    if whole < length:
        carry, rest = jax.lax.scan(step, carry, jax.tree.map(lambda x: x[whole:], xs))
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, rest)
    return carry, outputs
