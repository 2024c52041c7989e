"""The prefix cache: exact, bounded, and it says what it holds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.engine import prefix_cache
from pi05_ros.engine.prefix_cache import SAMPLE, PrefixCache, PrefixKey

RNG = np.random.default_rng(0)
IMAGES = tuple(RNG.integers(0, 255, (48, 64, 3), dtype=np.uint8) for _ in range(3))
TOKENS = np.arange(20, dtype=np.int64)
STEP = 8 * (IMAGES[0].size // 8 // SAMPLE | 1)  # bytes from one word of the sample to the next


def key(images: Any = IMAGES, tokens: np.ndarray = TOKENS, identity: Hashable = "lerobot") -> PrefixKey:
    """Of copies: a caller's next frame is never the same array."""
    return PrefixKey([image.copy(order="K") for image in images], tokens.copy(), identity)


def with_pixel(camera: int, index: int) -> tuple[np.ndarray, ...]:
    images = [image.copy() for image in IMAGES]
    images[camera].reshape(-1)[index] ^= 1
    return tuple(images)


SEEN, UNSEEN = STEP * 100, STEP * 100 + 8
FLIPS = {
    **{f"a pixel of camera {camera} that the sample sees": key(with_pixel(camera, SEEN)) for camera in range(3)},
    **{f"a pixel of camera {camera} that it does not see": key(with_pixel(camera, UNSEEN)) for camera in range(3)},
    "the last pixel": key(with_pixel(2, -1)),
    "order of cameras": key(IMAGES[::-1]),
    "a camera less": key(IMAGES[:2]),
    "a camera more": key((*IMAGES, IMAGES[0])),
    "no camera": key(()),
    "the same bytes in another shape": key([image.reshape(64, 48, 3) for image in IMAGES]),
    "the same bytes in another dtype": key([image.view(np.int8) for image in IMAGES]),
    "the same bytes as floats": key([image.reshape(48, 16, 12).view(np.float32) for image in IMAGES]),
    "mirrored views": key([image[:, ::-1] for image in IMAGES]),
    "the same bytes cut elsewhere": key((np.concatenate(IMAGES)[:60], np.concatenate(IMAGES)[60:])),
    "a token": key(tokens=np.where(TOKENS == 7, 8, TOKENS)),
    "a token less": key(tokens=TOKENS[:-1]),
    "dtype of tokens": key(tokens=TOKENS.view(np.uint64)),
    "shape of tokens": key(tokens=TOKENS[None]),
    "identity": key(identity="openpi"),
    "no identity": key(identity=None),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_whatever_differs_is_a_miss(flip: str) -> None:
    cache: PrefixCache[str] = PrefixCache(2)
    cache.put(key(), "known")
    assert cache.get(FLIPS[flip]) is None
    assert cache.get(key()) == "known"
    assert (cache.hits, cache.misses) == (1, 1)


def test_all_bytes_decide_where_the_sample_sees_no_difference() -> None:
    for camera in range(3):
        other = FLIPS[f"a pixel of camera {camera} that it does not see"]
        assert hash(other) == hash(key()), "else this is no test of the comparison"
        assert other != key()
        assert hash(FLIPS[f"a pixel of camera {camera} that the sample sees"]) != hash(key())


@pytest.mark.parametrize("flip", FLIPS)
def test_colliding_fingerprints_give_no_wrong_prefix(flip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixKey, "__hash__", lambda self: 1)
    cache: PrefixCache[str] = PrefixCache(2)
    cache.put(key(), "known")
    assert cache.get(FLIPS[flip]) is None
    assert cache.get(key()) == "known"


def test_strides_do_not_matter_values_do() -> None:
    mirrored = [image[:, ::-1] for image in IMAGES]
    assert key(mirrored) == key([np.ascontiguousarray(image) for image in mirrored])


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (np.float32(np.nan), -np.float32(np.nan))])
def test_floats_count_by_their_bytes(first: float, second: float) -> None:
    def of(value: float) -> PrefixKey:
        return key([np.full((4, 4, 3), value, np.float32)])

    assert of(first) == of(first)
    assert of(first) != of(second)


PIXELS = st.one_of(st.binary(min_size=12, max_size=12), st.binary(min_size=24, max_size=24))


@given(st.lists(PIXELS, max_size=3), st.lists(PIXELS, max_size=3))
def test_keys_are_equal_exactly_if_the_bytes_are(first: list[bytes], second: list[bytes]) -> None:
    keys = [key([np.frombuffer(one, np.uint8).reshape(2, -1, 3) for one in images]) for images in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 7, 3), (48, 64, 3), (224, 224, 3), (480, 640, 3), (479, 641, 3)])
def test_the_sample_spans_an_image_of_any_size(shape: tuple[int, ...]) -> None:
    words = prefix_cache._words(np.zeros(shape, np.uint8))
    assert words.nbytes == np.prod(shape)
    words[-(words.size // SAMPLE | 1) :] = 1
    sample = prefix_cache._sample(words)
    assert 1 in sample, "it reaches the end"
    assert len(sample) <= (SAMPLE + 1) * words.itemsize


def test_it_is_bounded_and_forgets_what_was_not_used() -> None:
    cache: PrefixCache[bytes] = PrefixCache(2, size=len)
    a, b, c = (key(identity=name) for name in "abc")
    cache.put(a, b"1")
    cache.put(b, b"22")
    assert cache.get(a) == b"1"
    cache.put(c, b"333")
    assert (len(cache), cache.bytes) == (2, 4)
    assert cache.get(b) is None
    assert (cache.get(a), cache.get(c)) == (b"1", b"333")
    cache.put(a, b"4444")
    assert (len(cache), cache.bytes) == (2, 7), "replaced, not counted twice"
    cache.clear()
    assert (len(cache), cache.bytes, cache.get(a)) == (0, 0, None)
    assert (cache.hits, cache.misses) == (3, 2)


def test_none_keeps_none() -> None:
    cache: PrefixCache[bytes] = PrefixCache(0, size=len)
    cache.put(key(), b"1")
    assert (len(cache), cache.bytes, cache.get(key())) == (0, 0, None)


@pytest.mark.parametrize("entries", [-1, None, True, 2.0])
def test_a_wrong_number_of_entries_is_said(entries: Any) -> None:
    with pytest.raises(ValueError, match=f"prefix_cache: expected an integer of 0 or more, got {entries}"):
        PrefixCache(entries)
