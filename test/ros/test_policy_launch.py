"""policy.launch.py as a user starts it, with a tiny checkpoint: real processes, real topics, a robot of this test."""

from __future__ import annotations

import tempfile
import unittest
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
from launch_testing.actions import ReadyToTest
from std_msgs.msg import String

from pi05_ros import Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from pi05_ros.policy.profile import config_folder
from ros.http_clients import HttpClient, free_port
from ros.robot_stand_in import NAMES, PROFILE, Robot, picture, rows, stamp_ns

SEED = 7
PROMPT = "on"  # which YAML takes for a boolean, where it is not told otherwise
SECOND = 1_000_000_000


def without_limits(folder: Path) -> Path:
    """The robot's profile, by which rows go out as the network says them: one that means nothing jumps about."""
    data = yaml.safe_load((config_folder() / "robots/aloha_sim.yaml").read_text())
    for arm in data["arms"]:
        del arm["limits"]
    path = folder / "aloha_sim.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.needs_launch
@pytest.mark.launch_test
def generate_test_description() -> tuple[LaunchDescription, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="pi05_launch_"))
    checkpoint = make_checkpoint("tiny", folder / "tiny")
    parameters, port = folder / "parameters.yaml", free_port()
    # The prompt stands in the file and the argument: the argument wins.
    parameters.write_text(f"/**:\n  ros__parameters:\n    seed: {SEED}\n    precision: float32\n    prompt: not this\n")
    policy_launch = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(get_package_share_directory("pi05_ros")) / "launch/policy.launch.py")),
        launch_arguments={
            "checkpoint": str(checkpoint),
            "robot": str(without_limits(folder)),
            "prompt": PROMPT,
            "device": "cpu",
            "params_file": str(parameters),
            "http_port": str(port),
        }.items(),
    )
    return LaunchDescription([policy_launch, ReadyToTest()]), {"checkpoint": checkpoint, "port": port}


class PolicyLaunch(unittest.TestCase):
    robot: ClassVar[Robot]

    @classmethod
    def setUpClass(cls) -> None:
        cls.robot = Robot()
        cls.policy: Policy | None = None
        cls.robot.wait_for_status(PolicyStatus.RUNNING)  # if the node does not come up at all, all tests end here

    @classmethod
    def tearDownClass(cls) -> None:
        cls.robot.close()
        if cls.policy:
            cls.policy.close()

    def setUp(self) -> None:
        """Whatever the test before did: all streams run and the node with them."""
        self.robot.wait_for_status(PolicyStatus.RUNNING)

    def expected(self, checkpoint: Path, prompt: str = PROMPT) -> np.ndarray:
        if self.policy is None:
            type(self).policy = Policy.from_checkpoint(checkpoint, "cpu", "float32", "aloha_sim", compile_mode="plain")
        assert self.policy is not None
        return self.policy.infer(self.robot.observation(prompt), seed=SEED).actions

    def test_chunks_are_what_the_policy_says_of_the_published_frames(self, checkpoint: Path) -> None:
        chunk = self.robot.wait_for_chunk(after_ns=self.robot.now_ns)
        np.testing.assert_allclose(rows(chunk), self.expected(checkpoint), atol=1e-5)
        assert stamp_ns(chunk) in self.robot.stamps
        assert list(chunk.joint_names) == list(PROFILE.joint_names)
        assert (chunk.horizon, chunk.action_dim, chunk.prompt) == (50, 14, PROMPT)
        assert (chunk.period.sec, chunk.period.nanosec) == (0, 20000000)
        assert chunk.total_ms > 0.0
        later = self.robot.wait_for_chunk(after_ns=stamp_ns(chunk))
        assert later.sequence == chunk.sequence + 1
        assert later.prefix_cache_hit

    def test_one_other_frame_gives_another_chunk(self, checkpoint: Path) -> None:
        for camera in self.robot.pictures:
            before = rows(self.robot.wait_for_chunk(after_ns=self.robot.now_ns))
            self.robot.pictures[camera] = picture(len(self.robot.stamps))
            self.robot.spin(0.2)
            after = rows(self.robot.wait_for_chunk(after_ns=self.robot.now_ns))
            assert np.abs(after - before).max() > 0.0001, camera
            np.testing.assert_allclose(after, self.expected(checkpoint), atol=1e-5)

    def test_a_prompt_counts_from_the_next_chunk_and_an_empty_one_is_refused(self, checkpoint: Path) -> None:
        self.robot.prompts.publish(String(data="fold the towel"))
        chunk = self.robot.wait_for_chunk(prompt="fold the towel")
        np.testing.assert_allclose(rows(chunk), self.expected(checkpoint, "fold the towel"), atol=1e-5)
        self.robot.prompts.publish(String(data="  "))
        assert self.robot.wait_for_chunk(after_ns=self.robot.now_ns + SECOND).prompt == "fold the towel"
        self.robot.prompts.publish(String(data=PROMPT))
        self.robot.wait_for_chunk(after_ns=self.robot.now_ns, prompt=PROMPT)

    def test_trajectories_are_the_rows_that_are_due(self) -> None:
        """What is commanded comes from a chunk, row for row, in the gripper's own unit, and never far ahead."""
        for heard in self.robot.trajectories.values():
            heard.clear()
        self.robot.wait_for(lambda: len(self.robot.trajectories["right"]) > 10, "trajectories")
        by_stamp = {stamp_ns(chunk): rows(chunk) for chunk in self.robot.chunks}
        matched = 0
        for message in self.robot.trajectories["right"][3:10]:
            assert list(message.joint_names) == NAMES
            assert len(message.points) <= 10
            assert list(message.points[-1].velocities) == [0.0] * 7
            times = [point.time_from_start.sec * SECOND + point.time_from_start.nanosec for point in message.points]
            assert times == [(index + 1) * 20000000 for index in range(len(times))]
            for stamp, chunk in by_stamp.items():
                index, rest = divmod(stamp_ns(message) - stamp, 20_000_000)
                if rest == 0 and 0 <= index < 50:
                    expected = chunk[index : index + len(times), 7:].astype(float)
                    expected[:, 6] = PROFILE.arms[1].gripper.unit_to_command(expected[:, 6])
                    got = np.array([point.positions for point in message.points])
                    matched += bool(np.allclose(got, expected, atol=1e-6))
        assert matched >= 5

    def test_a_camera_that_stops_is_waited_for(self) -> None:
        lost = self.robot.images.pop("cam_left_wrist")
        kept = self.robot.pictures.pop("cam_left_wrist")
        try:
            status = self.robot.wait_for_status(PolicyStatus.WAITING, "camera cam_left_wrist: stale: newest frame is")
            assert "limit 1 s" in status.reason
            assert "cam_high" not in status.reason
            self.robot.spin(0.3)
            count = len(self.robot.chunks) + len(self.robot.trajectories["left"])
            self.robot.spin(0.7)
            assert len(self.robot.chunks) + len(self.robot.trajectories["left"]) == count, "it still acts"
        finally:
            self.robot.images["cam_left_wrist"], self.robot.pictures["cam_left_wrist"] = lost, kept
        self.robot.wait_for_status(PolicyStatus.RUNNING)

    def test_a_wrong_encoding_is_named(self) -> None:
        before = self.robot.statuses[-1].refused_observations
        self.robot.encodings["cam_high"] = "32FC1"
        try:
            status = self.robot.wait_for_status(PolicyStatus.WAITING, "Encoding 32FC1")
            assert "camera cam_high on /aloha_sim/top/image_raw" in status.reason
            assert status.refused_observations > before
        finally:
            self.robot.encodings["cam_high"] = "rgb8"
        self.robot.wait_for_status(PolicyStatus.RUNNING)

    def test_a_missing_joint_is_named(self) -> None:
        self.robot.joint_names.remove("elbow")
        self.robot.wait_for_status(PolicyStatus.WAITING, "joint elbow is not in /aloha_sim/left/joint_states; it has")
        self.robot.joint_names.append("elbow")
        self.robot.wait_for_status(PolicyStatus.RUNNING)

    def test_disable_holds_once_and_enable_goes_on(self) -> None:
        assert self.robot.enable(False).success
        self.robot.wait_for_status(PolicyStatus.DISABLED)
        self.robot.spin(0.3)
        last = self.robot.trajectories["left"][-1]
        assert len(last.points) == 1
        np.testing.assert_allclose(last.points[0].positions[:6], [0.0, -0.96, 1.16, 0.0, -0.3, 0.0], atol=1e-6)
        count = len(self.robot.trajectories["left"]), len(self.robot.chunks)
        self.robot.spin(1.0)
        assert (len(self.robot.trajectories["left"]), len(self.robot.chunks)) == count
        assert self.robot.enable(True).success
        self.robot.wait_for_status(PolicyStatus.RUNNING)
        self.robot.wait_for_chunk(after_ns=self.robot.now_ns)

    def test_the_status_describes_every_stream(self) -> None:
        self.robot.spin(1.5)
        status = self.robot.statuses[-1]
        cameras = [camera.name for camera in PROFILE.cameras]
        assert list(status.streams) == [*cameras, *(arm.state_topic for arm in PROFILE.arms)]
        assert all(0 <= age < 1.0 for age in status.stream_ages), status.stream_ages
        assert all(5 < rate < 25 for rate in status.stream_rates), status.stream_rates
        assert (Path(status.robot).name, status.prompt, status.adapt_to_pi) == ("aloha_sim.yaml", PROMPT, False)
        assert status.latency_p95_ms >= status.latency_p50_ms
        assert status.latency_p50_ms > 0

    def test_the_same_policy_answers_over_http(self, port: int) -> None:
        client = HttpClient(port)
        assert client.get("/readyz").status == 200
        robot = client.get("/v1/actions/metadata").body["robot"]
        assert (robot["profile"], robot["joint_names"]) == ("aloha_sim", list(PROFILE.joint_names))
        assert client.act().actions.shape == (50, 14)

    def test_reset_forgets_the_prefixes(self) -> None:
        begin = self.robot.now_ns
        assert self.robot.reset().success
        self.robot.wait_for_chunk(after_ns=begin, prefix_cache_hit=False)


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    def test_it_ended_by_itself_and_cleanly(self, proc_info: Any, proc_output: Any) -> None:
        launch_testing.asserts.assertExitCodes(proc_info)
        text = "".join(line.text.decode() for line in proc_output)
        assert "Traceback" not in text
