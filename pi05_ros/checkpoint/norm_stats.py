"""Normalisation statistics as checkpoints ship them: LeRobot's processor state files, openpi's norm_stats.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pi05_ros.errors import CheckpointError

STATISTICS = ("mean", "std", "q01", "q99", "min", "max")
MODES = {
    "QUANTILES": ("q01", "q99"),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "IDENTITY": (),
}
"""Normalisation modes by LeRobot's names, and the statistics that each needs."""

FeatureStats = Mapping[str, np.ndarray]
"""Statistic by name, each [dims]. float32 from LeRobot, float64 from openpi: each dialect computes in its own dtype."""


@dataclass(frozen=True)
class NormStats:
    """Statistics of the state and of the actions; empty where a file has none. ``source`` is the file, for messages."""

    state: FeatureStats
    action: FeatureStats
    source: str

    def require(self, feature: str, mode: str) -> FeatureStats:
        """The statistics of "state" or "action" for a mode of ``MODES``.

        Raises CheckpointError: unknown mode, or one of its statistics is missing.
        """
        if mode not in MODES:
            raise CheckpointError(f"{self.source}: normalisation mode {mode!r} is unknown; known: {', '.join(MODES)}.")
        stats: FeatureStats = getattr(self, feature)
        missing = [name for name in MODES[mode] if name not in stats]
        if missing:
            raise CheckpointError(
                f"{self.source}: {feature} is to be normalised by {mode}, which needs {' and '.join(missing)}; "
                f"the file has {', '.join(stats) or 'nothing'} for it. "
                "Give a file with norm_stats=, or normalization='none' to go without."
            )
        sizes = {name: len(stats[name]) for name in MODES[mode]}
        if len(set(sizes.values())) > 1:
            raise CheckpointError(f"{self.source}: {feature}: statistics of different lengths: {sizes}.")
        if mode in ("QUANTILES", "MIN_MAX"):
            low, high = MODES[mode]
            below = np.flatnonzero(stats[high] < stats[low])
            if below.size:
                raise CheckpointError(f"{self.source}: {feature}: {high} is below {low} at dimension {below[0]}.")
        return stats


def read_norm_stats(path: Path) -> NormStats:
    """From openpi's norm_stats.json or a safetensors file of a LeRobot (un)normaliser.

    Raises CheckpointError: not readable, or a statistic is not a list of finite numbers.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: the file of normalisation statistics does not exist.")
    return _read_openpi_stats(path) if path.suffix == ".json" else read_lerobot_stats(path)


def _read_openpi_stats(path: Path) -> NormStats:
    try:
        features = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        found = {
            ours: _checked(path, theirs, features.get(theirs, {}), np.float64)
            for ours, theirs in (("state", "state"), ("action", "actions"))
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected {{'norm_stats': {{'state': {{...}}, 'actions': {{...}}}}}}: {error!r}"
        ) from error
    return NormStats(found["state"], found["action"], str(path))


def read_lerobot_stats(path: Path) -> NormStats:
    """From the state file of LeRobot's normaliser or unnormaliser. Raises CheckpointError as ``read_norm_stats``."""
    try:
        with safe_open(str(path), framework="np") as file:
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(f"{path}: not readable as a safetensors file of statistics: {error}") from error
    features = {
        ours: _checked(
            path,
            theirs,
            {key.removeprefix(theirs + "."): flat[key] for key in flat if key.startswith(theirs + ".")},
            np.float32,
        )
        for ours, theirs in (("state", "observation.state"), ("action", "action"))
    }
    return NormStats(features["state"], features["action"], str(path))


def _checked(source: Any, feature: str, stats: Mapping[str, Any], dtype: Any) -> FeatureStats:
    """The known statistics of one feature, each one-dimensional and finite; nulls (old pi0 files) are left out."""
    checked = {}
    for name in STATISTICS:
        if stats.get(name) is None:
            continue
        try:
            values = np.asarray(stats[name], dtype=dtype)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{source}: {feature}.{name}: expected a list of numbers: {error}") from error
        if values.ndim != 1 or values.size == 0:
            raise CheckpointError(f"{source}: {feature}.{name}: expected one number a dimension, got {values.shape}.")
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise CheckpointError(f"{source}: {feature}.{name}: not finite at dimension {', '.join(map(str, bad))}.")
        checked[name] = values
    return checked
