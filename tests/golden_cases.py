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

    def check(self, key: str, value, in_float32: bool = False) -> None:
        """Fails where ``value`` is further from ``arrays[key]`` than the case allows.

        ``in_float32``: float32 code is held to a float64 array, by the tolerance stated for that.
        """
        tol, suffix = self._meta[key]["tol"], "_if_f32" if in_float32 else ""
        expected, value = self.arrays[key].astype(np.float64), np.asarray(value, np.float64)
        if "rel_to_norm" in tol:  # the array is what ``_statistics`` says about the value
            value, norm = _statistics(value), expected[0]
            error = np.max(np.abs(value - expected) / (norm + np.abs(expected)))
            limit = tol["rel_to_norm" + suffix]
        elif "relative_frobenius" in tol:
            limit = tol["relative_frobenius"]
            error = np.linalg.norm(value - expected) / np.linalg.norm(expected)
        else:
            limit = tol.get("rel_to_max" + suffix, tol["rel_to_max"])
            error = np.max(np.abs(value - expected)) / max(np.max(np.abs(expected)), 1e-30)
            if not expected.any():  # a gradient that is exactly zero
                error = np.max(np.abs(value))
        assert value.shape == expected.shape, f"{self.name} {key}: {value.shape}"
        assert error <= limit, f"{self.name} {key}: error {error:.3g} above {limit:.3g}"

    def check_parameter_gradients(self, gradients, in_float32: bool = False) -> None:
        """Every gradient that the case has, whole (``pgrad``) and by its statistics."""
        stated = [key for key in self.arrays if key.startswith(("pgrad/", "pgradstat/"))]
        assert {key.split("/", 1)[1] for key in stated} == set(gradients), self.name
        for key in stated:
            self.check(key, gradients[key.split("/", 1)[1]], in_float32)


def _statistics(gradient) -> np.ndarray:
    """Its norm, its sum and one fixed projection."""
    flat = np.asarray(gradient, np.float64).ravel()
    return np.array([np.linalg.norm(flat), flat.sum(), flat @ np.cos(0.37 * np.arange(flat.size))])
