"""Small models, and requests for them, for tests of the paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pi05_ros.checkpoint.random_weights import random_model
from pi05_ros.engine import EngineRequest, PlainPath
from pi05_ros.model import Pi05Config, Pi05Model, RtcGuidance

TINY = dataclasses.replace(Pi05Config.tiny(), horizon=12)
SQUARE = (56, 56, "uint8")
"""An image that needs no resizing: height, width, dtype."""
EXACT = 1e-5
"""Relative difference of two ways to compute the same in float32."""


def tiny_model(precision: str = "float32") -> Pi05Model:
    """Always the same weights, on the CPU."""
    return random_model(TINY, "cpu", precision)


def plain_path(model: Pi05Model, dialect: str = "lerobot") -> PlainPath:
    """The oracle: no cache."""
    return PlainPath(model, resize=dialect, time_grid=dialect, prefix_cache=0)


def request(
    seed: int = 0,
    length: int = 9,
    cameras: Sequence[tuple[int, int, str]] = (SQUARE,),
    config: Pi05Config = TINY,
    **options: Any,
) -> EngineRequest:
    """All arrays are drawn from the seed. length: of the prompt. cameras: height, width and dtype of images."""
    rng = np.random.default_rng(seed)
    images = []
    for height, width, dtype in cameras:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(pixels if dtype == "uint8" else pixels.astype(np.float32) / 255.0)
    return EngineRequest(
        images=tuple(images),
        tokens=rng.integers(0, config.prefix.vocab, length),
        noise=rng.standard_normal((config.horizon, config.action_dim), dtype=np.float32),
        **{"num_steps": 2, **options},
    )


def guidance(seed: int = 0, config: Pi05Config = TINY, **options: Any) -> RtcGuidance:
    """By a previous chunk that is shorter than a whole one and has fewer dimensions."""
    rows = np.random.default_rng(seed).standard_normal((config.horizon - 3, config.action_dim - 5))
    return RtcGuidance(torch.from_numpy(rows), **{"inference_delay": 2, "execution_horizon": 7, **options})


def alone(path: PlainPath, requests: Sequence[EngineRequest]) -> np.ndarray:
    """What a path says of each request by itself, [B, H, A]."""
    return np.concatenate([path.run([one]).actions for one in requests])


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the expected; of the worst of chunks [B, H, A]. NaN counts as infinite."""
    assert actual.shape == expected.shape
    errors = [np.linalg.norm(a - e) / np.linalg.norm(e) for a, e in zip(actual, expected, strict=True)]
    return float(np.nan_to_num(max(errors, key=lambda e: (np.isnan(e), e)), nan=np.inf))
