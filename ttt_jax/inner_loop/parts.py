"""Parts of an ``InnerLoop`` with settings of their own: orthogonalisation, weight norm, spans."""

import dataclasses
import numbers
from typing import Any, Literal

from ttt_kernels.newton_schulz import MUON_COEFFICIENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Orthogonalise each update by Newton-Schulz iterations.

    Attributes:
      coefficients: one triple (a, b, c) an iteration; an empty tuple only normalises (LaCT-NVS
        with no Muon steps).
      dtype: dtype of the products, e.g. ``"bfloat16"`` as in the official code; ``None`` is the
        dtype of the tokens.
      eps: added to the Frobenius norm.

    Example:
      >>> NewtonSchulz(dtype="bfloat16").eps
      1e-07
    """

    coefficients: tuple[tuple[float, float, float], ...] = MUON_COEFFICIENTS
    dtype: str | None = None
    eps: float = 1e-7


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
        if not 0 <= self.start < self.end:
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


def fraction(name: str, value: Any) -> None:
    """Raises ``ValueError`` where ``value`` is not a number from 0 to 1."""
    if not isinstance(value, numbers.Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: use a number from 0 to 1")
