"""Each strategy on the simulated ALOHA: between the chunks the robot is never left without a command."""

from __future__ import annotations

import itertools
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import launch_testing
import launch_testing.asserts
import pytest
from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_testing.actions import ReadyToTest
from rcl_interfaces.srv import GetParameters
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from pi05_ros.robot.execution import STRATEGIES
from ros.robot_stand_in import PROFILE, Robot, stamp_ns

CHUNKS = 8
PERIOD = PROFILE.command_period_ns


@pytest.mark.needs_launch
@pytest.mark.launch_test
@launch_testing.parametrize("strategy", STRATEGIES)
def generate_test_description(strategy: str) -> tuple[LaunchDescription, dict[str, Any]]:
    checkpoint = make_checkpoint("tiny", Path(tempfile.mkdtemp(prefix="pi05_strategies_")) / "tiny")
    sim_launch = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(get_package_share_directory("pi05_ros")) / "launch/sim.launch.py")),
        launch_arguments={
            "checkpoint": str(checkpoint),
            "device": "cpu",
            "strategy": strategy,
            "render_quality": "fast",
            "camera_width": "64",
            "camera_height": "48",
            "http_port": "0",
        }.items(),
    )
    return LaunchDescription([sim_launch, ReadyToTest()]), {"strategy": strategy}


def due(trajectory: JointTrajectory) -> tuple[int, int]:
    """When its first and its last point are due, nanoseconds of the robot's time."""
    start = stamp_ns(trajectory)
    first, last = (point.time_from_start for point in (trajectory.points[0], trajectory.points[-1]))
    return start + first.sec * 10**9 + first.nanosec, start + last.sec * 10**9 + last.nanosec


class Strategies(unittest.TestCase):
    robot: ClassVar[Robot]

    @classmethod
    def setUpClass(cls) -> None:
        cls.robot = Robot(sim=True)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.robot.close()

    def test_no_gap_at_chunk_seams(self, strategy: str) -> None:
        robot = self.robot
        robot.wait_for(lambda: len(robot.chunks) >= CHUNKS, f"{CHUNKS} chunks", timeout=90)
        request = GetParameters.Request(names=["strategy"])
        (value,) = robot.call(GetParameters, "/policy_node/get_parameters", request).values
        assert value.string_value == strategy
        assert {status.state for status in robot.statuses[-5:]} == {PolicyStatus.RUNNING}, robot.statuses[-1]
        for arm, trajectories in robot.trajectories.items():
            spans = [due(trajectory) for trajectory in trajectories]
            gaps = [(after[0] - before[1]) / PERIOD for before, after in itertools.pairwise(spans)]
            assert max(gaps) <= 1.5, f"{arm}: {max(gaps):.2f} control periods without a command"
        begins = [stamp_ns(chunk) for chunk in robot.chunks]
        assert begins == sorted(begins)


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    def test_both_ended_cleanly(self, proc_info: Any) -> None:
        launch_testing.asserts.assertExitCodes(proc_info)
