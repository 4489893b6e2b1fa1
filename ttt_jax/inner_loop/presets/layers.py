"""The TTT layers of Sun et al. in their dual form."""

from ttt_jax.inner_loop.fast_nets import MLP
from ttt_jax.inner_loop.losses import Squared
from ttt_jax.inner_loop.spec import InnerLoop


def ttt_linear(*, chunk_size: int = 16) -> InnerLoop:
    """TTT-Linear: ``f(x) = x + LN(x W1 + b1)`` learns ``k → v``; token ``i`` reads its own weights.

    ``W_i = W − c_i Σ_{j≤i} lr_j ∂L_j/∂W`` inside a mini-batch, with gradients of
    ``½ |f(k) − v|²`` at its start. With the residual inside ``f`` this is the official code's
    target: ``LN(k W1 + b1)`` learns ``v − k``. ``lr`` is ``[batch, time, heads]``:
      ``base_lr · σ(…) / head_dim``;
    ``weights["position_rate"]`` is ``c = max(1/(i+1) + learnt_i, 0)``. ``momentum`` and ``forget``
    are not used. Not a linear attention: a norm follows the last layer.

    Args:
      chunk_size: tokens a mini-batch.

    Raises:
      ValueError: ``chunk_size`` is not a whole number from 1 on.

    Source: Sun et al., *Learning to (Learn at Test Time)* (arXiv 2407.04620), sections 2.4 to 2.7.

    Example:
      >>> import jax
      >>> weights = ttt_linear().init(jax.random.key(0), heads=2, key_dim=4)
      >>> weights["w1"].shape, weights["b1"].shape, weights["position_rate"].shape
      ((2, 4, 4), (2, 1, 4), (2, 16, 1))
    """
    return _dual_form(MLP(depth=1, bias=True, residual_norm=True), chunk_size)


def ttt_mlp(*, chunk_size: int = 16) -> InnerLoop:
    """TTT-MLP: ``f(x) = x + LN(gelu(x W1 + b1) W2 + b2)``; everything else as ``ttt_linear``.

    ``gelu`` is the approximation by tanh, as in the official code, whose hidden width is four times
    the head's: ``spec.init(..., hidden_dim=4*d)``.

    Args:
      chunk_size: tokens a mini-batch.

    Raises:
      ValueError: ``chunk_size`` is not a whole number from 1 on.

    Source: Sun et al., *Learning to (Learn at Test Time)* (arXiv 2407.04620), section 2.7.

    Example:
      >>> ttt_mlp().trained
      ('w1', 'b1', 'w2', 'b2')
    """
    net = MLP(depth=2, activation="gelu_tanh", bias=True, residual_norm=True)
    return _dual_form(net, chunk_size)


def _dual_form(net: MLP, chunk_size: int) -> InnerLoop:
    return InnerLoop(
        fast_net=net,
        loss=Squared(),
        chunk_size=chunk_size,
        order="token_causal",
        rate="per_token",
    )
