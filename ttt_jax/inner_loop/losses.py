"""Inner losses: what the fast network is asked to do with a key and its value.

A loss is a frozen dataclass with ``value(prediction, target)``, one number a token. Its cotangent
``∂L/∂f`` is written out for the built-in losses and taken by ``jax.grad`` for a user's own one.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Base of the inner losses; a user's own one overrides ``value``.

    Attributes:
      scale: number that multiplies the loss.
      reduction: ``"sum"`` over the tokens of a chunk, or their ``"mean"``.
      state_free: whether ``∂L/∂f`` does not depend on the prediction. Only then can the gradients
        of all chunks be taken at once (``mode="parallel"``).

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class Cubic(Loss):
      ...     def value(self, prediction, target):
      ...         return self.scale * jnp.sum(jnp.abs(prediction - target) ** 3, -1) / 3
      >>> float(Cubic().cotangent(jnp.array([3.0]), jnp.array([1.0]))[0])
      4.0
    """

    scale: float = 1.0
    reduction: Literal["sum", "mean"] = "sum"
    state_free: ClassVar[bool] = False

    def __post_init__(self):
        if self.reduction not in ("sum", "mean"):
            raise ValueError(f"reduction={self.reduction!r}: use 'sum' or 'mean'")

    def value(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of each token: ``[..., time, value_dim]`` twice in, ``[..., time]`` out."""
        raise NotImplementedError(f"{type(self).__name__} must define value(prediction, target)")

    def cotangent(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """``∂L/∂prediction`` of each token, ``[..., time, value_dim]``, in the input's dtype."""
        return jax.grad(lambda f: jnp.sum(self.value(f, target)))(prediction)

    def descent(self, target: jax.Array) -> jax.Array:
        """``−∂L/∂prediction`` where the loss is ``state_free``, like ``target``: what is learnt."""
        return -self.cotangent(target, target).astype(target.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProduct(Loss):
    """``L = −scale · ⟨f(k), v⟩``: its gradient ``−scale · v`` never looks at the state.

    Source: LaCT (Zhang et al., 2025), ViTTT; linear attention is its one-step solution.

    Example:
      >>> import jax.numpy as jnp
      >>> float(DotProduct().value(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      -11.0
    """

    state_free: ClassVar[bool] = True

    def value(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """``−scale · ⟨prediction, target⟩``, one number a token."""
        return -self.scale * jnp.sum(prediction * target, -1)

    def cotangent(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """``−scale · target``."""
        return -self.scale * target

    def descent(self, target: jax.Array) -> jax.Array:
        """``scale · target``; the target itself, and no pass over memory, for a scale of 1."""
        return target if self.scale == 1 else self.scale * target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squared(Loss):
    """``L = scale/2 · |f(k) − v|²``: the delta rule's loss; its gradient is affine in the state.

    Source: Sun et al., *Learning to (Learn at Test Time)* (2024); DeltaNet.

    Example:
      >>> import jax.numpy as jnp
      >>> float(Squared().value(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      4.0
    """

    def value(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """``scale/2 · |prediction − target|²``, one number a token."""
        return 0.5 * self.scale * jnp.sum(jnp.square(prediction - target), -1)

    def cotangent(self, prediction: jax.Array, target: jax.Array) -> jax.Array:
        """``scale · (prediction − target)``."""
        return self.scale * (prediction - target)
