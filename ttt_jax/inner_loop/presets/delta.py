"""Delta rules: the squared loss on a linear state, token by token from a zero state."""

from ttt_jax.inner_loop.fast_nets import Linear
from ttt_jax.inner_loop.losses import Squared
from ttt_jax.inner_loop.spec import InnerLoop


def deltanet() -> InnerLoop:
    """DeltaNet: ``S_t = S_{t-1} − β_t k_tᵀ (k_t S_{t-1} − v_t)``, ``o_t = q_t S_t``.

    One gradient step on ``½ |k S − v|²`` a token; ``lr = β_t``. Stable for ``β_t |k_t|²`` in [0,
    2]: normalise the keys. ``momentum`` and ``forget`` are not used.

    Source: Yang et al., *Parallelizing Linear Transformers with the Delta Rule* (arXiv 2406.06484).

    Example:
      >>> deltanet().forget is None
      True
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0), loss=Squared(), rate="per_token")


def gated_deltanet() -> InnerLoop:
    """Gated DeltaNet: ``S̃ = α_t S_{t-1}``, ``S_t = S̃ − β_t k_tᵀ (k_t S̃ − v_t)``, ``o_t = q_t S_t``.

    ``lr = β_t``; ``forget = α_t`` in [0, 1], one number a token and head (or one a key channel:
    Kimi delta attention). The state is forgotten first, and the error is that of the decayed state.

    Source: Yang et al., *Gated Delta Networks* (arXiv 2412.06464), eq. 10.

    Example:
      >>> gated_deltanet().forget_first
      True
    """
    return InnerLoop(
        fast_net=Linear(init_scale=0.0),
        loss=Squared(),
        rate="per_token",
        forget="per_token",
        forget_first=True,
    )


def rwkv7() -> InnerLoop:
    """RWKV-7: ``S_t = diag(w_t) S_{t-1} + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t``, ``o_t = q_t S_t``.

    The delta rule with an erase key of its own: ``erase = (a, b)`` with ``a = −κ̂_t`` and
    ``b = κ̂_t ⊙ η_t`` (κ̂ the normalised removal key, η the in-context rate a channel) is a step of
    rate η on ``½ |κ̂ S|²``. ``forget = w_t``, ``[batch, time, heads, key_dim]``; the erase reads
    the state before it is forgotten. ``lr`` and ``momentum`` are not used.

    Source: Peng et al., *RWKV-7 "Goose"* (arXiv 2503.14456), eq. 17.

    Example:
      >>> rwkv7().erase
      'per_token'
    """
    return InnerLoop(fast_net=Linear(init_scale=0.0), forget="per_token", erase="per_token")
