"""The paper's throughput table, and Newton-Schulz; `SUITES` names all suites."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import ttt_jax
from ttt_jax.benchmark.attention import linear_attention_suite
from ttt_jax.benchmark.common import Options, Size, floor_ms, passes, times
from ttt_jax.benchmark.decode import decode_suite
from ttt_jax.tables import Row
from ttt_kernels import newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS


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
    return floor_ms(flops, 8.0 * size.tokens * size.heads * size.dim)


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
            for direction, timing in passes(apply, [(a,) for _, a in layers], cotangents, options,
                                          static=f"ttt_v{variant}_{mode}"):
                if isinstance(timing, str):
                    print(f"V{variant} {mode}: {timing.splitlines()[0][:160]}")
                    break
                row = times(timing, size.tokens, limit if direction == "fwd" else None)
                recurrent.setdefault(direction, row["Mtok/s"])
                rows.append({"case": f"V{variant}", "implementation": mode, "pass": direction,
                             **row, "vs recurrent": row["Mtok/s"] / recurrent[direction]})
                options.report(rows[-1], timing)
    for row in rows:
        if (row["case"], row["implementation"], row["pass"]) == ("V6", "parallel", "fwd"):
            ratio = row["vs recurrent"]
            print(f"V6, T = {size.tokens}: parallel / recurrent = {ratio:.2f}")
    return rows


def newton_schulz_suite(options: Options) -> list[Row]:
    """Orthogonalisation of a batch of matrices, five iterations x implementations."""
    rows = []
    for count, *sides in options.size.matrices:
        case = f"{count}x{sides[0]}x{sides[1]}"

        def draw(seed, shape=(count, *sides)):
            return jax.random.normal(jax.random.key(seed), shape).astype(options.size.dtype)

        arguments, cotangents = [(draw(0),), (draw(1),)], [draw(2), draw(3)]
        small, large = sorted(sides)
        products = 2.0 * small**2 * (2 * large + small)  # of an iteration: two with X, one of A
        limit = floor_ms(5 * products * count, 4.0 * count * small * large)
        for name in ("xla", "mosaic_gpu", "symmetric", "mosaic_tpu"):
            def orthogonalise(x, name=name):
                return newton_schulz(x, LACT_COEFFICIENTS, implementation=name)

            for direction, timing in passes(orthogonalise, arguments, cotangents, options,
                                            static=f"newton_schulz_{name}"):
                if isinstance(timing, str):
                    print(f"newton_schulz {case} {name}: {timing}")
                    break
                row = times(timing, 1, limit if direction == "fwd" else None)
                del row["Mtok/s"]
                rows.append({"case": case, "implementation": name, "pass": direction, **row})
                options.report(rows[-1], timing)
    return rows


SUITES: dict[str, Callable[[Options], list[Row]]] = {
    "throughput_table": throughput_table,
    "newton_schulz": newton_schulz_suite,
    "decode": decode_suite,
    "linear_attention": linear_attention_suite,  # last: behind fla there are no kernel times
}
