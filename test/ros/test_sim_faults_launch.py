"""The policy in closed loop on the simulated ALOHA, with faults on the way from the robot to the node.

The node hears the robot through a relay of this test, which freezes, drops and delays. Whatever it does, the simulated
joints themselves, which the relay hears unspoiled, stay within their limits.
"""

from __future__ import annotations

import tempfile
import unittest
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import launch_testing
import launch_testing.asserts
import numpy as np
import pytest
import yaml
from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import Node
from launch_testing.actions import ReadyToTest
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image, JointState

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from pi05_ros.policy.profile import config_folder
from pi05_ros.sim.scene import HOME_POSE
from ros.robot_stand_in import PROFILE, Robot, stamp_ns

SPOILED = "/spoiled"
"""Before the name of every topic that the node hears."""
SECOND = 1_000_000_000
JOINTS = 6
LOWER, UPPER = np.array(HOME_POSE[:JOINTS]) - 0.05, np.array(HOME_POSE[:JOINTS]) + 0.05
SPEED = 0.3
"""Limits of every joint in rad and rad/s, narrower than the real ones: an untrained network wants more."""
SWING = 0.03
"""Radians by which a simulated servo swings beyond its target."""
SWING_SPEED = 2.5
"""By how much a simulated servo may be faster than its target, which is worst where that goes to and fro."""


def spoiled_profile(folder: Path) -> Path:
    """The robot's profile, with the relay's topics and narrow limits."""
    data = yaml.safe_load((config_folder() / "robots/aloha_sim.yaml").read_text())
    for camera in data["cameras"]:
        camera["topic"] = SPOILED + camera["topic"]
    for arm in data["arms"]:
        arm["state_topic"] = SPOILED + arm["state_topic"]
        arm["limits"] = {"lower": LOWER.tolist(), "upper": UPPER.tolist(), "velocity": [SPEED] * JOINTS}
    data["max_limit_excess"] = 3.0  # whatever it wants, it is to be clamped, not refused
    path = folder / "aloha_sim.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.needs_launch
@pytest.mark.launch_test
def generate_test_description() -> LaunchDescription:
    folder = Path(tempfile.mkdtemp(prefix="pi05_faults_launch_"))
    policy_launch = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(get_package_share_directory("pi05_ros")) / "launch/policy.launch.py")),
        launch_arguments={
            "checkpoint": str(make_checkpoint("tiny", folder / "tiny")),
            "robot": str(spoiled_profile(folder)),
            "prompt": "Transfer cube",
            "device": "cpu",
            "use_sim_time": "true",
            "http_port": "0",
        }.items(),
    )
    size = {"render_quality": "fast", "camera_width": 64, "camera_height": 48}
    simulation = Node(package="pi05_ros", executable="aloha_sim", name="aloha_sim", parameters=[size], output="screen")
    return LaunchDescription([policy_launch, simulation, ReadyToTest()])


class Relay(Robot):
    """Passes the robot's messages on, spoiled, and keeps what its joints really did.

    frozen: cameras whose frames all carry the stamp of the first that comes. dropped: share of the joint states that
    is lost. delay: seconds of the robot's time by which all messages come late.
    """

    def __init__(self) -> None:
        super().__init__(sim=True)
        self.frozen: set[str] = set()
        self.dropped, self.delay = 0.0, 0.0
        self.measured: dict[str, list[JointState]] = {arm.name: [] for arm in PROFILE.arms}
        self._stamps: dict[str, Any] = {}
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._chance = np.random.default_rng(0)
        for camera in PROFILE.cameras:
            self.relay(Image, camera.topic, lambda message, name=camera.name: self.see(name, message))
        for arm in PROFILE.arms:
            self.relay(JointState, arm.state_topic, lambda message, name=arm.name: self.measure(name, message))

    def relay(self, kind: Any, topic: Any, spoil: Any) -> None:
        publisher = self.node.create_publisher(kind, SPOILED + topic, 10)

        def on_message(message: Any) -> None:
            self._waiting.append((publisher, message))
            if not spoil(message):
                self._waiting.pop()
            while self._waiting and self.time_ns - stamp_ns(self._waiting[0][1]) >= self.delay * SECOND:
                late, kept = self._waiting.popleft()
                late.publish(kept)

        self.node.create_subscription(kind, topic, on_message, QoSProfile(depth=100))

    def see(self, camera: str, message: Image) -> bool:
        if camera in self.frozen:
            message.header.stamp = self._stamps.setdefault(camera, message.header.stamp)
        else:
            self._stamps.pop(camera, None)
        return True

    def measure(self, arm: str, message: JointState) -> bool:
        self.measured[arm].append(message)
        return bool(self._chance.random() >= self.dropped)

    @property
    def time_ns(self) -> int:
        """The robot's: of its newest joint state."""
        return max((stamp_ns(samples[-1]) for samples in self.measured.values() if samples), default=0)

    def let_pass(self, seconds: float) -> None:
        """Seconds of the robot's time."""
        until = self.time_ns + seconds * SECOND
        self.wait_for(lambda: self.time_ns >= until, f"{seconds} s of the robot's time")

    def motion(self, arm: str, since_ns: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Positions [samples, 6] in rad and speeds [samples - 1, 6] in rad/s of the simulated joints."""
        samples = [sample for sample in self.measured[arm] if stamp_ns(sample) >= since_ns]
        positions = np.array([sample.position[:JOINTS] for sample in samples])
        seconds = np.diff([stamp_ns(sample) for sample in samples]) / SECOND
        return positions, np.diff(positions, axis=0) / seconds[:, None]

    def wait_for_rest(self) -> None:
        """Until the last command is a hold and the joints have come to rest."""
        self.wait_for(lambda: all(len(one[-1].points) == 1 for one in self.trajectories.values()), "hold of both arms")
        self.let_pass(1.0)
        begin = self.time_ns
        self.let_pass(0.5)
        for arm in self.measured:
            assert np.ptp(self.motion(arm, begin)[0], axis=0).max() < 0.01, f"the {arm} arm still moves"


class Faults(unittest.TestCase):
    robot: ClassVar[Relay]

    @classmethod
    def setUpClass(cls) -> None:
        cls.robot = Relay()
        cls.robot.wait_for(lambda: len(cls.robot.chunks) >= 2, "two chunks", timeout=90)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.robot.close()

    def tearDown(self) -> None:
        """It recovers by itself and moves on, and at no time was a joint out of its limits."""
        robot = self.robot
        robot.frozen, robot.dropped, robot.delay = set(), 0.0, 0.0
        begin = len(robot.chunks)
        robot.wait_for(lambda: len(robot.chunks) > begin, "chunk after the fault")
        robot.wait_for_status(PolicyStatus.RUNNING)
        assert robot.statuses[-1].clamps > 0, "there was nothing to limit"
        for arm in robot.measured:
            positions, speeds = robot.motion(arm)
            assert np.ptp(positions, axis=0).max() > 0.05, "it does not move"
            assert (positions >= LOWER - SWING).all(), positions.min(axis=0)
            assert (positions <= UPPER + SWING).all(), positions.max(axis=0)
            assert np.abs(speeds).max() <= SWING_SPEED * SPEED, np.abs(speeds).max(axis=0)

    def test_a_camera_that_freezes_on_one_stamp_is_held_for(self) -> None:
        self.robot.frozen = {"cam_high"}
        status = self.robot.wait_for_status(PolicyStatus.WAITING, "camera cam_high: stale: newest frame is")
        assert "cam_left_wrist" not in status.reason
        self.robot.wait_for_rest()

    def test_joint_states_that_are_all_lost_are_held_for(self) -> None:
        self.robot.dropped = 1.0
        self.robot.wait_for_status(PolicyStatus.WAITING, f"{SPOILED}/aloha_sim/left/joint_states: stale")
        self.robot.wait_for_rest()

    def test_joint_states_of_which_most_are_lost(self) -> None:
        self.robot.dropped = 0.8
        self.robot.let_pass(4.0)

    def test_observations_that_are_300_ms_old_when_they_come(self) -> None:
        self.robot.delay = 0.3
        self.robot.let_pass(1.0)
        known = len(self.robot.chunks)
        self.robot.wait_for(lambda: len(self.robot.chunks) >= known + 6, "chunks of old observations")
        assert self.robot.statuses[-1].state == PolicyStatus.RUNNING


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    def test_both_ended_cleanly(self, proc_info: Any) -> None:
        launch_testing.asserts.assertExitCodes(proc_info)
