"""The softmax transformer: the baseline of LaCT-LLM, of the same size and from the same parts."""

import dataclasses

from flax import nnx

from ttt_jax.layers.attention import visible_pairs
from ttt_jax.layers.mixers import AttentionLayer
from ttt_jax.layers.mlp import swiglu_flops
from ttt_jax.models.decoder import Decoder
from ttt_jax.models.decoder_config import DecoderConfig, check_count


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class TransformerConfig(DecoderConfig):
    """A decoder with softmax attention; the other fields are those of `DecoderConfig`.

    Attributes:
      window_size: None (the default) for full causal attention, or a sliding window.
      max_decode_length: tokens that decoding can hold when there is no window.

    >>> TransformerConfig(vocab_size=64, hidden_size=32, num_layers=2,
    ...                   num_attention_heads=3).validate()
    Traceback (most recent call last):
    ...
    ValueError: num_attention_heads=3 must divide hidden_size=32: every head has the same size
    """

    window_size: int | None = None
    max_decode_length: int = 32768

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value and the rule that it breaks.
        """
        DecoderConfig.validate(self)
        check_count(self, "max_decode_length")

    def cache_length(self) -> int:
        """Tokens that the decoding cache of a layer keeps.

        Returns:
          The window, or `max_decode_length` without one.
        """
        return self.window_size or self.max_decode_length

    def decode_limit(self) -> int | None:
        """The longest sequence that decoding can continue exactly.

        Returns:
          A number of tokens, or None for any length.
        """
        return None if self.window_size else self.max_decode_length


# The sizes of the LaCT-LLM presets: where a LaCT layer has its branch, a baseline has nothing.
PRESETS = {
    "tiny": dict(
        vocab_size=512, hidden_size=128, num_layers=2, num_attention_heads=4, intermediate_size=384
    ),
    "125m": dict(vocab_size=32000, hidden_size=768, num_layers=12, num_attention_heads=12),
    "760m": dict(vocab_size=32000, hidden_size=1536, num_layers=24, num_attention_heads=24),
    "3b": dict(vocab_size=32000, hidden_size=3072, num_layers=24, num_attention_heads=24),
}


def preset(name: str, **overrides) -> TransformerConfig:
    """A configuration by size.

    Args:
      name: "tiny", "125m", "760m" or "3b".
      **overrides: fields to change.

    Returns:
      The configuration.

    Raises:
      ValueError: if the name is unknown.

    >>> preset("760m", window_size=2048).mlp_size()
    4096
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return TransformerConfig(**{**PRESETS[name], **overrides})


class Transformer(Decoder):
    """Softmax attention, full or windowed, in every block.

    >>> import jax.numpy as jnp
    >>> model = Transformer(preset("tiny"), nnx.Rngs(0))
    >>> model(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 512)
    """

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs) -> AttentionLayer:
        """The attention of one layer.

        Args:
          config: the model's configuration.
          rngs: random streams of that layer.

        Returns:
          The layer.
        """
        return AttentionLayer(**attention_options(config), rngs=rngs)

    def flops_per_token(self, sequence_length: int) -> float:
        """Matmul FLOPs of a forward pass over one document, by token.

        Args:
          sequence_length: tokens of the document.

        Returns:
          2 FLOPs a multiply-add: projections, feed-forward, head, and the attention's visible
          pairs only. Training costs three times as much.

        Raises:
          ValueError: if the length is below 1.
        """
        return decoder_flops(self.config, sequence_length)


def attention_options(config: DecoderConfig) -> dict:
    """Arguments of an `AttentionLayer` that come from the configuration.

    Args:
      config: a model configuration.

    Returns:
      Keyword arguments, without `rngs`.
    """
    return dict(
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        window=config.window_size,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        stddev=config.initializer_range,
        dtype=config.dtype,
        implementation=config.attention_implementation,
    )


def decoder_flops(config: DecoderConfig, sequence_length: int) -> float:
    """FLOPs by token of everything that a decoder has whatever its extra branches.

    Args:
      config: a model configuration.
      sequence_length: tokens of the document, at least 1.

    Returns:
      FLOPs of one forward pass by token.

    Raises:
      ValueError: if the length is below 1.

    >>> config = TransformerConfig(vocab_size=10, hidden_size=4, num_layers=1,
    ...                            num_attention_heads=2, intermediate_size=8)
    >>> decoder_flops(config, 1)
    416.0
    """
    if sequence_length < 1:
        raise ValueError(f"{sequence_length=} must be at least 1")
    width = config.hidden_size
    projections = 2 * 4 * width * width
    # A visible pair costs one product with the key and one with the value, over all heads.
    pairs = visible_pairs(sequence_length, config.window_size) / sequence_length
    layer = projections + swiglu_flops(width, config.mlp_size()) + 4 * width * pairs
    return float(config.num_layers * layer + 2 * width * config.vocab_size)
