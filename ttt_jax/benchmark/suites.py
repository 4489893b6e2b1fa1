"""The benchmark suites: what is timed, on which shapes, against which limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import ttt_jax
from ttt_jax.benchmark.timing import Timing, measure
from ttt_jax.tables import Row
from ttt_kernels import compat, linear_attention, newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS

# What one H200 reaches on large products and copies: measured, not the data sheet's.
H200_FLOPS = 744e12
H200_BYTES = 4.3e12


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of a run.

    Attributes:
      tokens: length of the one sequence.
      heads, dim: heads and head width of the LaCT layer.
      chunk: tokens a chunk of the LaCT layer.
      attention: (heads, dim) pairs of the token-causal suite.
      matrices: (number, width) pairs of the Newton-Schulz suite.
      dtype: of the inputs.
    """

    tokens: int
    heads: int
    dim: int
    chunk: int
    attention: tuple[tuple[int, int], ...]
    matrices: tuple[tuple[int, int], ...]
    dtype: str


SIZES = {
    # LaCT-760M's layer; minutes on one H200.
    "full": Size(32768, 4, 384, 2048, ((12, 128), (24, 64)), ((64, 384), (64, 128)), "bfloat16"),
    # Under two minutes on two CPU cores.
    "small": Size(8192, 2, 32, 256, ((2, 32),), ((8, 32),), "float32"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How a suite runs: sizes, timing and what to leave out."""

    size: Size
    seconds: float = 0.2
    batches: int = 5
    kernel_times: bool = False
    backward: bool = True
    variants: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)


def default_size() -> str:
    """"full" on a Hopper GPU, else "small"."""
    return "full" if compat.hopper_problem() is None else "small"


def describe_device() -> str:
    """One line for the head of a table: device, JAX version, dtype rules."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({device.platform}), jax {jax.__version__}"


def with_gradient(function: Callable) -> Callable:
    """`function(*arguments)` and the gradients of all arguments for a cotangent given first."""
    def forward_and_backward(cotangent, *arguments):
        out, pullback = jax.vjp(function, *arguments)
        return out, pullback(cotangent)

    return forward_and_backward


def _run(function: Callable, arguments: list[tuple], cotangents: list, options: Options,
         *, static: str) -> Iterator[tuple[str, Timing | str]]:
    """Times forward and forward + backward; an implementation's refusal comes as its text."""
    passes: list[tuple[str, Callable, list[tuple]]] = [("fwd", function, arguments)]
    if options.backward:
        pairs = [(c, *a) for c, a in zip(cotangents, arguments, strict=True)]
        passes.append(("fwd+bwd", with_gradient(function), pairs))
    for name, timed, inputs in passes:
        timed.__name__ = f"{static}_{name.replace('+', '_')}"
        try:
            yield name, measure(
                jax.jit(timed), inputs, seconds=options.seconds, batches=options.batches,
                kernel_times=options.kernel_times,
            )
        except (ValueError, NotImplementedError) as error:
            yield name, str(error)
            return


def _times(timing: Timing, tokens: int, limit_ms: float | None) -> Row:
    best = timing.kernel_milliseconds or timing.milliseconds
    return {
        "ms": timing.milliseconds,
        "spread": timing.spread,
        "kernels ms": timing.kernel_milliseconds,
        "Mtok/s": tokens / best / 1e3,
        "of limit": None if limit_ms is None else limit_ms / best,
    }


def _floor_ms(flops: float, byte_count: float) -> float | None:
    """Time that the products or the bytes take at an H200's measured rates; None elsewhere."""
    if compat.hopper_problem() is not None:
        return None
    return 1e3 * max(flops / H200_FLOPS, byte_count / H200_BYTES)


def linear_attention_suite(options: Options) -> list[Row]:
    """Token-causal linear attention: shapes x implementations x passes."""
    rows = []
    tokens = options.size.tokens
    for heads, dim in options.size.attention:
        def draw(seed, shape=(1, tokens, heads, dim), count=3):
            keys = jax.random.split(jax.random.key(seed), count)
            return tuple(jax.random.normal(k, shape).astype(options.size.dtype) for k in keys)

        arguments, cotangents = [draw(0), draw(1)], [draw(2, count=1)[0], draw(3, count=1)[0]]
        limit = _floor_ms(4 * tokens * heads * dim * dim, 8 * tokens * heads * dim)
        for implementation in ("xla", "mosaic_gpu"):
            def attend(q, k, v, implementation=implementation):
                return linear_attention(q, k, v, implementation=implementation)[0]

            for direction, timing in _run(attend, arguments, cotangents, options,
                                          static=f"linear_attention_{implementation}"):
                if isinstance(timing, str):
                    print(f"linear_attention {heads}x{dim} {implementation}: {timing}")
                    break
                rows.append({
                    "case": f"{heads}x{dim}", "implementation": implementation, "pass": direction,
                    **_times(timing, tokens, limit if direction == "fwd" else None),
                })
    return rows


def _layer(variant: int, size: Size, seed: int) -> tuple:
    """(spec, arrays) of the LaCT layer: weights and tokens as the layer would hand them over."""
    spec = ttt_jax.presets.lact_llm(variant=variant, chunk_size=size.chunk)
    keys = jax.random.split(jax.random.key(seed), 8)
    shape = (1, size.tokens, size.heads)
    weights = spec.init(keys[0], heads=size.heads, key_dim=size.dim)
    q, k, v = (jax.random.normal(key, (*shape, size.dim)) for key in keys[1:4])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays = {"weights": weights, **{n: x.astype(size.dtype) for n, x in zip("qkv", (q, k, v),
                                                                            strict=True)}}
    if spec.rate == "per_token":
        rates = jax.random.uniform(keys[4], (*shape, len(spec.trained)))
        arrays["lr"] = 1e-3 * rates
    if spec.momentum == "per_token":
        arrays["momentum"] = jax.nn.sigmoid(jax.random.normal(keys[5], shape))
    return spec, arrays


def _layer_limit(variant: int, spec, size: Size) -> float | None:
    """Each input and output byte once, each product once; None for the serial variants."""
    if variant < 2:
        return None
    per_product = 2.0 * size.tokens * size.heads * size.dim**2
    products = 2 if variant >= 3 else 6  # SwiGLU: two products more for q and for k each
    flops = products * per_product
    if spec.orthogonalise is not None:
        matrices = size.tokens // size.chunk * size.heads
        flops += 3 * len(spec.orthogonalise.coefficients) * 2.0 * size.dim**3 * matrices
    return _floor_ms(flops, 8.0 * size.tokens * size.heads * size.dim)


def throughput_table(options: Options) -> list[Row]:
    """The paper's table: variants x recurrent, parallel, kernel x passes, ratio to recurrent."""
    rows = []
    size = options.size
    for variant in options.variants:
        layers = [_layer(variant, size, seed) for seed in (0, 1)]
        spec = layers[0][0]
        limit = _layer_limit(variant, spec, size)
        recurrent: dict[str, float] = {}
        for mode in ("recurrent", "parallel", "kernel"):
            def apply(arrays, mode=mode, spec=spec):
                return ttt_jax.ttt(spec, **arrays, mode=mode)[0]

            shape = (1, size.tokens, size.heads, size.dim)
            cotangents = [jax.random.normal(jax.random.key(s), shape).astype(size.dtype)
                          for s in (2, 3)]
            for direction, timing in _run(apply, [(a,) for _, a in layers], cotangents, options,
                                          static=f"ttt_v{variant}_{mode}"):
                if isinstance(timing, str):
                    print(f"V{variant} {mode}: {timing.splitlines()[0][:160]}")
                    break
                times = _times(timing, size.tokens, limit if direction == "fwd" else None)
                recurrent.setdefault(direction, times["Mtok/s"])
                rows.append({"case": f"V{variant}", "implementation": mode, "pass": direction,
                             **times, "vs recurrent": times["Mtok/s"] / recurrent[direction]})
    for row in rows:
        if (row["case"], row["implementation"], row["pass"]) == ("V6", "parallel", "fwd"):
            ratio = row["vs recurrent"]
            print(f"V6, T = {size.tokens}: parallel / recurrent = {ratio:.2f}")
    return rows


def newton_schulz_suite(options: Options) -> list[Row]:
    """Orthogonalisation of a batch of square matrices, five iterations."""
    rows = []
    for count, width in options.size.matrices:
        def draw(seed, shape=(count, width, width)):
            return jax.random.normal(jax.random.key(seed), shape).astype(options.size.dtype)

        arguments, cotangents = [(draw(0),), (draw(1),)], [draw(2), draw(3)]
        limit = _floor_ms(5 * 3 * 2.0 * width**3 * count, 4.0 * count * width**2)
        for direction, timing in _run(_orthogonalise, arguments, cotangents, options,
                                      static="newton_schulz_xla"):
            times = _times(timing, 1, limit if direction == "fwd" else None)
            del times["Mtok/s"]
            rows.append({"case": f"{count}x{width}^2", "implementation": "xla",
                         "pass": direction, **times})
    return rows


def _orthogonalise(x: jax.Array) -> jax.Array:
    return newton_schulz(x, LACT_COEFFICIENTS)


SUITES: dict[str, Callable[[Options], list[Row]]] = {
    "linear_attention": linear_attention_suite,
    "throughput_table": throughput_table,
    "newton_schulz": newton_schulz_suite,
}
