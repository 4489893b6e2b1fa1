"""Reads the reference numbers in ``tests/golden`` (see its README for their sources)."""

import json
import pathlib

import numpy as np

_FOLDER = pathlib.Path(__file__).parent / "golden"


class Golden:
    """One case: ``arrays["f64/out"]``, ``hyper``, and the tolerance stated for each array."""

    def __init__(self, name: str):
        self.name = name
        self.arrays = dict(np.load(_FOLDER / f"{name}.npz"))
        meta = json.loads((_FOLDER / f"{name}.json").read_text())
        self.hyper = meta["hyper"]
        self._meta = meta["arrays"]

    def gated(self, key: str) -> bool:
        """Whether the case gates this array (it exists and is not informational)."""
        return key in self._meta and self._meta[key].get("tol", {}).get("note") != "informational"

    def tolerances(self, key: str) -> dict:
        """The tolerances stated for an array, by metric."""
        return self._meta[key]["tol"]

    def check(self, key: str, value) -> None:
        """Fails where ``value`` is further from ``arrays[key]`` than the case allows."""
        expected = self.arrays[key].astype(np.float64)
        value = np.asarray(value, np.float64)
        assert value.shape == expected.shape, f"{self.name} {key}: {value.shape}"
        tol = self._meta[key]["tol"]
        if "relative_frobenius" in tol:
            limit = tol["relative_frobenius"]
            error = np.linalg.norm(value - expected) / np.linalg.norm(expected)
        else:
            limit = tol["rel_to_max"]
            error = np.max(np.abs(value - expected)) / max(np.max(np.abs(expected)), 1e-30)
            if not expected.any():  # a gradient that is exactly zero
                error = np.max(np.abs(value))
        assert error <= limit, f"{self.name} {key}: error {error:.3g} above {limit:.3g}"
