"""Trajectories of joint targets, followed as a ros2_control joint_trajectory_controller follows them. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi05_ros.errors import Pi05Error


class TrajectoryError(Pi05Error, ValueError):
    """A trajectory cannot be followed; the arm goes on as before."""


class TrajectoryFollower:
    """The target of every joint of one arm over time, in any unit and on any clock, times in seconds.

    The target is piecewise linear between knots and stays at the last one. A new trajectory takes over from its start
    on, from wherever the target is then; until that moment the old one is followed.

    joint_names: the joints that a trajectory has to name, in the order of ``sample``.
    home: their targets until the first trajectory comes.
    """

    def __init__(self, joint_names: Sequence[str], home: Sequence[float]) -> None:
        self.joint_names = tuple(joint_names)
        self.reset(home)

    def reset(self, home: Sequence[float]) -> None:
        """Forget all trajectories and stay at ``home``."""
        self._times = np.array([-np.inf])
        self._targets = np.array([home], dtype=np.float64)

    def follow(
        self,
        joint_names: Sequence[str],
        times: Sequence[float],
        positions: Sequence[Sequence[float]],
        start: float | None,
        now: float,
    ) -> None:
        """Take over a new trajectory.

        joint_names: [n] all joints of this arm, in any order.
        times: [points] seconds after the start, increasing from 0 or more. A first point at 0 makes the target jump.
        positions: [points][n] in the order of ``joint_names``.
        start: when it starts; None: now. Points that lie in the past are left out.

        Raises TrajectoryError, which says what is wrong with it.
        """
        knot_targets = self._checked_positions(joint_names, times, positions)
        knot_times = (now if start is None else start) + np.asarray(times, dtype=np.float64)
        begin = now if start is None else max(start, now)
        if knot_times[-1] < begin:
            raise TrajectoryError(
                f"time_from_start: the last point lies {begin - knot_times[-1]:.3f} s in the past; is its header.stamp "
                "in simulation time?"
            )
        old = self._times < begin
        # The newest knot that has passed is where the present segment starts; all before it are history.
        old[: np.searchsorted(self._times, now, side="right") - 1] = False
        new = knot_times >= begin
        seam = self.sample(begin)
        self._times = np.concatenate([self._times[old], [begin], knot_times[new]])
        self._targets = np.concatenate([self._targets[old], [seam], knot_targets[new]])

    def sample(self, time: float) -> np.ndarray:
        """float64 [joints] target at that time."""
        after = int(np.searchsorted(self._times, time, side="right"))
        if after == len(self._times):
            return self._targets[-1].copy()
        # Two knots may share a time (a jump): side="right" steps over both, so that this segment has a length.
        begin, end = self._times[after - 1], self._times[after]
        share = 0.0 if np.isinf(begin) else (time - begin) / (end - begin)
        return self._targets[after - 1] + share * (self._targets[after] - self._targets[after - 1])

    def _checked_positions(
        self, joint_names: Sequence[str], times: Sequence[float], positions: Sequence[Sequence[float]]
    ) -> np.ndarray:
        """float64 [points, joints] in the order of this arm."""
        if sorted(joint_names) != sorted(self.joint_names):
            expected, got = ", ".join(self.joint_names), ", ".join(joint_names) or "none"
            raise TrajectoryError(f"joint_names: expected each of {expected} once, got {got}.")
        if len(times) == 0:
            raise TrajectoryError("points: expected at least one, got none.")
        for index, row in enumerate(positions):
            if len(row) != len(joint_names):
                raise TrajectoryError(
                    f"points[{index}].positions: expected {len(joint_names)} values, one a joint, got {len(row)}."
                )
            if not np.isfinite(row).all():
                name = joint_names[int(np.flatnonzero(~np.isfinite(row))[0])]
                raise TrajectoryError(f"points[{index}].positions: the target of {name} is not finite.")
        gaps = np.diff(times, prepend=-1.0) if times[0] >= 0 else np.array([-1.0])
        if not (gaps > 0).all():
            index = int(np.flatnonzero(~(gaps > 0))[0])
            raise TrajectoryError(
                f"points[{index}].time_from_start: expected a time of 0 or more that grows from point to point, got "
                f"{times[index]:g} s."
            )
        order = [list(joint_names).index(name) for name in self.joint_names]
        return np.asarray(positions, dtype=np.float64)[:, order]
