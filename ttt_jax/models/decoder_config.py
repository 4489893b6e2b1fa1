"""The configuration that all language models share."""

import dataclasses

from ttt_jax.layers.attention import IMPLEMENTATIONS
from ttt_jax.layers.mlp import default_intermediate_size

DTYPES = ("float32", "bfloat16", "float64")
REMAT = ("none", "full", "dots")


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class DecoderConfig:
    """Sizes and numerics of a decoder.

    Hashed by value, so that a model that keeps one can be an argument of a jitted function; a
    model keeps a copy, so that later changes here do not reach it.

    Attributes:
      vocab_size: rows of the embedding.
      hidden_size: width.
      num_layers: blocks.
      num_attention_heads: heads of the softmax attention; divides the width into even sizes.
      intermediate_size: width of the feed-forward layer; None for 8/3 of the width, rounded up
        to a multiple of 256.
      window_size: tokens that an attention query sees, itself included; None for all earlier.
      rope_theta: base of the rotary wavelengths.
      qk_norm: RMS norm of q and k over the whole width.
      qkv_bias: bias of the q, k, v projection.
      norm_epsilon: ε of the block norms and the final norm.
      initializer_range: standard deviation of the initial projections and embedding.
      tie_embeddings: the head is the transposed embedding.
      dtype: compute dtype; parameters are float32 whatever it is. "float64" needs
        `jax_enable_x64`.
      remat: what the backward pass recomputes of each block: "none", "full" (everything), or
        "dots" (everything but the weight products).
      scan_layers: stack the blocks and run them in a scan.
      attention_implementation: "auto", "xla", "cudnn" or "splash", see `layers.attention`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    intermediate_size: int | None = None
    window_size: int | None = 2048
    rope_theta: float = 1e6
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    tie_embeddings: bool = False
    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    attention_implementation: str = "auto"

    def validate(self) -> None:
        """Checks every field, before any work starts.

        Raises:
          ValueError: naming the field, its value and the rule that it breaks.
        """
        for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads"):
            check_count(self, name)
        for name in ("intermediate_size", "window_size"):
            if getattr(self, name) is not None:
                check_count(self, name)
        check_divides(self, "num_attention_heads")
        head_dim = self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} makes heads of size {head_dim};"
                " the size must be even: rotary embedding turns pairs"
            )
        for name in ("rope_theta", "norm_epsilon", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "remat", REMAT)
        check_choice(self, "attention_implementation", IMPLEMENTATIONS)

    def mlp_size(self) -> int:
        """Width of the feed-forward layer.

        Returns:
          `intermediate_size`, or its default.
        """
        return self.intermediate_size or default_intermediate_size(self.hidden_size)


def check_count(config, name: str) -> None:
    """Raises ValueError unless the field is an integer >= 1.

    Args:
      config: a configuration.
      name: of the field.
    """
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def check_divides(config, name: str) -> None:
    """Raises ValueError unless the field divides `hidden_size`.

    Args:
      config: a configuration.
      name: of the field, a number of heads.
    """
    value = getattr(config, name)
    if config.hidden_size % value:
        raise ValueError(
            f"{name}={value} must divide hidden_size={config.hidden_size}: every head has the"
            " same size"
        )


def check_choice(config, name: str, allowed: tuple) -> None:
    """Raises ValueError unless the field has one of the allowed values.

    Args:
      config: a configuration.
      name: of the field.
      allowed: its values.
    """
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {allowed}")
