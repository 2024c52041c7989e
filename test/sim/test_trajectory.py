"""Following joint trajectories: interpolation, replacement, lateness, refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.sim.trajectory import TrajectoryError, TrajectoryFollower

JOINTS = ("a", "b")


def follower() -> TrajectoryFollower:
    return TrajectoryFollower(JOINTS, home=(1.0, 2.0))


def test_stays_home_until_told_otherwise() -> None:
    arm = follower()
    for time in (0.0, 1.0, 1e6):
        np.testing.assert_array_equal(arm.sample(time), [1.0, 2.0])


def test_interpolates_linearly_from_the_present_target_and_holds_the_last_one() -> None:
    arm = follower()
    arm.follow(JOINTS, [1.0, 2.0], [[3.0, 2.0], [3.0, 0.0]], start=None, now=10.0)
    np.testing.assert_allclose(arm.sample(10.0), [1.0, 2.0])
    np.testing.assert_allclose(arm.sample(10.5), [2.0, 2.0])
    np.testing.assert_allclose(arm.sample(11.0), [3.0, 2.0])
    np.testing.assert_allclose(arm.sample(11.25), [3.0, 1.5])
    np.testing.assert_allclose(arm.sample(99.0), [3.0, 0.0])


def test_joints_are_matched_by_name_not_by_place() -> None:
    arm = follower()
    arm.follow(("b", "a"), [1.0], [[20.0, 10.0]], start=None, now=0.0)
    np.testing.assert_allclose(arm.sample(1.0), [10.0, 20.0])


def test_a_first_point_at_time_zero_makes_the_target_jump() -> None:
    arm = follower()
    arm.follow(JOINTS, [0.0, 1.0], [[5.0, 5.0], [6.0, 6.0]], start=None, now=3.0)
    np.testing.assert_allclose(arm.sample(3.0), [5.0, 5.0])
    np.testing.assert_allclose(arm.sample(3.5), [5.5, 5.5])


def test_points_that_are_late_are_left_out_and_the_rest_is_followed() -> None:
    arm = follower()
    arm.follow(JOINTS, [1.0, 2.0, 3.0], [[9.0, 9.0], [9.0, 9.0], [2.0, 4.0]], start=10.0, now=12.5)
    np.testing.assert_allclose(arm.sample(12.5), [1.0, 2.0])  # no jump to where it should have been
    np.testing.assert_allclose(arm.sample(12.75), [1.5, 3.0])
    np.testing.assert_allclose(arm.sample(13.0), [2.0, 4.0])


def test_the_old_trajectory_is_followed_until_the_new_one_starts() -> None:
    arm = follower()
    arm.follow(JOINTS, [4.0], [[5.0, 2.0]], start=None, now=0.0)
    arm.follow(JOINTS, [1.0], [[0.0, 0.0]], start=2.0, now=1.0)
    np.testing.assert_allclose(arm.sample(1.5), [2.5, 2.0])
    np.testing.assert_allclose(arm.sample(2.0), [3.0, 2.0])
    np.testing.assert_allclose(arm.sample(2.5), [1.5, 1.0])
    np.testing.assert_allclose(arm.sample(9.0), [0.0, 0.0])


def test_a_jump_planned_for_later_does_not_bend_what_comes_before_it() -> None:
    arm = follower()
    arm.follow(JOINTS, [0.0], [[7.0, 7.0]], start=5.0, now=1.0)
    np.testing.assert_allclose(arm.sample(4.999), [1.0, 2.0])
    np.testing.assert_allclose(arm.sample(5.0), [7.0, 7.0])


def test_reset_forgets_the_trajectory() -> None:
    arm = follower()
    arm.follow(JOINTS, [4.0], [[5.0, 2.0]], start=None, now=0.0)
    arm.reset((0.5, 0.5))
    np.testing.assert_array_equal(arm.sample(4.0), [0.5, 0.5])


@pytest.mark.parametrize(
    ("names", "times", "positions", "start", "complaint"),
    [
        ((), [1.0], [[]], None, "joint_names: expected each of a, b once, got none"),
        (("a",), [1.0], [[0.0]], None, "joint_names: expected each of a, b once, got a"),
        (("a", "c"), [1.0], [[0.0, 0.0]], None, "joint_names.*got a, c"),
        (("a", "b", "a"), [1.0], [[0.0, 0.0, 0.0]], None, "joint_names.*got a, b, a"),
        (JOINTS, [], [], None, "points: expected at least one"),
        (
            JOINTS,
            [1.0, 2.0],
            [[0.0, 0.0], [0.0]],
            None,
            r"points\[1\].positions: expected 2 values, one a joint, got 1",
        ),
        (JOINTS, [1.0], [[0.0, math.nan]], None, r"points\[0\].positions: the target of b is not finite"),
        (JOINTS, [1.0], [[-math.inf, 0.0]], None, r"points\[0\].positions: the target of a is not finite"),
        (JOINTS, [1.0, 1.0], [[0.0, 0.0]] * 2, None, r"points\[1\].time_from_start.*got 1 s"),
        (JOINTS, [-0.5], [[0.0, 0.0]], None, r"points\[0\].time_from_start.*got -0.5 s"),
        (JOINTS, [1.0, 2.0], [[0.0, 0.0]] * 2, 7.0, "the last point lies 1.000 s in the past"),
    ],
)
def test_a_malformed_trajectory_is_refused_and_the_arm_goes_on_as_before(
    names: tuple[str, ...], times: list[float], positions: list[list[float]], start: float | None, complaint: str
) -> None:
    arm = follower()
    arm.follow(JOINTS, [4.0], [[5.0, 2.0]], start=None, now=8.0)
    with pytest.raises(TrajectoryError, match=complaint):
        arm.follow(names, times, positions, start=start, now=10.0)
    np.testing.assert_allclose(arm.sample(10.0), [3.0, 2.0])


numbers = st.floats(-10, 10)
trajectories = st.lists(
    st.tuples(st.floats(0.01, 2), numbers, numbers), min_size=1, max_size=6
)  # (gap to the point before, a, b)


@given(st.lists(st.tuples(st.floats(0, 3), trajectories), min_size=1, max_size=5))
def test_the_target_never_jumps_whatever_replaces_whatever(commands: list[tuple[float, list]]) -> None:
    """Every trajectory begins after its start, so the target is continuous, and ends at the last point of the last."""
    arm = follower()
    now, before = 0.0, np.array([1.0, 2.0])
    for pause, points in commands:
        times = np.cumsum([gap for gap, _, _ in points]).tolist()
        before = arm.sample(now)
        arm.follow(JOINTS, times, [[a, b] for _, a, b in points], start=None, now=now)
        np.testing.assert_allclose(arm.sample(now), before)
        end = now + times[-1]
        np.testing.assert_allclose(arm.sample(end + 1), points[-1][1:])
        # No steeper than the steepest segment that was asked for.
        path = np.vstack([before, [[a, b] for _, a, b in points]])
        steepest = np.max(np.abs(np.diff(path, axis=0)) / np.diff(times, prepend=0.0)[:, None])
        samples = np.array([arm.sample(time) for time in np.linspace(now, end, 50)])
        assert np.max(np.abs(np.diff(samples, axis=0))) <= steepest * (end - now) / 49 * (1 + 1e-6) + 1e-6
        now += pause


def test_a_long_stream_of_trajectories_is_not_kept_for_ever() -> None:
    arm = follower()
    for tick in range(1000):
        arm.follow(JOINTS, [0.1, 0.2], [[1.0, 1.0], [2.0, 2.0]], start=None, now=tick * 0.02)
    assert len(arm._times) < 20
