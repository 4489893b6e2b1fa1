"""LaCT: large chunks, a SwiGLU network, orthogonalised updates; for language and for views."""

import dataclasses
from collections.abc import Sequence

from ttt_jax.inner_loop.fast_nets import Linear, SwiGLU
from ttt_jax.inner_loop.parts import whole_number
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz, Span, WeightNorm
from ttt_kernels.arguments import floating_dtype
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, MUON_COEFFICIENTS


def lact_llm(variant: int = 0, *, chunk_size: int = 2048) -> InnerLoop:
    """LaCT-LLM's inner loop and its six-step reduction to linear attention.

    ``f(x) = (silu(x W0) ⊙ (x W2)) W1``. A chunk is read first; when it is complete, each matrix
    learns, with ``L = −⟨f(k), v⟩`` at the chunk's starting weights and β its mean momentum::

        G = Σ_i lr_i ∇L_i;  M = β M + G;  W ← |W_0| · normalise(W − NewtonSchulz(M))

    where ``normalise`` divides each column by its norm and ``|W_0|`` are the initial norms.
    ``momentum`` is ``[batch, time, heads]``, ``lr`` ``[batch, time, heads, R]`` with ``R = 3``
    rates (of w0, w1, w2) in variant 0 and 1 in 1 to 3; nothing is forgotten.

    0: SwiGLU, all three matrices trained; rates per token, momentum, Newton-Schulz, weight norm.
    1: only ``W1`` is trained. 2: no weight norm (parallel from here on). 3: a linear network.
    4: no rates per token. 5: no momentum. 6: no orthogonalisation: ``o = q (W + Σ kᵀv)``.

    Args:
      variant: 0 to 6.
      chunk_size: tokens a chunk.

    Returns:
      An ``InnerLoop``; ``dataclasses.replace`` works on it.

    Raises:
      ValueError: ``variant`` is not 0 to 6, or ``chunk_size`` not a whole number from 1 on.

    Source: the paper's Table 1; LaCT (Zhang et al., 2025) for variant 0.

    Example:
      >>> lact_llm(variant=6).orthogonalise is None
      True
    """
    spec = InnerLoop(
        fast_net=SwiGLU(),
        chunk_size=chunk_size,
        order="apply_then_update",
        rate="per_token",
        momentum="per_token",
        orthogonalise=NewtonSchulz(coefficients=LACT_COEFFICIENTS),
        weight_norm=WeightNorm(),
    )
    return _reduce(spec, variant)


def lact_nvs(
    entries: Sequence[tuple[int, int, bool, bool]],
    muon_steps: int = 5,
    *,
    muon_dtype: str | None = None,
    variant: int = 0,
) -> InnerLoop:
    """LaCT-NVS's inner loop: updates and applications in the order of an explicit list.

    ``f(x) = (silu(x W0) ⊙ (x W2)) W1``; each update is
    ``W ← |W_0| · normalise(W + NS(Σ lr kᵀv…))``. For view synthesis: one update on the tokens of
    the input views, then applied to all tokens,
    ``[(0, inputs, True, False), (0, all, False, True)]``.

    ``lr`` is ``[batch, time, heads, 3]``: how much each token counts in the updates of ``w0``,
    ``w1`` and ``w2`` (Newton-Schulz removes their common scale). No momentum, nothing is forgotten.

    Args:
      entries: ``(start, end, update, apply)`` in tokens, run one after another.
      muon_steps: Newton-Schulz iterations; 0 only divides by the Frobenius norm, as the official
        code.
      muon_dtype: dtype of its products; the official code uses ``"bfloat16"``.
      variant: 0 to 6, the reduction of ``lact_llm``; there is no momentum, so 5 equals 4. From 4 on
        there is no ``lr``; in 1 to 3 it has one rate a token.

    Raises:
      ValueError: ``muon_steps`` is negative, ``variant`` is not 0 to 6, or ``entries`` are not
        what they must be.

    Source: LaCT (Zhang et al., 2025), ``lact_nvs/lact_ttt.py``. The gradient through the initial
    norms is stopped, as there.

    Example:
      >>> lact_nvs([(0, 16, True, False), (0, 24, False, True)]).order[1].end
      24
    """
    whole_number("muon_steps", muon_steps, least=0)
    if not isinstance(entries, Sequence) or not entries:
        raise ValueError(f"entries={entries!r}: give a list of (start, end, update, apply)")
    wrong = [e for e in entries if not isinstance(e, tuple | list) or len(e) != 4]
    if wrong:
        raise ValueError(f"entries hold {wrong[0]!r}: each must be (start, end, update, apply)")
    if muon_dtype is not None:
        floating_dtype("muon_dtype", muon_dtype)
    coefficients = MUON_COEFFICIENTS[:1] * muon_steps
    spec = InnerLoop(
        fast_net=SwiGLU(),
        order=tuple(Span(*entry) for entry in entries),
        rate="per_token",
        orthogonalise=NewtonSchulz(coefficients=coefficients, dtype=muon_dtype),
        weight_norm=WeightNorm(detach=True),
    )
    return _reduce(spec, variant)


def _reduce(spec: InnerLoop, variant: int) -> InnerLoop:
    """The first ``variant`` of the six removals of the paper's Table 1."""
    check_variant(variant)
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


def check_variant(variant: int) -> None:
    """Raises ``ValueError`` where ``variant`` is none of the paper's reduction."""
    if isinstance(variant, bool) or not isinstance(variant, int) or variant not in range(7):
        raise ValueError(
            f"{variant=}: the reduction has the variants 0 (as published) to 6 (linear attention)"
        )
