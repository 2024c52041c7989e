"""Exact cache of prefixes: the same images, prompt and state need to be read only once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pi05_ros.model import Prefix


def prefix_key(images: Sequence[np.ndarray], tokens: np.ndarray) -> bytes:
    """Digest of all that a prefix depends on besides the engine's own model, precision and resize dialect.

    images: the present cameras in model order, each [h, w, 3] of any dtype; tokens: [L].
    """
    digest = hashlib.blake2b(digest_size=32)
    for array in (*images, tokens):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


class PrefixCache:
    """Least recently used entries go first. Belongs to the engine's thread."""

    def __init__(self, entries: int) -> None:
        """entries: how many are kept at most; 0 keeps none."""
        self.entries = entries
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def get(self, key: bytes) -> Prefix | None:
        prefix = self._prefixes.get(key)
        if prefix is not None:
            self._prefixes.move_to_end(key)
        return prefix

    def put(self, key: bytes, prefix: Prefix) -> None:
        if self.entries == 0:
            return
        self._prefixes[key] = prefix
        self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.entries:
            self._prefixes.popitem(last=False)

    def clear(self) -> None:
        self._prefixes.clear()

    def __len__(self) -> int:
        return len(self._prefixes)
