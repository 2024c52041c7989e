"""A robot for the policy node to live on: it publishes what it is told to, and keeps what it hears."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.time import Time
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from pi05_ros import Observation
from pi05_ros.msg import ActionChunk, PolicyStatus
from pi05_ros.policy import load_profile
from ros.services import Services

TIMEOUT = 40.0
RATE = 20.0
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
PROFILE = load_profile("aloha_sim")
NAMES = ["waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "left_finger"]
POSE = [0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.03822]  # the finger half open
STATE = np.array([*POSE[:6], 0.5] * 2, np.float32)
ENCODINGS = {"cam_high": "rgb8", "cam_left_wrist": "bgr8", "cam_right_wrist": "rgba8"}


def picture(seed: int) -> np.ndarray:
    """RGB uint8 [24, 33, 3]; as wide as no row length is a round number."""
    return np.random.default_rng(seed).integers(0, 256, (24, 33, 3), dtype=np.uint8)


def image_message(rgb: np.ndarray, encoding: str) -> Image:
    """In the encoding's byte order, rows padded by 5 bytes."""
    height, width = rgb.shape[:2]
    opaque = np.full((height, width, 1), 255, np.uint8)
    pixels = {"rgb8": rgb, "bgr8": rgb[:, :, ::-1], "rgba8": np.concatenate([rgb, opaque], axis=2)}.get(encoding, rgb)
    rows = np.concatenate([pixels.reshape(height, -1), np.full((height, 5), 9, np.uint8)], axis=1)
    return Image(height=height, width=width, encoding=encoding, step=rows.shape[1], data=rows.tobytes())


class Robot:
    """Publishes at 20 Hz while it waits for something; every wait ends in an error with all that is known."""

    def __init__(self, sim: bool = False, domain: int | None = None) -> None:
        """sim: only listen. domain: of ROS; None: this test process's own."""
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = Node("robot_stand_in", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.statuses: list[PolicyStatus] = []
        self.chunks: list[ActionChunk] = []
        self.trajectories: dict[str, list[JointTrajectory]] = {"left": [], "right": []}
        self.stamps: list[int] = []
        self.pictures = {camera: picture(index) for index, camera in enumerate(ENCODINGS)}
        self.encodings = dict(ENCODINGS)
        self.joint_names = list(NAMES)
        self.pose = dict(zip(NAMES, POSE, strict=True))
        self.rate: float | None = None
        """Velocity and effort of every joint; None: the messages have none."""
        self.node.create_subscription(PolicyStatus, "/policy_node/status", self.statuses.append, LATCHED)
        self.node.create_subscription(ActionChunk, "/policy_node/action_chunk", self.chunks.append, 10)
        for arm, heard in self.trajectories.items():
            self.node.create_subscription(JointTrajectory, f"/aloha_sim/{arm}/joint_trajectory", heard.append, 10)
        self.prompts = self.node.create_publisher(String, "/policy_node/prompt", LATCHED)
        self._services = Services(self.node, self.wait_for)
        if not sim:
            self.images = {
                camera.name: self.node.create_publisher(Image, camera.topic, 1) for camera in PROFILE.cameras
            }
            self.joints = [self.node.create_publisher(JointState, arm.state_topic, 10) for arm in PROFILE.arms]
            self.node.create_timer(1 / RATE, self.publish)

    def publish(self) -> None:
        """One sample of every stream, all of one stamp."""
        now = Time(nanoseconds=self.now_ns)
        self.stamps.append(now.nanoseconds)
        for camera, rgb in self.pictures.items():
            message = image_message(rgb, self.encodings[camera])
            message.header.stamp = now.to_msg()
            self.images[camera].publish(message)
        for publisher in self.joints:
            message = JointState(name=self.joint_names, position=[self.pose[name] for name in self.joint_names])
            if self.rate is not None:
                message.velocity = message.effort = [self.rate] * len(self.joint_names)
            message.header.stamp = now.to_msg()
            publisher.publish(message)

    # --- waiting ---

    def wait_for(self, condition: Callable[[], Any], what: str, timeout: float = TIMEOUT) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > deadline:
                last = self.statuses[-1] if self.statuses else None
                raise AssertionError(f"no {what} within {timeout} s; {len(self.chunks)} chunks; last status: {last}")
            self.executor.spin_once(timeout_sec=0.1)
        return found

    def spin(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.05)

    def wait_for_status(self, state: str, reason: str = "") -> PolicyStatus:
        """A status that comes from now on, or is the last that came."""
        begin = max(len(self.statuses) - 1, 0)

        def found() -> PolicyStatus | None:
            for status in self.statuses[begin:]:
                if status.state == state and reason in status.reason:
                    return status
            return None

        return self.wait_for(found, f"status {state} with {reason!r}")

    def wait_for_chunk(self, after_ns: int = 0, **fields: Any) -> ActionChunk:
        """The first chunk of an observation that is later than ``after_ns``."""

        def found() -> ActionChunk | None:
            for chunk in self.chunks:
                wanted = all(getattr(chunk, name) == value for name, value in fields.items())
                if stamp_ns(chunk) > after_ns and wanted:
                    return chunk
            return None

        return self.wait_for(found, f"chunk with {fields}")

    @property
    def now_ns(self) -> int:
        return int(self.node.get_clock().now().nanoseconds)

    # --- services ---

    def call(self, kind: Any, name: str, request: Any) -> Any:
        return self._services.call(kind, name, request)

    def enable(self, data: bool) -> SetBool.Response:
        return self.call(SetBool, "/policy_node/enable", SetBool.Request(data=data))

    def reset(self) -> Trigger.Response:
        return self.call(Trigger, "/policy_node/reset", Trigger.Request())

    def observation(self, prompt: str) -> Observation:
        """What the policy ought to see of this robot."""
        return Observation(self.pictures, STATE, prompt)

    def close(self) -> None:
        self.executor.shutdown()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


def stamp_ns(message: Any) -> int:
    return message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec


def rows(chunk: ActionChunk) -> np.ndarray:
    """float32 [horizon, action_dim]."""
    return np.array(chunk.data, np.float32).reshape(chunk.horizon, chunk.action_dim)


def environment(domain: int) -> dict[str, str]:
    return {**os.environ, "ROS_DOMAIN_ID": str(domain)}
