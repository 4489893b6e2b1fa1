"""The document that a carried state is in the middle of: does a call go on with it or begin anew?

A document is a run of equal ids, and a call may begin with the next one. So the state remembers the
id of its last token, and rows whose first id differs start from the initial weights.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.chunks import first_id
from ttt_jax.inner_loop.updates import State, select

NO_ID = -1
"""``State.document`` where no call had ids: the next one goes on, whatever its ids."""


def resume(state: State, start: State, segment_ids: jax.Array | None) -> State:
    """``state``, but ``start`` and no unfinished chunk in rows that begin with another document.

    Args:
      state: the carried state.
      start: the state from which a new document starts, without a buffer.
      segment_ids: ``[batch, time]``, -1 for padding, or ``None``: all rows go on.

    Returns:
      The state that the first tokens of this call continue; without ``document``.

    >>> import jax
    >>> from ttt_jax import presets, ttt
    >>> spec, x = presets.linear_attention(), jax.numpy.ones((1, 4, 1, 2))
    >>> weights, ids = spec.init(jax.random.key(0), 1, 2), jax.numpy.array([[3, 3, 4, 4]])
    >>> whole, _ = ttt(spec, weights, x, x, x, segment_ids=ids)
    >>> _, state = ttt(spec, weights, *[x[:, :2]] * 3, segment_ids=ids[:, :2])
    >>> rest, _ = ttt(spec, weights, *[x[:, 2:]] * 3, segment_ids=ids[:, 2:], initial_state=state)
    >>> bool((rest == whole[:, 2:]).all())
    True
    """
    before, state = state.document, state._replace(document=None)
    if segment_ids is None:
        return state
    first = first_id(segment_ids)
    begins = (first >= 0) & (before != NO_ID) & (first != before)
    return select(begins, start._replace(buffer=jax.tree.map(jnp.zeros_like, state.buffer)), state)


def last_document(carried: State | None, segment_ids: jax.Array | None, batch: int) -> jax.Array:
    """The ``document`` of the state after a call, ``[batch]`` int32.

    Args:
      carried: the state before the call, or ``None``.
      segment_ids: ``[batch, time]`` or ``None``.
      batch: rows.

    Returns:
      The id of each row's last token that is no padding; without one, what was carried.
    """
    before = jnp.full((batch,), NO_ID, jnp.int32) if carried is None else carried.document
    if segment_ids is None:
        return before
    last = first_id(segment_ids[:, ::-1])
    return jnp.where(last >= 0, last, before).astype(jnp.int32)
