"""A TTT layer whose updates and applications follow an explicit list: LaCT-NVS's layer."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.spec import InnerLoop, Span
from ttt_jax.inner_loop.updates import State
from ttt_jax.layers.fast_weights import FastWeights
from ttt_jax.layers.linear import Linear, inverse_softplus
from ttt_jax.layers.norm_rows import norm_rows
from ttt_jax.layers.rms_norm import RMSNorm, at_least_float32
from ttt_jax.layers.sharded import sharded_spans
from ttt_jax.sharding import devices_along

_NORM_EPSILON = 1e-5
_GAIN = 2**0.5  # of the initial fast weights, as for a rectified layer


class ScheduledTTT(nnx.Module):
    """y = rms_norm(ttt(l2(q), l2(k), v)) W_o with q, k, v = silu(x W), over a list of spans.

    Rates are softplus(x W_lr + b + softplus⁻¹(base_rate)), one a token, head and trained matrix,
    where the inner loop takes them; l2 = x / (‖x‖ + 1e-5) by head. Source: the official
    `FastWeightGluMLPMultihead` (github.com/a1600012888/LaCT, lact_nvs).

    >>> import jax.numpy as jnp
    >>> from ttt_jax.inner_loop import presets
    >>> spec = presets.lact_nvs([(0, 1, True, True)])
    >>> layer = ScheduledTTT(16, 2, spec, hidden_multiple=1.0, base_rate=0.01, stddev=0.02,
    ...                      out_stddev=0.02, dtype="float32", rngs=nnx.Rngs(0))
    >>> y, state = layer(jnp.ones((1, 6, 16)), [Span(0, 4, True, False), Span(0, 6, False, True)])
    >>> y.shape, state.weights["w1"].shape
    ((1, 6, 16), (1, 2, 8, 8))
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        spec: InnerLoop,
        *,
        hidden_multiple: float,
        base_rate: float,
        stddev: float,
        out_stddev: float,
        dtype: str,
        rngs: nnx.Rngs,
        mode: str = "auto",
    ):
        """Makes the parameters that the inner loop needs.

        Args:
          hidden_size: width of the model.
          heads: fast-weight heads.
          spec: the inner loop; its order is replaced by that of each call.
          hidden_multiple: hidden width of the fast network over its head width.
          base_rate: rate of a token before training.
          stddev: standard deviation of the initial projections.
          out_stddev: that of the output projection.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
          mode: as in `ttt_jax.ttt`.
        """
        head_dim = hidden_size // heads
        self.mode = mode
        self.spec, self.heads, self.base_rate, self.dtype = spec, heads, base_rate, dtype
        self.weights = FastWeights(
            spec.fast_net,
            heads,
            head_dim,
            int(head_dim * hidden_multiple),
            low_rank=0,
            gain=_GAIN,
            rngs=rngs,
        )
        qkv = dict(names=("embed", None, "heads"), stddev=stddev, dtype=dtype, rngs=rngs)
        self.qkv = Linear(hidden_size, (3, hidden_size), **qkv)
        out = dict(names=("heads", "embed"), stddev=out_stddev, dtype=dtype, rngs=rngs)
        self.out = Linear(hidden_size, hidden_size, **out)
        self.norm = RMSNorm(head_dim, epsilon=_NORM_EPSILON, name="gain")
        # Rates are computed in float32, as in the official code.
        rates = dict(names=("embed", "gain", "gain"), stddev=stddev, rngs=rngs, bias=True)
        rates |= dict(dtype=str(at_least_float32(dtype)))
        size = (len(spec.trained), heads)
        per_token = spec.rate == "per_token"
        self.rate = Linear(hidden_size, size, **rates) if per_token else None

    def __call__(
        self, x, spans: list[Span], initial_state: State | None = None, parts: int = 1
    ):
        """Runs the spans, one after another.

        Args:
          x: [batch, time, hidden], already normalised; rows are parts of scenes with parts > 1.
          spans: which tokens update the fast weights and to which they are applied; every token
            is in an applied span, or its output is zero.
          initial_state: the state to go on from, of an earlier call; None starts from the learned
            initial weights.
          parts: as in `layers.sharded.sharded_spans`.

        Returns:
          ([batch, time, hidden] in the compute dtype, the state after the last span).

        Raises:
          ValueError: from `ttt_jax.ttt`, for spans that do not fit the tokens.
        """
        spec = dataclasses.replace(self.spec, order=tuple(spans))
        with jax.named_scope("ttt"):
            # Updates read keys, values and rates: nothing is computed for the tokens behind them.
            learnt = max((span.end for span in spans if span.update), default=1)
            learnt = x if spec.query == "key" else x[:, :learnt]
            rows = "parts" if parts > 1 else "batch"
            q, (k, v) = self._heads(x, rows)[0], self._heads(learnt, rows)[1:]
            gates = {} if self.rate is None else {"lr": self._rates(learnt)}
            options = dict(parts=parts, initial_state=initial_state, mode=self.mode)
            out, state = sharded_spans(spec, self.weights(), q, k, v, **options, **gates)
            out, size = out.reshape(-1, x.shape[-1]), out.shape[-1]
            scale = self.norm.scale[...][None]
            (out,) = norm_rows(out, scale, ("rms",), size, _NORM_EPSILON, rows)
            return self.out(out).reshape(x.shape), state

    def _heads(self, x, rows: str):
        """l2(silu(q)), l2(silu(k)) and silu(v), [batch, time, heads, head_dim] each.

        The compiler drops what is not used.
        """
        # Parts side by side would be gathered where the heads are cut.
        together = (1, 2) if devices_along("heads") == 1 else None
        kinds, made, size = ["unit", "unit", "silu"], [], x.shape[-1] // self.heads
        for y in self.qkv.split(x.reshape(-1, x.shape[-1]), together):
            some = tuple(kinds.pop(0) for _ in range(y.shape[-1] // x.shape[-1]))
            made += norm_rows(y, None, some, size, _NORM_EPSILON, rows)
        return [y.reshape(*x.shape[:2], self.heads, -1) for y in made]

    def _rates(self, x):
        """softplus(x W + b), [batch, time, heads, matrices]; the official order is matrix, head."""
        kernel, bias = self.rate.kernel[...], self.rate.bias[...]
        rows, columns = x.reshape(-1, x.shape[-1]), kernel.reshape(len(kernel), -1)
        product = _wide_product if x.dtype == jnp.bfloat16 else _exact_product
        sums = product(rows, columns).reshape(*x.shape[:2], *bias.shape)
        return jax.nn.softplus(sums + bias + inverse_softplus(self.base_rate)).mT


def _exact_product(x, w):
    return jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _wide_product(x, w):
    """x W for bfloat16 x, [rows, in], and few columns of a float32 W, to float32's accuracy.

    W is the sum of three bfloat16 matrices, which a GPU multiplies by x in one fast product; x in
    float32, transposed too, would be written to memory for the gradient.
    """
    return _sums_of_parts(x, w, 1)


def _sums_of_parts(x, w, axis):
    """Σ over an axis of bfloat16 x and the first axis of float32 w, as three products in one."""
    parts, rest = [], w
    for _ in range(3):
        parts.append(rest.astype(x.dtype))
        rest = rest - parts[-1].astype(w.dtype)
    y = jax.lax.dot_general(
        x, jnp.concatenate(parts, -1), (((axis,), (0,)), ((), ())), preferred_element_type=w.dtype
    )
    return sum(jnp.split(y, 3, axis=-1))


def _wide_backward(inputs, error):
    x, w = inputs
    dx = jnp.sum(error[:, None] * w, axis=-1).astype(x.dtype)
    return dx, _sums_of_parts(x, error, 0)


_wide_product.defvjp(lambda x, w: (_wide_product(x, w), (x, w)), _wide_backward)
