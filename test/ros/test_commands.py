"""Setpoints to command messages, for every kind of output."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray

from pi05_ros.errors import ProfileError
from pi05_ros.policy import RobotProfile, load_profile, make_example, profile_names
from pi05_ros.robot.execution import Setpoints
from pi05_ros.ros.commands import RobotOutput

PERIOD = 20_000_000
START = 1_000 * PERIOD

INTERBOTIX = """
from dataclasses import dataclass, field

@dataclass
class JointGroupCommand:
    name: str
    cmd: list

@dataclass
class JointSingleCommand:
    name: str
    cmd: float
"""


class Node:
    """The part of a node that an output needs, keeping what is published by topic."""

    def __init__(self) -> None:
        self.sent: dict[str, list[Any]] = {}
        self.kinds: dict[str, Any] = {}
        self.listeners: dict[str, int] = {}
        self.other_publishers: dict[str, int] = {}
        self.warnings: list[str] = []
        self.acknowledged: list[str] = []

    def get_logger(self) -> Any:
        return SimpleNamespace(warning=self.warnings.append)

    def count_subscribers(self, topic: str) -> int:
        return self.listeners.get(topic, 0)

    def count_publishers(self, topic: str) -> int:
        return 1 + self.other_publishers.get(topic, 0)

    def create_publisher(self, kind: Any, topic: str, qos: Any) -> Any:
        self.sent[topic], self.kinds[topic] = [], kind
        return SimpleNamespace(
            publish=self.sent[topic].append,
            topic_name=topic,
            wait_for_all_acked=lambda timeout: self.acknowledged.append(topic),
        )

    def destroy_publisher(self, publisher: Any) -> None:
        assert publisher.topic_name in self.acknowledged, "the last command may be a hold"
        del self.kinds[publisher.topic_name]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def interbotix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins of the driver's two messages, importable as the real ones are."""
    folder = tmp_path / "interbotix_xs_msgs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "msg.py").write_text(INTERBOTIX)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("interbotix_xs_msgs", "interbotix_xs_msgs.msg"):
        sys.modules.pop(name, None)


def setpoints(profile: RobotProfile, count: int = 10, start_ns: int = START) -> Setpoints:
    """Row i is i + column / 100; grippers half open."""
    rows = np.arange(count)[:, None] + np.arange(profile.action_dim) / 100
    rows[:, np.array(profile.gripper_mask)] = 0.5
    return Setpoints(rows, start_ns)


def output(node: Node, profile: RobotProfile) -> RobotOutput:
    return RobotOutput(node, profile, PERIOD)  # type: ignore[arg-type]


def test_a_trajectory_is_the_rows_of_its_arm_in_command_units(node: Node) -> None:
    profile = load_profile("aloha_sim")
    output(node, profile).send(setpoints(profile))
    (message,) = node.sent["/aloha_sim/right/joint_trajectory"]
    assert list(message.joint_names) == [*profile.arms[1].joints, "left_finger"]
    assert message.header.stamp.sec * 10**9 + message.header.stamp.nanosec == START
    positions = np.array([point.positions for point in message.points])
    velocities = np.array([point.velocities for point in message.points])
    assert np.allclose(positions[:, :6], np.arange(10)[:, None] + np.arange(7, 13) / 100)
    gripper = profile.arms[1].gripper
    assert gripper is not None
    assert np.allclose(positions[:, 6], (gripper.command_at_0 + gripper.command_at_1) / 2)
    assert np.allclose(velocities[:-1, :6], 50.0), "one radian a period"
    assert np.allclose(velocities[:, 6], 0.0)
    assert (velocities[-1] == 0.0).all(), "a joint_trajectory_controller refuses to end in motion"
    times = [point.time_from_start.sec * 10**9 + point.time_from_start.nanosec for point in message.points]
    assert times == [(index + 1) * PERIOD for index in range(10)]


def test_a_trajectory_is_renewed_at_every_tick(node: Node) -> None:
    profile = load_profile("aloha_sim")
    arms = output(node, profile)
    for tick in range(5):
        arms.send(setpoints(profile, start_ns=START + tick * PERIOD))
    sent = node.sent["/aloha_sim/left/joint_trajectory"]
    assert [message.header.stamp.nanosec % 10**9 // PERIOD for message in sent] == [0, 1, 2, 3, 4]


def test_a_hold_is_to_be_taken_however_late_it_comes(node: Node) -> None:
    profile = load_profile("aloha_sim")
    output(node, profile).send(dataclasses.replace(setpoints(profile, count=1), holds=True))
    (message,) = node.sent["/aloha_sim/left/joint_trajectory"]
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (0, 0), "at once"


def test_an_array_is_the_one_row_that_is_due(node: Node) -> None:
    profile = load_profile("franka_droid")
    arm = output(node, profile)
    for tick in range(3):
        arm.send(setpoints(profile, start_ns=START + tick * PERIOD))
    sent = node.sent["/joint_velocity_controller/commands"]
    assert node.kinds["/joint_velocity_controller/commands"] is Float64MultiArray
    assert len(sent) == 3, "at every tick"
    assert np.allclose(sent[0].data, [*(np.arange(7) / 100), 0.4])


def test_a_gripper_with_a_topic_of_its_own_has_a_trajectory_of_its_own(node: Node) -> None:
    profile = load_profile("trossen_ai")
    wanted = setpoints(profile)
    wanted.rows[:, 13] = np.linspace(0.0, 0.044, 10)
    output(node, profile).send(wanted)
    (arm,) = node.sent["/trossen_arm_1/arm_controller/joint_trajectory"]
    (gripper,) = node.sent["/trossen_arm_1/gripper_controller/joint_trajectory"]
    assert list(arm.joint_names) == list(profile.arms[1].joints)
    assert list(gripper.joint_names) == ["trossen_arm_1/left_carriage_joint"]
    assert np.allclose([point.positions for point in arm.points], wanted.rows[:, 7:13])
    assert np.allclose([point.positions for point in gripper.points], wanted.rows[:, 13:], atol=1e-12), "in metres"
    assert [list(one.points[-1].velocities) for one in (arm, gripper)] == [[0.0] * 6, [0.0]]
    assert arm.header.stamp == gripper.header.stamp


def test_a_joint_state_is_the_one_row_that_is_due_by_name(node: Node) -> None:
    profile = load_profile("cobot_magic")
    arms, wanted = output(node, profile), setpoints(profile)
    wanted.rows[:, 13] = 3.5
    for _ in range(3):
        arms.send(wanted)
    assert node.kinds["/master/joint_right"] is JointState
    assert len(node.sent["/master/joint_right"]) == 3, "at every tick"
    message = node.sent["/master/joint_right"][0]
    assert list(message.name) == [f"joint{index}" for index in range(7)]
    assert np.allclose(message.position, [*(np.arange(7, 13) / 100), 3.5]), "the gripper as it is"
    assert message.header.stamp.sec * 10**9 + message.header.stamp.nanosec == START
    assert (list(message.velocity), list(message.effort)) == ([], [])


@pytest.mark.usefixtures("interbotix")
@pytest.mark.parametrize("name", [name for name in profile_names() if name != "libero"])
def test_every_robot_that_ships_can_be_commanded(node: Node, name: str) -> None:
    """Where it stands in its example: every topic of the profile gets it, in the driver's units."""
    profile = load_profile(name)
    state = make_example(profile).state
    output(node, profile).send(Setpoints(np.array([state], np.float64), START))
    commands = [arm.command for arm in profile.arms if arm.command]
    assert set(node.sent) == {topic for one in commands for topic in (one.topic, one.gripper_topic) if topic}
    assert all(len(messages) == 1 for messages in node.sent.values())


@pytest.mark.usefixtures("interbotix")
def test_interbotix_takes_the_arm_as_a_group_and_the_gripper_alone(node: Node) -> None:
    profile = load_profile("aloha_ros2")
    output(node, profile).send(setpoints(profile))
    (group,) = node.sent["/follower_right/commands/joint_group"]
    (single,) = node.sent["/follower_right/commands/joint_single"]
    assert group.name == "arm"
    assert np.allclose(group.cmd, np.arange(7, 13) / 100)
    assert single.name == "gripper"
    assert single.cmd == pytest.approx((0.6197 + 1.6214) / 2)


def test_without_the_interbotix_messages_the_way_out_is_said(node: Node) -> None:
    with pytest.raises(ProfileError, match=r"interbotix_xs_msgs, which is not installed here.*dry_run"):
        output(node, load_profile("aloha_ros2"))


def test_actions_that_are_no_joint_values_command_nothing(node: Node) -> None:
    with pytest.raises(ProfileError, match="'libero' says no command that its actions could go to"):
        output(node, load_profile("libero"))


@pytest.mark.usefixtures("interbotix")
@pytest.mark.parametrize("kind", ["joint_trajectory", "joint_state", "interbotix"])
def test_velocities_are_no_positions(node: Node, kind: Any) -> None:
    profile = load_profile("franka_droid")
    assert profile.arms[0].command is not None
    command = dataclasses.replace(profile.arms[0].command, type=kind, gripper_topic="/gripper")
    arms = (dataclasses.replace(profile.arms[0], command=command),)
    with pytest.raises(ProfileError, match=f"a {kind} takes positions, its actions are velocities"):
        output(node, dataclasses.replace(profile, arms=arms))
    assert node.kinds == {}


def test_who_else_commands_and_who_does_not_listen_is_said(node: Node) -> None:
    left, right = "/aloha_sim/left/joint_trajectory", "/aloha_sim/right/joint_trajectory"
    node.listeners, node.other_publishers = {left: 1}, {left: 2}
    arms = output(node, load_profile("aloha_sim"))
    arms.warn_of_others()
    assert node.warnings == [f"{left}: 2 more publish commands there; stop them."]
    arms.warn_of_silence()
    assert node.warnings[1:] == [f"{right}: nobody listens to commands there."]


def test_publishers_are_given_back(node: Node) -> None:
    arms = output(node, load_profile("aloha_sim"))
    assert len(node.kinds) == 2
    arms.destroy()
    assert node.kinds == {}


def test_publishers_are_given_back_when_another_arm_cannot_be_commanded(node: Node) -> None:
    profile = load_profile("aloha_sim")
    arms = (profile.arms[0], dataclasses.replace(profile.arms[1], action="velocity"))
    with pytest.raises(ProfileError, match="Arm 'right': a joint_trajectory takes positions"):
        output(node, dataclasses.replace(profile, arms=arms))
    assert node.kinds == {}
