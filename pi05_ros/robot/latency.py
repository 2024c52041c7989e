"""How long the next chunk will take, from those before it."""

from __future__ import annotations

from collections import deque

RECENT = 10
"""Chunks that are looked back on: machines warm up, and clients come and go."""


class Latency:
    """From an observation's stamp until its chunk can be played."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque(maxlen=RECENT)

    def add(self, latency_ns: int) -> None:
        """Count one more. A clock that was set back meanwhile makes it 0."""
        self._recent_ns.append(max(latency_ns, 0))

    @property
    def expected_ns(self) -> int:
        """The second longest of the last ten: few come later, and a single outlier (a warm-up, a stall) does not count.

        A lone measurement counts until there is another; 0 before any.
        """
        return sorted(self._recent_ns)[-2:][0] if self._recent_ns else 0

    def rows(self, period_ns: int, wait_ns: int = 0) -> int:
        """Rows that will have begun when the chunk comes, after such a wait for its observation."""
        return -(-(self.expected_ns + wait_ns) // period_ns)
