"""What must hold of numbers before they may become motion: finite -> limits -> rate -> start ramp -> hold.

A chunk that cannot be meant is refused whole, before it is played. Of what is played every row is limited on its way
out, the last thing that happens to it before it is sent; what plays the chunks need not know of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from pi05_ros.policy.profile import Arm, RobotProfile
from pi05_ros.robot.execution import Setpoints
from pi05_ros.robot.joints import SECOND

logger = logging.getLogger(__name__)

GRIPPER_TOLERANCE = 0.05
"""Of a gripper's range, at either end: in data they are commanded a little beyond, to press on what they hold."""
ROUNDING = 1e-9
"""A value that is changed by less was not limited."""


@dataclass(frozen=True)
class SafetySettings:
    """max_start_error: rad, see ``RobotProfile``, which counts where it is None.

    late_after: seconds for which the last command stays when rows have run out; then the robot is held.
    """

    max_start_error: float | None = None
    late_after: float = 1.0


class SafetyFilter:
    """Limits what one robot is commanded. Not thread-safe: its owner locks.

    A position stays within the joint's limits, and from one row to the next within its speed. Where a driver takes one
    row a tick, the row before is the one that it was given last. Where it follows trajectories it has gone on through
    the rows that it was given ahead, so the row before is what they had come to by now; then it does not matter which
    of them were due when another trajectory takes their place. Rows outside of the limits, as of an arm that was moved
    there by hand, come back at the joints' speed and no faster.

    A velocity stays within the joint's speed, and brings no joint beyond its limits within a period.

    profile: of the robot. Actions that are not joint values (``action_names``) are only checked to be finite.
    period_ns: between two rows of a command.
    """

    def __init__(self, profile: RobotProfile, settings: SafetySettings, period_ns: int) -> None:
        self.clamps = 0
        """Values limited so far, of rows when they were due."""
        self.commanded: np.ndarray | None = None
        """The row that was due last, float64 [action_dim] in robot units, or the pose that a motion began from."""
        self._profile, self._period_ns = profile, period_ns
        self._of_joints = profile.action_names is None
        self._max_start_error = settings.max_start_error or profile.max_start_error
        self._lower, self._upper, self._speed = (np.array(limit) for limit in _limits(profile))
        self._velocities, self._grippers = velocity_mask(profile), np.array(profile.gripper_mask)
        self._angles = ~self._velocities & ~self._grippers
        self._rate = np.where(self._velocities, np.inf, self._speed)
        self._ahead = np.array([_takes_trajectories(arm) for arm in profile.arms for _ in arm.dimension_names])
        self._commanded_due_ns: int | None = None
        self._times_ns, self._path = np.zeros(1, np.int64), np.zeros((1, profile.state_dim))
        self._warn_of_no_limits()

    @property
    def needs_measured(self) -> bool:
        """True if ``apply`` has to know the measured state: a position limit of what is commanded as a velocity."""
        return self._of_joints and bool(self._velocities.any())

    def chunk_problem(self, actions: np.ndarray) -> str | None:
        """Why a chunk must be refused whole, as a sentence; None: it may be played.

        actions: [horizon, action_dim], robot units.
        """
        dims = self._profile.action_dim
        if actions.ndim != 2 or actions.shape[0] == 0 or actions.shape[1] != dims:
            return f"A chunk of shape {list(actions.shape)} came, expected [horizon, {dims}]."
        bad = np.argwhere(~np.isfinite(actions))
        if bad.size:
            row, column = bad[0]
            return f"A chunk came with {actions[row, column]} in row {row}, column {column}."
        if not self._of_joints:
            return None
        values = np.asarray(actions, np.float64)
        excess = np.maximum(self._lower - values, values - self._upper)
        excess[:, ~self._angles] = -np.inf
        row, column = np.unravel_index(np.argmax(excess), excess.shape)
        name, most = self._profile.joint_names[column], self._profile.max_limit_excess
        if excess[row, column] > most:
            return (
                f"A chunk came with {values[row, column]:.4g} rad for {name} in row {row}, limits are "
                f"{self._lower[column]:g} to {self._upper[column]:g} rad; at most {most:g} rad beyond is cut off "
                "(max_limit_excess)."
            )
        return None

    def start_problem(self, first: np.ndarray, measured: np.ndarray) -> str | None:
        """Why a motion must not begin, as a sentence; None: it may.

        first: its first target [action_dim]; measured: where the robot is, [state_dim]. Robot units.
        """
        if not self._of_joints:
            return None
        error = np.where(self._angles, np.abs(np.subtract(first, measured, dtype=np.float64)), 0.0)
        worst = int(np.argmax(error))
        if error[worst] > self._max_start_error:
            name, most = self._profile.joint_names[worst], self._max_start_error
            return (
                f"The first target of {name} is {first[worst]:.4g} rad, but it was measured at {measured[worst]:.4g} "
                f"rad; at most {most:g} rad may lie between (max_start_error)."
            )
        return None

    def forget(self) -> None:
        """Nothing has been commanded yet: who knows what has happened to the robot since."""
        self.commanded, self._commanded_due_ns = None, None

    def begin(self, measured: np.ndarray) -> None:
        """A motion or a hold begins from this pose, [state_dim] in robot units: the next rows ramp from there.

        Grippers go on from their last command if there was one, for what they hold keeps them from getting there.
        """
        if not self._of_joints:
            return
        pose = np.array(measured, dtype=np.float64)
        if self.commanded is not None:
            pose[self._grippers] = self.commanded[self._grippers]
        pose[self._velocities] = 0.0
        self.commanded, self._commanded_due_ns = pose, None
        self._times_ns, self._path = np.zeros(1, np.int64), pose[None]

    def apply(self, setpoints: Setpoints, now_ns: int, measured: np.ndarray | None = None) -> Setpoints:
        """The same rows, limited. Between two calls of ``begin`` every one that is sent has to come through here.

        now_ns: on the clock of ``setpoints``. measured: the state [state_dim] as it was measured just now, NaN where it
        is not known: what is commanded as a velocity stops there (see ``needs_measured``).
        """
        if not self._of_joints:
            return setpoints
        if self.commanded is None:
            raise RuntimeError("A motion has not begun: nobody said from which pose.")
        begin_ns = max(setpoints.start_ns, now_ns)
        times_ns = setpoints.start_ns + self._period_ns * np.arange(1, len(setpoints.rows) + 1)
        lower, upper = self._bounds(measured)
        before, seconds = self._before(begin_ns, int(times_ns[0]))
        along, rows = self._at(begin_ns), []
        for wanted in setpoints.rows:
            # The joint's limits come first: at its speed it then comes no further out than it was before.
            reach = np.multiply(self._rate, seconds, where=np.isfinite(self._rate), out=self._rate.copy())
            finite = np.where(np.isfinite(wanted), wanted, np.where(self._velocities, 0.0, before))
            rows.append(np.clip(np.clip(finite, lower, upper), before - reach, before + reach))
            before, seconds = rows[-1], np.array(self._period_ns / SECOND)
        limited = np.stack(rows)
        self.clamps += int(np.sum(~(np.abs(limited[0] - setpoints.rows[0]) < ROUNDING)))
        self.commanded, self._commanded_due_ns = limited[0], int(times_ns[0])
        self._times_ns, self._path = np.concatenate([[begin_ns], times_ns]), np.vstack([along, limited])
        return replace(setpoints, rows=limited)

    def _before(self, begin_ns: int, due_ns: int) -> tuple[np.ndarray, np.ndarray]:
        """The row before one that is due then, and seconds, at most a period, from one to the other; [dims] each."""
        assert self.commanded is not None
        since_ns = self._period_ns if self._commanded_due_ns is None else due_ns - self._commanded_due_ns
        before = np.where(self._ahead, self._at(begin_ns), self.commanded)
        return before, np.clip(np.where(self._ahead, due_ns - begin_ns, since_ns), 0, self._period_ns) / SECOND

    def _at(self, time_ns: int) -> np.ndarray:
        """float64 [dims] where the rows that were sent lead at that time."""
        times = (self._times_ns - time_ns).astype(np.float64)
        return np.array([np.interp(0.0, times, column) for column in self._path.T])

    def _bounds(self, measured: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest command now, float64 [dims]: a position in limits; a velocity that stays in them."""
        if not self.needs_measured:
            return self._lower, self._upper
        period = self._period_ns / SECOND
        at = np.full_like(self._lower, np.nan) if measured is None else np.asarray(measured, np.float64)
        known = np.isfinite(at)
        slowest = np.where(known, np.maximum(-self._speed, np.minimum(self._lower - at, 0.0) / period), 0.0)
        fastest = np.where(known, np.minimum(self._speed, np.maximum(self._upper - at, 0.0) / period), 0.0)
        return np.where(self._velocities, slowest, self._lower), np.where(self._velocities, fastest, self._upper)

    def _warn_of_no_limits(self) -> None:
        if not self._of_joints:
            logger.warning(
                "Robot profile %r: its actions are not joint values; nothing limits them.", self._profile.name
            )
            return
        free = [arm.name or str(index) for index, arm in enumerate(self._profile.arms) if arm.limits is None]
        if free:
            logger.warning(
                "Robot profile %r has no limits for arm %s: neither its positions nor its speed are limited.",
                self._profile.name,
                ", ".join(free),
            )


def hold_target(
    profile: RobotProfile, measured: np.ndarray | None, last_command: np.ndarray | None
) -> np.ndarray | None:
    """Where to hold a robot, float64 [action_dim] in robot units; None: nothing is known, nothing can be commanded.

    measured: where it was measured just now, [state_dim], NaN where that is not known; None: nowhere.

    A joint stays where it was measured, or at its last command: if it was not measured, or if it cannot be there, as
    far beyond its limits or away from that command as no chunk would be taken. Grippers stay at their last command, so
    that what they hold is not dropped; what is commanded as a velocity stops.
    """
    if profile.action_names is not None:
        return None  # actions of another kind than joints: no position of theirs is a hold
    target = np.full(profile.state_dim, np.nan) if measured is None else np.array(measured, dtype=np.float64)
    if last_command is not None:
        lower, upper, _ = (np.array(limit) for limit in _limits(profile))
        excess, error = np.maximum(lower - target, target - upper), np.abs(target - last_command)
        believed = (excess <= profile.max_limit_excess) & (error <= profile.max_start_error)  # NaN is not
        target = np.where(believed & ~np.array(profile.gripper_mask), target, last_command)
    target[velocity_mask(profile)] = 0.0
    return target if np.isfinite(target).all() else None


def velocity_mask(profile: RobotProfile) -> np.ndarray:
    """bool [state_dim]: True at joints that are commanded as velocities; grippers never are."""
    velocity = [arm.action == "velocity" for arm in profile.arms for _ in arm.dimension_names]
    return np.array(velocity) & ~np.array(profile.gripper_mask)


def _takes_trajectories(arm: Arm) -> bool:
    return arm.command is not None and arm.command.type == "joint_trajectory"


def _limits(profile: RobotProfile) -> tuple[list[float], list[float], list[float]]:
    """Lower and upper positions and speeds, [state_dim] each; infinite where there is no limit."""
    lower: list[float] = []
    upper: list[float] = []
    speed: list[float] = []
    for arm in profile.arms:
        free = [float("inf")] * len(arm.joints)
        lower += arm.limits.lower if arm.limits else [-limit for limit in free]
        upper += arm.limits.upper if arm.limits else free
        speed += arm.limits.velocity if arm.limits else free
        if arm.gripper:
            least, most = arm.gripper.range
            lower.append(least - GRIPPER_TOLERANCE * (most - least))
            upper.append(most + GRIPPER_TOLERANCE * (most - least))
            speed.append(arm.limits.gripper_speed or float("inf") if arm.limits else float("inf"))
    return lower, upper, speed
