"""Models, each with a typed configuration; `build` makes one from the other."""

from flax import nnx

from ttt_jax.models.h_vittt import HViTTT, HViTTTConfig
from ttt_jax.models.lact_llm import LactLLM, LactLLMConfig
from ttt_jax.models.lact_nvs import LactNVS, LactNVSConfig
from ttt_jax.models.transformer import Transformer, TransformerConfig
from ttt_jax.models.vit import ViT, ViTConfig
from ttt_jax.models.vittt import ViTTT, ViTTTConfig

_MODELS = {
    HViTTTConfig: HViTTT,
    LactLLMConfig: LactLLM,
    LactNVSConfig: LactNVS,
    TransformerConfig: Transformer,
    ViTConfig: ViT,
    ViTTTConfig: ViTTT,
}


def build(model_config, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """Makes the model of a configuration.

    Args:
      model_config: a configuration of one of the models here.
      rngs: random streams for the parameters; `nnx.Rngs(0)` if None.

    Returns:
      The model, parameters in float32.

    Raises:
      ValueError: if the configuration is of no known type, or invalid.

    >>> from ttt_jax.models import lact_llm
    >>> build(lact_llm.preset("tiny")).config.variant
    0
    """
    if type(model_config) not in _MODELS:
        known = ", ".join(config.__name__ for config in _MODELS)
        raise ValueError(f"model_config is a {type(model_config).__name__}; it must be: {known}")
    return _MODELS[type(model_config)](model_config, nnx.Rngs(0) if rngs is None else rngs)


__all__ = [
    "HViTTT",
    "HViTTTConfig",
    "LactLLM",
    "LactLLMConfig",
    "LactNVS",
    "LactNVSConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "ViTTT",
    "ViTTTConfig",
    "build",
]
