"""Playing chunks out: the right row at the right time, and standing still when there is none."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.robot.execution import ChunkPlayer
from pi05_ros.robot.ticks import ticks

PERIOD = 20_000_000
NO_VELOCITIES = np.zeros(2, bool)


def rows(begin: float = 0.0, count: int = 50) -> np.ndarray:
    """Row i is [begin + i, -(begin + i)]."""
    values = begin + np.arange(count, dtype=np.float32)
    return np.stack([values, -values], axis=1)


def player() -> ChunkPlayer:
    return ChunkPlayer(PERIOD, NO_VELOCITIES)


@given(st.integers(0, 49), st.integers(0, PERIOD - 1), st.integers(1, 20))
def test_row_i_is_due_i_plus_one_periods_after_the_observation(index: int, within: int, count: int) -> None:
    play = player()
    play.play(rows(), stamp_ns=7 * PERIOD)
    setpoints = play.next((7 + index) * PERIOD + within, count)
    assert setpoints is not None
    assert setpoints.rows[0, 0] == index
    assert setpoints.start_ns == (7 + index) * PERIOD, "so row 0 is due at the end of the period that runs"
    assert len(setpoints.rows) == min(count, 50 - index)
    assert np.array_equal(play.last_command, setpoints.rows[0])  # type: ignore[arg-type]


def test_a_new_chunk_takes_over_and_its_past_is_skipped() -> None:
    play = player()
    play.play(rows(0), stamp_ns=0)
    assert play.next(30 * PERIOD, 1).rows[0, 0] == 30  # type: ignore[union-attr]
    play.play(rows(100), stamp_ns=25 * PERIOD)
    first = play.next(31 * PERIOD, 1)
    assert first is not None
    assert first.rows[0, 0] == 106
    assert play.rows_played(32 * PERIOD) == 7
    assert play.rows_left(32 * PERIOD) == 43


def test_when_rows_run_out_the_last_one_stays_and_is_counted() -> None:
    play = ChunkPlayer(PERIOD, np.array([False, True]))
    play.play(rows(count=3), stamp_ns=0)
    for tick in range(5):
        setpoints = play.next(tick * PERIOD, 4)
    assert play.underruns == 2
    assert setpoints is not None
    assert setpoints.rows.tolist() == [[2.0, 0.0]], "a position stays, a velocity stops"
    assert play.rows_left(10 * PERIOD) == 0
    assert play.rows_played(10 * PERIOD) == 3


def test_a_hold_is_commanded_once_and_ends_the_chunk() -> None:
    play = player()
    assert play.next(0, 4) is None
    play.play(rows(), stamp_ns=0)
    play.next(0, 4)
    play.hold(np.array([5.0, 6.0]))
    assert not play.playing
    setpoints = play.next(PERIOD, 4)
    assert setpoints is not None
    assert setpoints.rows.tolist() == [[5.0, 6.0]]
    assert setpoints.holds
    assert play.next(2 * PERIOD, 4) is None
    play.play(rows(), stamp_ns=3 * PERIOD)
    assert play.next(3 * PERIOD, 1).rows[0, 0] == 0  # type: ignore[union-attr]


def test_a_clock_that_was_set_back_begins_at_the_first_row() -> None:
    play = player()
    play.play(rows(), stamp_ns=100 * PERIOD)
    assert play.next(10 * PERIOD, 1).rows[0, 0] == 0  # type: ignore[union-attr]


def test_a_clock_that_is_set_back_a_little_repeats_no_row() -> None:
    play = player()
    play.play(rows(), stamp_ns=0)
    seen = [play.next(now * PERIOD, 1).rows[0, 0] for now in (19, 20, 15, 18, 21)]  # type: ignore[union-attr]
    assert seen == [19, 20, 20, 20, 21]


def run_ticks(times: list[float]) -> list[float]:
    """The times at which a 1 s rate ticks, if the clock reads these times one after the other."""
    stop, reading = threading.Event(), iter(times)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now = next(reading, now)
        if now == times[-1]:
            stop.set()
        return now

    return [now for _ in ticks(1.0, clock, stop, simulated=True)]


def test_ticks_come_once_a_period() -> None:
    assert run_ticks([0.0, 0.5, 1.0, 1.4, 1.9, 2.1, 2.9, 3.0, 9.9]) == [1.0, 2.1, 3.0, 9.9]


def test_late_ticks_are_not_made_up_for() -> None:
    assert run_ticks([0.0, 1.0, 4.7, 4.7, 5.0, 5.6, 5.7, 6.0]) == [1.0, 4.7, 5.7]


def test_a_clock_that_jumps_back_starts_afresh() -> None:
    assert run_ticks([50.0, 51.0, 3.0, 3.5, 4.0, 4.1]) == [51.0, 4.0]


def test_a_clock_that_stands_still_does_not_keep_the_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=lambda: list(ticks(1.0, lambda: 5.0, stop, simulated=True)))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
