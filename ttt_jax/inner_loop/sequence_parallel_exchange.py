"""Exchanges between the devices of a mesh axis over which a sequence is cut, inside a shard_map.

Device ``p`` holds the ``p``-th stretch of the sequence. What it needs from its left is a prefix
over devices of an associative operation: of affine maps for states, of "the last tokens" for an
unfinished chunk.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.inner_loop.chunks import like, take
from ttt_jax.inner_loop.updates import Buffer

Exchange = Literal["all_gather", "ring"]
EXCHANGES = ("all_gather", "ring")


def ring_hops(devices: int) -> int:
    """Messages of the ring form of an exclusive prefix: one to the right, then doubling distances.

    Args:
      devices: along the axis, P.

    Returns:
      ``1 + ceil(log2(P - 1))``, and 0 for one device; all-gather moves ``P - 1``.

    >>> [ring_hops(devices) for devices in (1, 2, 4, 5, 8, 16)]
    [0, 1, 3, 3, 4, 5]
    """
    return 0 if devices == 1 else 1 + math.ceil(math.log2(devices - 1))


def fewest_bytes(devices: int) -> Exchange:
    """The form that moves fewer states: all-gather up to 4 devices, where both move ``P - 1``.

    At equal bytes the all-gather is one collective instead of ``P - 1`` that wait for each other.

    >>> fewest_bytes(4), fewest_bytes(5)
    ('all_gather', 'ring')
    """
    return "all_gather" if devices - 1 <= ring_hops(devices) else "ring"


def shift(tree, axis_name: str, hop: int = 1):
    """What the device ``hop`` places to the left holds; zeros where there is none.

    Args:
      tree: arrays, of the same shapes on all devices.
      axis_name: the mesh axis.
      hop: distance, 1 or more.
    """
    devices = lax.axis_size(axis_name)
    pairs = [(p, (p + hop) % devices) for p in range(devices)]  # vmap takes whole rings alone
    exists = lax.axis_index(axis_name) >= hop
    return jax.tree.map(lambda x: jnp.where(exists, lax.ppermute(x, axis_name, pairs), 0), tree)


def exclusive_prefix(
    decay: jax.Array | None,
    value: jax.Array,
    initial: jax.Array,
    axis_name: str,
    exchange: Exchange | None = None,
    *,
    matrices: bool = False,
) -> jax.Array:
    """The state ahead of each device, where device ``p`` maps ``S`` to ``decay_p S + value_p``.

    ``S_p = (Π_{m<p} decay_m) S_0 + Σ_{j<p} (Π_{j<m<p} decay_m) value_j``.

    Args:
      decay: factors that broadcast against ``value``, or ``None`` for 1; with ``matrices``
        ``[..., in, in]``, which multiply from the left.
      value: what the device's own tokens add, ``[..., in, out]``.
      initial: ``S_0``, the same on all devices; broadcasts against ``value``.
      axis_name: the mesh axis.
      exchange: ``"all_gather"`` of all maps, ``"ring"`` (a prefix by ``ppermute`` over doubling
        distances), or ``None`` for the one that moves fewer bytes.
      matrices: whether decays are matrices.

    Returns:
      ``S_p``, like ``value``.
    """
    devices = lax.axis_size(axis_name)
    initial = jnp.broadcast_to(initial, value.shape)
    if devices == 1:
        return initial
    chosen = exchange or fewest_bytes(devices)
    before = _gathered if chosen == "all_gather" else _ring
    return before(decay, value, initial, axis_name, matrix_product if matrices else jnp.multiply)


def matrix_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` in full precision: states are exact to float32 on every device."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _gathered(decay, value, initial, axis_name, times):
    """Applies everybody's maps to the left of this device, one after another."""
    index = lax.axis_index(axis_name)

    def step(state, device):
        number, decay, value = device
        after = value + (state if decay is None else times(decay, state))
        return jnp.where(number < index, after, state), None

    maps = lax.all_gather((decay, value), axis_name)
    return lax.scan(step, initial, (jnp.arange(lax.axis_size(axis_name)), *maps))[0]


def _ring(decay, value, initial, axis_name, times):
    """Composes the maps over doubling distances; device 0 holds the identity."""
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if decay is not None:
        identity = jnp.ones((), decay.dtype)
        if times is matrix_product:
            identity = jnp.eye(decay.shape[-1], dtype=decay.dtype)
    kept, added = shift((decay, value), axis_name)
    kept = None if kept is None else jnp.where(index == 0, identity, kept)
    hop = 1
    while hop < devices - 1:
        early_kept, early_added = shift((kept, added), axis_name, hop)
        if kept is None:
            added = early_added + added
        else:
            added = times(kept, early_added) + added
            kept = times(kept, jnp.where(index < hop, identity, early_kept))
        hop *= 2
    return added + (initial if kept is None else times(kept, initial))


def tail_hops(devices: int, length: int, room: int, documents: bool, carried: bool) -> int:
    """Messages of ``last_tokens``.

    Without padding the nearest shards fill the room; padding may empty any number of shards, so
    that tokens may come from everywhere.

    Args:
      devices: along the axis.
      length: tokens of a shard.
      room: tokens asked for.
      documents: whether shards may hold padding.
      carried: whether the first device has tokens from an earlier call.

    >>> tail_hops(4, 64, 15, False, False), tail_hops(4, 64, 15, True, False)
    (1, 3)
    """
    if devices == 1 or room == 0:
        return 0
    sources = devices if carried else devices - 1
    needed = sources if documents else min(sources, -(-room // length))
    return 1 + math.ceil(math.log2(needed))


def last_tokens(
    own: Buffer, carried: Buffer | None, length: int, documents: bool, axis_name: str
) -> Buffer:
    """The tokens just before each device's own, at the end of the room.

    Args:
      own: the last tokens of the device's stretch at the end of the room, ``count`` of them.
      carried: the same for the tokens before the sequence, or ``None``.
      length: tokens of a shard.
      documents: whether shards may hold padding.
      axis_name: the mesh axis.

    Returns:
      Tokens like ``own``, as many as the room holds or as there are.
    """
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    hops = tail_hops(devices, length, own.k.shape[2], documents, carried is not None)
    found = shift(own, axis_name) if hops else jax.tree.map(jnp.zeros_like, own)
    if carried is not None:
        found = jax.tree.map(lambda a, b: jnp.where(index == 0, a, b), carried, found)
    for step in range(hops - 1):
        found = _join(shift(found, axis_name, 2**step), found)
    return found


def _join(early: Buffer, late: Buffer) -> Buffer:
    """The last tokens of ``early`` followed by ``late``."""
    place = jnp.arange(late.k.shape[2])
    room = place.size
    from_late = place >= room - late.count[:, None]
    moved = jnp.minimum(place + late.count[:, None], room - 1)  # early tokens make way to the left

    def pick(a, b):
        return jnp.where(like(from_late, b), b, take(a, moved))

    count = jnp.minimum(early.count + late.count, room)
    return Buffer(*jax.tree.map(pick, early[:5], late[:5]), count)
