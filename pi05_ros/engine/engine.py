"""The engine: one thread that owns the model and the device, and runs what others submit.

Requests wait in a queue ordered by priority, then by arrival. The thread takes the first one and with it whatever else
waits and has the same shape, up to ``max_batch``, runs them as one batch, and answers each through its future.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pi05_ros.engine.images import image_to_model
from pi05_ros.engine.prefix_cache import PrefixCache, prefix_key
from pi05_ros.errors import InferenceError
from pi05_ros.model import Pi05Model, Prefix, RtcGuidance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineRequest:
    """One inference, already validated.

    images: the present cameras in model order, RGB [h, w, 3], uint8 or float32. tokens: int64 [L], without padding.
    noise: float32 [H, A] in model space. deadline: value of time.monotonic() after which it is not started any more.
    priority: higher goes first. use_cache: look in the prefix cache, and remember what is computed.
    """

    images: tuple[np.ndarray, ...]
    tokens: np.ndarray
    noise: np.ndarray
    num_steps: int
    rtc: RtcGuidance | None = None
    deadline: float | None = None
    priority: int = 0
    use_cache: bool = True

    def same_batch(self, other: EngineRequest) -> bool:
        """True if both can be run as one batch without padding."""
        return (
            self.rtc is None
            and other.rtc is None
            and len(self.images) == len(other.images)
            and self.tokens.shape == other.tokens.shape
            and self.noise.shape == other.noise.shape
            and self.num_steps == other.num_steps
        )


@dataclass(frozen=True)
class EngineResult:
    """model_actions: float32 [H, A]. timings: milliseconds by stage."""

    model_actions: np.ndarray
    timings: dict[str, float]
    prefix_cache_hit: bool


@dataclass(order=True)
class _Job:
    rank: tuple[int, int]
    request: EngineRequest = field(compare=False)
    finish: Callable[[EngineResult], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    submitted: float = field(compare=False)
    timings: dict[str, float] = field(compare=False, default_factory=dict)


class Engine:
    """Runs a ``Pi05Model`` for any number of callers."""

    def __init__(
        self,
        model: Pi05Model,
        *,
        resize: str,
        time_grid: str,
        prefix_cache: int = 8,
        max_batch: int = 4,
        batch_delay: float = 0.003,
        max_queue: int = 64,
    ) -> None:
        """The model must be on its device. resize: dialect of ``images.py``; time_grid: of ``model/pi05.py``.

        prefix_cache: entries kept, 0 for none. batch_delay: seconds that requests which wait together may wait for
        more company; one that finds the engine idle never waits. max_queue: requests that may wait; one more is
        refused. Raises ValueError that names the field.
        """
        for name, value, least in (
            ("prefix_cache", prefix_cache, 0),
            ("max_batch", max_batch, 1),
            ("max_queue", max_queue, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer of {least} or more, got {value!r}")
        if not isinstance(batch_delay, (int, float)) or not 0.0 <= batch_delay < float("inf"):
            raise ValueError(f"batch_delay: expected seconds, 0 or more, got {batch_delay!r}")
        self.model = model
        self.device = model.action_in_proj.weight.device
        self.resize, self.time_grid = resize, time_grid
        self.max_batch, self.batch_delay, self.max_queue = max_batch, batch_delay, max_queue
        self._cache = PrefixCache(prefix_cache)
        self._queue: list[_Job] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._clear_cache = False
        self._thread = threading.Thread(target=self._run, name="pi05-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: EngineRequest, finish: Callable[[EngineResult], Any] = lambda result: result
    ) -> Future[Any]:
        """Queue a request. The future gives finish(result), which runs on the engine's thread and must be quick.

        The future raises InferenceError (deadline passed, engine closed, non-finite actions) or whatever else failed;
        cancelling it before its turn costs nothing. Raises InferenceError at once: engine closed, queue full.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise InferenceError("The engine is closed.")
            if len(self._queue) >= self.max_queue:
                self._queue = [job for job in self._queue if not job.future.cancelled()]
                heapq.heapify(self._queue)
            if len(self._queue) >= self.max_queue:
                raise InferenceError(f"The engine is busy: {self.max_queue} requests are waiting already.")
            rank = (-request.priority, next(self._order))
            heapq.heappush(self._queue, _Job(rank, request, finish, future, time.monotonic()))
            self._changed.notify()
        return future

    def clear_cache(self) -> None:
        """Forget all cached prefixes before the next request."""
        with self._changed:
            self._clear_cache = True

    def close(self, timeout: float | None = None) -> bool:
        """Finish what runs, refuse what waits, and end the thread. Idempotent.

        timeout: seconds to wait for what runs, None: as long as it takes. Returns False if it still runs.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("The engine is closed, but a running inference has not ended yet.")
            return False
        self._cache.clear()
        return True

    # ---- everything below runs on the engine's thread ----

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also if the loop itself failed: nobody is to wait for an engine that is gone
            self._refuse_all()

    def _refuse_all(self) -> None:
        with self._changed:
            self._closed = True
            for job in self._queue:
                if not job.future.cancelled():
                    _fail(job, InferenceError("The engine was closed before this request's turn."))
            self._queue.clear()

    def _serve(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._run_each_or_together(batch)
            batch.clear()  # a request's callbacks may hold the very policy that owns this engine

    def _run_each_or_together(self, batch: list[_Job]) -> None:
        """A failing request fails alone: what fails together is run again one by one."""
        try:
            self._run_batch(batch)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            logger.warning("A batch of %d failed and is run one by one: %s", len(batch), error)
            for job in batch:
                self._run_each_or_together([job])

    def _next_batch(self) -> list[_Job] | None:
        """Wait for work; None when the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            if self._clear_cache:
                self._cache.clear()
                self._clear_cache = False
            if 1 < len(self._queue) < self.max_batch and self.batch_delay > 0:
                self._changed.wait_for(lambda: len(self._queue) >= self.max_batch or self._closed, self.batch_delay)
            batch: list[_Job] = []
            rest: list[_Job] = []
            for job in sorted(self._queue):
                if len(batch) == self.max_batch or (batch and not batch[0].request.same_batch(job.request)):
                    rest.append(job)
                elif self._starts(job):
                    batch.append(job)
            self._queue = rest  # sorted, so a heap
            return batch

    def _starts(self, job: _Job) -> bool:
        """False if the request was cancelled or its deadline has passed, which its future then says."""
        if not job.future.set_running_or_notify_cancel():
            return False
        deadline = job.request.deadline
        late = 0.0 if deadline is None else time.monotonic() - deadline
        if late > 0:
            job.future.set_exception(
                InferenceError(f"The deadline passed {late * 1e3:.0f} ms before this request's turn.")
            )
            return False
        return True

    @torch.no_grad()
    def _run_batch(self, batch: list[_Job]) -> None:
        """Answer every job of a batch, or raise."""
        if not batch:
            return
        for job in batch:
            job.timings = {"queue_ms": (time.monotonic() - job.submitted) * 1e3}
        with self._stage(batch, "cache_lookup_ms"):
            keys = [self._key(job.request) for job in batch]
            found = [None if key is None else self._cache.get(key) for key in keys]
        missing = [job.request for job, prefix in zip(batch, found, strict=True) if prefix is None]
        with self._stage(batch, "preprocess_ms"):
            images = self._images(missing)
        with self._stage(batch, "prefix_ms"):
            computed = iter(self._encode(images, missing))
            prefixes = [next(computed) if prefix is None else prefix for prefix in found]
            for key, prefix in zip(keys, prefixes, strict=True):
                if key is not None:
                    self._cache.put(key, prefix)
        with self._stage(batch, "denoise_ms"):
            actions = self._denoise(prefixes, [job.request for job in batch])
        hits = [prefix is not None for prefix in found]
        for job, chunk, hit in zip(batch, actions, hits, strict=True):
            _answer(job, chunk, hit)

    @contextmanager
    def _stage(self, batch: list[_Job], name: str) -> Iterator[None]:
        """Time a stage of a batch; on a GPU it ends with a synchronisation, which the plain path can afford."""
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = (time.monotonic() - began) * 1e3
        for job in batch:
            job.timings[name] = elapsed

    def _key(self, request: EngineRequest) -> bytes | None:
        if self._cache.entries == 0 or not request.use_cache:
            return None
        return prefix_key(request.images, request.tokens)

    def _images(self, requests: list[EngineRequest]) -> Tensor | None:
        """Images of requests, float32 [B, N, 3, S, S] in [-1, 1] on the device."""
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

    def _encode(self, images: Tensor | None, requests: list[EngineRequest]) -> list[Prefix]:
        if images is None:
            return []
        tokens = torch.from_numpy(np.stack([request.tokens for request in requests])).to(self.device)
        present = torch.ones(images.shape[:2], dtype=torch.bool, device=self.device)
        real = torch.ones(tokens.shape, dtype=torch.bool, device=self.device)
        prefix = self.model.encode_prefix(images, present, tokens, real)
        return [prefix] if len(requests) == 1 else prefix.split()

    def _denoise(self, prefixes: list[Prefix], requests: list[EngineRequest]) -> np.ndarray:
        prefix = Prefix.stack(prefixes)
        noise = torch.from_numpy(np.stack([request.noise for request in requests])).to(self.device)
        first = requests[0]
        actions = self.model.denoise(prefix, noise, first.num_steps, self.time_grid, first.rtc)
        return actions.cpu().numpy()


def _answer(job: _Job, actions: np.ndarray, hit: bool) -> None:
    """Give a job its result; an error in it is this job's alone."""
    try:
        if not np.isfinite(actions).all():
            raise InferenceError(
                "The model gave non-finite actions, which must not be used. The inputs were finite: look for damaged "
                "weights, or for statistics that blow up the state."
            )
        began = time.monotonic()
        result = job.finish(EngineResult(actions, job.timings, hit))  # shares the timings, so it sees the last two
        job.timings["postprocess_ms"] = (time.monotonic() - began) * 1e3
        job.timings["total_ms"] = (time.monotonic() - job.submitted) * 1e3
        job.future.set_result(result)
    except Exception as error:
        _fail(job, error)


def _fail(job: _Job, error: Exception) -> None:
    if not job.future.done():
        job.future.set_exception(error)
