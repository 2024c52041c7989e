"""Requests that differ in size share buffers and captured graphs: prompts are padded to the next of a few lengths."""

from __future__ import annotations

from dataclasses import dataclass

from pi05_ros.engine.requests import EngineRequest

PROMPT_STEP = 32
"""Prompts are padded to a multiple of this. Seven buckets cover the 200 tokens of a prompt; what is padded is at most
31 of some 900 positions, and much of that falls within the tiles that matrix products are rounded up to."""

LONGEST_PROMPT = 200
"""Tokens of the longest prompt that published checkpoints take: a bucket of its own, and no tile more for padding."""


@dataclass(frozen=True)
class Bucket:
    """images: height, width and dtype of each camera. tokens: padded prompt length. batch: requests."""

    images: tuple[tuple[int, int, str], ...]
    tokens: int
    batch: int

    @staticmethod
    def of(request: EngineRequest, batch: int = 1) -> Bucket:
        """The bucket in which ``batch`` requests like this one run."""
        images = tuple((*image.shape[:2], image.dtype.name) for image in request.images)
        return Bucket(images, padded(len(request.tokens)), batch)


def padded(length: int) -> int:
    """Tokens of a prompt with its padding."""
    whole = -(-length // PROMPT_STEP) * PROMPT_STEP
    return whole if length > LONGEST_PROMPT else min(whole, LONGEST_PROMPT)
