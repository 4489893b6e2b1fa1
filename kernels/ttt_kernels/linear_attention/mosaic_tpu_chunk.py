"""The kernels of chunk-causal linear attention on TPUs: one launch forwards, one backwards.

At each chunk's start the state `S` is put aside for the queries that read it; keys and values then
move it on, block by block. With `include_current_chunk` a chunk's queries come one chunk of steps
later than its keys, when the state holds the chunk whole, so both orders are the same kernel:

    step t:  if a chunk starts: seen = S;   o = q seen;   S' = e_end S + sum_j f_j k_j^T v_j

The backward pass takes the same steps in reverse. `R` is the gradient of `S'`, `P` that of `seen`:

    dk_j = f_j v_j R^T;   dv_j = f_j k_j R;   R' = e_end R;   P' = P + q^T do;   dq = do seen^T;
    if a chunk starts: R' += P', P' = 0

The gradient of a token's log decay is `<S, R>` ahead of the token: its value at its chunk's start,
and `k_j R v_j^T` of the chunk's tokens before it. Summed from the start, as here, the terms grow
from token to token; from the end, small results would be left from large ones.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention.mosaic_tpu_common import (
    Call,
    Inputs,
    carried,
    read_decay,
    read_tokens,
    scaled,
)
from ttt_kernels.tpu import COLUMNS, ROWS, dot, inside, row_sums


@dataclasses.dataclass(frozen=True)
class ChunkCall(Call):
    """A `Call` whose chunks are whole numbers of blocks.

    Attributes:
      chunk_blocks: blocks of a chunk.
      late: steps by which queries come after the keys of the same chunk: 0 or a chunk's.
    """

    chunk_blocks: int
    late: int

    @property
    def steps(self) -> int:
        """As of `Call`; late queries take steps of their own."""
        return self.blocks + self.late

    @property
    def seen_states(self) -> int:
        """States that are put aside for queries."""
        return pl.cdiv(self.steps, self.chunk_blocks)

    def key_block(self, t):
        """Block of keys and values at step `t`; the last one again after the row's end."""
        return lax.min(t, jnp.int32(self.blocks - 1))

    def query_block(self, t):
        """Block of queries at step `t`; the first one until it is its turn."""
        return lax.max(t - self.late, jnp.int32(0))

    def chunk(self, t):
        """Which of the states is read at step `t`."""
        return lax.div(t, jnp.int32(self.chunk_blocks))

    def starts_chunk(self, t):
        """Whether a chunk of keys starts at step `t`."""
        return lax.rem(t, jnp.int32(self.chunk_blocks)) == 0


def forward(
    x: Inputs, initial: jax.Array, call: ChunkCall, *, save_states: bool, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Outputs, final state and, with `save_states`, the states that were read.

    Arguments and results as of `mosaic_tpu_token.forward`, but for states
    [batch, heads, seen_states, key_dim, value_dim] and `x.valid`, which is None.
    """
    tiling, dtype = call.tiling, x.v.dtype
    sizes = (tiling.key_dim, tiling.value_dim)
    results = [
        jax.ShapeDtypeStruct(x.v.shape, dtype),
        jax.ShapeDtypeStruct(initial.shape, jnp.float32),
    ]
    specs = [call.token_spec(tiling.value_dim, call.query_block), call.state_spec()]
    scratch = []
    if save_states:
        shape = (call.batch, call.heads, call.seen_states, *sizes)
        results.append(jax.ShapeDtypeStruct(shape, dtype))
        specs.append(call.states_spec(call.chunk))
    else:
        shape = (1, tiling.heads_per_block, 1, *sizes)
        scratch.append(compat.mosaic_tpu().VMEM(shape, dtype))
    made = call.launch(
        _forward_body(call),
        "chunk_forward",
        (x, initial),
        [call.input_specs(x, call.query_block, call.key_block), call.state_spec()],
        results,
        specs,
        products=2 * sizes[0] * sizes[1],
        backward=False,
        scratch=scratch,
        interpret=interpret,
    )
    return tuple(made) if save_states else (*made, None)


def _forward_body(call: ChunkCall):
    tiling = call.tiling

    def body(x: Inputs, initial, out, state, seen):
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _():
            state[...] = initial[...]

        @pl.when(call.starts_chunk(t))
        def _():
            seen[:, :, 0] = state[...].astype(seen.dtype)

        @pl.when(t >= call.late)
        def _():
            valid = inside(call.query_block(t), tiling.block, call.length)
            for h in range(tiling.heads_per_block):
                q = read_tokens(x.q, h, tiling.key_dim, valid)
                lanes = slice(h * tiling.value_dim, (h + 1) * tiling.value_dim)
                out[0, :, lanes] = dot(q, seen[0, h, 0], COLUMNS, ROWS).astype(out.dtype)

        @pl.when(t < call.blocks)
        def _():
            valid = inside(t, tiling.block, call.length)
            for h in range(tiling.heads_per_block):
                k = read_tokens(x.k, h, tiling.key_dim, valid)
                v = read_tokens(x.v, h, tiling.value_dim, valid)
                decay = read_decay(x, h, tiling.block, between=False)
                added = dot(scaled(k, decay.to_end), v, ROWS, ROWS)
                state[0, h] = carried(state[0, h], decay) + added

    return body


def backward(
    x: Inputs,
    states: jax.Array,
    d_out: jax.Array,
    d_final: jax.Array,
    call: ChunkCall,
    *,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of q, k, v, the initial state and, where there are decays, their logarithms.

    Arguments and results as of `mosaic_tpu_token.backward`.
    """
    tiling, last = call.tiling, call.steps - 1
    sizes = (tiling.key_dim, tiling.value_dim)

    def reverse(order):
        return lambda t: order(last - t)

    terms = starts = terms_spec = starts_spec = None
    if x.sums is not None:
        shape = (call.batch, call.heads, 1, call.blocks * tiling.block)
        terms = jax.ShapeDtypeStruct(shape, jnp.float32)
        terms_spec = call.vector_spec(1, reverse(call.key_block))
        shape = (call.batch, call.heads, call.seen_states, 1, 1)
        starts = jax.ShapeDtypeStruct(shape, jnp.float32)
        starts_spec = pl.BlockSpec(
            (1, tiling.heads_per_block, 1, 1, 1),
            lambda b, g, t: (b, g, call.chunk(last - t), 0, 0),
        )
    results = (
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.q, x.k, x.v, d_final)),
        terms, starts,
    )  # fmt: skip
    queries, keys = reverse(call.query_block), reverse(call.key_block)
    specs = call.input_specs(x, queries, keys)
    d_out_spec = call.token_spec(tiling.value_dim, queries)
    *made, terms, starts = call.launch(
        _backward_body(call),
        "chunk_backward",
        (x, states, d_out, d_final),
        [specs, call.states_spec(reverse(call.chunk)), d_out_spec, call.state_spec()],
        results,
        (specs.q, specs.k, specs.v, call.state_spec(), terms_spec, starts_spec),
        products=4 * sizes[0] * sizes[1],
        backward=True,
        scratch=[compat.mosaic_tpu().VMEM((tiling.heads_per_block, *sizes), jnp.float32)],
        interpret=interpret,
    )
    return (*made, None if terms is None else _decay_gradient(terms, starts, call))


def _decay_gradient(terms: jax.Array, starts: jax.Array, call: ChunkCall) -> jax.Array:
    """Sums over the earlier tokens of each chunk, from its value at the chunk's start.

    Args:
      terms: [batch, heads, 1, blocks · block], `k_j R v_j^T` of each token.
      starts: [batch, heads, seen_states, 1, 1], `<S, R>` at each chunk's start.
      call: sizes.

    Returns:
      [batch, heads, 1, blocks · block].
    """
    size, whole = call.chunk_blocks * call.tiling.block, terms.shape[-1]
    padded = jnp.pad(terms[:, :, 0], ((0, 0), (0, 0), (0, -whole % size)))
    chunks = padded.reshape(*padded.shape[:2], -1, size)
    before = jnp.cumsum(chunks, axis=-1) - chunks
    before += starts[:, :, : chunks.shape[2], :, 0]
    return before.reshape(padded.shape)[:, :, None, :whole]


def _backward_body(call: ChunkCall):
    tiling = call.tiling
    heads = range(tiling.heads_per_block)

    def body(x: Inputs, states, d_out, d_final, dq, dk, dv, d_state, terms, starts, d_seen):
        step = pl.program_id(2)
        t = call.steps - 1 - step

        @pl.when(step == 0)
        def _():
            d_state[...] = d_final[...]
            d_seen[...] = jnp.zeros_like(d_seen)

        @pl.when(t < call.blocks)
        def _():
            valid = inside(t, tiling.block, call.length)
            for h in heads:
                _key_gradients(x, h, valid, tiling, dk, dv, d_state, terms)

        @pl.when(t >= call.late)
        def _():
            valid = inside(call.query_block(t), tiling.block, call.length)
            for h in heads:
                q = read_tokens(x.q, h, tiling.key_dim, valid)
                do = read_tokens(d_out, h, tiling.value_dim, valid)
                lanes = slice(h * tiling.key_dim, (h + 1) * tiling.key_dim)
                dq[0, :, lanes] = dot(do, states[0, h, 0], COLUMNS, COLUMNS).astype(dq.dtype)
                d_seen[h] += dot(q, do, ROWS, ROWS)

        @pl.when(call.starts_chunk(t))
        def _():
            if starts is not None:
                for h in heads:
                    starts[0, h, 0] = jnp.sum(states[0, h, 0] * d_state[0, h], keepdims=True)
            d_state[0] += d_seen[...]
            d_seen[...] = jnp.zeros_like(d_seen)

    return body


def _key_gradients(x, h, valid, tiling, dk, dv, d_state, terms):
    """What one head's block of keys, values and decays gets; moves the state's gradient on."""
    k = read_tokens(x.k, h, tiling.key_dim, valid)
    v = read_tokens(x.v, h, tiling.value_dim, valid)
    decay = read_decay(x, h, tiling.block, between=False)
    d_end = d_state[0, h]
    rounded = d_end.astype(v.dtype)
    k_gradient = scaled(dot(v, rounded, COLUMNS, COLUMNS), decay.to_end)
    v_gradient = scaled(dot(k, rounded, COLUMNS, ROWS), decay.to_end)
    dk[0, :, h * tiling.key_dim : (h + 1) * tiling.key_dim] = k_gradient.astype(dk.dtype)
    dv[0, :, h * tiling.value_dim : (h + 1) * tiling.value_dim] = v_gradient.astype(dv.dtype)
    d_state[0, h] = carried(d_end, decay)
    if terms is not None:
        terms[0, h] = row_sums(k * k_gradient)
