"""Softmax attention of every token to every token of its row, for images and views."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers import attention_cudnn
from ttt_jax.layers.attention import IMPLEMENTATIONS, masked_softmax_attention
from ttt_jax.layers.linear import Linear, by_rows
from ttt_jax.layers.norm_rows import norm_rows
from ttt_jax.layers.rms_norm import RMSNorm, at_least_float32
from ttt_jax.sharding import devices_along


def full_attention(q, k, v, *, implementation: str = "auto"):
    """softmax(q kᵀ / √head_dim) v, each query over all keys of its row.

    Args:
      q: [batch, queries, heads, head_dim], any float dtype.
      k: [batch, keys, heads, head_dim].
      v: [batch, keys, heads, head_dim].
      implementation: "auto" (cuDNN where it can, else XLA), "xla" or "cudnn".

    Returns:
      [batch, queries, heads, head_dim] in q's dtype; softmax in at least float32. XLA holds the
      scores, queries × keys a row and head, at once; cuDNN does not.

    Raises:
      ValueError: for an unknown implementation.
      NotImplementedError: if "cudnn" is asked for and this device, dtype or head size cannot.

    >>> x = jnp.ones((1, 6, 2, 8))
    >>> full_attention(x, x, x).shape
    (1, 6, 2, 8)
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {IMPLEMENTATIONS}")
    obstacle = None
    if implementation != "xla":
        obstacle = attention_cudnn.obstacle(q, None, None, None)
    if implementation == "cudnn" and obstacle is not None:
        raise obstacle
    with jax.named_scope("attention"):
        if implementation == "xla" or obstacle is not None:
            return masked_softmax_attention(q, k, v, jnp.ones((), bool))
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


class FullAttention(nnx.Module):
    """o = full_attention(norm(x W_q), norm(x W_k), x W_v) W_o within each row, without positions.

    The optional norms are root mean square over each head's channels (Dehghani et al. 2023), with
    the dtype's machine epsilon, as PyTorch's RMSNorm has it.

    >>> layer = FullAttention(16, 2, qk_norm=True, stddev=0.02, out_stddev=0.02, dtype="float32",
    ...                       implementation="auto", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 6, 16))).shape
    (3, 6, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        qk_norm: bool,
        stddev: float,
        out_stddev: float,
        dtype: str,
        implementation: str,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        """Makes the projections and norms.

        Args:
          hidden_size: width of the model.
          heads: number of heads; divides the width.
          qk_norm: RMS norm of the queries and keys of each head.
          stddev: standard deviation of the initial q, k, v projection.
          out_stddev: likewise of the output projection.
          dtype: compute dtype.
          implementation: as in `full_attention`.
          rngs: random streams; "params" is used.
          bias: whether the projections have a bias.
        """
        self.heads, self.implementation = heads, implementation
        options = dict(dtype=dtype, bias=bias, rngs=rngs)
        names = ("embed", None, "heads")
        self.qkv = Linear(hidden_size, (3, hidden_size), names=names, stddev=stddev, **options)
        names = ("heads", "embed")
        self.out = Linear(hidden_size, hidden_size, names=names, stddev=out_stddev, **options)
        epsilon = float(jnp.finfo(at_least_float32(dtype)).eps)

        def norm():
            size = hidden_size // heads
            return RMSNorm(size, epsilon=epsilon, name="gain") if qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()

    def __call__(self, x, batch: str = "images"):
        """Mixes the tokens of each row.

        Args:
          x: [rows, time, hidden].
          batch: logical name of the rows.

        Returns:
          [rows, time, hidden] in the compute dtype.
        """
        rows = x.reshape(-1, x.shape[-1])
        if self.q_norm is None:
            parts = self.qkv.split(rows)
        elif devices_along("heads") > 1:  # where queries and keys side by side would be gathered
            q, k, v = self.qkv.split(rows)
            parts = *self._norm(q, (self.q_norm,), batch), *self._norm(k, (self.k_norm,), batch), v
        else:
            both, v = self.qkv.split(rows, (2, 1))
            parts = *self._norm(both, (self.q_norm, self.k_norm), batch), v
        q, k, v = (y.reshape(*x.shape[:2], self.heads, -1) for y in parts)
        mixed = full_attention(q, k, v, implementation=self.implementation)
        return by_rows(self.out, mixed.reshape(x.shape))

    def _norm(self, x, norms, batch: str):
        """Each part of x [rows, parts · hidden] by a norm of its own."""
        scales = jnp.stack([norm.scale[...] for norm in norms])
        size, epsilon = scales.shape[1], norms[0].epsilon
        return norm_rows(x, scales, ("rms",) * len(norms), size, epsilon, batch)
