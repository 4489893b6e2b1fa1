"""The configuration of LaCT-NVS and its sizes."""

import dataclasses
from collections.abc import Sequence

from ttt_jax.inner_loop import kernel
from ttt_jax.inner_loop.presets import lact_nvs as inner_loop_preset
from ttt_jax.inner_loop.spec import InnerLoop, Span
from ttt_jax.layers.attention import IMPLEMENTATIONS
from ttt_jax.models.decoder_config import DTYPES, REMAT, check_choice, check_count, check_divides

MODES = ("auto", "recurrent", "parallel", "kernel")


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class LactNVSConfig:
    """A view-synthesis model.

    Attributes:
      hidden_size: width.
      num_layers: blocks.
      num_attention_heads: heads of the attention within a view; divides the width.
      num_fast_heads: heads of the fast weights; divides the width.
      patch_size: pixels along a side of a patch.
      fast_hidden_multiple: hidden width of the fast network over its head width.
      mlp_multiple: width of the feed-forward layer over the model's.
      variant: 0 (the official model) to 6 (linear attention), see `presets.lact_nvs`. Parameters
        that a variant does not use do not exist.
      direction: "descent", or "ascent" on the inner loss.
      query: read the fast weights with the "query" or with the "key".
      mode: "auto", "recurrent", "parallel" or "kernel", as in `ttt_jax.ttt`. The inputs make one
        update, so that every variant has a parallel form; "kernel" runs what has kernels by them.
      base_rate: inner learning rate of a token before training.
      newton_schulz_steps: iterations of the orthogonalisation; 0 only divides by the norm.
      newton_schulz_dtype: dtype of its products; None for the compute dtype.
      qk_norm: RMS norm of the attention's queries and keys by head.
      norm_epsilon: ε of the layer norms.
      initializer_range: standard deviation of the initial projections; those that end a residual
        part are divided by sqrt(3 · num_layers).
      dtype: compute dtype; parameters are float32 whatever it is.
      remat: what the backward pass recomputes of each block: "none", "full" (everything), or
        "dots" (everything but the weight products).
      scan_layers: stack the blocks and run them in a scan.
      attention_implementation: "auto", "xla" or "cudnn".

    >>> preset("tiny", patch_size=0).validate()
    Traceback (most recent call last):
    ...
    ValueError: patch_size=0 must be an integer of at least 1
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_fast_heads: int = 1
    patch_size: int = 8
    fast_hidden_multiple: float = 2.0
    mlp_multiple: float = 4.0
    variant: int = 0
    direction: str = "descent"
    query: str = "query"
    mode: str = "auto"
    base_rate: float = 0.01
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str | None = None
    qk_norm: bool = True
    norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    attention_implementation: str = "auto"

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value, the rule that it breaks and the way out.
        """
        counts = ("hidden_size", "num_layers", "num_attention_heads", "num_fast_heads")
        for name in (*counts, "patch_size"):
            check_count(self, name)
        check_divides(self, "num_attention_heads")
        check_divides(self, "num_fast_heads")
        for name in ("base_rate", "norm_epsilon", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")
        head_dim = self.hidden_size // self.num_fast_heads
        for name, width in (("fast_hidden_multiple", head_dim), ("mlp_multiple", self.hidden_size)):
            if not getattr(self, name) * width >= 1:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must leave a hidden layer of at least one unit"
                )
        check_choice(self, "newton_schulz_dtype", (None, *DTYPES))
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "remat", REMAT)
        check_choice(self, "attention_implementation", IMPLEMENTATIONS)
        check_choice(self, "mode", MODES)
        spec = self.inner_loop([Span(0, 1, True, True)])
        found = kernel.obstacles(spec) if self.mode == "kernel" else []
        if found:
            raise ValueError(
                f"mode='kernel' cannot run variant={self.variant}: {'; '.join(found)}; use "
                "mode='auto'"
            )

    def inner_loop(self, spans: Sequence[Span]) -> InnerLoop:
        """The inner loop of every layer, over the given spans.

        Args:
          spans: in tokens, run one after another.

        Returns:
          `presets.lact_nvs` of the variant, with the options of this configuration.

        Raises:
          ValueError: for an unknown variant or option, or a negative number of Newton-Schulz steps.
        """
        spec = inner_loop_preset(
            [dataclasses.astuple(span) for span in spans],
            self.newton_schulz_steps,
            muon_dtype=self.newton_schulz_dtype,
            variant=self.variant,
        )
        return dataclasses.replace(spec, direction=self.direction, query=self.query)


# The paper states 114M and no shape; this one is ours.
PRESETS = {
    "tiny": dict(hidden_size=128, num_layers=4, num_attention_heads=4, num_fast_heads=2),
    "114m": dict(
        hidden_size=768, num_layers=12, num_attention_heads=12, num_fast_heads=3, mlp_multiple=3.0
    ),
    "14": dict(hidden_size=768, num_layers=14, num_attention_heads=12),
    "24": dict(hidden_size=768, num_layers=24, num_attention_heads=12),
}


def preset(name: str, **overrides) -> LactNVSConfig:
    """A configuration by size.

    Args:
      name: "tiny", "114m", or "14" and "24": the official ones of so many layers.
      **overrides: fields to change.

    Returns:
      The configuration.

    Raises:
      ValueError: if the name is unknown.

    >>> preset("24").num_layers
    24
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return LactNVSConfig(**{**PRESETS[name], **overrides})
