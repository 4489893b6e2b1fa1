"""Neural memories: Titans and Atlas."""

from ttt_jax.inner_loop.fast_nets import MLP, Linear, Polynomial
from ttt_jax.inner_loop.losses import Squared
from ttt_jax.inner_loop.parts import whole_number
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz
from ttt_kernels.newton_schulz import MUON_COEFFICIENTS


def titans(depth: int = 2, *, chunk_size: int = 1) -> InnerLoop:
    """Titans' long-term memory: an MLP that learns ``k → v`` with momentum and forgetting.

    ``f(x) = gelu(… gelu(x W1) …) W_depth``; with ``depth=1`` ``f(x) = x W``, and the one matrix is
    called ``w``.

    ``M_t = η_t M_{t-1} + θ_t ∇|f(k_t) − v_t|²``, ``W_t = (1 − α_t) W_{t-1} − M_t``: ``lr = θ_t``,
    ``momentum = η_t``, ``forget = 1 − α_t``, each ``[batch, time, heads]``. With ``chunk_size=1``
    every token reads the memory after its own update; a larger chunk is one update (gates are its
    means), which later chunks read.

    The code of lucidrains takes gradients at the initial weights:
    ``dataclasses.replace(spec, gradient_at="start")``. fla's reference for the linear memory reads
    every token's weights with gradients at the last chunk boundary, behind a layer norm whose
    backward pass divides only its second term by the standard deviation; neither is followed here.

    Args:
      depth: layers of the memory, 1 to 4; 1 is a linear state.
      chunk_size: tokens an update.

    Raises:
      ValueError: ``depth`` is not 1 to 4, or ``chunk_size`` not a whole number from 1 on.

    Source: Behrouz et al., *Titans* (arXiv 2501.00663), eqs. 8 to 14.

    Example:
      >>> titans(depth=3).trained
      ('w1', 'w2', 'w3')
    """
    whole_number("depth", depth)
    if depth > 4:
        raise ValueError(f"depth={depth}: Titans' memories have 1 to 4 layers")
    return InnerLoop(
        fast_net=Linear() if depth == 1 else MLP(depth=depth),
        loss=Squared(scale=2.0),
        chunk_size=chunk_size,
        order="update_then_apply" if chunk_size == 1 else "apply_then_update",
        rate="per_token",
        momentum="per_token",
        forget="per_token",
    )


def atlas(
    *, window: int = 8, chunk_size: int = 1, degree: int = 2, depth: int = 2, steps: int = 5
) -> InnerLoop:
    """Atlas: a memory that learns its last ``window`` tokens at once, by orthogonalised steps.

    ``M_t = θ_t M_{t-1} + Σ_{i=t-window+1..t} γ_i ∇½|f(φ_p(k_i)) − v_i|²`` (the Omega rule,
    gradients at ``W_{t-1}``), ``W_t = α_t W_{t-1} − NewtonSchulz(M_t)``; ``φ_p`` are all monomials
    of the key up to degree ``p``. ``lr = γ_i``, ``momentum = θ_t``, ``forget = α_t``, each
    ``[batch, time, heads]``. The paper's rate ``η_t`` in front of Newton-Schulz is 1. With
    ``chunk_size > 1`` a chunk is one update, which later chunks read; its window then ends with the
    chunk.

    A window of few tokens makes an ``M_t`` of low rank, and with a rate of 1 Newton-Schulz turns
    also what rounding adds to it into a step (see ``NewtonSchulz``): with random keys float32 is
    only a few per cent near to float64, bfloat16 not at all, in every mode alike.

    Args:
      window: tokens in the window, a multiple of ``chunk_size``.
      chunk_size: tokens an update.
      degree: degree of the polynomial features, at least 1.
      depth: layers of the memory.
      steps: Newton-Schulz iterations; 0 only normalises.

    Raises:
      ValueError: a number is out of its range.

    Source: Behrouz et al., *Atlas* (arXiv 2505.23735), sections 3 and 5.

    Example:
      >>> atlas(window=4).window
      4
    """
    whole_number("steps", steps, least=0)
    return InnerLoop(
        fast_net=Polynomial(net=MLP(depth=depth), degree=degree),
        loss=Squared(),
        chunk_size=chunk_size,
        window=window,
        order="update_then_apply" if chunk_size == 1 else "apply_then_update",
        rate="per_token",
        momentum="per_token",
        orthogonalise=NewtonSchulz(coefficients=MUON_COEFFICIENTS[:1] * steps),
        forget="per_token",
    )
