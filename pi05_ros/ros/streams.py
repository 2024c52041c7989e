"""Subscriptions to a robot's cameras and joint states, which feed an assembler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSPolicyKind, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import Pi05Error
from pi05_ros.policy.profile import Camera
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.ros.conversions import to_nanoseconds
from pi05_ros.ros.topics import Publisher, Subscription, qos_conflict, why_silent

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # ROS 2 Humble
    from rclpy.qos_event import SubscriptionEventCallbacks

IMAGE_DEPTH = 1
"""Of images only the newest is of use."""
JOINT_DEPTH = 10
OVERRIDABLE = (QoSPolicyKind.RELIABILITY, QoSPolicyKind.DURABILITY, QoSPolicyKind.DEPTH)
SETTLING = 0.5
"""Seconds after which the graph surely has the node of a publisher that was just heard of."""
PATIENCE = 3.0
"""Seconds after the start in which drivers may still be discovered."""


class Streams:
    """Subscribes until it is destroyed. The callbacks store and do no more.

    The quality of service of a subscription may be set by ROS's own parameters,
    ``qos_overrides.<topic>.subscription.<reliability, durability or depth>``.

    on_data: called after every message, on the executor's thread.

    Raises Pi05Error: an override is none.
    """

    def __init__(self, node: Node, assembler: ObservationAssembler, on_data: Callable[[], None]) -> None:
        self._node, self._assembler, self._on_data = node, assembler, on_data
        self._unstamped: set[str] = set()
        self._started_at: float | None = None
        self._wanted: dict[str, Subscription] = {}
        self._subscriptions: list[Any] = []
        self._incompatible: dict[str, float] = {}  # streams with an event of that kind, and when
        self._told: dict[str, str] = {}  # the last sentence in the log, by stream
        self.faults: dict[str, str] = {}
        """By camera name or joint state topic, why no publisher reaches it and what to do: sentences. Any thread may
        read it."""
        try:
            for camera in assembler.cameras:
                self._subscribe_camera(camera)
            for topic in assembler.topics:
                self._subscribe_joints(topic)
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Give the subscriptions back."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    # ---- what does not come ----

    def start(self) -> None:
        """From now on it matters whether something comes."""
        self.faults, self._started_at = {}, time.monotonic()

    def stop(self) -> None:
        """From now on it does not."""
        self.faults, self._started_at = {}, None
        self._told.clear()

    def look(self) -> None:
        """See what the graph has: tell the log of publishers that offer less than is asked for, and once started of
        streams that no publisher reaches. About once a second, on any one thread.
        """
        self._explain_events()
        if self._started_at is None or time.monotonic() - self._started_at < PATIENCE:
            return
        faults = {}
        topics: dict[str, list[str]] | None = None
        for name, wanted in self._wanted.items():
            publishers = self._publishers(wanted)
            if not publishers and topics is None:
                topics = self._published()
            fault = why_silent(wanted, publishers, topics or {})
            if fault:
                faults[name] = fault
                self._tell(name, fault)
            else:
                self._told.pop(name, None)  # should it come again, it is worth another word
        self.faults = faults

    def _explain_events(self) -> None:
        for name, since in list(self._incompatible.items()):
            if time.monotonic() - since > SETTLING:
                del self._incompatible[name]
                conflict = qos_conflict(self._wanted[name], self._publishers(self._wanted[name]))
                if conflict:  # else it has gone again
                    self._tell(name, conflict)

    def _tell(self, name: str, sentence: str) -> None:
        if self._told.get(name) != sentence:
            self._told[name] = sentence
            self._node.get_logger().warning(sentence)

    def _publishers(self, wanted: Subscription) -> list[Publisher]:
        return [
            Publisher(
                node=_full_name(info.node_namespace, info.node_name),
                type=info.topic_type,
                reliability=info.qos_profile.reliability.name.lower(),
                durability=info.qos_profile.durability.name.lower(),
            )
            for info in self._node.get_publishers_info_by_topic(wanted.topic)
        ]

    def _published(self) -> dict[str, list[str]]:
        """Types by topic. A topic that is only subscribed to, as by this node, is none that could be meant."""
        topics = self._node.get_topic_names_and_types()
        return {topic: types for topic, types in topics if self._node.count_publishers(topic)}

    # ---- subscriptions ----

    def _subscribe_camera(self, camera: Camera) -> None:
        def on_image(message: Any) -> None:
            self._assembler.add_image(camera.name, self._stamp_ns(camera.name, message), message)
            self._on_data()

        kind = CompressedImage if camera.transport == "compressed" else Image
        self._subscribe(camera.name, kind, camera.topic or "", on_image, IMAGE_DEPTH)

    def _subscribe_joints(self, topic: str) -> None:
        def on_joint_state(message: JointState) -> None:
            self._assembler.add_joint_state(topic, self._stamp_ns(topic, message), message.name, message.position)
            self._on_data()

        self._subscribe(topic, JointState, topic, on_joint_state, JOINT_DEPTH)

    def _subscribe(self, name: str, kind: Any, topic: str, callback: Callable[[Any], None], depth: int) -> None:
        # A best-effort subscription connects to any publisher (REP-2003).
        qos = QoSProfile(depth=depth, reliability=ReliabilityPolicy.BEST_EFFORT, durability=DurabilityPolicy.VOLATILE)
        resolved = self._node.resolve_topic_name(topic)
        try:
            subscription = self._node.create_subscription(
                kind,
                topic,
                callback,
                qos,
                event_callbacks=SubscriptionEventCallbacks(incompatible_qos=lambda _: self._on_incompatible(name)),
                qos_overriding_options=QoSOverridingOptions(OVERRIDABLE, callback=_check_override),
            )
        except Exception as error:  # rclpy's own types differ between distributions and with what is wrong
            raise Pi05Error(f"Stream {name}, topic {resolved} with its qos_overrides: {error}") from error
        self._subscriptions.append(subscription)
        kind_name = f"{kind.__module__.split('.')[0]}/msg/{kind.__name__}"
        # The overrides were put into the profile.
        self._wanted[name] = Subscription(
            resolved, kind_name, qos.reliability.name.lower(), qos.durability.name.lower()
        )

    def _on_incompatible(self, name: str) -> None:
        """A publisher has come that offers less than is asked for. Which one, the graph may learn a little later."""
        self._incompatible[name] = time.monotonic()

    def _stamp_ns(self, stream: str, message: Any) -> int:
        """The header's stamp; the time of arrival if it is zero, said once a stream."""
        stamp_ns = to_nanoseconds(message.header.stamp)
        if stamp_ns:
            return stamp_ns
        if stream not in self._unstamped:
            self._unstamped.add(stream)
            self._node.get_logger().warning(f"{stream}: header.stamp is zero; the time of arrival is used instead.")
        return int(self._node.get_clock().now().nanoseconds)


def _full_name(namespace: str, name: str) -> str:
    if "UNKNOWN" in namespace:  # what the middleware says until it has heard more
        return "a publisher"
    return f"{namespace.rstrip('/')}/{name}"


def _check_override(qos: QoSProfile) -> SetParametersResult:
    problem = ""
    if qos.reliability not in (ReliabilityPolicy.RELIABLE, ReliabilityPolicy.BEST_EFFORT):
        problem = f"reliability: expected reliable or best_effort, got {qos.reliability.name.lower()}."
    if qos.durability not in (DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL):
        problem = f"durability: expected volatile or transient_local, got {qos.durability.name.lower()}."
    if qos.depth < 1:
        problem = f"depth: expected 1 or more, got {qos.depth}."
    return SetParametersResult(successful=not problem, reason=problem)
