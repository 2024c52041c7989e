"""The plain path: the model of ``model/`` as it is. The oracle of every faster path, and the one that runs anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pi05_ros.engine.images import DIALECTS, image_to_model
from pi05_ros.engine.prefix_cache import PrefixCache, PrefixKey
from pi05_ros.engine.requests import EngineRequest, Outcome
from pi05_ros.model import Pi05Model, Prefix
from pi05_ros.model.pi05 import TIME_GRIDS
from pi05_ros.model.siglip import embed_images


class PlainPath:
    """Runs a ``Pi05Model`` stage by stage."""

    name = "plain"

    def __init__(self, model: Pi05Model, *, resize: str, time_grid: str, prefix_cache: int = 8) -> None:
        """The model must be on its device. resize: dialect of ``images.py``; time_grid: of ``model/pi05.py``;
        prefix_cache: entries kept, 0 for none. Raises ValueError that names the field.
        """
        for field, value, known in (("resize", resize, DIALECTS), ("time_grid", time_grid, TIME_GRIDS)):
            if value not in known:
                raise ValueError(f"{field}: expected one of {', '.join(known)}, got {value!r}")
        self.model = model
        self.device = model.action_in_proj.weight.device
        self.resize, self.time_grid = resize, time_grid
        self.cache: PrefixCache[Prefix] = PrefixCache(prefix_cache, size=_bytes_of)

    def fits(self, first: EngineRequest, other: EngineRequest) -> bool:
        """Equal shapes run without padding. Guided requests run alone: the model takes one guidance a batch."""
        return first.rtc is None and other.rtc is None and first.same_shapes(other)

    @torch.no_grad()
    def run(self, requests: Sequence[EngineRequest]) -> Outcome:
        """One batch. Raises ValueError for guidance that does not fit the noise, and whatever the device raises."""
        timings: dict[str, float] = {}
        with self._stage(timings, "cache_lookup_ms"):
            keys = [self._key(request) for request in requests]
            found = [None if key is None else self.cache.get(key) for key in keys]
        missing = [request for request, prefix in zip(requests, found, strict=True) if prefix is None]
        with self._stage(timings, "preprocess_ms"):
            images = self._images(missing)
        with self._stage(timings, "vision_ms"):
            embedded = self._see(images)
        with self._stage(timings, "prefix_ms"):
            computed = iter(self._read(embedded, missing))
            prefixes = [next(computed) if prefix is None else prefix for prefix in found]
            for key, prefix, known in zip(keys, prefixes, found, strict=True):
                if key is not None and known is None:
                    self.cache.put(key, prefix)
        with self._stage(timings, "denoise_ms"):
            actions = self._denoise(prefixes, requests)
        return Outcome(actions, tuple(prefix is not None for prefix in found), timings)

    def clear_cache(self) -> None:
        """Forget all cached prefixes."""
        self.cache.clear()

    def close(self) -> None:
        """Let go of the model and the cache."""
        self.cache.clear()
        del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _stage(self, timings: dict[str, float], name: str) -> Iterator[None]:
        """Time a stage of a batch; on a GPU it ends with a synchronisation, which this path can afford."""
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        timings[name] = (time.monotonic() - began) * 1e3

    def _key(self, request: EngineRequest) -> PrefixKey | None:
        """None: the cache is not to be used. The cache is this path's own, and model and precision are its model's."""
        if self.cache.entries == 0 or not request.use_cache:
            return None
        return PrefixKey(request.images, request.tokens, identity=self.resize)

    def _images(self, requests: Sequence[EngineRequest]) -> Tensor | None:
        """Images of requests, float32 [B, N, 3, S, S] in [-1, 1] on the device; None without requests."""
        if not requests:
            return None
        size = self.model.config.vision.image_size
        stacked = torch.stack(
            [
                torch.stack([image_to_model(image, size, self.resize) for image in request.images])
                for request in requests
            ]
        )
        return stacked.to(self.device)

    def _see(self, images: Tensor | None) -> Tensor | None:
        """Embeddings of images [B, N, T, W]."""
        if images is None:
            return None
        present = torch.ones(images.shape[:2], dtype=torch.bool, device=self.device)
        return embed_images(self.model.vision, self.model.projector, images, present)

    def _read(self, embedded: Tensor | None, requests: Sequence[EngineRequest]) -> list[Prefix]:
        """A prefix a request."""
        if embedded is None:
            return []
        tokens = torch.from_numpy(np.stack([request.tokens for request in requests])).to(self.device)
        present = torch.ones(embedded.shape[:2], dtype=torch.bool, device=self.device)
        real = torch.ones(tokens.shape, dtype=torch.bool, device=self.device)
        prefix = self.model.encode_embedded(embedded, present, tokens, real)
        return [prefix] if len(requests) == 1 else prefix.split()

    def _denoise(self, prefixes: list[Prefix], requests: Sequence[EngineRequest]) -> np.ndarray:
        """Action chunks, float32 [B, H, A]."""
        prefix = Prefix.stack(prefixes)
        noise = torch.from_numpy(np.stack([request.noise for request in requests])).to(self.device)
        first = requests[0]
        actions = self.model.denoise(prefix, noise, first.num_steps, self.time_grid, first.rtc)
        return actions.cpu().numpy()


def _bytes_of(prefix: Prefix) -> int:
    """Device memory that a prefix holds."""
    return sum(tensor.nbytes for tensor in (prefix.embeddings, prefix.pad_mask, *prefix.keys, *prefix.values))
