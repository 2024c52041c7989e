"""One policy node that lives through what goes wrong around a robot, on a clock that this test keeps.

The node follows /clock, so that a test may let time stand still: then a control period is as long as the test wants it,
and an inference takes no time of the robot's however long it lasts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from rclpy.qos import QoSProfile
from rclpy.time import Time
from rosgraph_msgs.msg import Clock

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from ros.http_clients import HttpClient, free_port
from ros.policy_process import (
    ACTIVATE,
    CLEANUP,
    CONFIGURE,
    DEACTIVATE,
    Node,
    assert_ended_well,
    change_state,
    set_parameter,
    state,
)
from ros.robot_stand_in import POSE, PROFILE, Robot, stamp_ns

SECOND = 1_000_000_000
PERIOD_NS = PROFILE.command_period_ns
CLOCK_STEP = 0.01
LONG = 300
"""Denoise steps of an inference that lasts for a second or more."""
MOST_GROWTH = 12 * 2**20
"""Bytes by which resident memory may be more after the tenth configuration than after the second: less than three times
the weights, of the eight that came and went. The middleware grows by a little each time."""


class TimedRobot(Robot):
    """A robot that keeps the time, from 1000 s on; ``still``: it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.time_ns, self.still = 1000 * SECOND, False
        self.clock = self.node.create_publisher(Clock, "/clock", QoSProfile(depth=10))
        self.node.create_timer(CLOCK_STEP, self.tell_time)

    def tell_time(self) -> None:
        if not self.still:
            self.time_ns += round(CLOCK_STEP * SECOND)
        self.clock.publish(Clock(clock=self.now))

    @property
    def now(self) -> Any:
        return Time(nanoseconds=self.time_ns).to_msg()

    @property
    def now_ns(self) -> int:
        return self.time_ns

    def let_pass(self, seconds: float) -> None:
        """Seconds of the robot's time."""
        until = self.time_ns + seconds * SECOND
        self.wait_for(lambda: self.time_ns >= until, f"{seconds} s of the robot's time")

    def last(self) -> Any:
        return self.trajectories["left"][-1]

    def wait_for_hold(self, measured: bool = True) -> None:
        """Until the last command to either arm is to stay, measured: where this robot stands."""

        def held(trajectories: list[Any]) -> bool:
            last = trajectories[-1]
            if len(last.points) > 1 or stamp_ns(last) != 0:  # a hold is to be taken whenever it comes
                return False
            return not measured or np.allclose(last.points[0].positions[:6], POSE[:6], atol=1e-6)

        self.wait_for(lambda: all(map(held, self.trajectories.values())), "hold of both arms")

    def assert_nothing_comes(self) -> None:
        counts = len(self.trajectories["left"]), len(self.trajectories["right"]), len(self.chunks)
        self.let_pass(1.0)
        assert counts == (len(self.trajectories["left"]), len(self.trajectories["right"]), len(self.chunks))


@pytest.fixture(scope="module")
def robot() -> Iterator[TimedRobot]:
    robot = TimedRobot()
    yield robot
    robot.close()


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("faults")
    checkpoint = make_checkpoint("tiny", folder / "tiny")
    values = {"robot": "aloha_sim", "prompt": "x", "device": "cpu", "use_sim_time": True, "http_port": port}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "1")  # else what threads that are gone have freed is not used again for long
        node = Node(folder / "log", checkpoint=checkpoint, **values)
    yield node
    node.kill()


@pytest.fixture
def node(process: Node, robot: TimedRobot) -> Node:
    """Active and moving, whatever the test before did."""
    bring_up(robot, 0)
    return process


@pytest.fixture
def slow_node(process: Node, robot: TimedRobot, port: int) -> Node:
    """Active and moving, time stands still, and an inference runs that has to go on for long."""
    bring_up(robot, LONG)
    infer_while_time_stands_still(robot, port)
    return process


def bring_up(robot: TimedRobot, num_steps: int) -> None:
    robot.still = False
    for transition, of in ((DEACTIVATE, "active"), (CLEANUP, "inactive")):
        if state(robot) == of:
            assert change_state(robot, transition)
    assert set_parameter(robot, "num_steps", num_steps).successful
    assert change_state(robot, CONFIGURE)
    robot.still = num_steps > 0
    begin = len(robot.chunks)
    assert change_state(robot, ACTIVATE)
    robot.wait_for(lambda: len(robot.chunks) > begin, "chunk")
    robot.still = False
    robot.wait_for_status(PolicyStatus.RUNNING)


def infer_while_time_stands_still(robot: TimedRobot, port: int) -> None:
    """Time goes on until the next chunk is asked for."""
    client = HttpClient(port)
    robot.still = False
    robot.wait_for(lambda: client.engine("pi05_running") == 1, "inference")
    robot.still = True
    assert len(robot.last().points) > 1, "the arm moves meanwhile"


def test_a_position_that_is_no_number_is_named_and_held_for(node: Node, robot: TimedRobot) -> None:
    robot.pose["elbow"] = float("nan")
    try:
        robot.wait_for_status(PolicyStatus.WAITING, "joint elbow in /aloha_sim/left/joint_states: its position is nan.")
        robot.wait_for_hold(measured=False)
        assert np.isfinite(robot.last().points[0].positions).all(), "it is held at the last command"
        robot.assert_nothing_comes()
        assert robot.statuses[-1].refused_observations > 0
    finally:
        robot.pose["elbow"] = POSE[2]
    robot.wait_for_status(PolicyStatus.RUNNING)


def test_velocities_and_efforts_that_are_no_numbers_are_legal(node: Node, robot: TimedRobot) -> None:
    robot.rate = float("nan")
    try:
        robot.let_pass(0.2)
        refused = robot.statuses[-1].refused_observations
        robot.wait_for_chunk(after_ns=robot.now_ns)
        status = robot.wait_for_status(PolicyStatus.RUNNING)
        assert status.refused_observations == refused
    finally:
        robot.rate = None


@pytest.mark.parametrize("jump", [-30.0, 30.0])
def test_a_clock_that_jumps_holds_forgets_and_goes_on(node: Node, robot: TimedRobot, jump: float) -> None:
    robot.let_pass(0.3)
    sent, told = len(robot.trajectories["left"]), len(node.text)
    robot.time_ns += round(jump * SECOND)
    robot.wait_for(lambda: any(len(one.points) == 1 for one in robot.trajectories["left"][sent:]), "hold")
    begin = robot.now_ns
    robot.wait_for(lambda: 0 <= stamp_ns(robot.chunks[-1]) - begin < 10 * SECOND, "chunk of the new time")
    robot.wait_for_status(PolicyStatus.RUNNING)
    robot.wait_for(lambda: len(robot.last().points) > 1, "motion")
    assert abs(stamp_ns(robot.last()) - robot.now_ns) < SECOND
    lines = [line for line in node.text[told:].splitlines() if "went back by" in line]
    assert len(lines) == (jump < 0), "a jump ahead makes the streams stale, which ~/status says"


def test_ten_configurations_leave_nothing_behind(process: Node, robot: TimedRobot) -> None:
    bring_up(robot, 0)
    seen = psutil.Process(process.process.pid)
    resident, threads = [], []
    for _ in range(10):
        bring_up(robot, 0)
        assert change_state(robot, DEACTIVATE)
        robot.wait_for_hold()
        assert change_state(robot, CLEANUP)
        resident.append(seen.memory_info().rss)
        threads.append(seen.num_threads())
    assert resident[9] - resident[1] < MOST_GROWTH, [value // 2**20 for value in resident]
    robot.wait_for(lambda: seen.num_threads() <= min(threads), f"end of threads, of which there were {threads}")


def test_disable_during_an_inference_holds_within_a_period_and_its_chunk_is_lost(
    slow_node: Node, robot: TimedRobot, port: int
) -> None:
    sequence = robot.chunks[-1].sequence
    assert robot.enable(False).success
    robot.time_ns += PERIOD_NS
    robot.wait_for_hold()
    assert HttpClient(port).engine("pi05_running") == 1, "it still infers"
    robot.wait_for(lambda: HttpClient(port).engine("pi05_running") == 0, "end of the inference")
    robot.still = False
    robot.assert_nothing_comes()
    assert robot.statuses[-1].state == PolicyStatus.DISABLED

    robot.still = True
    assert robot.enable(True).success
    robot.wait_for(lambda: robot.chunks[-1].sequence == sequence + 1, "chunk, the next that counts")
    robot.time_ns += PERIOD_NS
    robot.wait_for(lambda: len(robot.last().points) > 1, "motion, within a period too")


def test_deactivate_during_an_inference_ends_with_a_hold(slow_node: Node, robot: TimedRobot) -> None:
    assert change_state(robot, DEACTIVATE)
    robot.wait_for_status(PolicyStatus.INACTIVE)
    robot.wait_for_hold()
    robot.still = False
    robot.assert_nothing_comes()


def test_sigint_during_an_inference_ends_with_a_hold(slow_node: Node, robot: TimedRobot) -> None:
    assert_ended_well(slow_node, signal.SIGINT)
    robot.wait_for_hold()
    robot.still = False
    robot.assert_nothing_comes()
