"""How chunks follow each other: averages, commands between rows, what is left of a chunk; at any timing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.robot.execution import ChunkPlayer, DatedChunk, ensemble
from pi05_ros.robot.latency import RECENT, Latency

PERIOD = 20_000_000
HORIZON = 50
NO_VELOCITIES = np.zeros(1, bool)
HELD = np.array([-1.0])


def ramp(stamp_ns: int, count: int = HORIZON) -> np.ndarray:
    """Every row is the time at which it is due, in periods."""
    return (stamp_ns / PERIOD + 1 + np.arange(count))[:, None]


def player(decay: float | None = None, commands_per_row: int = 1) -> ChunkPlayer:
    return ChunkPlayer(PERIOD, NO_VELOCITIES, PERIOD // commands_per_row, decay)


def first(play: ChunkPlayer, now_ns: int) -> float:
    """What is commanded now."""
    setpoints = play.next(now_ns, 1)
    assert setpoints is not None
    return float(setpoints.rows[0, 0])


DECAYS = st.one_of(st.none(), st.floats(0, 2))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(-5 * PERIOD, 20 * PERIOD)),  # the clock goes on, or is set back
        st.tuples(st.just("chunk"), st.integers(0, 60 * PERIOD)),  # of an observation so long ago
        st.tuples(st.just("hold"), st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS, DECAYS, st.sampled_from([1, 2, 4]), st.integers(1, 20))
def test_at_any_timing_time_never_runs_backwards_within_a_chunk(
    events: list[tuple[str, int]], decay: float | None, commands_per_row: int, count: int
) -> None:
    """Chunks that are late, early, dropped, or of a clock that was set back; all of them say the same of a moment."""
    play, now, stamp, last = player(decay, commands_per_row), 100 * PERIOD, 0, -math.inf
    command_period = PERIOD // commands_per_row
    for kind, amount in events:
        if kind == "chunk":
            stamp, last = now - amount, -math.inf
            play.play(ramp(stamp), stamp)
        elif kind == "hold":
            play.hold(HELD)
            assert play.next(now, count).rows.tolist() == [[-1.0]]  # type: ignore[union-attr]
            assert play.remaining(now) is None
        else:
            now += amount
        setpoints = play.next(now, count)
        assert (setpoints is None) == (not play.playing)
        if setpoints is None:
            continue
        end = stamp / PERIOD + HORIZON
        assert 1 <= len(setpoints.rows) <= count
        assert np.all(setpoints.rows <= end + 1e-6), "no row is made up beyond the chunk's last"
        assert setpoints.rows[0, 0] >= last - 1e-6
        last = setpoints.rows[0, 0]
        if now < stamp + HORIZON * PERIOD and last < end - 1e-6:
            due = (setpoints.start_ns + command_period * np.arange(1, len(setpoints.rows) + 1)) / PERIOD
            said = np.maximum(due, stamp / PERIOD + 1)  # an earlier one may know better
            assert np.all(setpoints.rows[:, 0] <= said + 1e-6)
            assert np.all(setpoints.rows[:, 0] >= (said if decay is None else due) - 1e-6)


@given(
    st.lists(st.integers(0, 12 * PERIOD), min_size=1, max_size=8),
    st.floats(0, 3),
    st.integers(0, HORIZON - 1),
    st.integers(0, 2**32 - 1),
)
def test_the_ensemble_is_the_weighted_average_of_what_is_said_of_a_moment(
    gaps: list[int], decay: float, index: int, seed: int
) -> None:
    rng, play = np.random.default_rng(seed), player(decay)
    stamps = np.cumsum(gaps)
    chunks = [rng.normal(size=(HORIZON, 1)) for _ in stamps]
    for rows, stamp in zip(chunks, stamps, strict=True):
        play.play(rows, int(stamp))
    now = int(stamps[-1]) + index * PERIOD
    said = []
    for rows, stamp in zip(chunks, stamps, strict=True):  # oldest first
        due = stamp + PERIOD * (1 + np.arange(HORIZON))
        if due[0] <= now + PERIOD <= due[-1]:
            said.append(np.interp(now + PERIOD, due, rows[:, 0]))
    weights = [math.exp(-decay * place) for place in range(len(said))]
    assert first(play, now) == pytest.approx(np.average(said, weights=weights), abs=1e-9)


def test_the_oldest_of_those_that_say_something_of_a_moment_counts_most() -> None:
    chunks = [DatedChunk(np.full((10, 1), value), stamp * PERIOD, PERIOD) for value, stamp in ((0.0, 0), (1.0, 5))]
    times = PERIOD * np.array([5, 6, 10, 11, 15])
    newer = math.exp(-0.5) / (1 + math.exp(-0.5))
    assert ensemble(chunks, times, 0.5)[:, 0] == pytest.approx([0, newer, newer, 1, 1])


def test_before_all_of_them_the_oldest_speaks() -> None:
    chunks = [DatedChunk(ramp(stamp), stamp, PERIOD) for stamp in (0, PERIOD // 2)]
    times = PERIOD * np.array([1, 2, 3, 4, 6]) // 4
    assert ensemble(chunks, times, 0.5)[:, 0] == pytest.approx([1, 1, 1, 1, 1.5]), "and time does not run backwards"


def test_between_the_end_of_one_and_the_first_row_of_the_next_the_next_speaks() -> None:
    chunks = [DatedChunk(np.full((2, 1), value), stamp, PERIOD) for value, stamp in ((0.0, 0), (1.0, 7 * PERIOD // 4))]
    times = PERIOD * np.array([8, 9, 10, 11, 12]) // 4
    assert ensemble(chunks, times, 0.5)[:, 0].tolist() == [0, 1, 1, 1, 1]


def test_another_motion_is_averaged_with_nothing_before_it() -> None:
    play = player(decay=0.0)
    play.play(np.zeros((HORIZON, 1)), 0)
    play.play(np.ones((HORIZON, 1)), 10 * PERIOD)
    assert first(play, 11 * PERIOD) == 0.5
    play.play(np.full((HORIZON, 1), 3.0), 12 * PERIOD, follows=False)
    assert first(play, 13 * PERIOD) == 3.0
    play.hold(HELD)
    play.next(14 * PERIOD, 1)
    play.play(np.full((HORIZON, 1), 5.0), 15 * PERIOD)
    assert first(play, 16 * PERIOD) == 5.0, "nor does a hold leave anything behind"
    play.play(np.full((HORIZON, 1), 7.0), 14 * PERIOD)
    assert first(play, 16 * PERIOD) == 7.0, "nor a clock that was set back"


def test_commands_between_rows_are_on_the_line() -> None:
    play = player(commands_per_row=4)
    play.play(np.array([[0.0], [4.0], [2.0]]), 0)
    setpoints = play.next(PERIOD // 2, 20)
    assert setpoints is not None
    assert setpoints.start_ns == PERIOD // 2
    assert setpoints.rows[:, 0].tolist() == [0, 0, 1, 2, 3, 4, 3.5, 3, 2.5, 2], "the first row is due after a period"
    assert (play.rows_played(PERIOD * 3 // 2), play.rows_left(PERIOD * 3 // 2)) == (1, 2), "counted in rows"
    assert play.next(3 * PERIOD - 1, 20).rows.tolist() == [[2.0]]  # type: ignore[union-attr]
    assert play.underruns == 0
    play.next(3 * PERIOD, 20)
    assert play.underruns == 1


def test_a_command_period_that_does_not_divide_the_chunk_ends_with_its_last_row() -> None:
    play = ChunkPlayer(20, NO_VELOCITIES, 13)
    play.play(np.array([[0.0], [2.0], [4.0]]), 0)
    seen = [first(play, now) for now in range(0, 65, 13)]
    assert seen == pytest.approx([0, 0.6, 1.9, 3.2, 4])
    assert play.underruns == 0


@given(st.integers(0, 60 * PERIOD))
def test_what_is_left_of_a_chunk_is_dated_by_the_new_observation(later: int) -> None:
    play = player()
    play.play(ramp(0), 0)
    remaining, whole = play.remaining(later), HORIZON - math.ceil(later / PERIOD)
    if whole <= 0:
        assert remaining is None
    else:
        assert remaining is not None
        assert np.allclose(remaining, np.maximum(ramp(later, whole), 1)), "the same moments, counted from the new stamp"
    assert play.remaining(-1) is None, "of an earlier observation, after a clock was set back, nothing is left"


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=30), st.integers(10**10, 10**12), st.integers(0, 29))
def test_one_outlier_changes_the_expected_latency_no_more_than_the_longest_other(
    usual: list[int], outlier: int, place: int
) -> None:
    latency = Latency()
    for measured in [*usual[:place], outlier, *usual[place:]]:
        latency.add(measured)
    assert latency.expected_ns <= max(usual)
    assert latency.rows(PERIOD) == math.ceil(latency.expected_ns / PERIOD)
    assert latency.rows(PERIOD, PERIOD) == latency.rows(PERIOD) + 1


def test_the_expected_latency_follows_the_machine() -> None:
    latency = Latency()
    assert latency.rows(PERIOD) == 0, "before any"
    latency.add(3 * PERIOD)
    assert latency.rows(PERIOD) == 3, "a lone one is better than none"
    latency.add(PERIOD + 1)
    assert latency.rows(PERIOD) == 2, "a warm-up is forgotten with the next"
    for _ in range(RECENT):
        latency.add(5 * PERIOD)
    assert latency.rows(PERIOD) == 5
    latency.add(-1)
    assert latency.expected_ns == 5 * PERIOD
