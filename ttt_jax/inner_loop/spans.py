"""An explicit order: a list of spans, each updating on and/or applied to its tokens.

LaCT-NVS runs one update on the tokens of the input views and then applies to all tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax.inner_loop import parallel
from ttt_jax.inner_loop.chunks import Tokens, stack_slots
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.prefix import scan_of
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Slot, State, apply, update


def run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    initial: State,
    start: State,
    backend: str | None = "xla",
    axis_name: str | None = None,
) -> tuple[jax.Array, State]:
    """Outputs (0 at tokens in no applied span) and the state after the last span, as written.

    Args:
      spec: the inner loop; its ``order`` is a tuple of ``Span``.
      static: matrices that are not trained.
      tokens: head-major tokens, at least as many as the largest ``end``.
      initial: the state before the first span.
      start: the state from which a document starts.
      backend: of the operations of ``ttt_kernels``.
      axis_name: a mesh axis whose devices have the rest of every span, or ``None``.
    """
    states = [initial]
    for span in spec.order:
        if span.update:
            stacked = stack_slots(spec, _cut(tokens, span), span.end - span.start, None)
            slot = jax.tree.map(lambda x: x[0], stacked)
            if axis_name is not None:
                slot = _slot_of_all(slot, axis_name)
            states.append(update(spec, static, states[-1], slot, start, backend, axis_name))
    return _read(spec, static, tokens, states, backend), states[-1]


def run_parallel(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    initial: State,
    start: State,
    implementation: str | None = None,
    backend: str | None = "xla",
) -> tuple[jax.Array, State]:
    """As ``run``, all updates at once, for a specification without ``parallel.obstacles``.

    ``implementation`` and ``backend`` are those of ``parallel.run``.
    """
    updates = [span for span in spec.order if span.update]
    if len(updates) <= 1:  # then nothing waits for anything: any network, any weight norm
        return run(spec, static, tokens, initial, start, backend)
    lengths = np.array([[span.end - span.start] for span in updates])
    inside = np.arange(lengths.max()) < lengths
    first = np.array([[span.start] for span in updates])
    index = np.where(inside, first + np.arange(lengths.max()), 0).ravel()
    picked = jax.tree.map(lambda x: x[:, :, index], tokens)
    mask = None if inside.all() else jnp.asarray(inside.reshape(1, 1, -1, 1))
    slots = stack_slots(spec, picked, int(lengths.max()), mask)
    scan = scan_of(tokens.k.dtype, implementation)
    found = parallel.all_states(spec, static, slots, initial, start, scan, backend)
    name, momenta, states = spec.fast_net.last, found.momenta, [initial]
    for n in range(len(updates) - 1):
        momentum = None if momenta is None else {name: momenta[n]}
        states.append(initial._replace(weights={name: found.weights[n]}, momentum=momentum))
    states.append(found.final)
    return _read(spec, static, tokens, states, backend), found.final


def _read(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    states: list[State],
    backend: str | None,
) -> jax.Array:
    """Each applied span, read from the state after the updates that come before it."""
    out = jnp.zeros((*tokens.q.shape[:3], tokens.v.shape[3]), tokens.q.dtype)
    done = 0
    for span in spec.order:
        done += span.update
        if span.apply:
            read = apply(spec, static, states[done], _cut(tokens, span).q, backend)
            # Not `out.at[...].set`: of a span of all tokens it has an empty array of indices, at
            # which XLA of jaxlib 0.11 ends in a segmentation fault inside of a shard_map.
            read = read.astype(out.dtype)
            out = jax.lax.dynamic_update_slice_in_dim(out, read, span.start, 2)
    return out


def _slot_of_all(slot: Slot, axis_name: str) -> Slot:
    """A slot that counts the tokens of all devices, and has their gates (means over tokens)."""
    momentum, forget = jax.lax.pmean((slot.momentum, slot.forget), axis_name)
    count = jax.lax.psum(slot.count, axis_name)
    return slot._replace(momentum=momentum, forget=forget, count=count)


def _cut(tokens: Tokens, span) -> Tokens:
    return jax.tree.map(lambda x: x[:, :, span.start : span.end], tokens)
