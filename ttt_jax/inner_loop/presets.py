"""Every system as one value of ``InnerLoop``."""

import dataclasses

from ttt_kernels.newton_schulz import LACT_COEFFICIENTS

from ttt_jax.inner_loop.fast_nets import Linear, SwiGLU
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz, WeightNorm


def lact_llm(variant: int = 0, *, chunk_size: int = 2048) -> InnerLoop:
    """LaCT-LLM's inner loop and its six-step reduction to linear attention.

    0: SwiGLU, all three matrices trained; rates per token, momentum, Newton-Schulz, weight norm.
    1: only ``W1`` is trained. 2: no weight norm (parallel from here on). 3: a linear network.
    4: no rates per token. 5: no momentum. 6: no orthogonalisation: ``o = q (W + Σ kᵀv)``.

    Args:
      variant: 0 to 6.
      chunk_size: tokens a chunk.

    Returns:
      An ``InnerLoop``; ``dataclasses.replace`` works on it.

    Raises:
      ValueError: ``variant`` is not 0 to 6.

    Source: the paper's Table 1; LaCT (Zhang et al., 2025) for variant 0.

    Example:
      >>> lact_llm(variant=6).orthogonalise is None
      True
    """
    if variant not in range(7):
        raise ValueError(f"variant={variant!r}: LaCT-LLM's reduction has the variants 0 to 6")
    spec = InnerLoop(
        fast_net=SwiGLU(),
        chunk_size=chunk_size,
        order="apply_then_update",
        rate="per_token",
        momentum="per_token",
        orthogonalise=NewtonSchulz(coefficients=LACT_COEFFICIENTS),
        weight_norm=WeightNorm(),
    )
    removals = (
        {"update": "last_layer"},
        {"weight_norm": None},
        {"fast_net": Linear(), "update": "all"},
        {"rate": 1.0},
        {"momentum": None},
        {"orthogonalise": None},
    )
    for removal in removals[:variant]:
        spec = dataclasses.replace(spec, **removal)
    return spec


def linear_attention() -> InnerLoop:
    """Causal linear attention: ``o_t = q_t Σ_{i≤t} k_iᵀ v_i``, from a zero state.

    Source: Katharopoulos et al., *Transformers are RNNs* (2020), without feature map or norm.

    Example:
      >>> linear_attention().chunk_size
      1
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0))
