"""Linear and gated networks: the fast networks of linear attention, LaCT and ViTTT."""

import dataclasses
import functools
from typing import ClassVar

import jax

from ttt_jax.inner_loop.fast_nets.base import Cotangent, OuterProductNet, Weights, dense


# Term by term JAX would keep a dozen arrays as large as the hidden layer for the backward pass;
# these keep their arguments.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gate_error(gate: jax.Array, up: jax.Array, error: jax.Array) -> jax.Array:
    """The gradient of ``_gated`` for ``gate``; that for ``up`` is ``_gated(gate, error)``."""
    sigmoid = jax.nn.sigmoid(gate)
    return error * up * (sigmoid * (1 + gate * (1 - sigmoid)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(OuterProductNet):
    """``f(x) = x W``: linear attention's state, DeltaNet's, Mamba-2's.

    Example:
      >>> import jax
      >>> {n: w.shape for n, w in Linear().init(jax.random.key(0), 2, 4, 3, 0).items()}
      {'w': (2, 4, 3)}
    """

    names: ClassVar[tuple[str, ...]] = ("w",)
    last: ClassVar[str | None] = "w"

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w`` is ``(key_dim, value_dim)``; ``hidden_dim`` is not used."""
        return {"w": (key_dim, value_dim)}

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x) = x``."""
        return x

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """``∂L/∂W = xᵀ ∂L/∂f``."""
        return {"w": (x, cotangent(self.apply(weights, x)))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(OuterProductNet):
    """``f(x) = (silu(x W0) ⊙ (x W2)) W1``: LaCT's fast network.

    Source: LaCT (Zhang et al., 2025), ``lact_model/ttt_operation.py`` for the naming of weights.

    Example:
      >>> import jax
      >>> {n: w.shape for n, w in SwiGLU().init(jax.random.key(0), 1, 4, 3, 8).items()}
      {'w0': (1, 4, 8), 'w1': (1, 8, 3), 'w2': (1, 4, 8)}
    """

    names: ClassVar[tuple[str, ...]] = ("w0", "w1", "w2")
    last: ClassVar[str | None] = "w1"

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w0`` and ``w2`` are ``(key_dim, hidden_dim)``, ``w1`` ``(hidden_dim, value_dim)``."""
        return {
            "w0": (key_dim, hidden_dim),
            "w1": (hidden_dim, value_dim),
            "w2": (key_dim, hidden_dim),
        }

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x) = silu(x W0) ⊙ (x W2)``."""
        return _gated(dense(x, weights["w0"]), dense(x, weights["w2"]))

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Back-propagation through the gate: ``silu'(z) = σ(z) (1 + z (1 − σ(z)))``."""
        gate, up = dense(x, weights["w0"]), dense(x, weights["w2"])
        hidden = _gated(gate, up)
        error = cotangent(dense(hidden, weights["w1"]))
        hidden_error = dense(error, weights["w1"].mT)
        gate_error = _gate_error(gate, up, hidden_error)
        up_error = _gated(gate, hidden_error)
        return {"w0": (x, gate_error), "w1": (hidden, error), "w2": (x, up_error)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLU(OuterProductNet):
    """``f(x) = (x W1) ⊙ silu(x W2)``: a linear layer with an output gate, ViTTT's first branch.

    Source: ViTTT, ``vittt/models/ttt_block.py`` (arXiv 2512.01643).

    Example:
      >>> import jax
      >>> {n: w.shape for n, w in GLU().init(jax.random.key(0), 1, 4, 3, 0).items()}
      {'w1': (1, 4, 3), 'w2': (1, 4, 3)}
    """

    names: ClassVar[tuple[str, ...]] = ("w1", "w2")
    last: ClassVar[str | None] = "w1"

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """Both are ``(key_dim, value_dim)``; ``hidden_dim`` is not used."""
        return {"w1": (key_dim, value_dim), "w2": (key_dim, value_dim)}

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``φ(x) = x``."""
        return x

    def gate(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``silu(x W2)``."""
        return jax.nn.silu(dense(x, weights["w2"]))

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Back-propagation through the gate, ``silu'(z) = σ(z) (1 + z (1 − σ(z)))``."""
        value, gate = dense(x, weights["w1"]), dense(x, weights["w2"])
        error = cotangent(_gated(gate, value))
        return {"w1": (x, _gated(gate, error)), "w2": (x, _gate_error(gate, value, error))}
