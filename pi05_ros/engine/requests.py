"""What goes into the engine, what comes out, and what a path (a way to run the model) has to offer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from pi05_ros.engine.prefix_cache import PrefixCache
from pi05_ros.model import RtcGuidance


@dataclass(frozen=True)
class EngineRequest:
    """One inference, already validated. Its arrays belong to the engine: nobody writes to them any more.

    images: the present cameras in model order, RGB [h, w, 3], uint8 (0..255) or float32 (0..1), contiguous.
    tokens: int64 [L], without padding. noise: float32 [H, A] in model space. rtc: guidance by the previous chunk.
    deadline: value of time.monotonic() after which it is not started any more.
    priority: higher goes first. use_cache: look in the prefix cache, and remember what is computed.
    graphs: False runs this request uncaptured where the path captures graphs; None and True: as the path is.

    Raises ValueError: deadline or priority cannot be compared, so that the queue never meets one.
    """

    images: tuple[np.ndarray, ...]
    tokens: np.ndarray
    noise: np.ndarray
    num_steps: int
    rtc: RtcGuidance | None = None
    deadline: float | None = None
    priority: int = 0
    use_cache: bool = True
    graphs: bool | None = None

    def __post_init__(self) -> None:
        if self.deadline is not None and not isinstance(self.deadline, (int, float)):
            raise ValueError(f"deadline: expected a time of time.monotonic(), got {self.deadline!r}")
        if not isinstance(self.priority, int):
            raise ValueError(f"priority: expected an integer, got {self.priority!r}")

    def same_shapes(self, other: EngineRequest) -> bool:
        """True if the arrays of both can be stacked (after images are resized) and take equally many steps."""
        return (
            len(self.images) == len(other.images)
            and self.tokens.shape == other.tokens.shape
            and self.noise.shape == other.noise.shape
            and self.num_steps == other.num_steps
        )


@dataclass(frozen=True)
class EngineResult:
    """One request's answer.

    model_actions: float32 [H, A]. timings: milliseconds: queue_ms, the stages of its batch (see ``Outcome``),
    postprocess_ms (the request's ``finish``) and total_ms (since submission); the last two come when ``finish`` has
    returned. batch_size: how many requests ran together.
    """

    model_actions: np.ndarray
    timings: dict[str, float]
    prefix_cache_hit: bool
    batch_size: int


@dataclass(frozen=True)
class Outcome:
    """What a path returns for a batch of B requests.

    actions: float32 [B, H, A] in model space, in memory that the path does not use again. hits: prefix cache hit by
    request. timings: milliseconds of the whole batch: cache_lookup_ms, preprocess_ms, vision_ms, prefix_ms and
    denoise_ms; 0 or so where nothing had to be done.
    """

    actions: np.ndarray
    hits: tuple[bool, ...]
    timings: dict[str, float]


class Path(Protocol):
    """A way to run the model. ``fits`` is called from any place, everything else on the engine's thread only."""

    name: str
    """ "plain", "eager" or "graphs"."""
    device: torch.device
    resize: str
    """How it resizes images: a dialect of ``images.py``."""

    @property
    def cache(self) -> PrefixCache[Any]:
        """The prefix cache, for its counters."""

    def fits(self, first: EngineRequest, other: EngineRequest) -> bool:
        """True if both may run in one batch. Quick, and free of side effects: the engine's lock is held."""

    def run(self, requests: Sequence[EngineRequest]) -> Outcome:
        """Run a batch in which all fit the first. Raises whatever fails; the engine then tries them one by one."""

    def clear_cache(self) -> None:
        """Forget all cached prefixes."""

    def close(self) -> None:
        """Free device memory. Nothing is called afterwards."""
