"""The policy node on the simulated ALOHA: what it plans is what the policy says of the frames that the robot sent."""

from __future__ import annotations

import itertools
import tempfile
import unittest
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import launch_testing
import launch_testing.asserts
import numpy as np
import pytest
from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_testing.actions import ReadyToTest
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image, JointState

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import ActionChunk, PolicyStatus
from ros.robot_stand_in import PROFILE, Robot, rows, stamp_ns

SEED = 11
MS = 1_000_000


@pytest.mark.needs_launch
@pytest.mark.launch_test
def generate_test_description() -> tuple[LaunchDescription, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="pi05_sim_launch_"))
    checkpoint = make_checkpoint("tiny", folder / "tiny")
    sim_launch = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(get_package_share_directory("pi05_ros")) / "launch/sim.launch.py")),
        launch_arguments={
            "checkpoint": str(checkpoint),
            "device": "cpu",
            "precision": "float32",
            "policy_seed": str(SEED),
            "seed": str(SEED + 1),  # of the robot
            "render_quality": "fast",
            "camera_width": "64",
            "camera_height": "48",
            "http_port": "0",
        }.items(),
    )
    return LaunchDescription([sim_launch, ReadyToTest()]), {"checkpoint": checkpoint}


class Listener(Robot):
    """Keeps every frame and joint sample by its stamp."""

    def __init__(self) -> None:
        super().__init__(sim=True)
        self.frames: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self.states: dict[str, dict[int, JointState]] = defaultdict(dict)
        for camera in PROFILE.cameras:
            self.node.create_subscription(Image, camera.topic, self.keep_frame(camera.name), QoSProfile(depth=20))
        for arm in PROFILE.arms:
            self.node.create_subscription(JointState, arm.state_topic, self.keep_state(arm.name), QoSProfile(depth=100))

    def keep_frame(self, camera: str) -> Any:
        def keep(message: Image) -> None:
            pixels = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)
            self.frames[camera][stamp_ns(message)] = pixels

        return keep

    def keep_state(self, arm: str) -> Any:
        def keep(message: JointState) -> None:
            self.states[arm][stamp_ns(message)] = message

        return keep

    def observations(self, chunk: ActionChunk) -> Any:
        """Everything the node may have seen at the stamp of a chunk, the likeliest first."""
        stamp = stamp_ns(chunk)

        def near(samples: dict[int, Any], before: int, after: int) -> list[Any]:
            times = sorted(samples, key=lambda time: abs(time - stamp))
            return [samples[time] for time in times if -before <= time - stamp <= after]

        frames = [near(self.frames[camera.name], 0, 100 * MS) for camera in PROFILE.cameras]
        states = [near(self.states[arm.name], 40 * MS, 40 * MS) for arm in PROFILE.arms]
        for chosen in itertools.product(*states, *frames):
            state: list[float] = []
            for arm, message in zip(PROFILE.arms, chosen, strict=False):
                values = dict(zip(message.name, message.position, strict=True))
                state += [values[joint] for joint in arm.joints]
                state.append(arm.gripper.state_to_unit(values[arm.gripper.joint]))
            images = dict(zip((camera.name for camera in PROFILE.cameras), chosen[2:], strict=True))
            yield Observation(images, np.array(state, np.float32), chunk.prompt)


class PolicyOnSim(unittest.TestCase):
    robot: ClassVar[Listener]

    @classmethod
    def setUpClass(cls) -> None:
        cls.robot = Listener()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.robot.close()

    def test_chunks_are_what_the_policy_says_of_the_robots_frames(self, checkpoint: Path) -> None:
        robot = self.robot
        robot.wait_for(lambda: len(robot.chunks) >= 4, "four chunks", timeout=90)
        robot.wait_for_status(PolicyStatus.RUNNING)
        robot.spin(0.5)
        with Policy.from_checkpoint(checkpoint, "cpu", "float32", "aloha_sim", compile_mode="plain") as policy:
            for chunk in robot.chunks[1:4]:  # this listener may have come later than the frames of the first
                candidates = itertools.islice(robot.observations(chunk), 40)
                errors = (
                    np.abs(policy.infer(observation, seed=SEED).actions - rows(chunk)).max()
                    for observation in candidates
                )
                assert any(error < 1e-5 for error in errors), f"chunk {chunk.sequence} is of no frames that were sent"
        assert [chunk.sequence for chunk in robot.chunks[:4]] == [1, 2, 3, 4]
        assert chunk.prompt == "Transfer cube"

    def test_the_robot_moves_as_it_is_commanded(self) -> None:
        robot = self.robot
        robot.wait_for(lambda: len(robot.trajectories["left"]) > 5 and len(robot.chunks) >= 2, "commands", timeout=90)
        begin = max(robot.states["left"])
        robot.wait_for(lambda: max(robot.states["left"]) > begin + 500 * MS, "half a second of the robot's time")
        poses = np.array([message.position for message in robot.states["left"].values()])
        assert np.abs(poses[-1] - poses[0]).max() > 0.01
        assert robot.statuses[-1].state == PolicyStatus.RUNNING


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    def test_both_ended_cleanly(self, proc_info: Any) -> None:
        launch_testing.asserts.assertExitCodes(proc_info)
