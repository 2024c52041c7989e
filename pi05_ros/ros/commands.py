"""Setpoints to a robot: one output per arm, of the kind that its profile names."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from pi05_ros.errors import ProfileError
from pi05_ros.policy import RobotProfile
from pi05_ros.policy.profile import Arm, Command
from pi05_ros.robot.execution import Setpoints
from pi05_ros.robot.loop import SECOND
from pi05_ros.ros.conversions import to_duration, to_time

COMMAND_QOS = QoSProfile(depth=1)
"""Reliable: a command that is lost is a motion that does not happen, or a stop."""
ACKNOWLEDGED = 0.5
"""Seconds that a driver has to acknowledge the last command."""


class Output(ABC):
    """Sends the commands of one arm. Raises ProfileError: the arm's actions are of another kind than its commands."""

    takes_velocities = False
    """Where they are position commands, a velocity would be taken for a place to go to."""

    def __init__(self, node: Node, arm: Arm, command: Command, period_ns: int) -> None:
        if arm.action == "velocity" and not self.takes_velocities:
            raise ProfileError(f"Arm {arm.name!r}: a {command.type} takes positions, its actions are velocities.")
        self._node, self._arm, self._command, self._period_ns = node, arm, command, period_ns
        self._publishers: list[Publisher] = []

    @abstractmethod
    def send(self, rows: np.ndarray, setpoints: Setpoints) -> None:
        """rows: float64 [n, dims of the arm] in robot units (gripper 0..1), as ``setpoints`` dates them."""

    @property
    def topics(self) -> list[str]:
        """Topics of the commands, resolved."""
        return [publisher.topic_name for publisher in self._publishers]

    def destroy(self) -> None:
        """Give the publishers back."""
        for publisher in self._publishers:
            publisher.wait_for_all_acked(Duration(seconds=ACKNOWLEDGED))  # the last one may be a hold
            self._node.destroy_publisher(publisher)

    def _publisher(self, kind: Any, topic: str) -> Publisher:
        self._publishers.append(self._node.create_publisher(kind, topic, COMMAND_QOS))
        return self._publishers[-1]

    @property
    def _names(self) -> list[str]:
        """Of the dimensions in a command, the gripper's last."""
        gripper = self._arm.gripper
        return [*self._arm.joints, *([gripper.command_joint or gripper.joint] if gripper else [])]

    def _in_command_units(self, rows: np.ndarray) -> np.ndarray:
        """Joints as they are, the gripper from the policy's units to what its driver takes."""
        if self._arm.gripper is None:
            return rows
        rows = rows.copy()
        rows[:, -1] = self._arm.gripper.unit_to_command(rows[:, -1])
        return rows


class RobotOutput:
    """All arms of a robot.

    Raises ProfileError: the profile says no command for an arm, or messages are needed that are not installed.
    """

    def __init__(self, node: Node, profile: RobotProfile, period_ns: int) -> None:
        silent = [arm.name or str(index) for index, arm in enumerate(profile.arms) if arm.command is None]
        if silent or profile.action_names is not None:
            raise ProfileError(
                f"Robot profile {profile.name!r} says no command that its actions could go to "
                f"({'arm ' + ', '.join(silent) if silent else 'they are not joint values'}). "
                "Set dry_run to run without commands."
            )
        self._node = node
        self._outputs: list[tuple[slice, Output]] = []
        begin = 0
        for arm in profile.arms:
            end = begin + len(arm.dimension_names)
            if arm.command is not None:
                try:
                    output = _OUTPUTS[arm.command.type](node, arm, arm.command, period_ns)
                except ProfileError:
                    self.destroy()  # what the arms before it have: the node lives on
                    raise
                self._outputs.append((slice(begin, end), output))
            begin = end

    def send(self, setpoints: Setpoints) -> None:
        for columns, output in self._outputs:
            output.send(setpoints.rows[:, columns], setpoints)

    def warn_of_others(self) -> None:
        """Say so if somebody else publishes commands too (a teleoperation that was left on): both would fight."""
        for _, output in self._outputs:
            for topic in output.topics:
                others = self._node.count_publishers(topic) - 1
                if others > 0:
                    self._node.get_logger().warning(f"{topic}: {others} more publish commands there; stop them.")

    def warn_of_silence(self) -> None:
        """Say so if nobody listens: the driver is not up, or takes its commands in another way."""
        for _, output in self._outputs:
            for topic in output.topics:
                if self._node.count_subscribers(topic) == 0:
                    self._node.get_logger().warning(f"{topic}: nobody listens to commands there.")

    def destroy(self) -> None:
        for _, output in self._outputs:
            output.destroy()


class TrajectoryOutput(Output):
    """A ros2_control joint_trajectory_controller: the next rows as one short trajectory, which replaces the last one.

    Sent at every control tick: the safety filter reckons with what the arm was given last (robot/safety.py).
    """

    def __init__(self, node: Node, arm: Arm, command: Command, period_ns: int) -> None:
        super().__init__(node, arm, command, period_ns)
        arm_end = len(arm.joints) if command.gripper_topic else len(self._names)
        self._parts = [(slice(0, arm_end), self._publisher(JointTrajectory, command.topic))]
        if command.gripper_topic:
            self._parts.append((slice(arm_end, None), self._publisher(JointTrajectory, command.gripper_topic)))

    def send(self, rows: np.ndarray, setpoints: Setpoints) -> None:
        # A stamp of zero means at once. With another the controller refuses a trajectory that ends in the past, as a
        # hold would that a busy machine delivers a period late.
        start_ns = 0 if setpoints.holds else setpoints.start_ns
        positions = self._in_command_units(rows)
        for columns, trajectories in self._parts:
            trajectories.publish(self._message(self._names[columns], positions[:, columns], start_ns))

    def _message(self, names: list[str], positions: np.ndarray, start_ns: int) -> JointTrajectory:
        """Positions with finite-difference velocities, the last of which is zero, as the controller demands."""
        velocities = np.zeros_like(positions)
        velocities[:-1] = np.diff(positions, axis=0) * (SECOND / self._period_ns)
        message = JointTrajectory(joint_names=names)
        message.header.stamp = to_time(start_ns)
        message.points = [
            JointTrajectoryPoint(
                positions=position.tolist(),
                velocities=velocity.tolist(),
                time_from_start=to_duration((index + 1) * self._period_ns),
            )
            for index, (position, velocity) in enumerate(zip(positions, velocities, strict=True))
        ]
        return message


class JointStateOutput(Output):
    """A driver that follows joint states, as Cobot Magic's does: the row that is due, at every control tick."""

    def __init__(self, node: Node, arm: Arm, command: Command, period_ns: int) -> None:
        super().__init__(node, arm, command, period_ns)
        self._states = self._publisher(JointState, command.topic)

    def send(self, rows: np.ndarray, setpoints: Setpoints) -> None:
        message = JointState(name=self._names, position=self._in_command_units(rows[:1])[0].tolist())
        message.header.stamp = to_time(setpoints.start_ns)
        self._states.publish(message)


class ArrayOutput(Output):
    """A ros2_control forward_command_controller: the row that is due, at every control tick."""

    takes_velocities = True

    def __init__(self, node: Node, arm: Arm, command: Command, period_ns: int) -> None:
        super().__init__(node, arm, command, period_ns)
        self._arrays = self._publisher(Float64MultiArray, command.topic)

    def send(self, rows: np.ndarray, setpoints: Setpoints) -> None:
        self._arrays.publish(Float64MultiArray(data=self._in_command_units(rows[:1])[0].tolist()))


class InterbotixOutput(Output):
    """An Interbotix driver: arm joints as a group command, the gripper as a single one, at every control tick."""

    def __init__(self, node: Node, arm: Arm, command: Command, period_ns: int) -> None:
        try:
            messages = importlib.import_module("interbotix_xs_msgs.msg")
        except ImportError as error:
            raise ProfileError(
                f"Arm {arm.name!r} is commanded through interbotix_xs_msgs, which is not installed here. Source the "
                "Interbotix workspace, or set dry_run to run without commands."
            ) from error
        super().__init__(node, arm, command, period_ns)
        self._messages = messages
        self._group = self._publisher(messages.JointGroupCommand, command.topic)
        self._single: Publisher | None = None
        if arm.gripper is not None and command.gripper_topic is not None:
            self._single = self._publisher(messages.JointSingleCommand, command.gripper_topic)

    def send(self, rows: np.ndarray, setpoints: Setpoints) -> None:
        values = self._in_command_units(rows[:1])[0].tolist()
        self._group.publish(self._messages.JointGroupCommand(name="arm", cmd=values[: len(self._arm.joints)]))
        if self._single is not None:
            self._single.publish(self._messages.JointSingleCommand(name=self._names[-1], cmd=values[-1]))


_OUTPUTS = {
    "joint_trajectory": TrajectoryOutput,
    "joint_state": JointStateOutput,
    "float64_multi_array": ArrayOutput,
    "interbotix": InterbotixOutput,
}
