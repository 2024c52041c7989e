"""What goes into the policy and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Observation:
    """One moment of the robot, in robot units.

    images: by camera name. RGB, [height, width, 3] (or [3, height, width]); uint8 means 0..255, a float dtype means
        0..1. Which of the two it is follows from the dtype alone.
    state: [state_dim], any float or integer dtype, in the order and units of the robot profile.
    prompt: the instruction, as a person would say it.
    image_masks: by camera name; False means "pretend this camera is absent". None: all that are given count.
    tokens, token_mask: [length] token ids and which of them are real; they replace the prompt text (and with it the
        state in the prompt) where a caller tokenises by itself.
    stamp: time of the observation in seconds, in whatever clock the caller uses; handed back unchanged.
    id: handed back unchanged.
    """

    images: Mapping[str, Any]
    state: Any
    prompt: str = ""
    image_masks: Mapping[str, bool] | None = None
    tokens: Any = None
    token_mask: Any = None
    stamp: float | None = None
    id: str | None = None


@dataclass(frozen=True)
class ActionChunk:
    """What the policy wants the robot to do next.

    actions: float32 [horizon, action_dim], robot units; row i is meant for (i + 1) control periods after the
        observation.
    model_actions: float32 [horizon, 32], normalised model space (what real-time chunking wants as previous chunk).
    timings: milliseconds by stage: queue_ms, preprocess_ms, cache_lookup_ms, prefix_ms, denoise_ms, postprocess_ms,
        total_ms.
    prefix_cache_hit: the prefix was not computed, an exactly equal one was at hand.
    batch_size: requests that ran together. num_steps: denoise steps.
    stamp, id: those of the observation.
    """

    actions: np.ndarray
    model_actions: np.ndarray
    timings: dict[str, float] = field(default_factory=dict)
    prefix_cache_hit: bool = False
    batch_size: int = 1
    num_steps: int = 0
    stamp: float | None = None
    id: str | None = None
