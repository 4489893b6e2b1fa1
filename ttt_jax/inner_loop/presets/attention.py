"""Linear attention and its gated forms: the dot-product loss, which never looks at the state.

All start from a zero state, read after the token's own update and apply no scale to the query.
"""

from ttt_jax.inner_loop.fast_nets import Linear
from ttt_jax.inner_loop.parts import whole_number
from ttt_jax.inner_loop.spec import InnerLoop


def linear_attention() -> InnerLoop:
    """Causal linear attention: ``o_t = q_t Σ_{i≤t} k_iᵀ v_i``, from a zero state.

    ``lr``, ``momentum`` and ``forget`` are not used.

    Source: Katharopoulos et al., *Transformers are RNNs* (2020), without feature map or norm.

    Example:
      >>> linear_attention().chunk_size
      1
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0))


def retnet(heads: int) -> InnerLoop:
    """RetNet's retention: ``S_t = γ_h S_{t-1} + k_tᵀ v_t``, ``o_t = q_t S_t``.

    ``γ_h = 1 − 2^(−5−h)`` is a constant of head ``h``; other constants by
    ``dataclasses.replace(spec, forget=(...))``. ``lr``, ``momentum`` and ``forget`` are not used.

    Args:
      heads: number of heads.

    Raises:
      ValueError: ``heads`` is not a whole number from 1 on.

    Source: Sun et al., *Retentive Network* (arXiv 2307.08621), eq. 5 to 8, without its norms.

    Example:
      >>> retnet(heads=2).forget
      (0.96875, 0.984375)
    """
    whole_number("heads", heads)
    decays = tuple(1 - 2.0 ** (-5 - head) for head in range(heads))
    return InnerLoop(fast_net=Linear(init_scale=0.0), forget=decays)


def mamba2() -> InnerLoop:
    """Mamba-2's state space duality: ``S_t = exp(Δ_t A) S_{t-1} + Δ_t B_tᵀ x_t``,
    ``y_t = C_t S_t``.

    ``q = C``, ``k = B``, ``v = x``; ``lr = Δ_t``, the step size; ``forget = exp(Δ_t A)``, one
    number a token and head. The state is ``[d_state, d_head]``, the transpose of the official
    code's.

    Source: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6.

    Example:
      >>> mamba2().forget
      'per_token'
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0), rate="per_token", forget="per_token")


def gla() -> InnerLoop:
    """Gated linear attention: ``S_t = diag(α_t) S_{t-1} + k_tᵀ v_t``, ``o_t = q_t S_t``.

    ``forget = α_t``, ``[batch, time, heads, key_dim]`` in [0, 1]: a gate for each key channel. With
    ``[batch, time, heads]`` it is the scalar gate of "simple GLA". ``lr`` and ``momentum`` are not
    used.

    Source: Yang et al., *Gated Linear Attention Transformers* (arXiv 2312.06635), eq. 3.

    Example:
      >>> gla().rate
      1.0
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0), forget="per_token")
