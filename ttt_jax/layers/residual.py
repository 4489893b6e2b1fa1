"""Residual branches: added to the stream, which is then normalised, in one operation."""

import jax
import jax.numpy as jnp

from ttt_jax.layers.layer_norm import LayerNorm
from ttt_jax.sharding import on_each_device
from ttt_kernels.residual_norm import add_branch, residual_norm


def add_and_norm(
    x, norm: LayerNorm | None, *, branch=None, branch_bias=None, factor=None, rows: str = "images"
):
    """s = x + factor (branch + branch_bias) and norm(s), each device on its own rows.

    See `ttt_kernels.residual_norm`, which makes s, norm(s) and all gradients in one pass each way.

    Args:
      x: [batch, height, width, hidden], the stream.
      norm: a layer norm, or None for s alone.
      branch: like x, or None for s = x.
      branch_bias: [hidden], the branch's last bias, or None.
      factor: [batch], see `stochastic_depth.drop_factor`, or None.
      rows: logical name of the batch.

    Returns:
      (s, norm(s)), both like x; without a norm s alone.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 3.0]).reshape(1, 1, 1, 2)
    >>> s, y = add_and_norm(x, LayerNorm(2, epsilon=0.0, bias=True), branch=x)
    >>> s.ravel().tolist(), y.ravel().round(3).tolist()
    ([2.0, 6.0], [-1.0, 1.0])
    """
    given = dict(x=x, branch=branch, branch_bias=branch_bias, factor=factor)
    if norm is not None:
        bias = jnp.zeros_like(norm.scale[...]) if norm.bias is None else norm.bias[...]
        given |= dict(scale=norm.scale[...], bias=bias)
    given = {name: array for name, array in given.items() if array is not None}

    def local(*arrays):
        parts = dict.fromkeys(("branch", "branch_bias", "factor"))
        parts |= dict(zip(given, arrays, strict=True))
        if norm is None:
            return add_branch(**parts)
        return residual_norm(**parts, epsilon=norm.epsilon)

    stream = (rows, None, None, None)
    names = {"x": stream, "branch": stream, "factor": (rows,)}
    names = [names.get(name, (None,)) for name in given]
    with jax.named_scope("residual"):
        out = stream if norm is None else (stream, stream)
        return on_each_device(local, list(given.values()), names, out)
