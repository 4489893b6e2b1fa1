"""Token mixers of a decoder block: softmax attention, and attention with a TTT branch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers.attention_cache import (
    AttentionCache,
    cached_attention,
    init_attention_cache,
)
from ttt_jax.layers.linear import Linear
from ttt_jax.layers.rms_norm import RMSNorm
from ttt_jax.layers.rotary import RotaryTables, apply_rotary
from ttt_jax.layers.sharded import sharded_attention
from ttt_jax.layers.ttt_branch import TTTBranch

_NORM_EPSILON = 1e-5


class TokenInfo(NamedTuple):
    """What all layers need to know of the tokens, computed once a call.

    Attributes:
      tables: rotary tables for the tokens' places in their documents.
      segment_ids: [batch, time], int32, or None.
      documents: [batch, time], int32, see `document_indices`, or None.
      start: [batch], int32: tokens seen before this call; None outside decoding.
      lengths: [batch], int32: real tokens of this call; None outside decoding.
    """

    tables: RotaryTables
    segment_ids: jax.Array | None = None
    documents: jax.Array | None = None
    start: jax.Array | None = None
    lengths: jax.Array | None = None


class LactCache(NamedTuple):
    """Decoding state of one `LactLayer`."""

    attention: AttentionCache
    state: Any


class AttentionLayer(nnx.Module):
    """o = attention(rope(norm(x W_q)), rope(norm(x W_k)), x W_v) W_o.

    >>> from ttt_jax.layers.rotary import rotary_tables
    >>> layer = AttentionLayer(16, 2, window=4, qk_norm=False, qkv_bias=False, stddev=0.02,
    ...                        dtype="float32", implementation="auto", rngs=nnx.Rngs(0))
    >>> tables = rotary_tables(jnp.arange(6)[None], 8, 1e4, "float32")
    >>> y, stats = layer(jnp.ones((1, 6, 16)), TokenInfo(tables))
    >>> y.shape, stats
    ((1, 6, 16), {})
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        window: int | None,
        qk_norm: bool,
        qkv_bias: bool,
        stddev: float,
        dtype: str,
        implementation: str,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and, with `qk_norm`, the full-width norms of q and k.

        Args:
          hidden_size: width of the model.
          heads: attention heads.
          window: tokens that a query sees, or None for all earlier ones.
          qk_norm: RMS norm of q and k over the whole width.
          qkv_bias: bias of the q, k, v projection.
          stddev: standard deviation of the initial projections.
          dtype: compute dtype.
          implementation: as in `causal_attention`.
          rngs: random streams; "params" is used.
        """
        self.heads, self.window, self.dtype = heads, window, dtype
        self.head_dim = hidden_size // heads
        self.implementation = implementation
        options = dict(stddev=stddev, dtype=dtype, rngs=rngs)

        def projection():
            names = ("embed", "heads")
            return Linear(hidden_size, hidden_size, names=names, bias=qkv_bias, **options)

        self.query, self.key, self.value = projection(), projection(), projection()
        self.out = Linear(hidden_size, hidden_size, names=("heads", "embed"), **options)

        def norm():
            return RMSNorm(hidden_size, epsilon=_NORM_EPSILON, name="heads") if qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()

    def __call__(self, x, info: TokenInfo):
        """Mixes the tokens of a batch.

        Args:
          x: [batch, time, hidden].
          info: places and documents of the tokens.

        Returns:
          ([batch, time, hidden], no statistics).
        """
        q, k, v = self._project(x)
        return self.out(self._attend(q, k, v, info).reshape(x.shape)), {}

    def decode(self, x, cache: AttentionCache, info: TokenInfo):
        """Mixes new tokens with those in the cache.

        Args:
          x: [batch, time, hidden].
          cache: of the tokens before.
          info: with `start` and `lengths`.

        Returns:
          ([batch, time, hidden], the cache after the new tokens).
        """
        q, k, v = self._project(x)
        mixed, cache = self._attend_cached(q, k, v, cache, info)
        return self.out(mixed.reshape(x.shape)), cache

    def init_cache(self, batch: int, length: int) -> AttentionCache:
        """An empty cache.

        Args:
          batch: number of rows.
          length: tokens kept: the window, or the longest sequence where there is none.

        Returns:
          The cache, in the compute dtype.
        """
        return init_attention_cache(batch, length, self.heads, self.head_dim, self.dtype)

    def compared(self, x, info: TokenInfo):
        """What the mixer compares: {"q", "k", "v"}, each [batch, time, heads, head size]."""
        return dict(zip("qkv", self._rotated(*self._project(x), info), strict=True))

    def _project(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _split(self, x):
        return x.reshape(*x.shape[:2], self.heads, self.head_dim)

    def _rotated(self, q, k, v, info):
        q = apply_rotary(self._split(q), info.tables)
        return q, apply_rotary(self._split(k), info.tables), self._split(v)

    def _attend(self, q, k, v, info):
        return sharded_attention(
            *self._rotated(q, k, v, info),
            window=self.window,
            documents=info.documents,
            implementation=self.implementation,
        )

    def _attend_cached(self, q, k, v, cache, info):
        # cuDNN has no cache, so a model that names it decodes through XLA.
        heads = self._rotated(q, k, v, info)
        return cached_attention(*heads, cache, info.start, info.lengths, implementation="xla")


class LactLayer(AttentionLayer):
    """o = (window attention(q, k, v) + TTT branch(q, k, v)) W_o with one q, k, v projection.

    Source: LaCT, Zhang et al. 2025 (arXiv 2505.23884), section 3.2.

    >>> from ttt_jax.inner_loop import presets
    >>> from ttt_jax.layers.rotary import rotary_tables
    >>> options = dict(stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> branch = TTTBranch(16, 2, presets.lact_llm(chunk_size=4), attention_heads=2, low_rank=0,
    ...                    **options)
    >>> layer = LactLayer(16, 2, branch=branch, window=4, qk_norm=False, qkv_bias=False,
    ...                   implementation="auto", **options)
    >>> tables = rotary_tables(jnp.arange(6)[None], 8, 1e4, "float32")
    >>> y, stats = layer(jnp.ones((1, 6, 16)), TokenInfo(tables))
    >>> y.shape, list(stats)
    ((1, 6, 16), ['state_norm', 'update_norm'])
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        branch: TTTBranch,
        fast_rotary: bool = True,
        **options,
    ):
        """Makes the layer.

        Args:
          hidden_size: width of the model.
          heads: attention heads.
          branch: the TTT branch.
          fast_rotary: whether the branch's queries and keys are rotated, too.
          **options: as in `AttentionLayer`.
        """
        super().__init__(hidden_size, heads, **options)
        self.branch, self.fast_rotary = branch, fast_rotary

    def __call__(self, x, info: TokenInfo):
        """Mixes the tokens of a batch.

        Args:
          x: [batch, time, hidden].
          info: places and documents of the tokens.

        Returns:
          ([batch, time, hidden], {"state_norm": norm of the final fast weights, "update_norm":
          norm of what the row added to them}).
        """
        q, k, v = self._project(x)
        options = dict(tables=self._fast_tables(info), segment_ids=info.segment_ids)
        fast, final = self.branch(x, q, k, v, **options)
        mixed = self._attend(q, k, v, info).reshape(x.shape)
        initial = self.branch.weights()
        added = {name: w - initial[name] for name, w in final.items()}
        stats = {"state_norm": state_norm(final), "update_norm": state_norm(added)}
        return self.out(mixed + fast), stats

    def compared(self, x, info: TokenInfo):
        """What the inner loop reads, see `TTTBranch.inputs`."""
        return self.branch.inputs(x, *self._project(x), self._fast_tables(info))

    def decode(self, x, cache: LactCache, info: TokenInfo):
        """Mixes new tokens with those before; the fast weights go on learning.

        Args:
          x: [batch, time, hidden].
          cache: of the tokens before.
          info: with `start` and `lengths`.

        Returns:
          ([batch, time, hidden], the cache after the new tokens).
        """
        q, k, v = self._project(x)
        options = dict(tables=self._fast_tables(info), segment_ids=info.segment_ids)
        fast, state = self.branch.decode(x, q, k, v, initial_state=cache.state, **options)
        mixed, attention = self._attend_cached(q, k, v, cache.attention, info)
        return self.out(mixed.reshape(x.shape) + fast), LactCache(attention, state)

    def init_cache(self, batch: int, length: int) -> LactCache:
        """An empty attention cache and the initial fast weights.

        Args:
          batch: number of rows.
          length: tokens kept by the attention.

        Returns:
          The cache.
        """
        width = self.heads * self.head_dim
        nothing = jnp.zeros((batch, 1, width), self.dtype)
        padding = jnp.full((batch, 1), -1, jnp.int32)
        # One token of padding leaves the state as it starts, in the form in which it is carried.
        _, state = self.branch.decode(nothing, *[nothing] * 3, tables=None, segment_ids=padding)
        return LactCache(super().init_cache(batch, length), state)

    def _fast_tables(self, info):
        return info.tables if self.fast_rotary else None


def state_norm(weights):
    """Root mean square, over rows and heads, of the Frobenius norm of a layer's fast weights.

    Args:
      weights: name -> [batch, heads, in, out], the trained matrices of a state.

    Returns:
      sqrt(Σ_name mean_{batch, heads} ‖W‖²), a scalar without gradient, in the weights' units.

    >>> round(float(state_norm({"w": 2 * jnp.ones((3, 2, 4, 4))})), 3)
    8.0
    """
    squares = [jnp.sum(jnp.square(w)) / (w.shape[0] * w.shape[1]) for w in weights.values()]
    return jax.lax.stop_gradient(jnp.sqrt(sum(squares)))
