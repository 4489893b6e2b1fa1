"""Batched Newton-Schulz orthogonalisation."""

from ttt_kernels.newton_schulz.api import LACT_COEFFICIENTS, MUON_COEFFICIENTS, newton_schulz

__all__ = ["LACT_COEFFICIENTS", "MUON_COEFFICIENTS", "newton_schulz"]
