"""The executable by itself: signals at every moment, a configure that fails and is mended, parameters refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.msg import Parameter
from rcl_interfaces.srv import SetParameters
from std_msgs.msg import String
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from ros.http_clients import Asking, HttpClient, free_port
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
from ros.robot_stand_in import Robot


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("process") / "tiny")


@pytest.fixture
def robot() -> Iterator[Robot]:
    robot = Robot()
    yield robot
    robot.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    nodes: list[Node] = []

    def begin(*arguments: str, **parameters: Any) -> Node:
        nodes.append(Node(tmp_path / f"log_{len(nodes)}", *arguments, **parameters))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.kill()


def test_a_wrong_path_leaves_the_node_to_be_mended(start: Any, robot: Robot, checkpoint: Path) -> None:
    node = start(checkpoint="/no/such/folder", robot="aloha_sim", prompt="x", device="cpu")
    robot.wait_for_status(PolicyStatus.UNCONFIGURED, "Not configured yet.")
    assert not change_state(robot, CONFIGURE)
    status = robot.wait_for_status(PolicyStatus.UNCONFIGURED, "/no/such/folder")
    assert "\n" not in status.reason
    assert status.reason in node.text
    assert state(robot) == "unconfigured"

    assert set_parameter(robot, "checkpoint", str(checkpoint)).successful
    assert set_parameter(robot, "robot", "no_such_robot").successful
    assert not change_state(robot, CONFIGURE)
    robot.wait_for_status(PolicyStatus.UNCONFIGURED, "'no_such_robot'")
    assert set_parameter(robot, "robot", "libero").successful
    assert not change_state(robot, CONFIGURE)
    robot.wait_for_status(PolicyStatus.UNCONFIGURED, "no topic is given for camera image")
    assert set_parameter(robot, "robot", "aloha_ros2").successful
    assert not change_state(robot, CONFIGURE)
    robot.wait_for_status(PolicyStatus.UNCONFIGURED, "interbotix_xs_msgs, which is not installed here")

    assert set_parameter(robot, "robot", "aloha_sim").successful
    assert change_state(robot, CONFIGURE)
    robot.wait_for_status(PolicyStatus.INACTIVE)
    assert change_state(robot, ACTIVATE)
    robot.wait_for_chunk()
    assert_ended_well(node, signal.SIGTERM)


def test_parameters_are_refused_with_a_reason(start: Any, robot: Robot, checkpoint: Path) -> None:
    node = start(checkpoint=checkpoint, robot="aloha_sim", device="cpu", dry_run=True, prompt="'x'")
    result = set_parameter(robot, "precision", "float31")
    assert (result.successful, result.reason) == (
        False,
        "precision: expected one of openpi, float32, bfloat16, fp8, got 'float31'.",
    )
    assert not set_parameter(robot, "replan_steps", 0).successful
    for wrong in (-1.0, 5, "soon", float("nan")):
        assert not set_parameter(robot, "max_ahead", wrong).successful
    result = set_parameter(robot, "max_ahead", "soon")
    assert result.reason == "max_ahead: expected a number from 0.01 to 2, got 'soon'."
    assert set_parameter(robot, "max_ahead", 1).successful, "an integer is a number too"
    assert not set_parameter(robot, "replan_steps", "ten").successful
    assert change_state(robot, CONFIGURE)
    result = set_parameter(robot, "checkpoint", "/other")
    assert not result.successful
    assert "is read when the node is configured" in result.reason
    assert set_parameter(robot, "prompt", "another").successful
    assert change_state(robot, ACTIVATE)
    robot.wait_for_chunk(prompt="another")
    assert_ended_well(node, signal.SIGINT)


def test_the_life_cycle_may_be_gone_through_again_and_again(start: Any, robot: Robot, checkpoint: Path) -> None:
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu")
    for _ in range(2):
        assert change_state(robot, CONFIGURE)
        for _ in range(2):
            begin = robot.now_ns
            assert change_state(robot, ACTIVATE)
            robot.wait_for_status(PolicyStatus.RUNNING)
            robot.wait_for_chunk(after_ns=begin)
            assert change_state(robot, DEACTIVATE)
            robot.wait_for_status(PolicyStatus.INACTIVE)
            robot.spin(0.3)
            last = robot.trajectories["right"][-1]
            assert len(last.points) == 1, "the last that is sent is a hold"
            counts = len(robot.trajectories["right"]), len(robot.chunks)
            robot.spin(0.5)
            assert (len(robot.trajectories["right"]), len(robot.chunks)) == counts
        assert change_state(robot, CLEANUP)
        robot.wait_for_status(PolicyStatus.UNCONFIGURED)
    assert robot.chunks[-1].sequence < len(robot.chunks), "counted anew after a configure"
    assert_ended_well(node, signal.SIGINT)


def test_transitions_that_are_not_possible_are_refused_and_the_robot_goes_on(
    start: Any, robot: Robot, checkpoint: Path
) -> None:
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu")
    for wrong in (ACTIVATE, DEACTIVATE, CLEANUP, 77):
        assert not change_state(robot, wrong)
    assert change_state(robot, CONFIGURE)
    for wrong in (CONFIGURE, DEACTIVATE):
        assert not change_state(robot, wrong)
    assert change_state(robot, ACTIVATE)
    robot.wait_for_status(PolicyStatus.RUNNING)
    for wrong in (CONFIGURE, ACTIVATE, CLEANUP):
        assert not change_state(robot, wrong)
    assert state(robot) == "active"
    robot.wait_for_chunk(after_ns=robot.now_ns)
    assert "transition 1 is refused" in node.text
    assert_ended_well(node, signal.SIGINT)


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.3])
def test_signals_that_come_in_pairs(start: Any, robot: Robot, checkpoint: Path, gap: float) -> None:
    """A terminal signals the whole group, and launch sends one more."""
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu", num_steps=1000)
    assert change_state(robot, CONFIGURE)
    assert change_state(robot, ACTIVATE)
    robot.wait_for_status(PolicyStatus.WAITING)
    node.process.send_signal(signal.SIGINT)
    time.sleep(gap)
    assert_ended_well(node, signal.SIGINT)


def test_without_a_prompt_it_waits_for_one(start: Any, robot: Robot, checkpoint: Path) -> None:
    node = start(checkpoint=checkpoint, robot="aloha_sim", device="cpu", dry_run=True)
    assert change_state(robot, CONFIGURE)
    assert change_state(robot, ACTIVATE)
    robot.wait_for_status(PolicyStatus.WAITING, "There is no prompt")
    assert set_parameter(robot, "prompt", "now there is one").successful
    robot.wait_for_chunk(prompt="now there is one")
    robot.wait_for_status(PolicyStatus.RUNNING, "Dry run: nothing is commanded.")
    robot.prompts.publish(String(data="from the topic"))
    robot.wait_for_chunk(prompt="from the topic")
    delete = SetParameters.Request(parameters=[Parameter(name="prompt")])
    answer = robot.call(SetParameters, "/policy_node/set_parameters", delete).results[0]
    assert (answer.successful, answer.reason) == (False, "prompt cannot be deleted.")
    assert set_parameter(robot, "prompt", "   ").successful
    robot.wait_for_status(PolicyStatus.WAITING, "There is no prompt")
    assert set_parameter(robot, "prompt", "the later one counts").successful
    robot.wait_for_chunk(prompt="the later one counts")
    assert not robot.trajectories["left"], "it is a dry run"
    assert_ended_well(node, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.5, 1.5])
def test_a_signal_while_it_starts(start: Any, number: int, delay: float) -> None:
    node = start()
    time.sleep(delay)
    assert_ended_well(node, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_weights_load(start: Any, robot: Robot, checkpoint: Path, number: int) -> None:
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu")
    client = robot.node.create_client(ChangeState, "/policy_node/change_state")
    robot.wait_for(client.service_is_ready, "the node")
    client.call_async(ChangeState.Request(transition=Transition(id=CONFIGURE)))
    deadline = time.monotonic() + 20
    while "Loading " not in node.text:
        assert time.monotonic() < deadline, node.text
        robot.executor.spin_once(timeout_sec=0.005)
    assert_ended_well(node, number)


def test_a_closed_terminal_does_not_end_what_nohup_started(start: Any, robot: Robot) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for what it starts
    try:
        node = start()
    finally:
        signal.signal(signal.SIGHUP, before)
    client = robot.node.create_client(GetState, "/policy_node/get_state")
    robot.wait_for(client.service_is_ready, "the node")
    node.process.send_signal(signal.SIGHUP)
    assert state(robot) == "unconfigured"
    assert_ended_well(node, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_an_inference_runs(start: Any, robot: Robot, checkpoint: Path, number: int) -> None:
    """An inference of many seconds, which nothing can break off."""
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu", num_steps=1000)
    assert change_state(robot, CONFIGURE)
    assert change_state(robot, ACTIVATE)
    robot.spin(1.0)
    assert_ended_well(node, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_clients_wait_for_answers(start: Any, robot: Robot, checkpoint: Path, number: int) -> None:
    """A batch runs for many seconds, others wait behind it: every client hears something, and the node ends."""
    port = free_port()
    node = start(checkpoint=checkpoint, robot="aloha_sim", prompt="x", device="cpu", http_port=port)
    assert change_state(robot, CONFIGURE)
    assert f"Serving on http://127.0.0.1:{port}" in node.text
    assert change_state(robot, ACTIVATE)
    robot.wait_for_status(PolicyStatus.RUNNING)
    client = HttpClient(port)
    with client.follow("/status/events") as events, connect(f"ws://127.0.0.1:{port}/openpi/policy") as idle:
        assert idle.recv()
        clients = Asking(port, 9, once=True, num_inference_steps=1000)
        robot.wait_for(lambda: client.engine("pi05_running") == 4 and client.engine("pi05_queue_depth"), "full batch")
        assert_ended_well(node, number)
        statuses = {answer.status for (answer,) in clients.finish()}
        assert 503 in statuses <= {200, 503}
        assert events.read(), "it has an end"
        with pytest.raises(ConnectionClosed):
            idle.recv(timeout=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "replan_steps:=ten"), "Parameter replan_steps"),
        (("-p", "http_port:=70000"), "Parameter http_port"),
        (("-p", "bad"), ""),
        (("--log-level", "foo"), ""),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "pi05_ros.tools.policy_node", "--ros-args", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith(f"policy_node: {message}")
    assert "Traceback" not in result.stderr


def test_help_names_every_parameter() -> None:
    from pi05_ros.ros.parameters import PARAMETERS

    command = [sys.executable, "-m", "pi05_ros.tools.policy_node", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
    assert result.returncode == 0
    for spec in PARAMETERS:
        assert f"  {spec.name} (" in result.stdout


def test_the_yaml_file_has_every_parameter_at_its_default() -> None:
    import yaml

    from pi05_ros.policy.profile import config_folder
    from pi05_ros.ros.parameters import PARAMETERS

    values = yaml.safe_load((config_folder() / "policy.yaml").read_text())["/**"]["ros__parameters"]
    assert values == {spec.name: spec.default for spec in PARAMETERS}
