"""LaCT-LLM: a decoder whose layers add a TTT branch to window attention, in variants 0 to 6.

Source: LaCT (Zhang et al. 2025, arXiv 2505.23884), and *Test-Time Training with KV Binding Is
Secretly Linear Attention* for the variants. Sizes as in the configurations published at
github.com/a1600012888/LaCT.
"""

import dataclasses

from flax import nnx

from ttt_jax.inner_loop.parallel import obstacles
from ttt_jax.inner_loop.presets import lact_llm as inner_loop_preset
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz, WeightNorm
from ttt_jax.layers.flops import inner_loop_flops
from ttt_jax.layers.mixers import LactLayer
from ttt_jax.layers.ttt_branch import TTTBranch
from ttt_jax.models.decoder import Decoder
from ttt_jax.models.decoder_config import DecoderConfig, check_choice, check_count, check_divides
from ttt_jax.models.transformer import attention_options, decoder_flops

MODES = ("auto", "recurrent", "parallel", "kernel")


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class LactLLMConfig(DecoderConfig):
    """A LaCT language model; the other fields are those of `DecoderConfig`.

    Attributes:
      variant: 0 (the official model) to 6 (linear attention), see `presets.lact_llm`. Parameters
        that a variant does not use do not exist.
      num_fast_heads: heads of the fast weights; divides the width.
      chunk_size: tokens of an inner update.
      fast_hidden_multiple: hidden width of the fast network over its head width.
      low_rank: rank of the initial weights other than the last layer's; 0 stores them whole.
      weight_norm: "post" or "pre", for the variants that have a weight norm.
      use_momentum: False drops the momentum of a variant that has it.
      use_newton_schulz: False drops the orthogonalisation of a variant that has it.
      newton_schulz_dtype: dtype of its products; None for the compute dtype.
      inner_steps: inner steps on each chunk.
      direction: "descent", or "ascent" on the inner loss.
      query: read the fast weights with the "query" or with the "key".
      silu_values: silu on the branch's values.
      fast_rotary: rotary embedding of the branch's queries and keys.
      learned_scale: the branch's output gate.
      mode: "auto", "recurrent", "parallel" or "kernel", as in `ttt_jax.ttt`.
      implementation: as in `ttt_jax.ttt`.

    >>> config = preset("tiny", variant=0, mode="parallel")
    >>> config.validate()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: mode='parallel' cannot run variant=0: update='all'...
    """

    variant: int = 0
    num_fast_heads: int = 4
    chunk_size: int = 2048
    fast_hidden_multiple: float = 1.0
    low_rank: int = 32
    weight_norm: str = "post"
    use_momentum: bool = True
    use_newton_schulz: bool = True
    newton_schulz_dtype: str | None = None
    inner_steps: int = 1
    direction: str = "descent"
    query: str = "query"
    silu_values: bool = True
    fast_rotary: bool = True
    learned_scale: bool = True
    mode: str = "auto"
    implementation: str | None = None

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value, the rule that it breaks and the way out.
        """
        DecoderConfig.validate(self)
        for name in ("num_fast_heads", "chunk_size", "inner_steps"):
            check_count(self, name)
        check_divides(self, "num_fast_heads")
        if self.window_size is None:
            raise ValueError("window_size=None: LaCT-LLM has window attention; give a number")
        if not isinstance(self.low_rank, int) or self.low_rank < 0:
            raise ValueError(f"low_rank={self.low_rank!r} must be an integer >= 0; 0 is full rank")
        if not self.fast_hidden_multiple * (self.hidden_size // self.num_fast_heads) >= 1:
            raise ValueError(
                f"fast_hidden_multiple={self.fast_hidden_multiple!r} must leave a hidden layer of"
                " at least one unit"
            )
        check_choice(self, "weight_norm", ("post", "pre"))
        check_choice(self, "newton_schulz_dtype", (None, "float32", "bfloat16", "float64"))
        check_choice(self, "mode", MODES)
        spec = self.inner_loop()
        found = obstacles(spec) if self.mode == "parallel" else []
        if found:
            raise ValueError(
                f"mode='parallel' cannot run variant={self.variant}: {'; '.join(found)};"
                " use mode='recurrent' or 'auto', or a variant from 2 to 6"
            )

    def inner_loop(self) -> InnerLoop:
        """The inner loop of every layer.

        Returns:
          `presets.lact_llm` of the variant, with the options of this configuration.

        Raises:
          ValueError: for an unknown variant or option.
        """
        spec = inner_loop_preset(variant=self.variant, chunk_size=self.chunk_size)
        changes = dict(steps=self.inner_steps, direction=self.direction, query=self.query)
        if spec.weight_norm is not None:
            changes["weight_norm"] = WeightNorm(form=self.weight_norm)
        if not self.use_momentum:
            changes["momentum"] = None
        if not self.use_newton_schulz:
            changes["orthogonalise"] = None
        elif isinstance(spec.orthogonalise, NewtonSchulz):
            changes["orthogonalise"] = dataclasses.replace(
                spec.orthogonalise, dtype=self.newton_schulz_dtype
            )
        return dataclasses.replace(spec, **changes)

    def cache_length(self) -> int:
        """Tokens that the attention cache of a layer keeps.

        Returns:
          The window.
        """
        return self.window_size

    def decode_limit(self) -> None:
        """The longest sequence that decoding can continue.

        Returns:
          None: any length.
        """
        return None


PRESETS = {
    "tiny": dict(
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        num_attention_heads=4,
        num_fast_heads=2,
        intermediate_size=384,
        window_size=64,
        chunk_size=64,
        low_rank=16,
        rope_theta=1e4,
    ),
    "125m": dict(vocab_size=32000, hidden_size=768, num_layers=12, num_attention_heads=12),
    "760m": dict(vocab_size=32000, hidden_size=1536, num_layers=24, num_attention_heads=24),
    "3b": dict(vocab_size=32000, hidden_size=3072, num_layers=24, num_attention_heads=24),
}


def preset(name: str, **overrides) -> LactLLMConfig:
    """A configuration by size.

    Args:
      name: "tiny", "125m", "760m" or "3b".
      **overrides: fields to change.

    Returns:
      The configuration: window and chunk 2048, 4 fast heads, rank 32, θ = 10⁶ but for "tiny".

    Raises:
      ValueError: if the name is unknown.

    >>> preset("760m", variant=2).hidden_size
    1536
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return LactLLMConfig(**{**PRESETS[name], **overrides})


class LactLLM(Decoder):
    """The language model.

    >>> import jax.numpy as jnp
    >>> model = LactLLM(preset("tiny", variant=6), nnx.Rngs(0))
    >>> model(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 512)
    """

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs) -> LactLayer:
        """Window attention and TTT branch of one layer.

        Args:
          config: the model's configuration.
          rngs: random streams of that layer.

        Returns:
          The layer.
        """
        branch = TTTBranch(
            config.hidden_size,
            config.num_fast_heads,
            config.inner_loop(),
            attention_heads=config.num_attention_heads,
            low_rank=config.low_rank,
            stddev=config.initializer_range,
            dtype=config.dtype,
            rngs=rngs,
            hidden_multiple=config.fast_hidden_multiple,
            silu_values=config.silu_values,
            learned_scale=config.learned_scale,
            mode=config.mode,
            implementation=config.implementation,
        )
        options = attention_options(config)
        return LactLayer(branch=branch, fast_rotary=config.fast_rotary, **options, rngs=rngs)

    def flops_per_token(self, sequence_length: int) -> float:
        """Matmul FLOPs of a forward pass over one document, by token.

        Args:
          sequence_length: tokens of the document.

        Returns:
          2 FLOPs a multiply-add: projections, feed-forward, head, the attention's visible pairs,
          and the inner loop (application, gradient, Newton-Schulz, one update for each complete
          chunk). Products of the low-rank initial weights, once a batch, are left out. Training
          costs three times as much.

        Raises:
          ValueError: if the length is below 1.
        """
        config = self.config
        total = decoder_flops(config, sequence_length)
        spec, heads = config.inner_loop(), config.num_fast_heads
        head_dim = config.hidden_size // heads
        gates = len(spec.trained) if spec.rate == "per_token" else 0
        gates += (spec.momentum == "per_token") + config.learned_scale
        branch = 2 * config.hidden_size * gates * heads
        hidden_dim = int(head_dim * config.fast_hidden_multiple)
        branch += inner_loop_flops(spec, heads, head_dim, hidden_dim, sequence_length)
        return total + config.num_layers * branch
