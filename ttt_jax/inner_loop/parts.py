"""Parts of an ``InnerLoop`` with settings of their own: orthogonalisation, weight norm, spans."""

import dataclasses
import math
import numbers
from typing import Any, Literal

from ttt_kernels.arguments import check_flag, floating_dtype
from ttt_kernels.newton_schulz import MUON_COEFFICIENTS, check_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Orthogonalise each update by Newton-Schulz iterations: its singular values go towards 1.

    ``X = M / (|M|_F + eps)``, then for each (a, b, c) ``A = X Xᵀ;  X = a X + (b A + c A²) X`` (for
    ``Mᵀ`` where M has more rows than columns).

    The first coefficient multiplies small singular values, and the rounding of what has none, in
    every iteration: by 3.4⁵ in all with the default. An update of low rank (few tokens, wide
    matrices) is so no more accurate than that times the rounding of its dtype.

    Attributes:
      coefficients: one triple (a, b, c) an iteration; an empty tuple only normalises (LaCT-NVS
        with no Muon steps).
      dtype: dtype of the products, e.g. ``"bfloat16"`` as in the official code; ``None`` is the
        dtype of the tokens.
      eps: added to the Frobenius norm.

    Raises:
      ValueError: the coefficients are no triples of finite numbers, ``eps`` is negative or no
        number, or ``dtype`` names no floating dtype.

    Source: Jordan et al., *Muon* (2024).

    Example:
      >>> NewtonSchulz(dtype="bfloat16").eps
      1e-07
    """

    coefficients: tuple[tuple[float, float, float], ...] = MUON_COEFFICIENTS
    dtype: str | None = None
    eps: float = 1e-7

    def __post_init__(self):
        triples = check_settings(self.coefficients, self.eps)
        object.__setattr__(self, "coefficients", triples)  # hashable, where lists were given
        if self.dtype is not None:
            floating_dtype("dtype", self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightNorm:
    """After an update, set the norm of each column (over the input axis) to its initial value.

    ``W ← W / (|W| + eps) · |W_initial|``.

    Attributes:
      form: ``"post"`` keeps the normalised weight as the state; ``"pre"`` accumulates in an
        un-normalised copy and normalises it for use.
      eps: added to the norm.
      detach: stop the gradient through the initial norms (LaCT-NVS does).

    Example:
      >>> WeightNorm(form="pre").detach
      False
    """

    form: Literal["post", "pre"] = "post"
    eps: float = 1e-5
    detach: bool = False

    def __post_init__(self):
        one_of("form", self.form, ("post", "pre"))
        finite("eps", self.eps, least=0)
        check_flag("detach", self.detach)


@dataclasses.dataclass(frozen=True)
class Span:
    """One entry of an explicit order: update on, and/or apply to, tokens ``start:end``.

    Example:
      >>> Span(0, 16, update=True, apply=False).end
      16
    """

    start: int
    end: int
    update: bool
    apply: bool

    def __post_init__(self):
        whole_number("start", self.start, least=0)
        whole_number("end", self.end)
        check_flag("update", self.update)
        check_flag("apply", self.apply)
        if self.start >= self.end:
            raise ValueError(f"Span(start={self.start}, end={self.end}): need 0 <= start < end")
        if not (self.update or self.apply):
            raise ValueError(f"Span({self.start}, {self.end}) neither updates nor applies; drop it")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ``ValueError`` where ``value`` is not in ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}")


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raises ``ValueError`` where ``value`` is not a whole number from ``least`` on."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: use a whole number, {least} or more")


def finite(name: str, value: Any, least: float = -math.inf) -> None:
    """Raises ``ValueError`` where ``value`` is not a finite number from ``least`` on."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        rule = "" if least == -math.inf else f", {least} or more"
        raise ValueError(f"{name}={value!r}: use a finite number{rule}")


def fraction(name: str, value: Any) -> None:
    """Raises ``ValueError`` where ``value`` is not a number from 0 to 1."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: use a number from 0 to 1")
