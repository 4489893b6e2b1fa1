"""``InnerLoop``: one frozen value that says what a TTT layer does with its keys and values.

One mini-batch (chunk) ``c`` runs, in this order::

    G_c = Σ_i rate_i ∇L(f_θ(k_i), v_i)          gradient at the chunk's starting weights
    M_c = momentum_c · M_{c-1} + G_c            (optional)
    U_c = orthogonalise(M_c)                    (optional)
    θ_c = forget_c · θ_{c-1} − U_c              (+ for ascent)
    θ_c = weight_norm(θ_c)                      to the initial norms (optional)
    o_i = f_θ(q_i)                              θ = θ_{c-1} or θ_c, by ``order``

Every system of the family is one value of this dataclass (see ``presets``), and
``dataclasses.replace`` changes one part of it.
"""

import dataclasses
from typing import Literal

import jax
from ttt_kernels.newton_schulz import MUON_COEFFICIENTS

from ttt_jax.inner_loop.fast_nets import FastNet, Linear
from ttt_jax.inner_loop.losses import DotProduct, Loss

ORDERS = ("apply_then_update", "update_then_apply")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Orthogonalise each update by Newton-Schulz iterations.

    Attributes:
      coefficients: one triple (a, b, c) an iteration; an empty tuple only normalises (LaCT-NVS
        with no Muon steps).
      dtype: dtype of the products, e.g. ``"bfloat16"`` as in the official code; ``None`` is the
        dtype of the tokens.
      eps: added to the Frobenius norm.

    Example:
      >>> NewtonSchulz(dtype="bfloat16").eps
      1e-07
    """

    coefficients: tuple[tuple[float, float, float], ...] = MUON_COEFFICIENTS
    dtype: str | None = None
    eps: float = 1e-7


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightNorm:
    """After an update, set the norm of each column (over the input axis) to its initial value.

    ``W ← W / (|W| + eps) · |W_initial|``.

    Attributes:
      form: ``"post"`` keeps the normalised weight as the state; ``"pre"`` accumulates in an
        un-normalised copy and normalises it for use.
      eps: added to the norm.
      detach: stop the gradient through the initial norms (LaCT-NVS does).

    Example:
      >>> WeightNorm(form="pre").detach
      False
    """

    form: Literal["post", "pre"] = "post"
    eps: float = 1e-5
    detach: bool = False

    def __post_init__(self):
        _one_of("form", self.form, ("post", "pre"))


@dataclasses.dataclass(frozen=True)
class Span:
    """One entry of an explicit order: update on, and/or apply to, tokens ``start:end``.

    Example:
      >>> Span(0, 16, update=True, apply=False).end
      16
    """

    start: int
    end: int
    update: bool
    apply: bool

    def __post_init__(self):
        if not 0 <= self.start < self.end:
            raise ValueError(f"Span(start={self.start}, end={self.end}): need 0 <= start < end")
        if not (self.update or self.apply):
            raise ValueError(f"Span({self.start}, {self.end}) neither updates nor applies; drop it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """What a TTT layer does: network, loss, update rule and order, hashable and comparable.

    Attributes:
      fast_net: the network whose weights are the state.
      loss: inner loss between ``f(k)`` and ``v``.
      update: train ``"all"`` matrices or the ``"last_layer"`` only.
      steps: inner steps on each chunk.
      direction: ``"descent"`` or ``"ascent"`` (a paradox of the paper: it trains as well).
      query: read with the ``"query"`` or with the ``"key"`` (Q replaced by K).
      chunk_size: tokens a chunk, or ``None`` for the whole sequence as one.
      order: ``"apply_then_update"`` (a chunk sees earlier chunks only; only complete chunks
        update), ``"update_then_apply"`` (a chunk sees itself whole, too; token-causal at
        ``chunk_size=1``), or a tuple of ``Span``.
      rate: ``"per_token"`` (argument ``lr``), a number, or one number for each trained matrix.
      momentum: ``None``, a number, or ``"per_token"`` (argument ``momentum``; its mean over the
        chunk counts).
      orthogonalise: ``None`` or ``NewtonSchulz``.
      weight_norm: ``None`` or ``WeightNorm``.
      forget: ``None``, a number, or ``"per_token"`` (argument ``forget``; its mean over the chunk
        multiplies the state before the update is added).

    Raises:
      ValueError: a field has a value that it cannot have, or two fields contradict each other.

    Source: *Test-Time Training with KV Binding Is Secretly Linear Attention*, section 5.

    Example:
      >>> import dataclasses
      >>> spec = InnerLoop(chunk_size=16, rate="per_token")
      >>> dataclasses.replace(spec, direction="ascent").trained
      ('w',)
    """

    fast_net: FastNet = Linear()
    loss: Loss = DotProduct()
    update: Literal["all", "last_layer"] = "all"
    steps: int = 1
    direction: Literal["descent", "ascent"] = "descent"
    query: Literal["query", "key"] = "query"
    chunk_size: int | None = 1
    order: Literal["apply_then_update", "update_then_apply"] | tuple[Span, ...] = (
        "update_then_apply"
    )
    rate: Literal["per_token"] | float | tuple[float, ...] = 1.0
    momentum: Literal["per_token"] | float | None = None
    orthogonalise: NewtonSchulz | None = None
    weight_norm: WeightNorm | None = None
    forget: Literal["per_token"] | float | None = None

    def __post_init__(self):
        _one_of("update", self.update, ("all", "last_layer"))
        _one_of("direction", self.direction, ("descent", "ascent"))
        _one_of("query", self.query, ("query", "key"))
        if not isinstance(self.fast_net, FastNet):
            raise ValueError(f"fast_net={self.fast_net!r}: use a FastNet, e.g. fast_nets.SwiGLU()")
        if not isinstance(self.loss, Loss):
            raise ValueError(f"loss={self.loss!r}: use a Loss, e.g. losses.DotProduct()")
        if self.update == "last_layer" and self.fast_net.last is None:
            raise ValueError(
                f"update='last_layer': {type(self.fast_net).__name__} has no linear last layer; "
                "use update='all'"
            )
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: at least one inner step is needed")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size}: use a positive number, or None")
        _check_order(self.order, self.chunk_size)
        if isinstance(self.rate, tuple) and len(self.rate) != len(self.trained):
            raise ValueError(
                f"rate={self.rate} has {len(self.rate)} numbers for the trained matrices "
                f"{self.trained}; give one for each"
            )
        for name in ("rate", "momentum", "forget"):
            value = getattr(self, name)
            if isinstance(value, str):
                _one_of(name, value, ("per_token",))

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the matrices that the inner loop updates, in the order in which ``lr`` counts."""
        return self.fast_net.names if self.update == "all" else (self.fast_net.last,)

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
          name to ``[heads, in, out]``, float32.

        Example:
          >>> weights = InnerLoop().init(jax.random.key(0), heads=2, key_dim=4)
          >>> weights["w"].shape
          (2, 4, 4)
        """
        return self.fast_net.init(key, heads, key_dim, value_dim or key_dim, hidden_dim or key_dim)


def _check_order(order, chunk_size: int | None) -> None:
    if isinstance(order, str):
        _one_of("order", order, ORDERS)
        if order == "apply_then_update" and chunk_size is None:
            raise ValueError(
                "chunk_size=None with order='apply_then_update': the whole sequence would be the "
                "last chunk, which never updates; give a chunk_size or use 'update_then_apply'"
            )
        return
    if not isinstance(order, tuple) or not order or not all(isinstance(s, Span) for s in order):
        raise ValueError(f"order={order!r}: use one of {ORDERS} or a tuple of Span")
    applied = sorted((span.start, span.end) for span in order if span.apply)
    for (_, end), (start, _) in zip(applied, applied[1:], strict=False):
        if start < end:
            raise ValueError(
                f"order={order!r} applies token {start} twice; let the applied spans not overlap"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}")
