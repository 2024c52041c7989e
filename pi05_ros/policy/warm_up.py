"""What a deployment will ask for, asked before it does, so that its first real request meets no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.engine.buckets import padded
from pi05_ros.errors import ObservationError
from pi05_ros.policy.binding import Binding
from pi05_ros.policy.inputs import as_integer
from pi05_ros.policy.observation import Observation
from pi05_ros.policy.profile import MAX_SIDE

IMAGE_SHAPE = (480, 640)
"""Height and width of images of which nothing is known: what robots' cameras are mostly set to."""


def rehearsals(
    checkpoint: Checkpoint,
    binding: Binding,
    image_shapes: Mapping[str, tuple[int, int]] | None,
    prompt_lengths: Iterable[int] | None,
) -> list[Observation]:
    """One observation for each bucket of the prompt lengths, black and without meaning, the longest prompt first.

    Arguments as of ``Policy.warm_up``. Raises ObservationError that names the field.
    """
    limit = checkpoint.prompt_length
    if image_shapes is None:
        image_shapes = dict.fromkeys(binding.fed_cameras, IMAGE_SHAPE)
    lengths = (
        range(1, limit + 1)
        if prompt_lengths is None
        else [as_integer("prompt_lengths", length, 1, limit) for length in prompt_lengths]
    )
    buckets = {min(padded(length), limit) for length in lengths}
    images = {name: _black(f"image_shapes.{name}", shape) for name, shape in image_shapes.items()}
    state = np.zeros(binding.state_dim)
    # Captured graphs share one pool of memory, and the smaller ones then fit into what the largest left.
    return [Observation(images, state, tokens=np.zeros(length, np.int64)) for length in sorted(buckets, reverse=True)]


def run_in_turn(
    batches: Sequence[Callable[[], Sequence[Future[Any]]]], progress: Callable[[int, int], None] | None = None
) -> None:
    """Submit each when the one before it has been answered. progress: called with batches done and batches in all,
    also while one runs; what it raises ends this. Raises what a request does.
    """
    tell = progress or (lambda done, total: None)
    tell(0, len(batches))
    for done, submit in enumerate(batches):
        futures = submit()
        try:
            while wait(futures, timeout=0.1).not_done:
                tell(done, len(batches))
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
        tell(done + 1, len(batches))


def _black(field: str, shape: Any) -> np.ndarray:
    try:
        height, width = shape
    except (TypeError, ValueError) as error:
        raise ObservationError(field, f"expected height and width, got {shape!r}") from error
    return np.zeros((as_integer(field, height, 1, MAX_SIDE), as_integer(field, width, 1, MAX_SIDE), 3), np.uint8)
