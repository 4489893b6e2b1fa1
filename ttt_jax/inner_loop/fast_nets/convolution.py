"""A 3×3 depthwise convolution as a fast network: a linear layer on patches."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.fast_nets.base import Cotangent, OuterProductNet, Rates, Weights, dense
from ttt_jax.inner_loop.parts import whole_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthwiseConv3x3(OuterProductNet):
    """``f(x)_p = Σ_j w_j x_{p+j}`` over the 3×3 neighbours ``j`` of pixel ``p``, zeros outside.

    Channels are heads: tokens are ``[batch, height·width, channels, 1]`` (rows of the image one
    after another) and the weight is ``[channels, 9, 1]``. With the patch of a pixel as its features
    the network is linear, so the layer is a local linear attention. Cross-correlation, as in
    PyTorch.

    Attributes:
      height: rows of the image.
      width: its columns.

    Source: ViTTT, ``vittt/models/ttt_block.py`` (arXiv 2512.01643).

    Example:
      >>> import jax.numpy as jnp
      >>> net = DepthwiseConv3x3(height=2, width=2)
      >>> image = jnp.arange(1.0, 5.0).reshape(1, 4, 1)
      >>> net.apply({"w": jnp.ones((1, 9, 1))}, image).ravel().tolist()
      [10.0, 10.0, 10.0, 10.0]
    """

    height: int
    width: int
    names: ClassVar[tuple[str, ...]] = ("w",)
    last: ClassVar[str | None] = "w"
    mixes_tokens: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("height", "width"):
            whole_number(name, getattr(self, name))

    def shapes(self, key_dim: int, value_dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """``w`` is ``(9, 1)``: one kernel a channel; ``hidden_dim`` is not used."""
        if key_dim != 1 or value_dim != 1:
            raise ValueError(
                f"key_dim={key_dim}, value_dim={value_dim}: the channels of DepthwiseConv3x3 are "
                "heads, so keys and values are [batch, time, channels, 1]"
            )
        return {"w": (9, 1)}

    def features(self, weights: Weights, x: jax.Array) -> jax.Array:
        """The patch around each pixel, ``[..., time, 1]`` to ``[..., time, 9]``."""
        return jnp.concatenate(self._neighbours(x), -1)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """``f(x)`` as nine shifted products: patches would take nine times the memory."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kernel = weights["w"].astype(x.dtype).astype(wide)
        terms = (y * kernel[..., tap : tap + 1, :] for tap, y in enumerate(self._neighbours(x)))
        return sum(terms).astype(x.dtype)

    def gradient(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent, rates: Rates
    ) -> dict[str, jax.Array]:
        """As ``FastNet.gradient``, without patches where a token has one rate."""
        rate = rates["w"]
        if rate is not None and rate.shape[-1] != 1:
            return super().gradient(weights, x, cotangent, rates)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        error = cotangent(self.apply(weights, x)).astype(wide)
        error = error if rate is None else error * rate
        sums = [jnp.sum(y * error, -2, keepdims=True) for y in self._neighbours(x)]
        return {"w": jnp.concatenate(sums, -2)}

    def _neighbours(self, x: jax.Array) -> list[jax.Array]:
        """The image shifted to each of the nine taps, ``[..., time, 1]`` each."""
        if x.shape[-2] != self.height * self.width:
            raise ValueError(
                f"time={x.shape[-2]}, but an image of {self.height}×{self.width} has "
                f"{self.height * self.width} tokens"
            )
        image = x.reshape(*x.shape[:-2], self.height, self.width)
        padded = jnp.pad(image, [(0, 0)] * (image.ndim - 2) + [(1, 1), (1, 1)])
        return [
            padded[..., row : row + self.height, column : column + self.width].reshape(x.shape)
            for row in range(3)
            for column in range(3)
        ]

    def factors(
        self, weights: Weights, x: jax.Array, cotangent: Cotangent
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """``∂L/∂w = Σ_p patch_pᵀ ∂L/∂f_p``."""
        patches = self.features(weights, x)
        return {"w": (patches, cotangent(dense(patches, weights["w"])))}
