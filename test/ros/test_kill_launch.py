"""The policy node is killed while a trajectory runs: the simulated arms go on through what was sent, and no further."""

from __future__ import annotations

import os
import signal
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import launch_testing
import launch_testing.asserts
import numpy as np
import pytest
from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription, RegisterEventHandler
from launch.event_handlers import OnProcessStart
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_testing.actions import ReadyToTest
from rclpy.qos import QoSProfile
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.checkpoint import make_checkpoint
from ros.robot_stand_in import PROFILE, Robot, stamp_ns

MAX_AHEAD = 0.2
PERIOD_NS = PROFILE.command_period_ns
SECOND = 1_000_000_000
LIMITS = PROFILE.arms[0].limits
assert LIMITS is not None
STEP = np.array(LIMITS.velocity) * PERIOD_NS / SECOND + 1e-6
OVERSHOOT = 0.03
"""Radians by which a simulated servo swings beyond its target."""


@pytest.mark.needs_launch
@pytest.mark.launch_test
def generate_test_description() -> tuple[LaunchDescription, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="pi05_kill_launch_"))
    parameters = folder / "parameters.yaml"
    parameters.write_text(f"/**:\n  ros__parameters:\n    max_ahead: {MAX_AHEAD}\n    precision: float32\n")
    sim_launch = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(get_package_share_directory("pi05_ros")) / "launch/sim.launch.py")),
        launch_arguments={
            "checkpoint": str(make_checkpoint("tiny", folder / "tiny")),
            "device": "cpu",
            "params_file": str(parameters),
            "render_quality": "fast",
            "camera_width": "64",
            "camera_height": "48",
            "http_port": "0",
        }.items(),
    )
    processes: dict[str, int] = {}

    def remember(event: Any, _context: Any) -> None:
        processes[event.process_name.partition("-")[0]] = event.pid

    started = RegisterEventHandler(OnProcessStart(on_start=remember))
    return LaunchDescription([started, sim_launch, ReadyToTest()]), {"processes": processes}


class Listener(Robot):
    """Keeps every joint sample by its stamp, arm joints only."""

    def __init__(self) -> None:
        super().__init__(sim=True)
        self.states: dict[str, dict[int, np.ndarray]] = {arm.name: {} for arm in PROFILE.arms}
        for arm in PROFILE.arms:
            self.node.create_subscription(JointState, arm.state_topic, self.keep(arm.name), QoSProfile(depth=100))

    def keep(self, arm: str) -> Any:
        def keep(message: JointState) -> None:
            self.states[arm][stamp_ns(message)] = np.array(message.position[:6])

        return keep

    def after(self, arm: str, begin_ns: int) -> np.ndarray:
        """float64 [samples, 6], rad, from that stamp on."""
        return np.array([position for stamp, position in self.states[arm].items() if stamp >= begin_ns])


def positions(trajectory: JointTrajectory) -> np.ndarray:
    """float64 [points, 6], rad."""
    return np.array([point.positions[:6] for point in trajectory.points])


class Killed(unittest.TestCase):
    robot: ClassVar[Listener]

    @classmethod
    def setUpClass(cls) -> None:
        cls.robot = Listener()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.robot.close()

    def test_the_arms_go_no_further_than_what_was_sent(self, processes: dict[str, int]) -> None:
        robot, sent = self.robot, self.robot.trajectories
        robot.wait_for(lambda: len(sent["left"]) > 10 and len(robot.chunks) >= 2, "commands", timeout=90)
        before = len(sent["left"])
        robot.wait_for(lambda: len(sent["left"]) > before and len(sent["left"][-1].points) > 5, "a long trajectory")
        os.kill(processes["policy_node"], signal.SIGKILL)
        killed_ns = max(robot.states["left"])
        robot.wait_for(lambda: max(robot.states["left"]) > killed_ns + 3 * SECOND, "three seconds of the robot's time")

        for arm, trajectories in sent.items():
            rows = [positions(trajectory) for trajectory in trajectories]
            assert all((row >= LIMITS.lower).all() and (row <= LIMITS.upper).all() for row in rows)
            assert all((np.abs(np.diff(row, axis=0)) <= STEP).all() for row in rows)
            assert len(rows[-1]) * PERIOD_NS <= MAX_AHEAD * SECOND
            assert np.ptp(robot.after(arm, 0), axis=0).max() > 0.05, "they did move"
            states = robot.after(arm, killed_ns)
            # Of the last trajectory the listener may have been robbed: it went a row further.
            allowed = np.vstack([states[:1], rows[-1]])
            assert (states >= allowed.min(axis=0) - STEP - OVERSHOOT).all()
            assert (states <= allowed.max(axis=0) + STEP + OVERSHOOT).all()
            rest = robot.after(arm, killed_ns + 2 * SECOND)
            assert np.ptp(rest, axis=0).max() < 0.01, "and there they stay"


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    def test_only_the_killed_one_ended_badly(self, proc_info: Any) -> None:
        for name in proc_info.process_names():
            code = -signal.SIGKILL if name.startswith("policy_node") else 0
            assert proc_info[name].returncode == code, name
