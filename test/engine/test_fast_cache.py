"""The prefix cache of the fast path: exact, bounded, and of no effect on any number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from engine.small import EXACT, TINY, alone, difference, plain_path, request, tiny_model
from pi05_ros.engine import EngineRequest, FastPath

CAMERAS = ((56, 56, "uint8"), (56, 56, "uint8"), (8, 10, "float32"))


def fast_path(entries: int = 8) -> FastPath:
    return FastPath(tiny_model(), resize="lerobot", time_grid="lerobot", prefix_cache=entries)


@pytest.fixture
def fast() -> FastPath:
    return fast_path()


def counts(path: FastPath) -> tuple[int, int, int]:
    return path.cache.hits, path.cache.misses, len(path.cache)


def test_a_hit_is_bit_equal(fast: FastPath) -> None:
    miss, other, hit = (fast.run([request(seed)]) for seed in (1, 2, 1))
    assert [outcome.hits for outcome in (miss, other, hit)] == [(False,), (False,), (True,)]
    assert np.array_equal(hit.actions, miss.actions)
    again = dataclasses.replace(request(1), noise=request(2).noise, num_steps=5)
    assert fast.run([again]).hits == (True,), "noise and steps are not the prefix's"
    assert counts(fast) == (2, 2, 2)


def test_a_batch_of_hits_is_bit_equal(fast: FastPath) -> None:
    requests = [request(seed, length) for seed, length in ((1, 5), (2, 30), (3, 9))]
    miss, hit = fast.run(requests), fast.run(requests)
    assert (miss.hits, hit.hits) == ((False,) * 3, (True,) * 3)
    assert np.array_equal(hit.actions, miss.actions)
    moved = fast.run(requests[::-1])
    assert moved.hits == (True,) * 3
    assert difference(moved.actions[::-1], miss.actions) < EXACT


@pytest.mark.parametrize("known", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_hits_and_misses_share_a_batch(fast: FastPath, known: tuple[int, ...]) -> None:
    requests = [request(seed, length) for seed, length in ((1, 5), (2, 30), (3, 9))]
    for index in known:
        fast.run([requests[index]])
    outcome = fast.run(requests)
    assert outcome.hits == tuple(index in known for index in range(3))
    assert difference(outcome.actions, alone(plain_path(tiny_model()), requests)) < EXACT
    assert fast.run(requests).hits == (True,) * 3, "what was computed is kept, each under its own key"


def with_image(one: EngineRequest, camera: int, image: np.ndarray) -> EngineRequest:
    images = list(one.images)
    images[camera] = image
    return dataclasses.replace(one, images=tuple(images))


def last_pixel(one: EngineRequest) -> EngineRequest:
    image = one.images[1].copy()
    image[-1, -1, -1] ^= 1
    return with_image(one, 1, image)


def smallest_float(one: EngineRequest) -> EngineRequest:
    image = one.images[2].copy()
    image[3, 4, 1] = np.nextafter(image[3, 4, 1], np.float32(2))
    return with_image(one, 2, image)


def token(one: EngineRequest) -> EngineRequest:
    tokens = one.tokens.copy()
    tokens[-1] ^= 1
    return dataclasses.replace(one, tokens=tokens)


FLIPS: dict[str, Callable[[EngineRequest], EngineRequest]] = {
    "pixel": last_pixel,
    "float pixel": smallest_float,
    "order of cameras": lambda one: dataclasses.replace(one, images=(one.images[1], one.images[0], one.images[2])),
    "count of cameras": lambda one: dataclasses.replace(one, images=one.images[:2]),
    "shape, of the same bytes": lambda one: with_image(one, 0, one.images[0].reshape(28, 112, 3)),
    "dtype, of the same bytes": lambda one: with_image(one, 2, one.images[2].view(np.uint8).reshape(8, 40, 3)),
    "token": token,
    "order of tokens": lambda one: dataclasses.replace(one, tokens=np.roll(one.tokens, 1)),
    "count of tokens": lambda one: dataclasses.replace(one, tokens=one.tokens[:-1]),
    "count of tokens, which the padding would hide": lambda one: dataclasses.replace(
        one, tokens=np.append(one.tokens, 0)
    ),
}


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_whatever_is_flipped_is_a_miss(fast: FastPath, flip: Callable[[EngineRequest], EngineRequest]) -> None:
    one = request(1, cameras=CAMERAS)
    flipped = flip(one)
    first = fast.run([one])
    second = fast.run([flipped])
    assert counts(fast) == (0, 2, 2)
    assert np.array_equal(second.actions, fast_path().run([flipped]).actions)
    for known, before in ((one, first), (flipped, second)):
        outcome = fast.run([known])
        assert outcome.hits == (True,)
        assert np.array_equal(outcome.actions, before.actions)


def test_equal_bytes_in_other_memory_are_a_hit(fast: FastPath) -> None:
    assert [fast.run([request(1, cameras=CAMERAS)]).hits for _ in range(2)] == [(False,), (True,)]


def test_a_request_may_leave_the_cache_alone(fast: FastPath) -> None:
    uncached = request(1, use_cache=False)
    first = fast.run([uncached])
    assert (first.hits, counts(fast)) == ((False,), (0, 0, 0)), "it is not written"
    assert np.array_equal(fast.run([request(1)]).actions, first.actions)
    assert (fast.run([uncached]).hits, counts(fast)) == ((False,), (0, 1, 1)), "nor read"
    both = fast.run([request(1), uncached])
    assert (both.hits, counts(fast)) == ((True, False), (1, 1, 1)), "nor by a neighbour's leave"


def test_the_least_recently_used_go() -> None:
    fast = fast_path(entries=2)
    hits = [fast.run([request(seed)]).hits[0] for seed in (1, 2, 1, 3, 1, 2)]
    assert hits == [False, False, True, False, True, False]
    positions = TINY.vision.tokens + 32
    assert counts(fast) == (2, 4, 2)
    assert fast.cache.bytes == 2 * 2 * TINY.prefix.layers * positions * TINY.prefix.head_dim * 4
    fast.clear_cache()
    assert (counts(fast), fast.cache.bytes) == ((2, 4, 0), 0)
    assert fast.run([request(1)]).hits == (False,)


def test_a_batch_larger_than_the_cache() -> None:
    fast = fast_path(entries=1)
    requests = [request(seed) for seed in (1, 2, 3)]
    assert fast.run(requests).hits == (False,) * 3
    assert fast.run(requests).hits == (False, False, True)


def test_no_entries_no_cache() -> None:
    fast = fast_path(entries=0)
    assert [fast.run([request()]).hits for _ in range(2)] == [(False,), (False,)]
    assert counts(fast) == (0, 0, 0)


def test_the_same_prefix_twice_in_a_batch(fast: FastPath) -> None:
    one, other = request(1), dataclasses.replace(request(1), noise=request(2).noise)
    outcome = fast.run([one, other])
    assert outcome.hits == (False, False)
    assert len(fast.cache) == 1
    assert difference(outcome.actions, alone(plain_path(tiny_model()), [one, other])) < EXACT
