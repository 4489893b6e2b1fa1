"""What a user's own fast network and loss promise, tried once on a few random numbers.

All forms of the inner loop rest on these promises; a network that breaks one would give other
results in one mode than in another.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.fast_nets import FastNet
from ttt_jax.inner_loop.losses import Loss

_TOKENS, _TOLERANCE = 3, 1e-2  # products of accelerators have few bits


@functools.cache
def check_net(
    net: FastNet, shapes: tuple[tuple[str, tuple[int, ...]], ...], dims: tuple[int, int]
) -> None:
    """Raises ``ValueError`` where a network's methods contradict what it says of itself.

    Args:
      net: the network; those of this package are taken at their word.
      shapes: (name, shape) of all weights of one head.
      dims: widths of keys and values.

    Source: this project's ``fast_nets.FastNet``.
    """
    if not (type(net).__module__.startswith("ttt_jax.") or net.mixes_tokens):
        _apart(_try_net, net, shapes, *dims)


@functools.cache
def check_loss(loss: Loss, value_dim: int) -> None:
    """Raises ``ValueError`` where a loss contradicts what it says of itself.

    Args:
      loss: the loss; those of this package are taken at their word.
      value_dim: width of a value.

    Source: this project's ``losses.Loss``.
    """
    if not type(loss).__module__.startswith("ttt_jax."):
        _apart(_try_loss, loss, value_dim)


def _apart(check, *arguments) -> None:
    """Calls ``check`` with numbers, also inside of a jit, a mesh or a shard_map.

    Those are contexts of a thread, so one of its own has none.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(check, *arguments).result()


def _try_net(net: FastNet, shapes, key_dim: int, value_dim: int) -> None:
    name = type(net).__name__
    weights = {n: _draw(seed, (1, *shape)) for seed, (n, shape) in enumerate(shapes)}
    x = _draw(len(shapes), (1, 1, _TOKENS, key_dim))
    out = net.apply(weights, x)
    wanted = (1, 1, _TOKENS, value_dim)
    if jnp.shape(out) != wanted or out.dtype != x.dtype:
        raise ValueError(
            f"{name}.apply makes {out.dtype}{list(jnp.shape(out))} of keys "
            f"{x.dtype}{list(x.shape)}; it must be {x.dtype}{list(wanted)}"
        )
    if net.last is None:
        return
    gate = net.gate(weights, x)
    parts = net.features(weights, x) @ weights[net.last] * (1 if gate is None else gate)
    if not _close(out, parts):
        raise ValueError(
            f"{name}.apply is not (features @ {net.last}) * gate, which last={net.last!r} "
            "promises; leave apply out, mend features and gate, or set last=None"
        )


def _try_loss(loss: Loss, value_dim: int) -> None:
    name, shape = type(loss).__name__, (1, 1, _TOKENS, value_dim)
    one, other, target = (_draw(seed, shape) for seed in range(3))
    value = loss.value(one, target)
    if jnp.shape(value) != shape[:-1]:
        raise ValueError(
            f"{name}.value makes {list(jnp.shape(value))} of predictions {list(shape)}; it must be "
            f"one number a token, {list(shape[:-1])}"
        )
    if loss.state_free and not _close(loss.cotangent(one, target), loss.cotangent(other, target)):
        raise ValueError(
            f"{name}.state_free=True, but its cotangent depends on the prediction; leave "
            "state_free out"
        )


def _draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def _close(a: jax.Array, b: jax.Array) -> bool:
    scale = float(jnp.max(jnp.abs(b)))
    return a.shape == b.shape and float(jnp.max(jnp.abs(a - b))) <= _TOLERANCE * scale
