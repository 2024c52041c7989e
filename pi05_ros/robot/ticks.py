"""A fixed rate on any clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

POLL = 0.004
"""Seconds between two looks at a clock that cannot be waited for (simulated time)."""


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
