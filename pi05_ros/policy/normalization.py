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
    """The affine map of one feature: QUANTILES and MIN_MAX put a range to [-1, 1], MEAN_STD standardises."""

    def __init__(self, mode: str, stats: FeatureStats, dialect: str) -> None:
        """mode: "QUANTILES", "MEAN_STD", "MIN_MAX" or "IDENTITY" (stats unused); dialect: "lerobot" or "openpi"."""
        self.mode = mode
        if mode == "IDENTITY":
            return
        openpi = dialect == "openpi"
        if mode == "MEAN_STD":
            mean, std = stats["mean"], stats["std"]
            self._offset, self._divisor = mean, std + (OPENPI_EPS if openpi else LEROBOT_EPS)
            self._factor = std + (OPENPI_EPS if openpi else 0.0)  # LeRobot's eps is in one direction only
        else:
            low, high = ("q01", "q99") if mode == "QUANTILES" else ("min", "max")
            self._offset, span = stats[low], stats[high] - stats[low]
            self._divisor = span + OPENPI_EPS if openpi else np.where(span == 0, span.dtype.type(LEROBOT_EPS), span)
            self._factor = self._divisor

    @property
    def dims(self) -> int | None:
        """Dimensions that the statistics cover, None if they are not used."""
        return None if self.mode == "IDENTITY" else len(self._offset)

    def constant(self, dims: int) -> np.ndarray:
        """bool [dims]: where the data had one value only; every normalised number stands for it there."""
        return np.zeros(dims, bool) if self.mode == "IDENTITY" else self._divisor[:dims] <= OPENPI_EPS

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """[..., dims] in robot units -> normalised. Statistics that are longer than x are cut to it."""
        if self.mode == "IDENTITY":
            return x
        dims = x.shape[-1]
        centred = x.astype(self._offset.dtype) - self._offset[:dims]
        if self.mode == "MEAN_STD":
            return centred / self._divisor[:dims]
        return 2 * centred / self._divisor[:dims] - 1

    def unnormalize(self, x: np.ndarray) -> np.ndarray:
        """Normalised [..., dims] -> robot units. Dimensions beyond the statistics pass unchanged."""
        if self.mode == "IDENTITY":
            return x
        dims = min(len(self._offset), x.shape[-1])
        result = x.astype(self._offset.dtype)
        head = result[..., :dims] if self.mode == "MEAN_STD" else (result[..., :dims] + 1) / 2
        result[..., :dims] = head * self._factor[:dims] + self._offset[:dims]
        return result


def outside_quantiles(x: np.ndarray, stats: FeatureStats) -> np.ndarray | None:
    """bool [dims]: where x, [dims], lies outside of q01..q99. None: there are none, or not for every dimension.

    Not a number lies outside. A dimension that never moved in training is given the rounding of float32.
    """
    low, high = stats.get("q01"), stats.get("q99")
    if low is None or high is None or min(len(low), len(high)) < len(x):
        return None
    low, high = low[: len(x)], high[: len(x)]
    rounding = np.finfo(np.float32).eps * np.maximum(np.abs(low), np.abs(high))
    return ~((x >= low - rounding) & (x <= high + rounding))
