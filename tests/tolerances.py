"""The one rule for tolerances: unit roundoff times a growth with the length of the reductions."""

import math

import jax.numpy as jnp
import numpy as np

_FACTOR = 64  # a few dozen roundings in a row between input and output


def tolerance(dtype, reduction_length: int = 1) -> float:
    """Largest error allowed, relative to the largest entry of the reference.

    ``64 · eps(dtype) · sqrt(reduction_length)``: roundings of a sum of ``n`` terms grow like
    ``sqrt(n)``. A number of the rule is never raised to let a test pass.
    """
    return _FACTOR * float(jnp.finfo(dtype).eps) * math.sqrt(reduction_length)


def relative_error(value, reference) -> float:
    """``max|value − reference| / max|reference|``; NaN counts as infinite."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if value.shape != reference.shape:
        raise AssertionError(f"shapes differ: {value.shape} and {reference.shape}")
    if value.size == 0:
        return 0.0
    error = float(np.max(np.abs(value - reference)))
    scale = float(np.max(np.abs(reference)))
    return math.inf if math.isnan(error) else error / max(scale, 1e-30)


def assert_close(value, reference, tol: float, name: str = "value") -> None:
    """Fails with the name and the error where ``relative_error`` is above ``tol``."""
    error = relative_error(value, reference)
    assert error <= tol, f"{name}: relative error {error:.3g} above {tol:.3g}"
