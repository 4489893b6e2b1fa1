"""Multi-layer perceptrons of any depth, with biases and a normalised residual output on demand."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.fast_nets.base import Cotangent, OuterProductNet, Weights, dense
from ttt_jax.inner_loop.parts import finite, one_of, whole_number
from ttt_kernels.arguments import check_flag

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(OuterProductNet):
    """``f(x) = act(… act(x W1 + b1) …) W_depth + b_depth``, and ``x + LN(that)`` on demand.

    A bias is the matrix ``[heads, 1, out]`` of an input that is always 1, so its gradient is a sum
    of outer products, too. With a bias in the last layer or an output norm the layer is not a
    linear attention (``last`` is ``None``).

    Attributes:
      depth: number of linear layers, at least 1; ``w1, b1, w2, …`` are their names.
      activation: ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.
      bias: whether the layers have biases.
      residual_norm: ``f(x) = x + LN(z) · norm_scale + norm_shift``; scale and shift are in
        ``weights``, ``[heads, 1, value_dim]``, and no inner step changes them.
      norm_eps: added to the variance.

    Raises:
      ValueError: a field has a value that it cannot have.

    Source: TTT-Linear and TTT-MLP of Sun et al. (arXiv 2407.04620), Titans (arXiv 2501.00663).

    Example:
      >>> MLP(depth=2).last, MLP(depth=2, residual_norm=True).last
      ('w2', None)
      >>> MLP(depth=2, bias=True).names
      ('w1', 'b1', 'w2', 'b2')
    """

    depth: int = 2
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    bias: bool = False
    residual_norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self):
        whole_number("depth", self.depth)
        one_of("activation", self.activation, tuple(ACTIVATIONS))
        check_flag("bias", self.bias)
        check_flag("residual_norm", self.residual_norm)
        finite("norm_eps", self.norm_eps, least=0)

    @property
    def names(self) -> tuple[str, ...]:
        """``w1, …, w_depth``, each followed by its bias where there is one."""
        kinds = "wb" if self.bias else "w"
        return tuple(f"{kind}{layer}" for layer in self._layers for kind in kinds)

    @property
    def static_names(self) -> tuple[str, ...]:
        """Scale and shift of the output norm."""
        return ("norm_scale", "norm_shift") if self.residual_norm else ()

    @property
    def last(self) -> str | None:
        """The last matrix, where neither a bias nor a norm follows it."""
        return None if self.bias or self.residual_norm else f"w{self.depth}"

    @property
    def _layers(self) -> range:
        return range(1, self.depth + 1)

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w1`` is ``(key_dim, hidden_dim)``, the last ``(…, value_dim)``, ``b`` ``(1, out)``."""
        if self.residual_norm and key_dim != value_dim:
            raise ValueError(
                f"key_dim={key_dim}, value_dim={value_dim}: a residual needs them equal; use "
                "residual_norm=False"
            )
        widths = [key_dim] + [hidden_dim] * (self.depth - 1) + [value_dim]
        found = {}
        for layer in self._layers:
            found[f"w{layer}"] = (widths[layer - 1], widths[layer])
            if self.bias:
                found[f"b{layer}"] = (1, widths[layer])
        return found

    def static_shapes(self, key_dim: int, value_dim: int) -> dict[str, tuple[int, ...]]:
        """``norm_scale`` and ``norm_shift`` are ``(1, value_dim)``."""
        return {name: (1, value_dim) for name in self.static_names}

    def init(
        self, key: jax.Array, heads: int, key_dim: int, value_dim: int, hidden_dim: int
    ) -> dict[str, jax.Array]:
        """As ``FastNet.init``, biases at zero."""
        weights = super().init(key, heads, key_dim, value_dim, hidden_dim)
        return {name: w * 0 if name[0] == "b" else w for name, w in weights.items()}

    def init_static(self, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.Array]:
        """Scale 1 and shift 0."""
        if not self.residual_norm:
            return {}
        shape = (heads, 1, value_dim)
        return {"norm_scale": jnp.ones(shape), "norm_shift": jnp.zeros(shape)}

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """The input of the last layer."""
        for layer in self._layers[:-1]:
            x = ACTIVATIONS[self.activation](self._linear(weights, layer, x))
        return x

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``f(x)``: ``[..., time, key_dim]`` to ``[..., time, value_dim]``."""
        out = self._linear(weights, self.depth, self.features(weights, x))
        return x + self._norm(weights, out) if self.residual_norm else out

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Back-propagation, layer after layer from the last."""
        inputs, pullbacks, hidden = [], [], x
        for layer in self._layers:
            inputs.append(hidden)
            hidden = self._linear(weights, layer, hidden)
            if layer < self.depth:
                hidden, pullback = jax.vjp(ACTIVATIONS[self.activation], hidden)
                pullbacks.append(pullback)
        if self.residual_norm:
            normed, pullback = jax.vjp(functools.partial(self._norm, weights), hidden)
            (error,) = pullback(cotangent(x + normed))
        else:
            error = cotangent(hidden)
        found = {}
        for layer in reversed(self._layers):
            found[f"w{layer}"] = (inputs[layer - 1], error)
            if self.bias:
                found[f"b{layer}"] = (jnp.ones_like(error[..., :1]), error)
            if layer > 1:
                (error,) = pullbacks[layer - 2](dense(error, weights[f"w{layer}"].mT))
        return found

    def _linear(self, weights: Weights, layer: int, x: jax.Array) -> jax.Array:
        out = dense(x, weights[f"w{layer}"])
        return out + dense(jnp.ones_like(x[..., :1]), weights[f"b{layer}"]) if self.bias else out

    def _norm(self, weights: Weights, z: jax.Array) -> jax.Array:
        """Layer norm over the channels, in float32 or wider."""
        wide = z.astype(jnp.promote_types(z.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.norm_eps)
        return (normed * weights["norm_scale"] + weights["norm_shift"]).astype(z.dtype)
