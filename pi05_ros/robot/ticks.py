"""A fixed rate on any clock, and how well it was kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

POLL = 0.004
"""Seconds between two looks at a clock that cannot be waited for (simulated time)."""
OVERRUN = 1.5
"""Periods between two ticks from which on the later one counts as late."""


def ticks(period: float, clock: Callable[[], float], stop: threading.Event, simulated: bool) -> Iterator[None]:
    """Yields once a period until ``stop`` is set.

    period and clock in seconds. A tick that comes late is not made up for; a clock that jumps back starts afresh.
    simulated: the clock need not advance with real time, so it is polled.
    """
    due = clock() + period
    while not stop.is_set():
        now = clock()
        if due - now > 2 * period:
            due = now + period
        if now >= due:
            due += period
            if due <= now:
                due = now + period
            yield
        else:
            stop.wait(POLL if simulated else due - now)


@dataclass(frozen=True)
class Regularity:
    """Of the last ticks. jitter: by how much the time between two ticks differs from the period, seconds.

    overruns: of these ticks, those that came more than half a period late. total_overruns: since the record began.
    since_last: seconds since the last tick.
    """

    ticks: int
    rate_hz: float
    jitter_p50: float
    jitter_p99: float
    overruns: int
    total_overruns: int
    since_last: float


class TickRecord:
    """The times of the last ticks. One thread adds, any thread reads."""

    def __init__(self, period: float, window: float = 5.0) -> None:
        """period, and window to be remembered, in seconds."""
        self._period = period
        self._lock = threading.Lock()
        self._times: deque[float] = deque(maxlen=max(round(window / period), 1) + 1)
        self._overruns = 0

    def add(self, time: float) -> None:
        """A tick, at this time in seconds. One that is before the last begins the record anew, as its clock did."""
        with self._lock:
            if self._times and time < self._times[-1]:
                self._times.clear()
            if self._times and time - self._times[-1] > OVERRUN * self._period:
                self._overruns += 1
            self._times.append(time)

    def clear(self) -> None:
        """Nothing has ticked yet."""
        with self._lock:
            self._times.clear()
            self._overruns = 0

    def regularity(self, now: float) -> Regularity | None:
        """As of now, in seconds of the same clock. None: there were not two ticks yet."""
        with self._lock:
            times, total = np.array(self._times), self._overruns
        if len(times) < 2:
            return None
        intervals = np.diff(times)
        p50, p99 = np.percentile(np.abs(intervals - self._period), [50, 99])
        return Regularity(
            ticks=len(times),
            rate_hz=float(1.0 / max(intervals.mean(), 1e-9)),
            jitter_p50=float(p50),
            jitter_p99=float(p99),
            overruns=int((intervals > OVERRUN * self._period).sum()),
            total_overruns=total,
            since_last=max(now - float(times[-1]), 0.0),
        )
