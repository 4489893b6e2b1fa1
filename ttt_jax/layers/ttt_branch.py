"""The TTT branch of a LaCT layer: projections, the inner loop, norm and gate."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.fast_weights import FastWeights
from ttt_jax.layers.linear import Linear, inverse_softplus
from ttt_jax.layers.rms_norm import RMSNorm, at_least_float32, l2_normalize
from ttt_jax.layers.rotary import RotaryTables, apply_rotary
from ttt_jax.layers.sharded import sharded_ttt
from ttt_jax.sharding import param

_BASE_RATE = 0.001
_NORM_EPSILON = 1e-5


class TTTBranch(nnx.Module):
    """Fast queries, keys, values, rates and gates from a shared q, k, v projection.

    With a = per-channel scale and offset, split into fast heads, l2 = x / (‖x‖ + 1e-5):
      q̃ = rope(l2(silu(a_q(q)))),  k̃ = rope(l2(silu(a_k(k)))),  ṽ = silu(v)
      rates = softplus(x W_lr + b + softplus⁻¹(0.001)),  momentum = sigmoid(x W_m + b)
      y = rms_norm(ttt(q̃, k̃, ṽ)) · silu(x W_s + b)
    The rotation uses the head split of the attention, after the l2 norm over the fast heads.
    Rates and momentum exist only where the inner loop takes them per token. Source: the official
    `LaCTSWIGLULayer` (github.com/a1600012888/LaCT).

    >>> from ttt_jax.inner_loop import presets
    >>> branch = TTTBranch(16, 2, presets.lact_llm(variant=6, chunk_size=4), attention_heads=2,
    ...                    low_rank=0, stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> x = jnp.ones((1, 6, 16))
    >>> y, final = branch(x, x, x, x, tables=None)
    >>> y.shape
    (1, 6, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        spec: InnerLoop,
        *,
        attention_heads: int,
        low_rank: int,
        stddev: float,
        dtype: str,
        rngs: nnx.Rngs,
        hidden_multiple: float = 1.0,
        silu_values: bool = True,
        learned_scale: bool = True,
        mode: str = "auto",
        implementation: str | None = None,
    ):
        """Makes the parameters that the inner loop needs.

        Args:
          hidden_size: width of the model.
          heads: fast-weight heads.
          spec: the inner loop.
          attention_heads: head split of the rotation.
          low_rank: rank of the initial weights, see `FastWeights`.
          stddev: standard deviation of the initial projections.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
          hidden_multiple: hidden width of the fast network over its head width.
          silu_values: whether values go through silu.
          learned_scale: whether the output has the gate silu(x W_s + b).
          mode: as in `ttt_jax.ttt`.
          implementation: as in `ttt_jax.ttt`.
        """
        head_dim = hidden_size // heads
        self.spec, self.heads, self.attention_heads = spec, heads, attention_heads
        self.silu_values, self.mode, self.implementation = silu_values, mode, implementation
        self.dtype = dtype
        hidden_dim = int(head_dim * hidden_multiple)
        self.weights = FastWeights(
            spec.fast_net, heads, head_dim, hidden_dim, low_rank=low_rank, rngs=rngs
        )
        # Row 0 is for the queries, row 1 for the keys.
        self.scale = param(jnp.ones((2, hidden_size), jnp.float32), ("gain", "heads"))
        self.offset = param(jnp.zeros((2, hidden_size), jnp.float32), ("gain", "heads"))
        self.norm = RMSNorm(head_dim, epsilon=_NORM_EPSILON, name="gain")

        def gate(*out):
            names = ("embed", *["gain"] * len(out))
            options = dict(stddev=stddev, dtype=dtype, rngs=rngs, bias=True)
            return Linear(hidden_size, out, names=names, **options)

        self.rate = gate(heads, len(spec.trained)) if _per_token(spec.rate) else None
        self.momentum = gate(heads) if _per_token(spec.momentum) else None
        self.output_scale = gate(heads) if learned_scale else None

    def __call__(self, x, q, k, v, *, tables: RotaryTables | None, segment_ids=None):
        """Runs the branch over whole rows, on the ambient mesh.

        Args:
          x: [batch, time, hidden]: input of the layer, already normalised.
          q: [batch, time, hidden]: queries, after the optional q norm, before rotation.
          k: [batch, time, hidden]: keys likewise.
          v: [batch, time, hidden].
          tables: rotary tables of the attention's head size, or None for no rotation.
          segment_ids: [batch, time], int32, as in `ttt_jax.ttt`.

        Returns:
          ([batch, time, hidden] in the compute dtype, the final fast weights without gradient,
          name to [batch, heads, in, out]).

        Raises:
          ValueError: from `sharded_ttt`, for a mode or a mesh that the inner loop forbids.
        """
        with jax.named_scope("ttt"):
            options = dict(mode=self.mode, implementation=self.implementation)
            inputs = self.inputs(x, q, k, v, tables)
            out, final = sharded_ttt(
                self.spec, self.weights(), **inputs, segment_ids=segment_ids, **options
            )
            return self._output(out, x), final

    def decode(
        self, x, q, k, v, *, tables: RotaryTables | None, segment_ids=None, initial_state=None
    ):
        """Runs the branch over new tokens that continue a state.

        Args:
          x, q, k, v, tables, segment_ids: as in `__call__`.
          initial_state: state that the row's first document continues; None for the initial
            weights.

        Returns:
          ([batch, time, hidden] in the compute dtype, the state after the last token).

        Raises:
          ValueError: from `ttt_jax.ttt`, for a mode that the inner loop forbids.
        """
        with jax.named_scope("ttt"):
            out, state = ttt(
                self.spec,
                self.weights(),
                **self.inputs(x, q, k, v, tables),
                segment_ids=segment_ids,
                initial_state=initial_state,
                mode=self.mode,
                implementation=self.implementation,
            )
            return self._output(out, x), state

    def inputs(self, x, q, k, v, tables: RotaryTables | None) -> dict[str, jax.Array]:
        """What the inner loop reads: q, k, v and the gates that it takes per token.

        Args:
          x, q, k, v, tables: as in `__call__`.

        Returns:
          q, k, v: [batch, time, heads, head size] in the compute dtype; lr and momentum, where the
          inner loop takes them per token: [batch, time, heads(, matrices)], float32.
        """
        fast = zip("qkv", self._fast_inputs(q, k, v, tables), strict=True)
        return dict(fast) | self._gates(x)

    def _output(self, out, x):
        out = self.norm(out)
        if self.output_scale is not None:
            out = out * jax.nn.silu(self.output_scale(x))[..., None]
        return out.reshape(x.shape).astype(self.dtype)

    def _fast_inputs(self, q, k, v, tables):
        wide = at_least_float32(self.dtype)
        scale, offset = self.scale[...].astype(wide), self.offset[...].astype(wide)

        def fast(x, row):
            x = jax.nn.silu(x.astype(wide) * scale[row] + offset[row])
            x = l2_normalize(self._split(x, self.heads), _NORM_EPSILON)
            if tables is not None:
                # Both head splits cut the same channels: only the shape changes.
                x = apply_rotary(self._split(x, self.attention_heads), tables)
            return self._split(x, self.heads).astype(self.dtype)

        values = jax.nn.silu(v.astype(wide)) if self.silu_values else v
        return fast(q, 0), fast(k, 1), self._split(values, self.heads).astype(self.dtype)

    def _gates(self, x):
        wide = at_least_float32(self.dtype)
        gates = {}
        if self.rate is not None:
            rate = self.rate(x, out_dtype=wide) + inverse_softplus(_BASE_RATE)
            gates["lr"] = jax.nn.softplus(rate)
        if self.momentum is not None:
            gates["momentum"] = jax.nn.sigmoid(self.momentum(x, out_dtype=wide))
        return gates

    @staticmethod
    def _split(x, heads):
        return x.reshape(*x.shape[:2], heads, -1)


def _per_token(value):
    return isinstance(value, str) and value == "per_token"
