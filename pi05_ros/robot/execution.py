"""Plays action chunks out in time: which rows are due now, and what happens when there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STRATEGIES = ("receding", "ensemble", "rtc")
"""How one chunk follows another: the new one takes over; what overlaps is averaged; the new one takes over and was made
to begin as the old one goes on (real-time chunking). docs/explanation/chunk-execution.md compares them."""


@dataclass(frozen=True)
class Setpoints:
    """What to command at a control tick.

    rows: float64 [n, action_dim] in robot units; row i is due at start_ns + (i + 1) * the period of commands.
    start_ns: on the clock that stamps observations.
    holds: where to stay; it is said once, so it counts however late it is heard.
    """

    rows: np.ndarray
    start_ns: int
    holds: bool = False


@dataclass(frozen=True)
class DatedChunk:
    """A chunk in time: row i of rows, float64 [horizon, action_dim], is due at stamp_ns + (i + 1) * period_ns."""

    rows: np.ndarray
    stamp_ns: int
    period_ns: int

    @property
    def end_ns(self) -> int:
        """When the last row is due."""
        return self.stamp_ns + len(self.rows) * self.period_ns

    def covers(self, times_ns: np.ndarray) -> np.ndarray:
        """bool [n]: not before the first row is due, nor after the last."""
        return (times_ns >= self.stamp_ns + self.period_ns) & (times_ns <= self.end_ns)

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """Float64 [n, action_dim] at times int64 [n]: linear between rows; outside of them the first or last one."""
        whole, rest = np.divmod(times_ns - self.stamp_ns, self.period_ns)
        before, after = (self.rows[np.clip(index, 0, len(self.rows) - 1)] for index in (whole - 1, whole))
        return before + (rest / self.period_ns)[:, None] * (after - before)


def ensemble(chunks: Sequence[DatedChunk], times_ns: np.ndarray, decay: float) -> np.ndarray:
    """Average of what the chunks, oldest first, say of each time: float64 [n, action_dim].

    Weights are exp(-decay * i), i = 0 for the oldest chunk that covers the time, as in ACT. What no chunk covers
    is, before the first row or between the end of one chunk and the first row of another, the oldest one's that is not
    over, and after all of them the newest one's.
    """
    covered = np.stack([chunk.covers(times_ns) for chunk in chunks])
    goes_on = np.stack([times_ns <= chunk.end_ns for chunk in chunks])
    goes_on[-1] = True
    covered[np.argmax(goes_on, axis=0), np.arange(len(times_ns))] |= ~covered.any(axis=0)
    # Counted from the first of all: the same, since the oldest are what falls away, and only ratios of weights count.
    weights = np.where(covered, np.exp(-decay * np.arange(len(chunks)))[:, None], 0.0)
    rows = np.stack([chunk.at(times_ns) for chunk in chunks])
    return np.einsum("cn,cnd->nd", weights / weights.sum(axis=0), rows)


class ChunkPlayer:
    """Plays the newest chunk, or the average of all that overlap; rows that lie in the past are skipped.

    Row i of a chunk is due (i + 1) periods after its observation. Commands that are due more often are interpolated.
    When the rows of a chunk have run out, the last one stays (velocities stop), and every tick until the next chunk
    counts as an underrun. Not thread-safe: its owner locks.
    """

    def __init__(
        self,
        period_ns: int,
        velocities: np.ndarray,
        command_period_ns: int | None = None,
        ensemble_decay: float | None = None,
    ) -> None:
        """period_ns: time between two rows. velocities: bool [action_dim], dimensions commanded as velocities.

        command_period_ns: time between two commands; None: period_ns. ensemble_decay: of the weights of overlapping
        chunks, see ``ensemble``; None: a new chunk takes the place of the old one.
        """
        self.period_ns = period_ns
        self.command_period_ns = command_period_ns or period_ns
        self.underruns = 0
        self.last_command: np.ndarray | None = None
        self._velocities, self._decay = velocities, ensemble_decay
        self._chunks: list[DatedChunk] = []  # oldest first; the last one says what is due when
        self._reached = 0
        self._hold: np.ndarray | None = None

    @property
    def playing(self) -> bool:
        """True from a chunk on until a hold."""
        return bool(self._chunks)

    def play(self, rows: np.ndarray, stamp_ns: int, follows: bool = True) -> None:
        """From now on play these rows [horizon, action_dim], predicted from an observation of that stamp.

        follows: they are of the same motion as the chunks before; False: nothing is averaged with those.
        """
        chunk = DatedChunk(rows.astype(np.float64), stamp_ns, self.period_ns)
        averaged = self._decay is not None and follows
        # A chunk from later than this one is of a clock that was set back since.
        earlier = [one for one in self._chunks if averaged and one.stamp_ns <= stamp_ns < one.end_ns]
        self._chunks = [*earlier, chunk]
        self._hold, self._reached = None, 0

    def hold(self, target: np.ndarray | None) -> None:
        """Play nothing any more, and command this target [action_dim] once. It is not looked at again."""
        self._chunks, self._hold = [], target

    def rows_left(self, now_ns: int) -> int:
        """Rows of the newest chunk that are still to come."""
        return len(self._chunks[-1].rows) - self.rows_played(now_ns) if self._chunks else 0

    def rows_played(self, now_ns: int) -> int:
        """Rows of the newest chunk whose time has come."""
        if not self._chunks:
            return 0
        chunk = self._chunks[-1]
        return min(max((now_ns - chunk.stamp_ns) // self.period_ns, 0), len(chunk.rows))

    def remaining(self, stamp_ns: int) -> np.ndarray | None:
        """What was to follow an observation of that stamp: float64 [n, action_dim], row i due (i + 1) periods after it.

        None: nothing is left then, or the present chunk is of a later observation (the clock was set back).
        """
        if not self._chunks or stamp_ns < self._chunks[-1].stamp_ns:
            return None
        count = (self._chunks[-1].end_ns - stamp_ns) // self.period_ns
        return self._rows(stamp_ns, self.period_ns, count) if count > 0 else None

    def next(self, now_ns: int, count: int) -> Setpoints | None:
        """What to command now, at most ``count`` rows; None: nothing."""
        if self._hold is not None:
            target, self._hold = self._hold, None
            self.last_command = target
            return Setpoints(target[None], now_ns, holds=True)
        if not self._chunks:
            return None
        chunk, period_ns = self._chunks[-1], self.command_period_ns
        # A chunk from the future begins at its first row, and a clock that is set back repeats no row.
        index = self._reached = max((now_ns - chunk.stamp_ns) // period_ns, self._reached)
        start_ns = chunk.stamp_ns + index * period_ns
        if start_ns >= chunk.end_ns:
            self.underruns += 1
            last = np.where(self._velocities, 0.0, chunk.rows[-1])
            self.last_command = last
            return Setpoints(last[None], now_ns)
        rows = self._rows(start_ns, period_ns, min(count, -((start_ns - chunk.end_ns) // period_ns)))
        self.last_command = rows[0]
        return Setpoints(rows, start_ns)

    def _rows(self, start_ns: int, period_ns: int, count: int) -> np.ndarray:
        """Float64 [count, action_dim], row i due (i + 1) periods after the start."""
        times_ns = start_ns + period_ns * np.arange(1, count + 1)
        if self._decay is None:
            return self._chunks[-1].at(times_ns)
        return ensemble(self._chunks, times_ns, self._decay)
