"""The engine: one thread that owns a path and its device, and runs what others submit.

Requests wait in a queue ordered by priority, then by arrival. The thread takes the first one and with it what else of
its priority waits and may run in the same batch (``Path.fits``), up to ``max_batch``, runs them, and answers each
through its future.

A future is settled on this thread only, and never under the engine's lock: its callbacks are other people's code, which
may submit again, close the engine, wait for locks of its own, or fail.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pi05_ros.engine.requests import EngineRequest, EngineResult, Path
from pi05_ros.errors import DeadlineError, EngineBusyError, EngineClosedError, InferenceError

logger = logging.getLogger(__name__)

MAX_BATCH_DELAY = 60.0
"""Seconds. Beyond any use, and within what a clock can wait for."""

REFUSALS = {"busy": EngineBusyError, "deadline": DeadlineError, "closed": EngineClosedError}


@dataclass(order=True)
class _Job:
    """rank: (-priority, arrival): the smallest goes first. submitted: time.monotonic()."""

    rank: tuple[int, int]
    request: EngineRequest = field(compare=False)
    finish: Callable[[EngineResult], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    submitted: float = field(compare=False)

    def late(self, now: float) -> float:
        """Seconds since its deadline; negative before it, or if it has none."""
        return -float("inf") if self.request.deadline is None else now - self.request.deadline


class Engine:
    """Runs a path for any number of callers."""

    def __init__(self, path: Path, *, max_batch: int = 4, batch_delay: float = 0.003, max_queue: int = 64) -> None:
        """The path belongs to the engine, which closes it at its own end.

        batch_delay: seconds that requests which wait together may wait for more company; one that finds the engine
        idle never waits, nor does one that would go ahead of its company. max_queue: requests that may wait.
        Raises ValueError that names the field.
        """
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}")
        if not isinstance(batch_delay, (int, float)) or not 0.0 <= batch_delay <= MAX_BATCH_DELAY:
            raise ValueError(f"batch_delay: expected seconds, 0 to {MAX_BATCH_DELAY:g}, got {batch_delay!r}")
        self.path, self.device = path, path.device
        self.max_batch, self.batch_delay, self.max_queue = max_batch, batch_delay, max_queue
        self._changed = threading.Condition()  # guards everything below
        self._queue: list[_Job] = []  # by rank
        self._refused: list[tuple[Future[Any], InferenceError]] = []  # out of the queue, to be told
        self._arrivals = itertools.count()
        self._counts: Counter[str] = Counter()
        self._batches: Counter[int] = Counter()
        self._running = 0
        self._clear_cache = self._closing = self._drain = False
        self._thread = threading.Thread(target=self._run, name="pi05-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: EngineRequest, finish: Callable[[EngineResult], Any] = lambda result: result
    ) -> Future[Any]:
        """Queue a request. The future gives finish(result), which runs on the engine's thread and must be quick.

        The future raises InferenceError (DeadlineError, EngineClosedError, EngineBusyError if a request of higher
        priority took its place in a full queue, non-finite actions) or whatever else failed. Cancelled before its turn
        it gives its place back at once and costs nothing. Callbacks of the future must be quick as well.
        Raises at once: EngineClosedError; EngineBusyError if the queue is full and nothing in it is less urgent.
        """
        future: Future[Any] = Future()
        with self._changed:
            self._counts["requests"] += 1
            job = _Job((-request.priority, next(self._arrivals)), request, finish, future, time.monotonic())
            if self._closing:
                self._counts["closed"] += 1
                raise EngineClosedError("The engine is closed.")
            if len(self._queue) >= self.max_queue:
                self._sweep()
            if len(self._queue) >= self.max_queue:
                busy = f"The engine is busy: {self.max_queue} requests are waiting already."
                if self._queue[-1].request.priority >= request.priority:
                    self._counts["busy"] += 1
                    raise EngineBusyError(busy)
                self._refuse(self._queue.pop(), "busy", busy)
            bisect.insort(self._queue, job)
            self._changed.notify()
        return future

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted within comes into the queue at once, so that it can share batches. Do nothing else there:
        everybody else waits.
        """
        with self._changed:  # re-entrant
            yield

    def clear_cache(self) -> None:
        """Forget all cached prefixes before the next request."""
        with self._changed:
            self._clear_cache = True
            self._changed.notify()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, for metrics.

        requests = answered + failed + cancelled + refused (by reason: busy, deadline, closed) + waiting + running.
        batches: how often which batch size ran. cache: hits, misses, entries, bytes.
        """
        cache = self.path.cache
        with self._changed:
            self._sweep()
            return {
                "requests": self._counts["requests"],
                "answered": self._counts["answered"],
                "failed": self._counts["failed"],
                "cancelled": self._counts["cancelled"],
                "refused": {reason: self._counts[reason] for reason in REFUSALS},
                "waiting": len(self._queue),
                "running": self._running,
                "batches": dict(sorted(self._batches.items())),
                "cache": {"hits": cache.hits, "misses": cache.misses, "entries": len(cache), "bytes": cache.bytes},
            }

    def close(self, timeout: float | None = None, drain: bool = False) -> bool:
        """Finish what runs, then run what waits (drain) or refuse it, free the path and end the thread. Idempotent.

        timeout: seconds to wait for that, None: as long as it takes. A second call may stop a drain, not begin one.
        Returns False if the thread has not ended yet, as it cannot have when one of its own callbacks calls this.
        """
        with self._changed:
            self._drain = drain and (self._drain or not self._closing)
            self._closing = True
            self._changed.notify()
        if self.is_own_thread():
            return False
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("The engine is closed, but a running inference has not ended yet.")
            return False
        return True

    def is_own_thread(self) -> bool:
        """True where callbacks run: whoever waits there for a request waits for himself."""
        return self._thread is threading.current_thread()

    # ---- the queue; the lock is held ----

    def _sweep(self) -> None:
        """Take out what was cancelled and what is too late."""
        now = time.monotonic()
        waiting, self._queue = self._queue, []
        for job in waiting:
            late = job.late(now)
            if late > 0 or job.future.cancelled():
                self._refuse(job, "deadline", f"The deadline passed {late * 1e3:.0f} ms before this request's turn.")
            else:
                self._queue.append(job)

    def _refuse(self, job: _Job, reason: str, message: str) -> None:
        """A job that has left the queue is not to run. Its future says so at the thread's next turn."""
        if self._starts(job):
            self._counts[reason] += 1
            self._refused.append((job.future, REFUSALS[reason](message)))

    def _starts(self, job: _Job) -> bool:
        """From here on the future cannot be cancelled any more; False if it was."""
        starts = job.future.set_running_or_notify_cancel()
        self._counts["cancelled"] += not starts
        return starts

    def _together(self) -> list[_Job]:
        """The first job by rank and those that may run with it, by rank.

        Company has its priority: a batch takes longer than a request alone, and a robot is not to pay for clients.
        """
        if not self._queue:
            return []
        first, *others = self._queue
        equal = itertools.takewhile(lambda job: job.request.priority == first.request.priority, others)
        fitting = (job for job in equal if self.path.fits(first.request, job.request))
        return [first, *itertools.islice(fitting, self.max_batch - 1)]

    def _is_worth_waiting(self, until: float) -> bool:
        """More company may come for those that wait together, and none of them would pay for it with its deadline."""
        batch = self._together()
        return 1 < len(batch) < self.max_batch and all(job.late(until) < 0 for job in batch) and not self._closing

    def _take_batch(self) -> list[_Job]:
        """The next jobs to run, which cannot be cancelled any more; none if nothing is left that may run."""
        self._sweep()
        until = time.monotonic() + self.batch_delay
        if self._is_worth_waiting(until):
            self._changed.wait_for(lambda: not self._is_worth_waiting(until), self.batch_delay)
            self._sweep()
        if self._closing and not self._drain:
            return []
        taken = self._together()
        self._queue = [job for job in self._queue if job not in taken]
        batch = [job for job in taken if self._starts(job)]
        self._running = len(batch)
        return batch

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while self._take_a_turn():  # whose frame ends with it: nothing of a request outlives its answer
                pass
        except BaseException:
            logger.exception("The engine's thread failed; the engine is closed.")
        with self._changed:  # nobody is to wait for an engine that is gone
            self._closing = True
            for job in self._queue:
                self._refuse(job, "closed", "The engine was closed before this request's turn.")
            self._queue.clear()
        self._tell_refused()
        try:
            self.path.close()
        except Exception:
            logger.exception("The %s path did not close.", self.path.name)

    def _take_a_turn(self) -> bool:
        """Wait for work and do it; False when the engine is at its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._refused or self._clear_cache or self._closing)
            if self._closing and not (self._drain and self._queue):
                return False
            clear_cache, self._clear_cache = self._clear_cache, False
            batch = [] if clear_cache else self._take_batch()
        self._tell_refused()
        if clear_cache:
            self.path.clear_cache()
        if batch:
            self._run_batch(batch)
        return True

    def _tell_refused(self) -> None:
        with self._changed:
            refused, self._refused = self._refused, []
        for future, error in refused:
            _settle(future.set_exception, error)

    def _run_batch(self, batch: list[_Job]) -> None:
        """Answer every job. What fails together is run again one by one, so that a failing request fails alone."""
        began = time.monotonic()
        with self._changed:
            self._batches[len(batch)] += 1
        try:
            outcome = self.path.run([job.request for job in batch])
            answers = list(zip(batch, outcome.actions, outcome.hits, strict=True))
        except BaseException as error:  # whatever it is: the request is to hear of it, and the thread to go on
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            logger.warning("A batch of %d failed and is run one by one: %s", len(batch), error)
        else:
            for job, actions, hit in answers:
                timings = {"queue_ms": (began - job.submitted) * 1e3, **outcome.timings}
                self._answer(job, EngineResult(actions, timings, hit, len(batch)))
            return
        for job in batch:
            self._run_batch([job])

    def _answer(self, job: _Job, result: EngineResult) -> None:
        """Give a job its result; an error in it is this job's alone."""
        began = time.monotonic()
        try:
            if not np.isfinite(result.model_actions).all():
                raise InferenceError(
                    "The model gave non-finite actions, which must not be used. The inputs were finite: look for "
                    "damaged weights, or for statistics that blow up the state."
                )
            answer = job.finish(result)
        except BaseException as error:
            self._fail(job, error)
            return
        now = time.monotonic()
        result.timings["postprocess_ms"] = (now - began) * 1e3
        result.timings["total_ms"] = (now - job.submitted) * 1e3
        self._count("answered")
        _settle(job.future.set_result, answer)

    def _fail(self, job: _Job, error: BaseException) -> None:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error does not keep the batch's tensors
        self._count("failed")
        _settle(job.future.set_exception, error)

    def _count(self, end: str) -> None:
        with self._changed:
            self._counts[end] += 1
            self._running -= 1


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    """Settle a future. It logs what its callbacks raise, save what is no Exception, which is no reason to end here."""
    try:
        settle(value)
    except BaseException:
        logger.exception("A callback of a request failed.")
