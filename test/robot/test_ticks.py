"""How well a rate was kept, from the times of its ticks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.robot.ticks import OVERRUN, Regularity, TickRecord

PERIOD = 0.02


def regularity(times: list[float], now: float | None = None, window: float = 5.0) -> Regularity:
    record = TickRecord(PERIOD, window)
    for time in times:
        record.add(time)
    result = record.regularity(times[-1] if now is None else now)
    assert result is not None
    return result


def test_even_ticks_have_the_rate_and_no_jitter() -> None:
    result = regularity([10.0 + index * PERIOD for index in range(101)], now=12.5)
    assert result.rate_hz == pytest.approx(50.0)
    assert result.jitter_p99 == pytest.approx(0.0, abs=1e-9)
    assert (result.ticks, result.overruns, result.total_overruns) == (101, 0, 0)
    assert result.since_last == pytest.approx(0.5)


def test_a_tick_that_was_missed_is_an_overrun_and_in_the_tail_of_the_jitter() -> None:
    result = regularity([0.0, 0.02, 0.04, 0.08, 0.10])
    assert (result.overruns, result.total_overruns) == (1, 1)
    assert result.jitter_p50 == pytest.approx(0.0, abs=1e-9)
    assert 0.019 < result.jitter_p99 <= 0.0201


def test_only_the_last_seconds_count_but_for_the_total() -> None:
    late_once = [0.0, 0.1] + [0.1 + index * PERIOD for index in range(1, 60)]
    result = regularity(late_once, window=1.0)
    assert (result.ticks, result.overruns, result.total_overruns) == (51, 0, 1)


def test_a_clock_that_went_back_begins_anew() -> None:
    result = regularity([100.0, 100.02, 3.0, 3.02])
    assert (result.ticks, result.overruns) == (2, 0)
    assert result.rate_hz == pytest.approx(50.0)


def test_nothing_is_said_of_less_than_two_ticks() -> None:
    record = TickRecord(PERIOD)
    assert record.regularity(0.0) is None
    record.add(1.0)
    assert record.regularity(1.0) is None
    record.add(1.0)
    assert record.regularity(1.0) is not None, "a simulated clock may stand still"
    record.clear()
    assert record.regularity(1.0) is None


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=300))
def test_of_any_intervals(intervals: list[float]) -> None:
    times = [0.0, *np.cumsum(intervals).tolist()]
    result = regularity(times, window=100.0)
    # The times are sums, so an interval that is read back from them is off by rounding.
    assert sum(gap > OVERRUN * PERIOD + 1e-9 for gap in intervals) <= result.overruns
    assert result.overruns <= sum(gap > OVERRUN * PERIOD - 1e-9 for gap in intervals)
    assert result.total_overruns == result.overruns
    assert 0.0 <= result.jitter_p50 <= result.jitter_p99
    assert result.rate_hz > 0.0
