"""Which requests share a bucket, and which may run in one batch."""

from __future__ import annotations

import pytest

from engine.small import SQUARE, guidance, request, tiny_model
from pi05_ros.engine import EngineRequest, FastPath
from pi05_ros.engine.buckets import Bucket


@pytest.mark.parametrize(
    ("length", "padded"),
    [(1, 32), (31, 32), (32, 32), (33, 64), (64, 64), (65, 96), (192, 192), (193, 200), (200, 200), (201, 224)],
)
def test_prompts_are_padded_to_the_next_multiple_or_the_longest(length: int, padded: int) -> None:
    assert Bucket.of(request(length=length), 3) == Bucket((SQUARE,), padded, 3)


def test_images_count_each_by_shape_and_dtype() -> None:
    cameras = ((30, 40, "uint8"), (40, 30, "float32"))
    assert Bucket.of(request(cameras=cameras)) == Bucket(cameras, 32, 1)
    assert Bucket.of(request(cameras=cameras)) != Bucket.of(request(cameras=cameras[::-1]))


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (request(2), True),
        (request(2, length=1), True),
        (request(2, length=32), True),
        (request(2, rtc=guidance()), True),
        (request(2, use_cache=False, priority=1, deadline=1.0), True),
        (request(2, graphs=True), True),
        (request(2, length=33), False),
        (request(2, cameras=(SQUARE, SQUARE)), False),
        (request(2, cameras=((56, 57, "uint8"),)), False),
        (request(2, cameras=((56, 56, "float32"),)), False),
        (request(2, num_steps=3), False),
        (request(2, graphs=False), False),
        (request(2, rtc=guidance(jacobian="vjp")), False),
    ],
)
def test_what_may_run_together(path: FastPath, other: EngineRequest, fits: bool) -> None:
    assert path.fits(request(1), other) is fits
    assert path.fits(other, request(1)) is fits


def test_guidance_through_the_model_runs_alone(path: FastPath) -> None:
    one = request(1, rtc=guidance(jacobian="vjp"))
    assert not path.fits(one, one)


@pytest.fixture(scope="module")
def path() -> FastPath:
    return FastPath(tiny_model(), resize="lerobot", time_grid="lerobot")
