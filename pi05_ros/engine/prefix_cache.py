"""Exact cache of prefixes: the same images, prompt and state need to be read only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

SAMPLE = 512
"""Words of an image, evenly spread, that its fingerprint looks at. Two frames of a real camera differ in them."""


class PrefixKey:
    """All that a prefix depends on. Hashed by a sample, equal only if every byte is.

    A digest of all bytes would take long beside an inference of milliseconds. The sample finds
    the candidate and the comparison decides, at the speed of memory, and only where there is a candidate.

    Images count as they came in, before they are resized and normalised: those are deterministic functions of what is
    compared here (the bytes, shape and dtype, and the dialect and precision in ``identity``), so equal keys mean equal
    preprocessed bytes.
    """

    __slots__ = ("_facts", "_hash", "_images")

    def __init__(self, images: Sequence[np.ndarray], tokens: np.ndarray, identity: Hashable = None) -> None:
        """images: the present cameras in model order, each [h, w, 3], of any dtype. They are kept, not copied: nobody
        may write to them any more. tokens: [L], without padding. identity: whatever else counts (model, precision,
        resize dialect, layout of the bucket).
        """
        self._images = [_words(image) for image in images]
        shapes = tuple((image.dtype.str, image.shape) for image in images)
        self._facts = (identity, shapes, tokens.dtype.str, tokens.shape, tokens.tobytes())
        self._hash = hash((self._facts, *(_sample(image) for image in self._images)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PrefixKey)
            and self._facts == other._facts
            and all(map(np.array_equal, self._images, other._images))
        )


def _words(image: np.ndarray) -> np.ndarray:
    """The bytes of an image as uint64 [n / 8], or as uint8 [n] where they do not fill words, which compare slower."""
    flat = np.ascontiguousarray(image).reshape(-1).view(np.uint8)
    return flat if flat.size % 8 else flat.view(np.uint64)


def _sample(words: np.ndarray) -> bytes:
    """Evenly spread words; the odd step visits all columns, where a round one might see a single one."""
    return words[:: words.size // SAMPLE | 1].tobytes()


class PrefixCache(Generic[T]):
    """The most recently used entries. Belongs to the engine's thread; its counters may be read from any.

    An entry keeps the images of its key on the host (2.8 MB for three of 640x480) beside its value.
    """

    def __init__(self, entries: int, size: Callable[[T], int] = lambda value: 0) -> None:
        """entries: how many are kept at most, 0 keeps none. size: bytes of device memory that a value holds.

        Raises ValueError: entries is no integer of 0 or more.
        """
        if not isinstance(entries, int) or isinstance(entries, bool) or entries < 0:
            raise ValueError(f"prefix_cache: expected an integer of 0 or more, got {entries!r}")
        self.entries = entries
        self.hits = self.misses = self.bytes = 0
        self._size = size
        self._kept: OrderedDict[PrefixKey, tuple[PrefixKey, T]] = OrderedDict()  # with the very key it lies under

    def get(self, key: PrefixKey) -> T | None:
        """The value put under an equal key, None if there is none (any more)."""
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        own, value = found
        self._kept.move_to_end(own)  # the equal key would be compared byte by byte once more
        return value

    def put(self, key: PrefixKey, value: T) -> None:
        """Keep a value; the least recently used one goes if there are too many."""
        replaced = self._kept.pop(key, None)
        if replaced is not None:
            self.bytes -= self._size(replaced[1])
        self._kept[key] = (key, value)
        self.bytes += self._size(value)
        while len(self._kept) > self.entries:
            _, (_, oldest) = self._kept.popitem(last=False)
            self.bytes -= self._size(oldest)

    def clear(self) -> None:
        """Forget all entries; the counters of hits and misses go on."""
        self._kept.clear()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)
