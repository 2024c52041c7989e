"""No number becomes motion that must not: what is refused, what is limited, and where a robot is held."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05_ros.policy import RobotProfile, load_profile
from pi05_ros.policy.profile import Limits
from pi05_ros.robot.execution import ChunkPlayer, Setpoints
from pi05_ros.robot.safety import SafetyFilter, SafetySettings, hold_target, velocity_mask
from pi05_ros.sim.trajectory import TrajectoryFollower

PERIOD = 20_000_000
SECOND = 1_000_000_000
STREAMED = load_profile("aloha_ros2")  # its driver takes a row a tick
AHEAD = load_profile("aloha_sim")  # its controller follows trajectories
DROID = load_profile("franka_droid")  # velocities
POSE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2)
GRIPPERS = np.array(STREAMED.gripper_mask)
ARMS = ~GRIPPERS
CLOSE = 1e-9


def limits(profile: RobotProfile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As the profile says them, a gripper's being 0 to 1 and a little: lower, upper, speed; [state_dim] each."""
    rows: list[tuple[float, float, float]] = []
    for arm in profile.arms:
        assert isinstance(arm.limits, Limits)
        rows += zip(arm.limits.lower, arm.limits.upper, arm.limits.velocity, strict=True)
        rows.append((-0.05, 1.05, arm.limits.gripper_speed or np.inf))
    lower, upper, speed = np.array(rows).T
    return lower, upper, speed


LOWER, UPPER, SPEED = limits(AHEAD)


def safety_of(profile: RobotProfile, period_ns: int = PERIOD, **options: float) -> SafetyFilter:
    return SafetyFilter(profile, SafetySettings(**options), period_ns)


def begun(profile: RobotProfile, pose: np.ndarray = POSE) -> SafetyFilter:
    safety = safety_of(profile)
    safety.begin(pose)
    return safety


def setpoints(rows: np.ndarray, start_ns: int = 0) -> Setpoints:
    return Setpoints(np.array(rows, np.float64), start_ns)


def moved(joint: int, by: float, pose: np.ndarray = POSE) -> np.ndarray:
    return pose + by * (np.arange(len(pose)) == joint)


# ---- refused whole ----


def test_chunks_of_wrong_shape_and_what_is_not_finite_are_refused() -> None:
    safety = safety_of(STREAMED)
    good = np.tile(POSE, (50, 1)).astype(np.float32)
    assert safety.chunk_problem(good) is None
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[49, 13] = value
        assert "row 49, column 13" in str(safety.chunk_problem(bad))
    for shape in ((50, 13), (0, 14), (14,), (1, 50, 14)):
        assert "expected [horizon, 14]" in str(safety.chunk_problem(np.zeros(shape, np.float32)))


@pytest.mark.parametrize(("value", "says"), [(1.4, None), (1.5, "1.5 rad for right_shoulder"), (-9.0, "-9 rad for")])
def test_a_chunk_far_beyond_a_limit_is_refused_and_a_small_excess_is_not(value: float, says: str | None) -> None:
    chunk = np.tile(POSE, (50, 1)).astype(np.float32)
    chunk[7, 8] = value  # the upper limit of the shoulder is 1.25664
    problem = safety_of(STREAMED).chunk_problem(chunk)
    if says is None:
        assert problem is None
    else:
        assert says in str(problem)
        assert "in row 7, limits are -1.85005 to 1.25664 rad; at most 0.2 rad beyond" in str(problem)


def test_grippers_and_velocities_are_limited_rather_than_refused() -> None:
    chunk = np.tile(POSE, (50, 1))
    chunk[:, 6] = -3e30
    assert safety_of(STREAMED).chunk_problem(chunk) is None
    assert safety_of(DROID).chunk_problem(np.full((10, 8), 3e30)) is None


def test_a_motion_begins_near_where_the_robot_is() -> None:
    far = moved(9, -0.6)
    assert safety_of(STREAMED).start_problem(moved(9, 0.4), POSE) is None
    problem = safety_of(STREAMED).start_problem(far, POSE)
    assert problem == (
        "The first target of right_elbow is 0.56 rad, but it was measured at 1.16 rad; at most 0.5 rad may lie between "
        "(max_start_error)."
    )
    assert safety_of(STREAMED, max_start_error=0.7).start_problem(far, POSE) is None
    assert safety_of(STREAMED).start_problem(moved(6, 0.5), POSE) is None, "a gripper may begin anywhere"
    assert safety_of(DROID).start_problem(np.full(8, 2.0), np.zeros(8)) is None, "a velocity is no place"
    assert "nan" in str(safety_of(STREAMED).chunk_problem(np.full((1, 14), np.nan)))


# ---- limited ----


def test_what_is_within_all_limits_goes_through_as_it_is() -> None:
    for profile in (STREAMED, AHEAD):
        safety = begun(profile)
        rows = POSE + 0.04 * np.arange(1, 11)[:, None] * np.where(GRIPPERS, 0.2, 1.0)
        assert np.array_equal(safety.apply(setpoints(rows), 0).rows, rows)
        assert safety.clamps == 0


def test_a_position_beyond_a_limit_stays_at_it_and_is_counted_once_when_it_is_due() -> None:
    near = moved(1, 1.25 - POSE[1])
    safety = begun(STREAMED, near)
    rows = np.tile(near, (10, 1))
    rows[:, 1] = 1.3
    for tick in range(3):
        limited = safety.apply(setpoints(rows[tick:], tick * PERIOD), tick * PERIOD).rows
        assert (limited[:, 1] == 1.25664).all()
        assert np.array_equal(limited[:, ARMS & (np.arange(14) != 1)], rows[tick:, ARMS & (np.arange(14) != 1)])
    assert safety.clamps == 3


def test_a_jump_becomes_a_ramp_at_the_joints_speed() -> None:
    safety = begun(STREAMED)
    target = moved(0, 0.3)
    seen = [safety.apply(setpoints(target[None], tick * PERIOD), tick * PERIOD).rows[0, 0] for tick in range(7)]
    step = np.pi * 0.02
    assert np.allclose(seen, np.minimum(step * np.arange(1, 8), 0.3), atol=1e-5)
    assert safety.clamps == 4


def test_the_gripper_has_a_range_and_a_speed() -> None:
    safety = begun(STREAMED)
    rows = np.tile(moved(6, 9.0), (20, 1))
    gripper = safety.apply(setpoints(rows), 0).rows[:, 6]
    assert np.allclose(np.diff(gripper[:8]), 3.1 * 0.02)
    assert gripper[-1] == 1.05
    free = replace(STREAMED, arms=tuple(replace(arm, limits=None) for arm in STREAMED.arms))
    assert begun(free).apply(setpoints(rows), 0).rows[0, 6] == 1.05, "its range is limited anyway, its speed is not"


def test_a_gripper_in_its_own_unit_has_its_own_range() -> None:
    profile = load_profile("trossen_ai")
    pose = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.02] * 2)
    safety = begun(profile, pose)
    rows = np.tile(moved(6, 1.0, pose), (20, 1))
    assert safety.apply(setpoints(rows), 0).rows[-1, 6] == pytest.approx(0.044 * 1.05)


def test_an_arm_that_is_out_of_its_limits_comes_back_no_faster_than_it_may() -> None:
    out = moved(1, 1.5 - POSE[1])
    safety = begun(STREAMED, out)
    rows = safety.apply(setpoints(np.tile(out, (10, 1))), 0).rows[:, 1]
    assert np.allclose(rows[:3], 1.5 - np.pi * 0.02 * np.arange(1, 4), atol=1e-5)
    assert rows[-1] == 1.25664


def test_what_is_not_finite_stays_at_the_row_before() -> None:
    for value in (np.nan, np.inf, -np.inf):
        rows = np.tile(POSE, (3, 1))
        rows[1:, 4] = value
        safety = begun(STREAMED)
        assert np.array_equal(safety.apply(setpoints(rows), 0).rows, np.tile(POSE, (3, 1)))
        safety.apply(setpoints(rows[1:], PERIOD), PERIOD)
        assert safety.clamps == 1
    assert (begun(DROID, np.zeros(8)).apply(setpoints(np.full((1, 8), np.nan)), 0, np.zeros(8)).rows == 0).all()


def test_velocities_stay_within_the_speed_and_stop_at_a_limit() -> None:
    period = round(SECOND / DROID.control_hz)
    safety = safety_of(DROID, period)
    safety.begin(np.zeros(8))
    measured = np.array([2.8973, -1.7628, 2.95, -1.0, 0.0, 0.0, 2.8, 0.5])
    command = np.array([1.0, -1.0, 1.0, 9.0, -9.0, 0.5, 2.61, 0.5])
    out = safety.apply(setpoints(command[None]), 0, measured).rows[0]
    assert out[:3].tolist() == [0.0, 0.0, 0.0], "at its limit, or beyond, a joint goes no further"
    assert out[3:6].tolist() == [2.175, -2.61, 0.5]
    assert out[6] * period / SECOND == pytest.approx(2.8973 - 2.8), "the limit is just reached when the period ends"
    assert safety.clamps == 6 + 1, "the gripper, far from where it was, is one of them"
    back = safety.apply(setpoints(-command[None], period), period, measured).rows[0]
    assert back[:3].tolist() == [-1.0, 1.0, -1.0], "away from its limit a joint may go"
    unknown = safety.apply(setpoints(command[None], 2 * period), 2 * period, None).rows[0]
    assert unknown[:7].tolist() == [0.0] * 7, "who does not see the limit does not move"


def test_nothing_is_commanded_of_a_motion_that_did_not_begin() -> None:
    with pytest.raises(RuntimeError, match="A motion has not begun"):
        safety_of(STREAMED).apply(setpoints(POSE[None]), 0)


def test_an_arm_without_limits_is_warned_of_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    left, right = STREAMED.arms
    with caplog.at_level(logging.WARNING):
        safety_of(STREAMED)
        assert not caplog.records
        safety = safety_of(replace(STREAMED, arms=(left, replace(right, limits=None))))
    assert [record.getMessage() for record in caplog.records] == [
        "Robot profile 'aloha_ros2' has no limits for arm right: neither its positions nor its speed are limited."
    ]
    safety.begin(POSE)
    rows = safety.apply(setpoints(np.full((1, 14), 50.0)), 0).rows[0]
    assert (rows[7:13] == 50.0).all()
    assert (rows[:7] < 2).all()


def test_actions_that_are_no_joints_are_only_checked_to_be_finite(caplog: pytest.LogCaptureFixture) -> None:
    libero = load_profile("libero")
    safety = safety_of(libero)
    assert "its actions are not joint values" in caplog.text
    assert safety.chunk_problem(np.full((10, 7), 99.0)) is None
    assert safety.start_problem(np.full(7, 99.0), np.zeros(8)) is None
    safety.begin(np.zeros(8))
    rows = setpoints(np.full((1, 7), 99.0))
    assert safety.apply(rows, 0) is rows


# ---- seams ----


def test_at_a_seam_the_row_counts_that_was_due_and_not_the_last_one_sent_ahead() -> None:
    step = np.pi * 0.02
    ramp = POSE + 0.06 * np.arange(1, 11)[:, None] * (np.arange(14) == 0)
    back = np.tile(POSE, (10, 1))  # another chunk that wants to be elsewhere
    safety = begun(AHEAD)
    safety.apply(setpoints(ramp), 0)  # ten rows were sent, and three of them are due when the other one comes
    assert safety.apply(setpoints(back, 3 * PERIOD), 3 * PERIOD).rows[0, 0] == pytest.approx(0.18 - step, abs=1e-5)
    safety = begun(STREAMED)
    safety.apply(setpoints(ramp), 0)  # the driver got the first of them alone
    assert safety.apply(setpoints(back, 3 * PERIOD), 3 * PERIOD).rows[0, 0] == pytest.approx(0.0, abs=1e-5)


def test_a_seam_between_two_rows_leaves_what_time_there_is() -> None:
    safety = begun(AHEAD)
    safety.apply(setpoints(np.tile(POSE, (10, 1))), 0)
    late = setpoints(np.tile(moved(0, 1.0), (10, 1)), PERIOD)
    rows = safety.apply(late, PERIOD + 15_000_000).rows
    assert rows[0, 0] == pytest.approx(np.pi * 0.005, abs=1e-5), "5 ms until the first row is due"
    assert rows[1, 0] - rows[0, 0] == pytest.approx(np.pi * 0.02, abs=1e-5)


def test_a_hold_goes_nowhere_and_the_gripper_keeps_its_grip() -> None:
    safety = begun(AHEAD)
    safety.apply(setpoints(np.tile(moved(6, -0.05), (5, 1))), 0)
    measured = moved(6, 0.3, moved(0, -0.4))  # it lags behind, and the gripper is kept open by what it holds
    target = hold_target(AHEAD, measured, safety.commanded)
    assert target is not None
    safety.begin(target)
    held = safety.apply(setpoints(target[None], 7), 7).rows[0]
    assert np.array_equal(held, target)
    assert held[6] == pytest.approx(POSE[6] - 0.05)
    safety.begin(measured)
    assert safety.commanded is not None
    assert safety.commanded[6] == pytest.approx(POSE[6] - 0.05), "so does the motion that begins then"
    assert safety.commanded[0] == pytest.approx(-0.4)


def test_a_hold_beyond_a_limit_is_latched_a_step_nearer() -> None:
    out = moved(1, 1.26 - POSE[1])
    safety = begun(STREAMED, out)
    assert safety.apply(setpoints(out[None]), 0).rows[0, 1] == 1.25664


def test_where_to_hold() -> None:
    profile = STREAMED
    command = np.array(POSE)
    measured = command + 0.1
    given = measured.copy()
    target = hold_target(profile, measured, command)
    assert target is not None
    assert np.array_equal(target[[6, 13]], command[[6, 13]]), "grippers keep their last command: nothing is dropped"
    assert np.array_equal(target[ARMS], measured[ARMS])
    assert np.array_equal(hold_target(profile, None, command), command)  # type: ignore[arg-type]
    assert np.array_equal(hold_target(profile, measured, None), measured)  # type: ignore[arg-type]
    assert hold_target(profile, None, None) is None
    assert np.array_equal(measured, given), "the input is not changed"

    assert velocity_mask(DROID).tolist() == [True] * 7 + [False]
    stop = hold_target(DROID, np.full(8, 0.5), np.full(8, 0.9))
    assert stop is not None
    assert stop.tolist() == [0.0] * 7 + [0.9]


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -1e30, 2 * np.pi, 1.9])
def test_a_joint_is_not_held_where_it_cannot_be(nonsense: float) -> None:
    command = np.array(POSE)
    measured = command + 0.1
    measured[1] = nonsense  # the shoulder
    target = hold_target(STREAMED, measured, command)
    assert target is not None
    assert target[1] == command[1]
    assert np.array_equal(target[[0, 2, 3, 4, 5]], measured[[0, 2, 3, 4, 5]]), "the others are believed"
    assert hold_target(STREAMED, np.full(14, np.nan), None) is None


# ---- whatever comes, whenever ----

EXTREME = st.sampled_from([0.0, 1e-30, -0.0, 3e38, -3e38, 1e5, -np.pi])
VALUES = st.one_of(st.floats(-3, 3), EXTREME)


@st.composite
def chunks(draw: st.DrawFn) -> np.ndarray:
    """float64 [1 .. 12, 14]: near the pose, jumping about, or beyond all measure."""
    rows = draw(st.integers(1, 12))
    size = draw(st.sampled_from([0.01, 0.1, 1.0, 1e3, 1e30]))
    seed = draw(st.integers(0, 2**32 - 1))
    chunk = POSE + size * np.random.default_rng(seed).standard_normal((rows, 14))
    for _ in range(draw(st.integers(0, 3))):
        chunk[draw(st.integers(0, rows - 1)), draw(st.integers(0, 13))] = draw(VALUES)
    return chunk


EVENTS = st.lists(
    st.tuples(
        st.one_of(st.just(PERIOD), st.integers(0, 3 * PERIOD)),  # until it happens
        st.one_of(st.none(), st.tuples(chunks(), st.integers(0, 5 * PERIOD))),  # another chunk, and its age
    ),
    min_size=1,
    max_size=25,
)


def play_out(
    profile: RobotProfile, events: list, ensemble: bool, see: Callable[[Setpoints, int], None]
) -> SafetyFilter:
    """What leaves a loop to which all this happens."""
    player = ChunkPlayer(PERIOD, velocity_mask(profile), ensemble_decay=0.1 if ensemble else None)
    safety, now_ns = begun(profile), 10 * PERIOD
    for after_ns, chunk in events:
        now_ns += after_ns
        if chunk is not None:
            rows, age_ns = chunk
            player.play(rows, now_ns - age_ns)
        planned = player.next(now_ns, 5)
        if planned is not None:
            see(safety.apply(planned, now_ns), now_ns)
    return safety


@given(events=EVENTS, ensemble=st.booleans(), profile=st.sampled_from([STREAMED, AHEAD]))
@settings(max_examples=150)
def test_no_row_leaves_limits_speed_or_finiteness(events: list, ensemble: bool, profile: RobotProfile) -> None:
    def see(out: Setpoints, now_ns: int) -> None:
        assert np.isfinite(out.rows).all()
        assert (out.rows >= LOWER).all()
        assert (out.rows <= UPPER).all()
        assert (np.abs(np.diff(out.rows, axis=0)) <= SPEED * PERIOD / SECOND + CLOSE).all()

    play_out(profile, events, ensemble, see)


@given(events=EVENTS, ensemble=st.booleans())
@settings(max_examples=100)
def test_a_driver_that_takes_rows_one_by_one_is_never_given_a_jump(events: list, ensemble: bool) -> None:
    """Nor many small ones in quick succession."""
    given_rows, times = [POSE], [10 * PERIOD]

    def see(out: Setpoints, now_ns: int) -> None:
        given_rows.append(out.rows[0])
        times.append(now_ns)

    play_out(STREAMED, events, ensemble, see)
    for index in range(1, len(given_rows)):
        assert (np.abs(given_rows[index] - given_rows[index - 1]) <= SPEED * PERIOD / SECOND + CLOSE).all()
        for before in range(1, index):
            seconds = (times[index] - times[before] + PERIOD) / SECOND
            assert (np.abs(given_rows[index] - given_rows[before]) <= SPEED * seconds + CLOSE).all()


@given(events=EVENTS, ensemble=st.booleans())
@settings(max_examples=100)
def test_a_controller_that_follows_trajectories_never_moves_faster(events: list, ensemble: bool) -> None:
    """Followed as a joint_trajectory_controller does it."""
    names = [str(index) for index in range(14)]
    follower = TrajectoryFollower(names, POSE.tolist())
    path, last_ns = [POSE], 10 * PERIOD

    def see(out: Setpoints, now_ns: int) -> None:
        nonlocal last_ns
        path.extend(follower.sample(time_ns / SECOND) for time_ns in [*range(last_ns, now_ns, 1_000_000), now_ns])
        last_ns = now_ns
        dues = (np.arange(len(out.rows)) + 1) * PERIOD / SECOND
        follower.follow(names, dues.tolist(), out.rows.tolist(), out.start_ns / SECOND, now_ns / SECOND)

    play_out(AHEAD, events, ensemble, see)
    assert (np.abs(np.diff(path, axis=0)) <= SPEED * 0.001 + 1e-6).all()


@given(
    command=st.lists(st.lists(st.one_of(st.floats(-9, 9), EXTREME), min_size=8, max_size=8), min_size=1, max_size=5),
    measured=st.lists(st.floats(-4, 4), min_size=8, max_size=8),
)
def test_no_velocity_brings_a_joint_beyond_its_limits(command: list, measured: list) -> None:
    lower, upper, speed = limits(DROID)
    here, joints = np.array(measured), slice(0, 7)
    out = begun(DROID, here).apply(setpoints(command), 0, here).rows
    assert (np.abs(out[:, joints]) <= speed[joints]).all()
    there = here + out * PERIOD / SECOND
    further = np.maximum(np.abs(there - np.clip(there, lower, upper)) - np.abs(here - np.clip(here, lower, upper)), 0)
    assert (further[:, joints] < CLOSE).all()
