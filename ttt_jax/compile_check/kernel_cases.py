"""The kernels for TPUs at the shapes of the models, and the least work that their results take.

"Least" is the mathematics: products that no algorithm of this form leaves out, and every input,
result, cotangent and gradient read or written once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttt_kernels import fast_weight_apply, fast_weight_gradients, linear_attention, newton_schulz
from ttt_kernels.fast_weight import mosaic_tpu as fast_weight_tpu
from ttt_kernels.linear_attention import mosaic_tpu as linear_attention_tpu
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape, value and every gradient.

    Attributes:
      name: for the table: model and shape.
      kernel: what the names of its kernels begin with.
      operation: `operation(*arguments, implementation=...)`, an array or a tree of them.
      arguments: shapes and dtypes.
      flops: least FLOPs of value and gradients, 2 a multiply-add.
      tokens: pairs of a token and a head, or matrices, of one call.
    """

    name: str
    kernel: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float
    tokens: int

    def step(self, implementation: str) -> Callable[..., Any]:
        """Value and gradients as a function of the arguments and the result's cotangent."""
        run = functools.partial(self.operation, implementation=implementation)

        def step(arguments, cotangent):
            out, pullback = jax.vjp(run, *arguments)
            return out, pullback(cotangent)

        return step

    def inputs(self) -> tuple[Any, Any]:
        """Shapes of the two arguments of `step`."""
        run = functools.partial(self.operation, implementation="xla")
        return self.arguments, jax.eval_shape(run, *self.arguments)

    def bytes(self) -> int:
        """Least bytes moved: every array that goes in or comes out, once."""
        inputs = self.inputs()
        arrays = jax.tree.leaves((inputs, jax.eval_shape(self.step("xla"), *inputs)))
        return sum(x.size * x.dtype.itemsize for x in arrays)


def cases() -> list[Case]:
    """All cases: what LaCT-760M, 12 heads of 128 and ViTTT-B call."""
    chunks = dict(causal="chunk", chunk_size=2048)
    image = dict(causal="chunk", chunk_size=196, include_current_chunk=True)
    return [
        _attention("12 x 128, 32,768 tokens", (1, 32768, 12, 128)),
        _attention("LaCT-760M V6, 32,768 tokens, 4 x 384", (1, 32768, 4, 384), **chunks),
        _attention("ViTTT-B V6, 256 images of 196 tokens, 12 x 64", (256, 196, 12, 64), **image),
        _newton_schulz("LaCT-760M, 64 of 384 x 384", (64, 384, 384)),
        _newton_schulz("12 x 128, 192 of 128 x 128", (192, 128, 128)),
        *_fast_weight("LaCT-760M V0, 16 chunks of 2048, 4 x 384", (16, 4, 2048, 384)),
    ]


def _attention(name: str, shape: tuple[int, ...], **options: Any) -> Case:
    """Linear attention: two products a token forwards (q S, k^T v), four backwards."""

    def operation(q, k, v, **implementation):
        return linear_attention(q, k, v, **options, **implementation)[0]

    batch, length, heads, dim = shape
    tokens = batch * length * heads
    kernel = f"linear_attention_{options.get('causal', 'token')}"
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return Case(name, kernel, operation, (x, x, x), 12.0 * tokens * dim * dim, tokens)


def _newton_schulz(name: str, shape: tuple[int, ...]) -> Case:
    """Five iterations: three products each forwards, four backwards from kept iterates."""

    def operation(x, **implementation):
        return newton_schulz(x, LACT_COEFFICIENTS, dtype=jnp.bfloat16, **implementation)

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    flops = 2.0 * 5 * 7 * shape[0] * shape[1] ** 2 * shape[2]
    return Case(name, "newton_schulz", operation, (x,), flops, shape[0])


def _fast_weight(name: str, shape: tuple[int, ...]) -> list[Case]:
    """The SwiGLU network: three products a token, or six for its gradients; backwards twice."""
    batch, heads, length, dim = shape
    tokens = batch * heads * length
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = jax.ShapeDtypeStruct((batch, heads, dim, dim), jnp.float32)
    weights = dict(w0=w, w1=w, w2=w)
    rates = jax.ShapeDtypeStruct((batch, heads, length, 3), jnp.float32)
    product = 2.0 * tokens * dim * dim
    return [
        Case(name, "fast_weight_apply", fast_weight_apply, (weights, x), 9 * product, tokens),
        Case(
            name, "fast_weight_gradients", fast_weight_gradients, (weights, x, x, rates),
            18 * product, tokens,
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tile:
    """A kernel with its tile named, for the tiles' table.

    Attributes:
      kernel, label: what is tiled, and how.
      operation: of arrays like `arguments`.
      arguments: shapes and dtypes.
      tokens: pairs of a token and a head in one grid point.
    """

    kernel: str
    label: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    tokens: int


def tiles() -> list[Tile]:
    """The tiles that were compared, of which `mosaic_tpu` takes the best."""
    chunks = dict(causal="chunk", chunk_size=2048)
    found = [
        _attention_tile(128, 12, block, heads)
        for block, heads in ((256, 1), (256, 2), (256, 4), (512, 2))
    ]
    found += [_attention_tile(384, 4, block, 1) for block in (128, 256, 512)]
    found += [_attention_tile(384, 4, block, 1, **chunks) for block in (256, 512, 1024)]
    image = dict(causal="chunk", chunk_size=256, include_current_chunk=True)
    found += [_attention_tile(64, 12, 256, heads, length=196, **image) for heads in (2, 4, 6, 12)]
    for block in (128, 256, 512, 1024):
        found += _fast_weight_tiles(block)
    return found


def _attention_tile(
    dim: int, heads: int, block: int, together: int, length: int = 8192, **options: Any
) -> Tile:
    def operation(q, k, v):
        return linear_attention_tpu.linear_attention(
            q, k, v, block=block, heads_per_block=together, **options
        )[0]

    x = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16)
    kernel = f"linear_attention_{options.get('causal', 'token')}"
    label = f"{heads} x {dim}: {block} tokens, {together} heads"
    return Tile(kernel, label, operation, (x, x, x), min(block, length) * together)


def _fast_weight_tiles(block: int, shape: tuple[int, ...] = (1, 4, 2048, 384)) -> list[Tile]:
    def apply(w0, w1, w2, q):
        return fast_weight_tpu.apply(w0, w1, w2, q, block=block)

    def gradients(w0, w1, w2, k, error, rates):
        return fast_weight_tpu.gradients(w0, w1, w2, k, error, rates, block=block)

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*shape[:2], shape[-1], shape[-1]), jnp.bfloat16)
    rates = jax.ShapeDtypeStruct((*shape[:3], 3), jnp.float32)
    label = f"384: {block} tokens"
    return [
        Tile("fast_weight_apply", label, apply, (w, w, w, x), block),
        Tile("fast_weight_gradients", label, gradients, (w, w, w, x, x, rates), block),
    ]


