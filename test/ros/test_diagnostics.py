"""/diagnostics and ~/status of a node in this process, over real DDS, when something does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from pi05_ros.policy import Policy
from pi05_ros.ros import diagnostics
from pi05_ros.ros.findings import ERROR, OK, STALE, TASKS, WARN, Finding
from ros.http_clients import free_port
from ros.station import Station

TOP = "/aloha_sim/top/image_raw"
RELIABILITY = f"qos_overrides.{TOP}.subscription.reliability"
BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("diagnostics") / "tiny")


class Watch:
    """Keeps what it hears of /diagnostics."""

    def __init__(self, station: Station) -> None:
        self.robot = station.robot
        self.heard: list[DiagnosticArray] = []
        self.robot.node.create_subscription(DiagnosticArray, "/diagnostics", self.heard.append, 10)

    def last(self, task: str) -> DiagnosticStatus | None:
        named = [status for array in self.heard for status in array.status if status.name == f"policy_node: {task}"]
        return named[-1] if named else None

    def wait_for(self, task: str, level: bytes, message: str = "") -> dict[str, str]:
        """The values of the first that fits from now on, or of the last that came."""

        def fits() -> bool:
            last = self.last(task)
            return last is not None and last.level == level and message in last.message

        try:
            self.robot.wait_for(fits, f"{task} of level {level!r} with {message!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; last of the task: {self.last(task)}") from error
        last = self.last(task)
        assert last is not None
        return {value.key: value.value for value in last.values}


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., tuple[Station, Watch]]]:
    stations: list[Station] = []

    def begin(**parameters: Any) -> tuple[Station, Watch]:
        stations.append(Station(checkpoint, **parameters))
        stations[-1].thread.start()
        return stations[-1], Watch(stations[-1])

    yield begin
    for station in stations:
        station.close()


def test_a_camera_that_stops_and_comes_back(start: Any) -> None:
    port = free_port()
    station, watch = start(http_port=port)
    watch.wait_for("policy", STALE, "Not configured yet.")
    station.configure()
    watch.wait_for("streams", OK, "Inactive.")
    station.activate()
    station.robot.wait_for_chunk()
    values = watch.wait_for("streams", OK, "All streams are fresh.")
    assert float(values["cam_high.rate_hz"]) > 5
    assert int(values["/aloha_sim/left/joint_states.count"]) > 0
    assert watch.wait_for("policy", OK, "Running.")["chunks"] != "0"
    assert watch.wait_for("server", OK, f"http://127.0.0.1:{port}")["clients_http"] == "0"
    assert "jitter_p99_ms" in watch.wait_for("control loop", OK)
    last = watch.last("state distribution")
    assert last is not None
    assert "14 dimensions lie outside of q01..q99" in last.message
    assert last.hardware_id == "aloha_sim"

    picture = station.robot.pictures.pop("cam_high")
    values = watch.wait_for("streams", WARN, "cam_high: stale: the newest sample is")
    assert values["cam_high.stale"] == "true"
    assert values["cam_left_wrist.stale"] == "false"
    watch.wait_for("policy", WARN, "camera cam_high: stale")
    station.robot.pictures["cam_high"] = picture
    watch.wait_for("streams", OK, "All streams are fresh.")
    watch.wait_for("policy", OK, "Running.")

    assert station.node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
    for task in ("streams", "policy", "control loop", "state distribution"):
        watch.wait_for(task, OK, "Inactive.")


def test_a_topic_that_nobody_publishes_is_told_with_the_one_that_is_meant(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    station, watch = start()
    robot = station.robot
    del robot.pictures["cam_high"]
    robot.node.destroy_publisher(robot.images["cam_high"])
    meant = robot.node.create_publisher(Image, "/aloha_sim/top/camera/image_rect_raw", 1)
    station.configure()
    station.activate()
    status = robot.wait_for_status(PolicyStatus.WAITING, f"Nobody publishes {TOP}")
    reason = f"Nobody publishes {TOP}; sensor_msgs/msg/Image comes on {meant.topic_name}, "
    assert f"camera cam_high: no frame yet on {TOP}. {reason}" in status.reason
    watch.wait_for("streams", WARN, f"cam_high: nothing has come yet. {reason}")
    watch.wait_for("policy", WARN, reason)
    robot.spin(2.5)
    assert capfd.readouterr().err.count(reason) == 1, "said once in the log"

    robot.images["cam_high"] = robot.node.create_publisher(Image, TOP, 1)
    robot.pictures["cam_high"] = robot.pictures["cam_left_wrist"]
    robot.wait_for_status(PolicyStatus.RUNNING)
    watch.wait_for("streams", OK, "All streams are fresh.")


def test_a_publisher_that_offers_less_than_is_asked_for_is_told_with_the_parameter_that_mends_it(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    station, watch = start(**{RELIABILITY: "reliable"})
    robot = station.robot
    robot.node.destroy_publisher(robot.images["cam_high"])
    robot.images["cam_high"] = robot.node.create_publisher(Image, TOP, BEST_EFFORT)
    station.configure()
    offer = "/robot_stand_in offers best_effort, this node asks for reliable"
    fix = f"{TOP}: {offer}, so nothing arrives: set {RELIABILITY} to best_effort."
    robot.wait_for(lambda: fix in capfd.readouterr().err, "word in the log, of the middleware's event")
    station.activate()
    robot.wait_for_status(PolicyStatus.WAITING, fix)
    watch.wait_for("streams", WARN, fix)
    assert fix not in capfd.readouterr().err, "said once in the log"
    reliable = robot.node.create_publisher(Image, TOP, QoSProfile(depth=1))
    robot.node.destroy_publisher(robot.images["cam_high"])
    robot.images["cam_high"] = reliable
    robot.wait_for_status(PolicyStatus.RUNNING)


@pytest.mark.parametrize(
    ("policy", "value", "message"),
    [
        ("reliability", "strong", "strong"),
        ("reliability", "system_default", "expected reliable or best_effort, got system_default"),
        ("durability", "system_default", "expected volatile or transient_local"),
        ("depth", 0, "expected 1 or more, got 0"),
        ("depth", "ten", "ten"),
    ],
)
def test_an_override_that_is_none_stops_configure(start: Any, policy: str, value: Any, message: str) -> None:
    station, watch = start(**{f"qos_overrides.{TOP}.subscription.{policy}": value})
    assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
    status = station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, "Not configured: Stream cam_high, topic")
    assert message in status.reason
    watch.wait_for("policy", ERROR, "Not configured: Stream cam_high, topic")
    assert not any(thread.name == "pi05-engine" for thread in threading.enumerate()), "nothing is left behind"


def test_status_and_diagnostics_go_on_while_weights_load(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure keeps the executor, so they are not its business."""
    station, watch = start()
    load, loaded = Policy.from_checkpoint, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Policy:
        assert loaded.wait(60)
        return load(*arguments, **options)

    monkeypatch.setattr(Policy, "from_checkpoint", slow)
    configured = station.executor.create_task(station.node.trigger_configure)
    robot = station.robot

    def beats() -> bool:
        return sum(status.reason.startswith("Loading ") for status in robot.statuses) > 3

    try:
        robot.wait_for(beats, "status while weights load")
        watch.wait_for("policy", STALE, "Loading ")
        assert not configured.done()
    finally:
        loaded.set()
    robot.wait_for_status(PolicyStatus.INACTIVE)
    watch.wait_for("policy", OK, "Inactive.")


def test_without_diagnostic_updater_the_same_goes_out(start: Any) -> None:
    station, _ = start()
    found = {task: Finding(bytes([index % 4]), f"{task}.", {"a": "1", "b": "x"}) for index, task in enumerate(TASKS)}
    kinds = {"plain": diagnostics._Plain, "updater": diagnostics._Updater}
    heard: dict[str, list[DiagnosticArray]] = {kind: [] for kind in kinds}
    nodes = []
    for kind in kinds:
        topic = f"/{kind}/diagnostics"
        remapped = ["--ros-args", "-r", f"/diagnostics:={topic}"]
        nodes.append(Node("one_name", context=station.context, cli_args=remapped, use_global_arguments=False))
        station.robot.node.create_subscription(DiagnosticArray, topic, heard[kind].append, 10)
    publishers = [kind(node) for kind, node in zip(kinds.values(), nodes, strict=True)]

    def both() -> bool:
        for publisher in publishers:
            publisher.publish(found, "aloha_sim")
        return all(arrays and len(arrays[-1].status) == len(TASKS) for arrays in heard.values())

    station.robot.wait_for(both, "diagnostics of both kinds")
    assert heard["plain"][-1].status == heard["updater"][-1].status
    assert heard["plain"][-1].status[0].name == "one_name: streams"
    for node in nodes:
        node.destroy_node()
