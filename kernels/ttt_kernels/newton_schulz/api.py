"""Newton-Schulz orthogonalisation: the public function and the choice of an implementation."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_number, floating_dtype
from ttt_kernels.choice import choose
from ttt_kernels.newton_schulz import mosaic_gpu, mosaic_tpu, symmetric, xla

# The triples of LaCT-LLM (Zhang et al., Test-Time Training Done Right, 2025), one an iteration.
LACT_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# The triple of Muon (Jordan et al., 2024), repeated five times.
MUON_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5

_MODULES = {
    "mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu, "symmetric": symmetric, "xla": xla
}  # fmt: skip


def newton_schulz(
    x: jax.Array,
    coefficients: Sequence[tuple[float, float, float]] = MUON_COEFFICIENTS,
    *,
    eps: float = 1e-7,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Pushes the singular values of each matrix towards 1 and keeps its singular vectors.

    Equivalent to, for each matrix (transposed first when it has more rows than columns)::

        X = G / (|G|_F + eps)
        for a, b, c in coefficients:
            A = X Xᵀ;  X = a X + (b A + c A²) X

    so the result is ``G P(GᵀG)`` with a polynomial ``P``: an odd function of ``G``, zero at zero,
    with a finite gradient everywhere.

    Args:
      x: matrices, ``[..., rows, columns]``, floating.
      coefficients: one triple (a, b, c) an iteration; the empty tuple only normalises.
      eps: added to the Frobenius norm. Matrices whose norm is not well above it stay small.
      dtype: dtype of the products; ``None`` is ``x.dtype``. ``bfloat16`` is the official choice.
      implementation: ``"xla"`` (any device), ``"mosaic_gpu"`` (Hopper GPUs; bfloat16 products, up
        to 768 rows and columns), ``"symmetric"`` (XLA's form with kernels for Hopper GPUs where a
        product is symmetric), ``"mosaic_tpu"`` (one launch for all iterations, on TPUs), or
        ``None`` for the best one here. A named one never falls back.

    Returns:
      ``[..., rows, columns]`` in ``x.dtype``.

    Raises:
      ValueError: ``x`` is no floating array of two axes or more; ``coefficients`` are not triples
        of finite numbers; ``eps`` is negative or no number; ``dtype`` is not floating; an unknown
        implementation.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: Jordan et al., *Muon* (2024); coefficient tables of LaCT (Zhang et al., 2025).

    Example:
      >>> import jax.numpy as jnp
      >>> y = newton_schulz(jnp.array([[3.0, 0.0], [0.0, 0.5]]))
      >>> bool((jnp.linalg.svd(y, compute_uv=False) > 0.6).all())
      True
    """
    check_array("x", x)
    if x.ndim < 2:
        raise ValueError(f"{x.shape=}: newton_schulz needs matrices, [..., rows, columns]")
    dtype = jnp.dtype(x.dtype) if dtype is None else floating_dtype("dtype", dtype)
    coefficients = check_settings(coefficients, eps)
    call = x, len(coefficients), dtype
    problems = {
        "mosaic_tpu": mosaic_tpu.unsupported(*call) or compat.tpu_problem(),
        "mosaic_gpu": mosaic_gpu.unsupported(*call) or compat.hopper_problem(),
        "symmetric": symmetric.unsupported(*call) or compat.hopper_problem(),
    }
    if implementation is None:
        problems["symmetric"] = problems["symmetric"] or symmetric.untimed(x)
    module = choose("newton_schulz", implementation, _MODULES, problems)
    return module.newton_schulz(x, coefficients, float(eps), dtype)


def check_settings(coefficients, eps: float) -> tuple[tuple[float, float, float], ...]:
    """Checks what `newton_schulz` is set to do.

    Args:
      coefficients, eps: as of `newton_schulz`.

    Returns:
      The triples, as floats.

    Raises:
      ValueError: they are no triples of finite numbers, or ``eps`` is negative or no number.

    >>> check_settings([[3, -4, 2]], 0)
    ((3.0, -4.0, 2.0),)
    """
    check_number("eps", eps, least=0)
    try:
        kinds = Sequence | np.ndarray | jax.Array  # a dict or a set is in no order
        known = isinstance(coefficients, kinds) and not isinstance(coefficients, str)
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError, OverflowError):
        known = False
    if not known or not all(math.isfinite(number) for row in triples for number in row):
        raise ValueError(
            f"{coefficients=}: newton_schulz needs (a, b, c) of finite numbers for each iteration, "
            "as MUON_COEFFICIENTS, ((3.4445, -4.7750, 2.0315),) * 5"
        )
    return triples
