"""Batched Newton-Schulz orthogonalisation."""

from ttt_kernels.newton_schulz.api import (
    LACT_COEFFICIENTS,
    MUON_COEFFICIENTS,
    check_settings,
    newton_schulz,
)

__all__ = ["LACT_COEFFICIENTS", "MUON_COEFFICIENTS", "check_settings", "newton_schulz"]
