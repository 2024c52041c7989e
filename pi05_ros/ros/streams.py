"""Subscriptions to a robot's cameras and joint states, which feed an assembler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.policy.profile import Camera
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.ros.conversions import to_nanoseconds

# A best-effort subscription connects to any publisher (REP-2003). Of images only the newest is of use.
IMAGE_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
JOINT_QOS = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)


class Streams:
    """Subscribes until it is destroyed. The callbacks store and do no more.

    on_data: called after every message, on the executor's thread.
    """

    def __init__(self, node: Node, assembler: ObservationAssembler, on_data: Callable[[], None]) -> None:
        self._node, self._assembler, self._on_data = node, assembler, on_data
        self._unstamped: set[str] = set()
        self._subscriptions = [
            *(self._subscribe_camera(camera) for camera in assembler.cameras),
            *(self._subscribe_joints(topic) for topic in assembler.topics),
        ]

    def destroy(self) -> None:
        """Give the subscriptions back."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _subscribe_camera(self, camera: Camera) -> Any:
        def on_image(message: Any) -> None:
            self._assembler.add_image(camera.name, self._stamp_ns(camera.name, message), message)
            self._on_data()

        kind = CompressedImage if camera.transport == "compressed" else Image
        return self._node.create_subscription(kind, camera.topic or "", on_image, IMAGE_QOS)

    def _subscribe_joints(self, topic: str) -> Any:
        def on_joint_state(message: JointState) -> None:
            self._assembler.add_joint_state(topic, self._stamp_ns(topic, message), message.name, message.position)
            self._on_data()

        return self._node.create_subscription(JointState, topic, on_joint_state, JOINT_QOS)

    def _stamp_ns(self, stream: str, message: Any) -> int:
        """The header's stamp; the time of arrival if it is zero, said once a stream."""
        stamp_ns = to_nanoseconds(message.header.stamp)
        if stamp_ns:
            return stamp_ns
        if stream not in self._unstamped:
            self._unstamped.add(stream)
            self._node.get_logger().warning(f"{stream}: header.stamp is zero; the time of arrival is used instead.")
        return int(self._node.get_clock().now().nanoseconds)
