"""The node in this process, where a test can break a part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from pi05_ros.policy import Policy, load_profile
from ros.robot_stand_in import POSE
from ros.station import Station


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("node") / "tiny")


@pytest.fixture
def station(checkpoint: Path) -> Iterator[Station]:
    station = Station(checkpoint)
    station.configure()
    station.activate()
    station.thread.start()
    yield station
    station.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_control_thread_that_dies_is_seen_and_the_robot_held(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot, output = station.robot, station.deployment._output
    assert output is not None
    robot.wait_for(lambda: len(robot.trajectories["left"]) > 3, "commands")
    # The first is the command that kills the thread, the second the hold that should follow it at once.
    send, failures = output.send, [RuntimeError("still gone"), RuntimeError("the bus is gone")]

    def fail_once(setpoints: Any) -> None:
        if failures:
            raise failures.pop()
        send(setpoints)

    monkeypatch.setattr(output, "send", fail_once)
    robot.wait_for_status(PolicyStatus.ERROR, "The control thread failed")
    answer = robot.enable(True)
    assert not answer.success
    assert "control thread has failed" in answer.message

    robot.wait_for(lambda: len(robot.trajectories["left"][-1].points) == 1, "hold, which is sent once it can be")
    last = robot.trajectories["left"][-1]
    assert np.allclose(last.points[0].positions[:6], POSE[:6], atol=1e-6)
    assert station.node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
    station.activate()
    robot.wait_for_status(PolicyStatus.DISABLED, "Not enabled since: The control thread failed")
    assert robot.enable(True).success
    robot.wait_for_status(PolicyStatus.RUNNING)


def test_an_inference_that_fails_is_an_error_in_the_status_until_it_works_again(station: Station) -> None:
    robot = station.robot
    robot.wait_for_chunk()
    bias = station.deployment.policy.engine.path.model.action_out_proj.bias
    bias[0] = float("nan")
    try:
        status = robot.wait_for_status(PolicyStatus.ERROR, "non-finite")
        assert status.reason.startswith("Inference failed: ")
    finally:
        bias[0] = 0.0
    robot.wait_for_status(PolicyStatus.RUNNING)


def test_what_nobody_foresaw_in_configure_is_in_the_log_and_the_status(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """rclpy says nothing at all of an exception in a transition."""
    monkeypatch.setattr("pi05_ros.ros.deployment.Streams", None)
    station = Station(checkpoint)
    try:
        assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, "Not configured: 'NoneType' object is not callable")
        assert "in __init__" in capfd.readouterr().err
        assert not any(thread.name == "pi05-engine" for thread in threading.enumerate()), "nothing is left behind"
        assert not list(station.node.get_publishers_info_by_topic("/aloha_sim/left/joint_trajectory"))
        monkeypatch.undo()
        assert station.node.trigger_configure() == TransitionCallbackReturn.SUCCESS
    finally:
        station.thread.start()
        station.close()


def test_configure_warms_up_what_the_robot_will_ask_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    station = Station(checkpoint)
    station.node.set_parameters([Parameter("num_steps", value=3)])
    asked: list[dict[str, Any]] = []
    warm_up = Policy.warm_up

    def spy(policy: Policy, image_shapes: Any, **options: Any) -> float:
        station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, "Warming up for cam_high 320 x 240, cam_left_wrist")
        asked.append({"image_shapes": image_shapes, "num_steps": options["num_steps"], "batches": options["batches"]})
        return warm_up(policy, image_shapes, **options)

    monkeypatch.setattr(Policy, "warm_up", spy)
    monkeypatch.setattr(Policy, "compiles", True)  # as on a GPU
    try:
        assert station.node.trigger_configure() == TransitionCallbackReturn.SUCCESS
        cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
        shapes = dict.fromkeys(cameras, (240, 320))
        assert asked == [{"image_shapes": shapes, "num_steps": 3, "batches": range(1, 2)}]
        assert station.deployment.policy.engine.stats()["answered"] == 7, "one for each bucket of prompt lengths"
        station.thread.start()
        status = station.robot.wait_for_status(PolicyStatus.INACTIVE)
        assert (status.chunks, status.latency_p50_ms) == (0, 0.0), "no chunk came of it, and no latency"
    finally:
        station.close()


def test_a_warm_up_is_given_up_when_the_process_is_to_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warming = threading.Event()

    def long(policy: Policy, *_: Any, progress: Callable[[int, int], None], **__: Any) -> float:
        warming.set()
        progress(0, 7)
        return 60.0

    monkeypatch.setattr(Policy, "warm_up", long)
    monkeypatch.setattr(Policy, "compiles", True)
    station = Station(checkpoint, interrupted=warming.is_set)
    try:
        assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, "Not configured: Warming up was interrupted.")
        assert not any(thread.name == "pi05-engine" for thread in threading.enumerate())
    finally:
        station.thread.start()
        station.close()


def test_a_cpu_is_not_warmed_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled there, and at full size every inference takes many seconds."""
    monkeypatch.setattr(Policy, "warm_up", None)
    station = Station(checkpoint)
    try:
        assert station.node.trigger_configure() == TransitionCallbackReturn.SUCCESS
        assert station.deployment.policy.engine.stats()["requests"] == 0
    finally:
        station.thread.start()
        station.close()


def test_the_simulated_robot_has_the_image_sizes_that_its_profile_says() -> None:
    """Else the node would warm up for others."""
    from pi05_ros.sim.node import PARAMETERS

    size = PARAMETERS["camera_height"][0], PARAMETERS["camera_width"][0]
    assert {(camera.height, camera.width) for camera in load_profile("aloha_sim").cameras} == {size}
