"""The simulated robot over real ROS: a process of its own, this test as its only user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Duration, Time
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, qos_profile_sensor_data
from ros.services import Services
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool, Float32
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from pi05_ros.policy.profile import load_profile
from pi05_ros.sim.scene import CAMERAS, COMMAND_NAMES, HOME_POSE, JOINT_NAMES, AlohaScene
from sim import handover

DOMAIN = int(os.environ["ROS_DOMAIN_ID"])  # of this test run alone
TIMEOUT = 30.0
LATCHED = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Robot:
    """The process of the simulated robot, and a ROS node that listens to all that it says."""

    def __init__(self, log: Path, domain: int = DOMAIN, **parameters: Any) -> None:
        arguments = [word for name, value in parameters.items() for word in ("-p", f"{name}:={value}")]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pi05_ros.tools.aloha_sim", "--ros-args", *arguments],
            env={**os.environ, "ROS_DOMAIN_ID": str(domain)},
            stderr=log.open("w"),
        )
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = Node("listener", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.heard: dict[str, list[Any]] = defaultdict(list)
        self.listen(Clock, "/clock", QoSProfile(depth=10_000))
        for arm in ("left", "right"):
            self.listen(JointState, f"/aloha_sim/{arm}/joint_states", QoSProfile(depth=1000))
        for camera in CAMERAS:
            self.listen(Image, f"/aloha_sim/{camera}/image_raw", qos_profile_sensor_data)
        self.listen(Float32, "/aloha_sim/reward", LATCHED)
        self.listen(Bool, "/aloha_sim/success", LATCHED)
        self.listen(Float32, "/aloha_sim/real_time_factor", LATCHED)
        self.commands = {
            arm: self.node.create_publisher(JointTrajectory, f"/aloha_sim/{arm}/joint_trajectory", 10)
            for arm in ("left", "right")
        }
        self.services = Services(self.node, self.wait_for)

    def listen(self, kind: type, topic: str, qos: QoSProfile) -> None:
        self.node.create_subscription(kind, topic, self.heard[topic].append, qos)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {TIMEOUT} s; {self.log.read_text()}"
            assert self.process.poll() is None, f"the robot died; {self.log.read_text()}"
            self.executor.spin_once(timeout_sec=0.1)

    @property
    def now(self) -> float:
        return seconds(self.heard["/clock"][-1].clock) if self.heard["/clock"] else 0.0

    def wait_until(self, sim_time: float) -> None:
        self.wait_for(lambda: self.now >= sim_time, f"simulated time {sim_time}")

    def positions(self, arm: str) -> np.ndarray:
        return np.array(self.heard[f"/aloha_sim/{arm}/joint_states"][-1].position)

    def settle(self, seconds_: float) -> None:
        """Let that much simulated time pass, and a joint state come in after it."""
        self.wait_until(self.now + seconds_)
        before = {arm: len(self.heard[f"/aloha_sim/{arm}/joint_states"]) for arm in ("left", "right")}
        self.wait_for(
            lambda: all(len(self.heard[f"/aloha_sim/{arm}/joint_states"]) > count for arm, count in before.items()),
            "joint states",
        )

    def command(
        self, arm: str, points: list[tuple[float, Any]], names: Any = COMMAND_NAMES, stamp: float = 0.0
    ) -> None:
        message = JointTrajectory(joint_names=list(names))
        message.header.stamp = Time(sec=int(stamp), nanosec=int(stamp % 1 * 1e9))
        for after, positions in points:
            point = JointTrajectoryPoint(positions=[float(value) for value in positions])
            point.time_from_start = Duration(sec=int(after), nanosec=int(after % 1 * 1e9))
            message.points.append(point)
        self.commands[arm].publish(message)

    def reset(self) -> str:
        answer = self.services.call(Trigger, "/aloha_sim/reset", Trigger.Request())
        assert answer.success
        return str(answer.message)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(5.0)
        finally:
            self.process.kill()
            self.executor.shutdown()
            self.node.destroy_node()
            rclpy.shutdown(context=self.context)


def seconds(stamp: Any) -> float:
    return stamp.sec + stamp.nanosec * 1e-9


@pytest.fixture(scope="module")
def running_robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    """Faster than real time, with small and rare pictures, which are all that costs; not so fast that this test's own
    process cannot keep up with the clock."""
    robot = Robot(
        tmp_path_factory.mktemp("aloha_sim") / "log",
        max_real_time_factor=4.0,
        camera_rate=2.0,
        camera_width=64,
        camera_height=48,
        render_quality="fast",
        seed=7,
    )
    robot.wait_for(lambda: all(len(robot.heard[topic]) > 0 for topic in robot.heard), "message on every topic")
    robot.wait_for(lambda: all(p.get_subscription_count() for p in robot.commands.values()), "command topics")
    yield robot
    assert robot.stop(signal.SIGINT) == 0


@pytest.fixture
def robot(running_robot: Robot) -> Robot:
    running_robot.reset()
    return running_robot


def test_the_topics_are_those_of_the_robot_profile(robot: Robot) -> None:
    profile = load_profile("aloha_sim")
    offered = {name for name, _ in robot.node.get_topic_names_and_types()}
    wanted = {camera.topic for camera in profile.cameras} | {arm.state_topic for arm in profile.arms}
    wanted |= {arm.command.topic for arm in profile.arms if arm.command}
    assert wanted <= offered
    for arm in profile.arms:
        assert arm.gripper is not None
        assert sorted([*arm.joints, arm.gripper.command_joint or arm.gripper.joint]) == sorted(COMMAND_NAMES)
        assert set(arm.joints) | {arm.gripper.joint} <= set(JOINT_NAMES)


def test_the_clock_advances_one_physics_step_at_a_time(robot: Robot) -> None:
    robot.heard["/clock"].clear()
    robot.wait_for(lambda: len(robot.heard["/clock"]) > 500, "clock")
    ticks = [message.clock.sec * 10**9 + message.clock.nanosec for message in robot.heard["/clock"]]
    assert set(np.diff(ticks)) == {2_000_000}


def test_joint_states_carry_names_simulated_time_and_the_set_rate(robot: Robot) -> None:
    states = robot.heard["/aloha_sim/left/joint_states"]
    states.clear()
    robot.wait_for(lambda: len(states) > 20, "joint states")
    for state in states:
        assert tuple(state.name) == JOINT_NAMES
        assert len(state.position) == len(state.velocity) == len(JOINT_NAMES)
    stamps = [round(seconds(state.header.stamp), 9) for state in states]
    np.testing.assert_allclose(np.diff(stamps), 0.02, atol=1e-9)
    assert abs(stamps[-1] - robot.now) < 0.1
    np.testing.assert_allclose(robot.positions("left"), [*HOME_POSE, -HOME_POSE[-1]], atol=0.02)


def test_cameras_show_the_same_moment_in_rgb8(robot: Robot) -> None:
    topics = [f"/aloha_sim/{camera}/image_raw" for camera in CAMERAS]
    for topic in topics:
        robot.heard[topic].clear()
    robot.wait_for(lambda: all(robot.heard[topic] for topic in topics), "images")
    images = [robot.heard[topic][0] for topic in topics]
    assert len({seconds(image.header.stamp) for image in images}) == 1
    for image, camera in zip(images, CAMERAS, strict=True):
        assert (image.height, image.width, image.encoding, image.step) == (48, 64, "rgb8", 192)
        assert image.header.frame_id == camera
        pixels = np.frombuffer(image.data, np.uint8).reshape(48, 64, 3)
        assert pixels.std() > 10
    top = np.frombuffer(images[0].data, np.uint8).reshape(48, 64, 3).astype(int)
    assert ((top[..., 0] > 150) & (top[..., 1] < 60)).any(), "the cube is red, not blue"


def test_a_trajectory_is_followed_at_its_own_pace(robot: Robot) -> None:
    start = robot.now + 2.0  # far enough ahead that a busy machine is not late for it
    target = np.array(HOME_POSE)
    target[[0, 1, 6]] += [0.4, 0.2, 0.02]
    robot.command("left", [(2.0, target)], stamp=start)
    states = robot.heard["/aloha_sim/left/joint_states"]
    states.clear()
    robot.wait_until(start + 3.0)
    waist = {round(seconds(state.header.stamp) - start, 2): state.position[0] for state in states}
    times = sorted(waist)
    measured = np.array([waist[at] for at in times])
    np.testing.assert_allclose(measured, np.interp(times, [0.0, 2.0], [0.0, 0.4]), atol=0.05)  # servos lag
    np.testing.assert_allclose(robot.positions("left")[:7], target, atol=0.02)
    assert robot.positions("left")[7] == pytest.approx(-target[6], abs=0.003)  # the other finger comes along
    np.testing.assert_allclose(robot.positions("right")[:6], HOME_POSE[:6], atol=0.02)


def test_names_in_another_order_mean_the_same(robot: Robot) -> None:
    target = np.array(HOME_POSE)
    target[[0, 6]] += [0.3, 0.03]
    robot.command("right", [(0.5, target[::-1])], names=COMMAND_NAMES[::-1])
    robot.settle(1.5)
    np.testing.assert_allclose(robot.positions("right")[:7], target, atol=0.02)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"names": JOINT_NAMES, "points": [(1.0, [0.0] * 8)]}, "joint_names: expected each of waist"),
        ({"points": [(1.0, [0.0] * 6)]}, "points[0].positions: expected 7 values"),
        ({"points": [(1.0, [float("nan")] * 7)]}, "points[0].positions: the target of waist is not finite"),
        ({"points": [(1.0, [0.0] * 7)] * 2}, "points[1].time_from_start"),
        ({"points": [(0.001, [0.0] * 7)], "stamp": 0.01}, "in the past"),
    ],
)
def test_a_malformed_trajectory_is_refused_with_a_logged_sentence(
    robot: Robot, change: dict[str, Any], complaint: str
) -> None:
    already = len(robot.log.read_text())
    robot.command("left", **change)
    robot.wait_for(lambda: complaint in robot.log.read_text()[already:], f"log of {complaint!r}")
    assert "Trajectory of the left arm refused" in robot.log.read_text()[already:]
    robot.settle(0.5)
    np.testing.assert_allclose(robot.positions("left")[:6], HOME_POSE[:6], atol=0.02)


def test_reset_begins_the_next_episode_while_time_goes_on(robot: Robot) -> None:
    robot.command("left", [(0.5, np.array(HOME_POSE) + 0.2)])
    robot.settle(1.0)
    assert robot.positions("left")[0] > 0.15
    before, count = robot.now, int(robot.reset().split("Episode ")[1].split()[0])
    assert robot.reset() == f"Episode {count + 1} began, seed {7 + count + 1}."
    robot.settle(0.2)
    np.testing.assert_allclose(robot.positions("left")[:6], HOME_POSE[:6], atol=0.02)
    assert robot.now > before


def test_the_task_is_solved_over_topics_and_its_success_is_told(robot: Robot) -> None:
    """The scripted handover as two long trajectories; the plan comes from a scene of our own with the same seed."""
    next_seed = 1 + int(robot.reset().rstrip(".").split("seed ")[1])
    points: dict[str, list[tuple[float, Any]]] = {"left": [], "right": []}
    at = 0.2
    for duration, targets in handover.waypoints(AlohaScene(next_seed)):
        for arm, of_arm in (("left", targets[:7]), ("right", targets[7:])):
            points[arm] += [(at + 0.8 * duration, of_arm), (at + duration, of_arm)]
        at += duration
    assert f"seed {next_seed}." in robot.reset()
    robot.heard["/aloha_sim/reward"].clear()
    robot.heard["/aloha_sim/success"].clear()
    for arm in ("left", "right"):
        robot.command(arm, points[arm])
    robot.wait_for(lambda: any(message.data for message in robot.heard["/aloha_sim/success"]), "success")
    assert {2.0, 4.0} <= {message.data for message in robot.heard["/aloha_sim/reward"]}
    robot.wait_for(lambda: "the cube was handed over" in robot.log.read_text(), "log of the success")


def test_it_never_runs_faster_than_allowed_reports_its_speed_and_stops_on_sigterm(tmp_path: Path) -> None:
    robot = Robot(
        tmp_path / "log",
        domain=1 + DOMAIN % 101,  # the other robot may still run
        max_real_time_factor=2.0,
        camera_rate=0.1,
        episode_length=0.5,
    )
    try:
        robot.wait_until(0.5)
        simulated, wall = robot.now, time.monotonic()
        robot.wait_for(lambda: len(robot.heard["/aloha_sim/real_time_factor"]) >= 3, "real-time factor")
        assert (robot.now - simulated) / (time.monotonic() - wall) < 2.2
        assert all(0.0 < message.data < 2.2 for message in robot.heard["/aloha_sim/real_time_factor"])
        assert "Episode 0 ended after 0.5 s" in robot.log.read_text()
    finally:
        code = robot.stop(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in robot.log.read_text()


@pytest.mark.parametrize(
    ("parameter", "complaint"),
    [
        ("camera_rate:=-1.0", "camera_rate out of range"),
        ("render_quality:=best", "render_quality: expected full or fast, got 'best'"),
    ],
)
def test_a_wrong_parameter_is_one_line_and_exit_code_1(parameter: str, complaint: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pi05_ros.tools.aloha_sim", "--ros-args", "-p", parameter],
        env={**os.environ, "ROS_DOMAIN_ID": str(DOMAIN)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 1
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_help_names_every_parameter() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pi05_ros.tools.aloha_sim", "--help"], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0
    for name in ("camera_width", "camera_rate", "max_real_time_factor", "seed", "episode_length", "render_quality"):
        assert name in result.stdout
