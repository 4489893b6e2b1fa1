"""``InnerLoop``: one frozen value that says what a TTT layer does with its keys and values.

Every system of the family is one value of this dataclass (see ``presets``), and
``dataclasses.replace`` changes one part of it.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax.inner_loop.fast_nets import FastNet, Linear
from ttt_jax.inner_loop.losses import DotProduct, Loss
from ttt_jax.inner_loop.parts import NewtonSchulz, Span, WeightNorm, whole_number
from ttt_jax.inner_loop.spec_checks import check_spec

__all__ = ["InnerLoop", "NewtonSchulz", "Span", "WeightNorm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """What a TTT layer does: network, loss, update rule and order, hashable and comparable.

    A chunk of tokens ``i`` updates the weights ``θ`` of the fast network ``f``, in this order::

        G = Σ_i rate_i ∇_θ L(f_θ(k_i), v_i)    / number of tokens, where the loss is a mean
        M = momentum · M + G                   M = G without momentum
        U = orthogonalise(M) or clip(M)        U = M with neither
        θ = forget · θ − U                     + U for ascent
        θ = weight_norm(θ)                     its columns get their initial norms, if asked for

    and its queries read ``o_i = f_θ(q_i)`` before or after that, see ``order``. With ``steps > 1``
    the five lines run so many times on the chunk, each from the ``θ`` and ``M`` of the step before;
    ``forget`` is in the first alone.

    Attributes:
      fast_net: the network whose weights are the state.
      loss: inner loss between ``f(k)`` and the target.
      target: ``"value"``, or ``"value_minus_key"``: ``v − k``.
      update: train ``"all"`` matrices or the ``"last_layer"`` only.
      steps: inner steps on each chunk.
      direction: ``"descent"`` or ``"ascent"`` (a paradox of the paper: it trains as well).
      query: read with the ``"query"`` or with the ``"key"`` (Q replaced by K).
      chunk_size: tokens a chunk, or ``None`` for the whole sequence as one.
      window: ``None``, or the number of last tokens of the document over which each chunk's
        gradient sums (the Omega rule of Atlas), a multiple of ``chunk_size``.
      order: ``"apply_then_update"`` (a chunk sees earlier chunks only; only complete chunks
        update), ``"update_then_apply"`` (a chunk sees itself whole, too; token-causal at
        ``chunk_size=1``), ``"token_causal"`` (token ``i`` of a chunk reads
        ``W_start − c_i Σ_{j≤i} rate_j g_j`` with gradients at the chunk's start and
        ``c = weights["position_rate"]``, ``[heads, chunk_size, 1]``: the dual form of Sun et al.),
        or a tuple of ``Span``.
      rate: ``"per_token"`` (argument ``lr``), a number, or one number for each trained matrix.
      momentum: ``None``, a number, or ``"per_token"`` (argument ``momentum``; its mean over the
        chunk counts).
      orthogonalise: ``None`` or ``NewtonSchulz``.
      clip: divide the update by its norm over the input axis plus one, ``g / (|g| + 1)``.
      weight_norm: ``None`` or ``WeightNorm``.
      forget: ``None``, a number, one number for each head, or ``"per_token"`` (argument ``forget``;
        its mean over the chunk multiplies the state before the update is added).
      forget_first: whether the gradient is taken at the state that was already multiplied by
        ``forget`` (Gated DeltaNet) or at the one before (Titans).
      gradient_at: weights at which gradients are taken: the ``"state"``, or the ``"start"``, the
        initial weights of the document.
      erase: ``None``, or ``"per_token"`` (argument ``erase``, a pair of keys): each token also adds
        ``write_tᵀ (read_t S)`` to a linear state, read before it is forgotten (RWKV-7).

    Raises:
      ValueError: a field has a value that it cannot have, or two fields contradict each other.

    Source: *Test-Time Training with KV Binding Is Secretly Linear Attention* (arXiv 2602.21204),
    Theorem 5.1 (one step), 5.2 (a sequence), 5.3 (momentum); the other lines: the presets' sources.

    Example:
      >>> import dataclasses
      >>> spec = InnerLoop(chunk_size=16, rate="per_token")
      >>> dataclasses.replace(spec, direction="ascent").trained
      ('w',)
    """

    fast_net: FastNet = Linear()
    loss: Loss = DotProduct()
    target: Literal["value", "value_minus_key"] = "value"
    update: Literal["all", "last_layer"] = "all"
    steps: int = 1
    direction: Literal["descent", "ascent"] = "descent"
    query: Literal["query", "key"] = "query"
    chunk_size: int | None = 1
    window: int | None = None
    order: Literal["apply_then_update", "update_then_apply", "token_causal"] | tuple[Span, ...] = (
        "update_then_apply"
    )
    rate: Literal["per_token"] | float | tuple[float, ...] = 1.0
    momentum: Literal["per_token"] | float | None = None
    orthogonalise: NewtonSchulz | None = None
    clip: bool = False
    weight_norm: WeightNorm | None = None
    forget: Literal["per_token"] | float | tuple[float, ...] | None = None
    forget_first: bool = False
    gradient_at: Literal["state", "start"] = "state"
    erase: Literal["per_token"] | None = None

    def __post_init__(self):
        check_spec(self)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the matrices that the inner loop updates, in the order of ``lr``."""
        return self.fast_net.names if self.update == "all" else (self.fast_net.last,)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything in ``weights``: matrices, static arrays, rates by position."""
        names = (*self.fast_net.names, *self.fast_net.static_names)
        return (*names, "position_rate") if self.order == "token_causal" else names

    @property
    def static_features(self) -> bool:
        """Whether ``φ`` is frozen: the last layer is linear and nothing but it is trained."""
        return self.fast_net.last is not None and self.trained == (self.fast_net.last,)

    def init(
        self,
        key: jax.Array,
        heads: int,
        key_dim: int,
        value_dim: int | None = None,
        hidden_dim: int | None = None,
    ) -> dict[str, jax.Array]:
        """Initial fast weights.

        Args:
          key: a ``jax.random`` key.
          heads: number of heads.
          key_dim: width of a key, in channels.
          value_dim: width of a value; ``None`` is ``key_dim``.
          hidden_dim: width of the hidden layer; ``None`` is ``key_dim``.

        Returns:
          name to ``[heads, in, out]``, float32 (float64 with ``jax_enable_x64``: the state is as
          wide as the weights, so cast them for float32 tokens). ``"position_rate"``, where
          ``order`` uses it, starts at ``1 / (i + 1)`` for position ``i`` of a chunk.

        Raises:
          ValueError: a size is not a whole number from 1 on, or ``key`` no key.

        Example:
          >>> weights = InnerLoop().init(jax.random.key(0), heads=2, key_dim=4)
          >>> weights["w"].shape
          (2, 4, 4)
        """
        value_dim = key_dim if value_dim is None else value_dim
        hidden_dim = key_dim if hidden_dim is None else hidden_dim
        sizes = dict(heads=heads, key_dim=key_dim, value_dim=value_dim, hidden_dim=hidden_dim)
        for name, size in sizes.items():
            whole_number(name, size)
        _check_key(key)
        weights = self.fast_net.init(key, heads, key_dim, value_dim, hidden_dim)
        if self.order == "token_causal":
            rate = 1 / jnp.arange(1.0, self.chunk_size + 1)[:, None]
            weights["position_rate"] = jnp.broadcast_to(rate, (heads, self.chunk_size, 1))
        return weights


def _check_key(key) -> None:
    """Raises ``ValueError`` where ``key`` is neither a typed key nor the data of one."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32
    if not (typed and key.ndim == 0 or raw and key.ndim == 1):
        raise ValueError(f"key={key!r}: use a key, e.g. jax.random.key(0)")
