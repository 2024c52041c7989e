"""Plays action chunks out in time: which rows are due now, and what happens when there are none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Setpoints:
    """What to command at a control tick.

    rows: float64 [n, action_dim] in robot units; row i is due at start_ns + (i + 1) * period.
    start_ns: on the clock that stamps observations.
    fresh: the first tick of a chunk or of a hold: whoever commands less often than every tick should do so now.
    """

    rows: np.ndarray
    start_ns: int
    fresh: bool


class ChunkPlayer:
    """Receding execution: a new chunk takes the place of the old one, and rows that lie in the past are skipped.

    Row i of a chunk is due (i + 1) periods after its observation. When the rows of a chunk have run out, the last one
    stays (velocities stop), and every tick until the next chunk counts as an underrun. Not thread-safe: its owner
    locks.
    """

    def __init__(self, period_ns: int, velocities: np.ndarray) -> None:
        """period_ns: time between two rows. velocities: bool [action_dim], dimensions commanded as velocities."""
        self.period_ns = period_ns
        self.underruns = 0
        self.last_command: np.ndarray | None = None
        self._velocities = velocities
        self._rows: np.ndarray | None = None
        self._stamp_ns = 0
        self._reached = 0
        self._fresh = False
        self._hold: np.ndarray | None = None

    @property
    def playing(self) -> bool:
        """True from a chunk on until a hold."""
        return self._rows is not None

    def play(self, rows: np.ndarray, stamp_ns: int) -> None:
        """From now on play these rows [horizon, action_dim], predicted from an observation of that stamp."""
        self._rows, self._stamp_ns, self._reached = rows.astype(np.float64), stamp_ns, 0
        self._fresh, self._hold = True, None

    def hold(self, target: np.ndarray | None) -> None:
        """Play nothing any more, and command this target [action_dim] once. It is not looked at again."""
        self._rows, self._hold = None, target

    def rows_left(self, now_ns: int) -> int:
        """Rows of the present chunk that are still to come."""
        return 0 if self._rows is None else max(len(self._rows) - self._index(now_ns), 0)

    def rows_played(self, now_ns: int) -> int:
        """Rows of the present chunk whose time has come."""
        return 0 if self._rows is None else min(self._index(now_ns), len(self._rows))

    def next(self, now_ns: int, count: int) -> Setpoints | None:
        """What to command now, at most ``count`` rows; None: nothing."""
        if self._hold is not None:
            target, self._hold = self._hold, None
            self.last_command = target
            return Setpoints(target[None], now_ns, fresh=True)
        if self._rows is None:
            return None
        index = self._reached = max(self._index(now_ns), self._reached)  # a clock that is set back repeats no row
        fresh, self._fresh = self._fresh, False
        if index >= len(self._rows):
            self.underruns += 1
            last = np.where(self._velocities, 0.0, self._rows[-1])
            self.last_command = last
            return Setpoints(last[None], now_ns, fresh)
        rows = self._rows[index : index + count]
        self.last_command = rows[0]
        return Setpoints(rows, self._stamp_ns + index * self.period_ns, fresh)

    def _index(self, now_ns: int) -> int:
        """The row that is due next. A chunk from the future (a clock that was set back) begins at its first row."""
        return max((now_ns - self._stamp_ns) // self.period_ns, 0)
