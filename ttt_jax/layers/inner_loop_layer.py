"""One token mixer for every inner loop of the family: project, ``ttt``, norm, project."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.checks import check_is_spec
from ttt_jax.inner_loop.fast_nets import Linear as LinearNet
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.attention import causal_attention
from ttt_jax.layers.inner_loop_checks import (
    check_gates,
    check_numerics,
    check_sizes,
    check_tokens,
)
from ttt_jax.layers.linear import Linear, inverse_softplus
from ttt_jax.layers.mixers import TokenInfo
from ttt_jax.layers.rms_norm import RMSNorm, at_least_float32, l2_normalize
from ttt_jax.layers.short_convolution import ShortConvolution
from ttt_jax.sharding import param

_NORM_EPSILON = 1e-6
_RATE = 0.1  # first rate of a dot-product loss: the upper end of Mamba-2's step sizes
_DECAYS = (0.001, 0.1)  # first −log(forget) of the slowest and of the fastest head


class ConvolvedAttention(nnx.Module):
    """o = attention(q, k, v) W_o with q, k, v = silu(conv(x W)): softmax, and no positions.

    The control for `InnerLoopLayer`, which differs in what stands between q, k, v and the norm.

    >>> layer = ConvolvedAttention(16, 2, rngs=nnx.Rngs(0))
    >>> y, stats = layer(jnp.ones((1, 6, 16)))
    >>> y.shape, layer.state_size(tokens=6)
    ((1, 6, 16), 192)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        stddev: float = 0.02,
        dtype: str = "float32",
        rngs: nnx.Rngs,
        convolution: int = 4,
    ):
        """Makes projections, convolution and norm.

        Args:
          hidden_size: width of the model.
          heads: number of heads.
          head_dim: width of a key and of a value; None for hidden_size / heads.
          stddev: standard deviation of the initial projections.
          dtype: compute dtype; parameters are float32 whatever it is.
          rngs: random streams; "params" is used.
          convolution: tokens that the convolution of q, k, v sees; 0 for none.

        Raises:
          ValueError: naming the argument, its value and the rule that it breaks.
        """
        check_sizes(hidden_size, heads, head_dim, convolution)
        check_numerics(stddev, dtype, rngs)
        head_dim = hidden_size // heads if head_dim is None else head_dim
        self.hidden_size, self.heads, self.head_dim = hidden_size, heads, head_dim
        self.dtype = dtype
        width = heads * head_dim
        options = dict(stddev=stddev, dtype=dtype, rngs=rngs)
        self.qkv = Linear(hidden_size, 3 * width, names=("embed", "heads"), **options)
        short = ShortConvolution(3 * width, width=convolution, rngs=rngs) if convolution else None
        self.convolution = short
        self.norm = RMSNorm(head_dim, epsilon=_NORM_EPSILON, name="gain")
        self.out = Linear(width, hidden_size, names=("heads", "embed"), **options)

    def __call__(self, x, info: TokenInfo | None = None):
        """Mixes the tokens of a batch.

        Args:
          x: [batch, time, hidden], any float dtype.
          info: documents of the tokens; None where every row is one.

        Returns:
          ([batch, time, hidden] in the compute dtype, no statistics: the pair that a block of a
          decoder takes from its mixer).

        Raises:
          ValueError: x has another rank, width or kind of numbers.
        """
        check_tokens(x, info, self.hidden_size)
        info = TokenInfo(None) if info is None else info
        mixed = self._mix(x, *self._heads(x, info), info)
        return self.out(self.norm(mixed).reshape(*x.shape[:2], -1)), {}

    def state_size(self, tokens: int) -> int:
        """Numbers that a sequence carries from token to token.

        Args:
          tokens: seen so far.

        Returns:
          Keys and values of all tokens.
        """
        return 2 * tokens * self.heads * self.head_dim

    def _heads(self, x, info):
        """q, k and v, [batch, time, heads, head_dim] each."""
        qkv = self.qkv(x)
        if self.convolution is None:
            qkv = jax.nn.silu(qkv)
        else:
            qkv = self.convolution(qkv, info.documents)
        qkv = qkv.reshape(*x.shape[:2], 3, self.heads, self.head_dim)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]

    def _mix(self, x, q, k, v, info):
        return causal_attention(q, k, v, documents=info.documents, implementation="xla")


class InnerLoopLayer(ConvolvedAttention):
    """o = norm(ttt(q, k, v, gates)) W_o for any `InnerLoop` of sequences.

    Every argument of `ttt_jax.ttt` that the specification takes per token is a projection of x:
      lr        squared loss: σ(x W), over head_dim where the fast network is not linear (as in Sun
                et al.); else softplus(x W + softplus⁻¹(0.1)). One for each trained matrix.
      momentum  σ(x W)
      forget    exp(−softplus(x W + b)), b such that the heads first forget 0.1 % to 10 % a token
      erase     (−κ, κ ⊙ σ(x W)) with κ = x W normalised: RWKV-7's removal keys
    The initial weights are learned, but for a fast network that starts from zero
    (`init_scale=0`): its state does.

    Sources: LaCT (arXiv 2505.23884) for rates and momentum, Mamba-2 (arXiv 2405.21060) and Gated
    DeltaNet (arXiv 2412.06464) for rates, forgetting and the convolution, RWKV-7 (arXiv 2503.14456)
    for the removal key, here without its low-rank projections.

    >>> from ttt_jax import presets
    >>> layer = InnerLoopLayer(16, 2, presets.gated_deltanet(), rngs=nnx.Rngs(0))
    >>> y, _ = layer(jnp.ones((1, 6, 16)))
    >>> y.shape, layer.state_size(tokens=6)
    ((1, 6, 16), 128)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        spec: InnerLoop,
        *,
        head_dim: int | None = None,
        stddev: float = 0.02,
        dtype: str = "float32",
        rngs: nnx.Rngs,
        convolution: int = 4,
        normalize: bool = True,
        tie_forget: bool = False,
        channel_forget: bool = False,
        mode: str = "auto",
    ):
        """Makes the parameters that the inner loop needs.

        Args:
          hidden_size: width of the model.
          heads: fast-weight heads.
          spec: the inner loop; one that is not causal makes a mixer that is not.
          head_dim, stddev, dtype, rngs, convolution: as in `ConvolvedAttention`.
          normalize: divides q and k of each head by their l2 norm.
          tie_forget: forget = exp(−a_h lr) with one learned a a head: Mamba-2's discretisation.
          channel_forget: a forget gate for each key channel (GLA, RWKV-7), not for each head.
          mode: as in `ttt_jax.ttt`.

        Raises:
          ValueError: naming the argument, its value and the rule that it breaks; `tie_forget` or
            `channel_forget` does not fit the specification.
        """
        check_is_spec(spec)
        check_gates(spec, tie_forget, channel_forget)
        common = dict(stddev=stddev, dtype=dtype, rngs=rngs)
        super().__init__(hidden_size, heads, head_dim=head_dim, convolution=convolution, **common)
        self.spec, self.normalize, self.mode = spec, normalize, mode
        self.channel_forget = channel_forget
        head_dim = self.head_dim
        initial = spec.init(rngs.params(), heads, head_dim)
        axes = {name: ("heads", *[None] * (w.ndim - 1)) for name, w in initial.items()}
        learned = {} if spec.fast_net.init_scale == 0 else initial
        self.weights = nnx.Dict({name: param(w, axes[name]) for name, w in learned.items()})

        def gate(*out):
            names = ("embed", *["gain"] * len(out))
            return Linear(hidden_size, out, names=names, bias=True, **common)

        self.rate = gate(heads, len(spec.trained)) if spec.rate == "per_token" else None
        self.momentum = gate(heads) if spec.momentum == "per_token" else None
        decay = jnp.log(_first_decays(heads) / _RATE)
        self.decay = param(decay, ("gain",)) if tie_forget else None
        gated = spec.forget == "per_token" and not tie_forget
        self.forget = gate(heads, *[head_dim] * channel_forget) if gated else None
        self.removal = gate(heads, head_dim) if spec.erase == "per_token" else None
        self.removal_rate = gate(heads, head_dim) if spec.erase == "per_token" else None

    def state_size(self, tokens: int) -> int:
        """Numbers that a sequence carries from token to token.

        Args:
          tokens: seen so far; the state does not depend on it.

        Returns:
          Trained matrices, once more for their momentum, and once more where a weight norm of form
          "pre" keeps them unnormalised. The tokens of an unfinished chunk come on top of it.
        """
        spec, dim = self.spec, self.head_dim
        shapes = spec.fast_net.shapes(dim, dim, dim)
        copies = 1 + (spec.momentum is not None)
        copies += spec.weight_norm is not None and spec.weight_norm.form == "pre"
        return copies * self.heads * sum(math.prod(shapes[name]) for name in spec.trained)

    def initial_weights(self) -> dict[str, jax.Array]:
        """The fast weights before the first token, name to [heads, in, out], float32."""
        if self.weights:
            return {name: w[...] for name, w in self.weights.items()}
        return self.spec.init(jax.random.key(0), self.heads, self.head_dim)

    def gates(self, x) -> dict[str, jax.Array]:
        """What the inner loop takes per token beside q, k and v.

        Args:
          x: [batch, time, hidden].

        Returns:
          The arguments lr, momentum, forget and erase of `ttt_jax.ttt` that the specification
          uses; lr, momentum and forget in at least float32.
        """
        wide = at_least_float32(self.dtype)
        gates = {}
        if self.rate is not None:
            gates["lr"] = self._rate(self.rate(x, out_dtype=wide))
        if self.momentum is not None:
            gates["momentum"] = jax.nn.sigmoid(self.momentum(x, out_dtype=wide))
        if self.decay is not None:
            gates["forget"] = jnp.exp(-jnp.exp(self.decay[...]) * gates["lr"][..., 0])
        if self.forget is not None:
            first = jnp.log(jnp.expm1(_first_decays(self.heads)))
            first = first[:, None] if self.channel_forget else first
            decay = self.forget(x, out_dtype=wide) + first.astype(wide)
            gates["forget"] = jnp.exp(-jax.nn.softplus(decay))
        if self.removal is not None:
            key = l2_normalize(self.removal(x), _NORM_EPSILON)
            gates["erase"] = (-key, key * jax.nn.sigmoid(self.removal_rate(x)))
        return gates

    def _rate(self, x):
        if self.spec.loss.state_free:
            return jax.nn.softplus(x + inverse_softplus(_RATE))
        # A step of rate 1 on a normalised key replaces what a linear state holds under it.
        linear = isinstance(self.spec.fast_net, LinearNet)
        return jax.nn.sigmoid(x) / (1 if linear else self.head_dim)

    def _heads(self, x, info):
        q, k, v = super()._heads(x, info)
        if self.normalize:
            q, k = l2_normalize(q, _NORM_EPSILON), l2_normalize(k, _NORM_EPSILON)
        return q, k, v

    def _mix(self, x, q, k, v, info):
        with jax.named_scope("ttt"):
            options = dict(segment_ids=info.segment_ids, mode=self.mode)
            out, _ = ttt(self.spec, self.initial_weights(), q, k, v, **self.gates(x), **options)
            return out


def _first_decays(heads: int):
    """−log(forget) of each head at the start, spaced geometrically, [heads] float32."""
    return jnp.geomspace(*_DECAYS, heads) if heads > 1 else jnp.full(1, math.prod(_DECAYS) ** 0.5)
