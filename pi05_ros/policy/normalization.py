"""States and actions to the range that the model was trained on, and back, in the dialects of LeRobot and openpi.

The dialects differ in where they guard against a zero denominator, and in their dtype: each computes in the dtype of
its statistics (float32 in LeRobot, float64 in openpi). Neither clips.
"""

from __future__ import annotations

import numpy as np

from pi05_ros.checkpoint.norm_stats import FeatureStats

OPENPI_EPS = 1e-6
LEROBOT_EPS = 1e-8


class Normalizer:
    """The affine map of one feature: normalised = (x - offset) / scale, with the ends of a range at -1 and 1."""

    def __init__(self, mode: str, stats: FeatureStats, dialect: str) -> None:
        """mode: "QUANTILES", "MEAN_STD", "MIN_MAX" or "IDENTITY" (stats unused); dialect: "lerobot" or "openpi"."""
        self.mode, self.dialect = mode, dialect
        self.low = self.high = np.zeros(0)
        if mode in ("QUANTILES", "MIN_MAX"):
            low, high = ("q01", "q99") if mode == "QUANTILES" else ("min", "max")
            self.low, self.high = stats[low], stats[high]
        elif mode == "MEAN_STD":
            self.low, self.high = stats["mean"], stats["std"]

    @property
    def dims(self) -> int | None:
        """Dimensions that the statistics cover, None if they are not used."""
        return None if self.mode == "IDENTITY" else len(self.low)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """[..., dims] in robot units -> normalised. Statistics that are longer than x are cut to it."""
        if self.mode == "IDENTITY":
            return x
        low, high = self.low[: x.shape[-1]], self.high[: x.shape[-1]]
        x = x.astype(low.dtype)
        if self.mode == "MEAN_STD":
            return (x - low) / (high + self._std_eps)
        return (
            2 * (x - low) / self._range(low, high) - 1
            if self.dialect == "lerobot"
            else self._openpi_range(x, low, high)
        )

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Normalised [..., dims] -> robot units. Dimensions beyond the statistics pass unchanged."""
        if self.mode == "IDENTITY":
            return x
        dims = min(len(self.low), x.shape[-1])
        low, high = self.low[:dims], self.high[:dims]
        result = x.astype(low.dtype)
        head = result[..., :dims]
        if self.mode == "MEAN_STD":
            # LeRobot's eps is in the forward direction only.
            result[..., :dims] = head * (high + (OPENPI_EPS if self.dialect == "openpi" else 0.0)) + low
        else:
            result[..., :dims] = (head + 1) / 2 * self._range(low, high) + low
        return result

    @property
    def _std_eps(self) -> float:
        return OPENPI_EPS if self.dialect == "openpi" else LEROBOT_EPS

    def _range(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        if self.dialect == "openpi":
            return high - low + OPENPI_EPS
        span = high - low
        return np.where(span == 0, np.asarray(LEROBOT_EPS, dtype=span.dtype), span)

    def _openpi_range(self, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return (x - low) / self._range(low, high) * 2.0 - 1.0
