"""Listens to a simulated robot and to the policy that drives it, and fills a ``Recording``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, qos_profile_sensor_data
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool, Float32
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.msg import ActionChunk, PolicyStatus
from pi05_ros.policy.profile import Arm, RobotProfile
from pi05_ros.sim.recording import ChunkRecord, Recording
from pi05_ros.sim.scene import COMMAND_NAMES
from pi05_ros.sim.trajectory import TrajectoryError, TrajectoryFollower

LATCHED_QOS = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL)
FRAME_PERIOD = 0.5  # simulated seconds between two frames of a camera that are kept


class Recorder(Node):
    """Subscribes to all topics of a profile with joint trajectory commands, and to the policy node's.

    on_chunk: called with every chunk's record. on_status: called with every PolicyStatus message.
    What arrives before the first chunk is not kept: an episode begins when the policy begins.
    """

    def __init__(
        self,
        profile: RobotProfile,
        policy_node: str,
        on_chunk: Callable[[ChunkRecord], None],
        on_status: Callable[[Any], None],
    ) -> None:
        super().__init__("demo_recorder", parameter_overrides=[Parameter("use_sim_time", value=True)])
        self.recording = Recording(profile.joint_names, tuple(camera.name for camera in profile.cameras))
        self._profile = profile
        self._on_chunk = on_chunk
        self._positions: dict[str, np.ndarray] = {}
        self._states: deque[tuple[float, np.ndarray]] = deque(maxlen=500)
        self._followers: dict[str, TrajectoryFollower] = {}

        for arm in profile.arms:
            assert arm.command is not None
            self.create_subscription(JointState, str(arm.state_topic), self._state_callback(arm), 50)
            self.create_subscription(JointTrajectory, arm.command.topic, self._command_callback(arm), 10)
        for camera in profile.cameras:
            self.create_subscription(
                Image, str(camera.topic), self._image_callback(camera.name), qos_profile_sensor_data
            )
        self.create_subscription(ActionChunk, f"{policy_node}/action_chunk", self._on_action_chunk, 10)
        self.create_subscription(PolicyStatus, f"{policy_node}/status", on_status, LATCHED_QOS)
        self.create_subscription(Float32, f"/{profile.name}/reward", self._on_reward, LATCHED_QOS)
        self.create_subscription(Bool, f"/{profile.name}/success", self._on_success, LATCHED_QOS)
        self.create_subscription(Float32, f"/{profile.name}/real_time_factor", self._on_speed, LATCHED_QOS)

    @property
    def started(self) -> bool:
        return len(self.recording.chunks) > 0

    def _state_callback(self, arm: Arm) -> Callable[[JointState], None]:
        def on_state(message: JointState) -> None:
            position = dict(zip(message.name, message.position, strict=True))
            values = [position[name] for name in arm.joints]
            if arm.gripper is not None:
                values.append(arm.gripper.state_to_unit(position[arm.gripper.joint]))
            self._positions[arm.name] = np.array(values)
            if arm is self._profile.arms[-1] and len(self._positions) == len(self._profile.arms):
                self._keep_state(_seconds(message.header.stamp))

        return on_state

    def _keep_state(self, time: float) -> None:
        """All arms have reported: one row of measured and commanded values."""
        state = np.concatenate([self._positions[arm.name] for arm in self._profile.arms])
        self._states.append((time, state))
        if self.started:
            self.recording.measured.append((time, state))
            self.recording.commanded.append(
                (time, np.concatenate([self._target(arm, time) for arm in self._profile.arms]))
            )

    def _target(self, arm: Arm, time: float) -> np.ndarray:
        """Where the arm is to be at that time, in policy units; NaN before its first command."""
        if arm.name not in self._followers:
            return np.full(len(arm.dimension_names), np.nan)
        target = self._followers[arm.name].sample(time)
        if arm.gripper is not None:
            low, high = arm.gripper.command_at_0, arm.gripper.command_at_1
            target[-1] = (target[-1] - low) / (high - low)
        return target

    def _command_callback(self, arm: Arm) -> Callable[[JointTrajectory], None]:
        def on_trajectory(message: JointTrajectory) -> None:
            if arm.name not in self._positions:
                return
            if arm.name not in self._followers:
                here = self._positions[arm.name].copy()
                if arm.gripper is not None:
                    here[-1] = arm.gripper.unit_to_command(here[-1])
                self._followers[arm.name] = TrajectoryFollower(COMMAND_NAMES, here)
            try:
                self._followers[arm.name].follow(
                    message.joint_names,
                    [_seconds(point.time_from_start) for point in message.points],
                    [point.positions for point in message.points],
                    start=_seconds(message.header.stamp) or None,
                    now=self.get_clock().now().nanoseconds * 1e-9,
                )
            except TrajectoryError as error:
                self.get_logger().warning(f"The {arm.name} arm cannot follow a command: {error}")

        return on_trajectory

    def _image_callback(self, camera: str) -> Callable[[Image], None]:
        def on_image(message: Image) -> None:
            kept = self.recording.frames.setdefault(camera, [])
            time = _seconds(message.header.stamp)
            if self.started and (not kept or time - kept[-1][0] >= FRAME_PERIOD - 1e-6):
                shape = (message.height, message.width, 3)
                kept.append((time, np.frombuffer(message.data, np.uint8).reshape(shape)))

        return on_image

    def _on_action_chunk(self, message: ActionChunk) -> None:
        if not self._states:
            return  # heard before the robot was
        observed = _seconds(message.header.stamp)
        rows = np.array(message.data, dtype=np.float32).reshape(message.horizon, message.action_dim)
        state = min(self._states, key=lambda sample: abs(sample[0] - observed))[1]
        stages = ("queue", "preprocess", "cache_lookup", "prefix", "denoise", "postprocess", "total")
        record = ChunkRecord(
            sequence=message.sequence,
            time=self.get_clock().now().nanoseconds * 1e-9,
            observation_time=observed,
            observation_age_ms=message.observation_age_ms,
            latency_ms={stage: getattr(message, f"{stage}_ms") for stage in stages},
            prefix_cache_hit=message.prefix_cache_hit,
            state=state,
            first_target=rows[0],
        )
        self.recording.prompt = message.prompt
        self.recording.chunks.append(record)
        self._on_chunk(record)

    def _on_reward(self, message: Float32) -> None:
        if self.started:
            self.recording.rewards.append(message.data)

    def _on_success(self, message: Bool) -> None:
        self.recording.success = self.recording.success or (self.started and message.data)

    def _on_speed(self, message: Float32) -> None:
        if self.started:
            self.recording.real_time_factors.append(message.data)


def _seconds(stamp: Any) -> float:
    return stamp.sec + stamp.nanosec * 1e-9
