"""Parts of matrices rounded in plain JAX, a pass each, any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def round_parts(matrices, parts) -> tuple:
    """`ttt_kernels.round_parts`."""
    made = []
    for matrix, counts in zip(matrices, parts, strict=True):
        rounded, start = matrix.astype(jnp.bfloat16), 0
        rounded = rounded.reshape(len(rounded), sum(counts), -1)
        for count in counts:
            part = rounded[:, start : start + count]
            made.append(jax.lax.reshape(part, (len(part), part.shape[1] * part.shape[2])))
            start += count
    return tuple(made)
