"""The sidecar of the node: one policy for the robot and for clients over HTTP, of which only the robot is moved."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from server.serving import Held

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.msg import PolicyStatus
from ros.http_clients import IMAGES, PROMPT, Asking, HttpClient, free_port
from ros.robot_stand_in import STATE, rows
from ros.station import Station

LONG = 150
"""Denoise steps: on a CPU an inference that can be met while it runs."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("http") / "tiny")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def client(port: int) -> HttpClient:
    return HttpClient(port)


@pytest.fixture
def station(checkpoint: Path, port: int) -> Iterator[Station]:
    station = Station(checkpoint, http_port=port, seed=7)
    station.thread.start()
    yield station
    station.close()


def expected(station: Station, seed: int) -> np.ndarray:
    return station.deployment.policy.infer(Observation(IMAGES, STATE, PROMPT), seed=seed).actions


def wait_until_it_runs(station: Station, client: HttpClient, waiting: int = 0) -> None:
    """A request runs, and so many wait behind it."""
    station.robot.wait_for(
        lambda: client.engine("pi05_running") >= 1 and client.engine("pi05_queue_depth") >= waiting,
        f"request that runs, with {waiting} behind it",
    )


def test_an_inactive_node_answers_clients_and_commands_nothing(station: Station, client: HttpClient) -> None:
    robot = station.robot
    station.configure()
    robot.wait_for_status(PolicyStatus.INACTIVE)
    np.testing.assert_allclose(client.act(seed=3).actions, expected(station, 3), atol=1e-5)
    assert client.get("/readyz").status == 200
    robot.spin(0.5)
    assert (robot.trajectories, robot.chunks) == ({"left": [], "right": []}, [])
    assert robot.statuses[-1].state == PolicyStatus.INACTIVE

    station.activate()  # and the robot's own requests do command it
    robot.wait_for(lambda: robot.trajectories["left"] and robot.chunks, "commands")


def test_the_robot_goes_on_beside_four_busy_clients(station: Station, port: int) -> None:
    robot = station.robot
    station.configure()
    station.activate()
    first = robot.wait_for_chunk()
    robot.wait_for_status(PolicyStatus.RUNNING)
    seen = len(robot.statuses)
    clients = Asking(port, 4)
    robot.wait_for(
        lambda: robot.chunks[-1].sequence >= first.sequence + 5 and all(len(got) >= 3 for got in clients.answers),
        "chunks of the robot and of each client",
    )
    answers = clients.finish()
    sequences = [chunk.sequence for chunk in robot.chunks]
    assert sequences == list(range(first.sequence, first.sequence + len(sequences))), "one is lost"
    for chunk in robot.chunks:  # the same frames and seed: nobody else's
        np.testing.assert_allclose(rows(chunk), rows(first), atol=1e-5)
    assert {status.state for status in robot.statuses[seen:]} == {PolicyStatus.RUNNING}
    for seed, got in enumerate(answers):
        for answer in got:
            np.testing.assert_allclose(answer.actions, expected(station, seed), atol=1e-5)  # type: ignore[union-attr]


def test_the_robot_goes_before_clients_that_wait(station: Station, port: int) -> None:
    station.configure()
    policy = station.deployment.policy
    ended: list[str] = []
    policy.watch(lambda observation, _: ended.append(observation.prompt))
    with Held(policy) as held:
        clients = Asking(port, 8, once=True)
        station.robot.wait_for(lambda: held.stats["waiting"] == 8, "requests of eight clients")
        station.activate()
        station.robot.wait_for(lambda: held.stats["waiting"] == 9, "the robot's own request")
    station.robot.wait_for(lambda: len(ended) >= 10, "all answers")
    assert ended.index("x") == 1, "behind what ran already"
    assert [answer.status for (answer,) in clients.finish()] == [200] * 8  # type: ignore[union-attr]


def test_clients_hear_what_configure_is_at(
    station: Station, client: HttpClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, Any] = {}
    from_checkpoint = Policy.from_checkpoint

    def load(*arguments: Any, **options: Any) -> Policy:
        heard["load"] = client.get("/readyz"), client.act()
        return from_checkpoint(*arguments, **options)

    def rehearse(*_: Any, batches: range, **__: Any) -> float:
        heard["warm up"] = client.get("/readyz"), client.act()
        assert batches == range(1, 5), "those of clients too, for which the robot would else wait later"
        return 0.0

    monkeypatch.setattr(Policy, "from_checkpoint", load)
    monkeypatch.setattr(Policy, "warm_up", rehearse)
    monkeypatch.setattr(Policy, "compiles", True)  # as on a GPU
    assert not client.listens(), "the node is not configured"
    station.configure()
    for stage, status, reason in (
        ("load", "loading", f"Loading {checkpoint} for aloha_sim"),
        ("warm up", "warming_up", "Warming up for cam_high 320 x 240"),
    ):
        ready, answer = heard[stage]
        assert (ready.status, answer.status) == (503, 503)
        assert ready.body["status"] == answer.body["status"] == status
        assert reason in answer.body["detail"]
    assert client.get("/readyz").status == 200
    assert client.act().status == 200


def test_a_port_that_is_taken_fails_configure_and_names_it(
    station: Station, client: HttpClient, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other, monkeypatch.context() as no_weights:
        other.bind(("127.0.0.1", port))
        other.listen()
        no_weights.setattr(Policy, "from_checkpoint", None)  # they are not even looked at
        assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        status = station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, f"http_port {port}")
        assert "127.0.0.1" in status.reason
        assert "Address already in use" in status.reason
        assert not list(station.node.get_publishers_info_by_topic("/aloha_sim/left/joint_trajectory"))
    station.configure()
    assert client.act().status == 200


def test_a_configure_that_fails_leaves_no_server_behind(
    station: Station, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    with monkeypatch.context() as broken:
        broken.setattr("pi05_ros.ros.deployment.Streams", None)
        assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
    assert not client.listens()
    assert set(threading.enumerate()) <= threads
    station.configure()
    assert client.act().status == 200


def test_the_status_page_is_told_what_the_robot_is_at(station: Station, client: HttpClient) -> None:
    robot = station.robot
    station.configure()

    def told() -> dict[str, str]:
        return client.get("/status/snapshot").body["robot"]

    inactive = {"state": "inactive", "reason": "Configured; not activated.", "prompt": "x", "robot": "aloha_sim"}
    robot.wait_for(lambda: told() == inactive, "inactive node")
    station.activate()
    robot.wait_for(lambda: told()["state"] == "running", "running node")
    robot.joint_names.remove("elbow")
    robot.wait_for(lambda: "joint elbow is not in" in told()["reason"], "reason for waiting")


def test_deactivating_leaves_clients_alone(station: Station, client: HttpClient, port: int) -> None:
    station.configure()
    station.activate()
    station.robot.wait_for_chunk()
    clients = Asking(port, 2, once=True, num_inference_steps=LONG)
    wait_until_it_runs(station, client)
    assert station.node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
    assert [answer.status for (answer,) in clients.finish()] == [200, 200]  # type: ignore[union-attr]


def test_cleaning_up_answers_or_refuses_clients(station: Station, client: HttpClient, port: int) -> None:
    station.configure()
    clients = Asking(port, 8, once=True, num_inference_steps=400)
    wait_until_it_runs(station, client, waiting=1)
    assert station.node.trigger_cleanup() == TransitionCallbackReturn.SUCCESS
    statuses = {answer.status for (answer,) in clients.finish()}  # type: ignore[union-attr]
    assert 503 in statuses <= {200, 503}
    assert not client.listens()
    station.configure()  # the address is free at once
    assert client.act().status == 200


def test_a_token_is_read_from_a_file_and_never_a_parameter(
    station: Station, client: HttpClient, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("PI05_ROS_TOKEN", "of the environment")
    station.node.set_parameters([Parameter("http_token_file", value=str(file))])
    for content, problem in ((None, "cannot be read"), (" \n", "is empty"), (b"\xff", "cannot be read")):
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, f"Not configured: http_token_file: {file} {problem}")

    file.write_text("of the file\n")
    station.configure()
    assert [client.act().status, HttpClient(port, "of the environment").act().status] == [401, 401]
    assert HttpClient(port, "of the file").act().status == 200
    assert "of the file" not in {parameter.value for parameter in station.node._parameters.values()}


def test_without_a_file_the_token_is_that_of_the_environment(
    station: Station, client: HttpClient, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI05_ROS_TOKEN", "of the environment")
    station.configure()
    assert client.act().status == 401
    assert HttpClient(port, "of the environment").act().status == 200


def test_origins_and_files_reach_the_server(station: Station, client: HttpClient, tmp_path: Path) -> None:
    values = {"http_origins": " http://one:3000, ,http://two ", "http_certificate": str(tmp_path / "no.pem")}
    station.node.set_parameters([Parameter(name, value=value) for name, value in values.items()])
    assert station.node.trigger_configure() == TransitionCallbackReturn.FAILURE
    station.robot.wait_for_status(PolicyStatus.UNCONFIGURED, "no.pem")
    station.node.set_parameters([Parameter("http_certificate", value="")])
    station.configure()
    settings = station.deployment.settings.server
    assert settings is not None
    assert settings.origins == ("http://one:3000", "http://two")
