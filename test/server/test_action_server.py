"""The executable, as a user starts it: the README's curl answers, openpi's client gets the policy's own chunk."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from server.serving import flat, load, noise, observation, tiny_checkpoint

ROOT = Path(__file__).parents[2]
TIMEOUT = 60.0
README_URL = "http://127.0.0.1:8000"


class Process:
    """action_server, on a port that it chooses."""

    def __init__(self, log: Path, *arguments: str, checkpoint: Path | None = None, **environment: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "pi05_ros.tools.action_server", "--port", "0", "--device", "cpu"]
        command += ["--robot", "aloha_sim", "--checkpoint", str(checkpoint or tiny_checkpoint()), *arguments]
        self.process = subprocess.Popen(
            command, stderr=log.open("w"), stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **environment}
        )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def url(self) -> str:
        """As soon as it listens."""
        return self.wait_for(r"Serving on (\S+)")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + TIMEOUT
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.text}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.text}"
            time.sleep(0.01)
        return found

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str, **options: Any) -> Process:
        started.append(Process(tmp_path / f"log_{len(started)}", *arguments, **options))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


def fails(*arguments: str, **environment: str) -> str:
    """The one line that a mistake gives."""
    command = [sys.executable, "-m", "pi05_ros.tools.action_server", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT, env={**os.environ, **environment}
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_clients_get_what_the_policy_gives(start: Callable[..., Process]) -> None:
    """The acceptance of the server: curl, openpi's client and the page."""
    server = start("--precision", "float32")
    url = server.url()
    server.wait_for("Ready")
    commands = re.findall(r"^curl .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = [
        subprocess.run(one.replace(README_URL, url), shell=True, capture_output=True, timeout=30) for one in commands
    ]
    metadata, generation = (json.loads(one.stdout) for one in told)
    assert metadata["status"] == "ready"
    assert generation["data"][0]["action"]["shape"] == [50, 14]

    client = WebsocketClientPolicy("127.0.0.1", int(url.rpartition(":")[2]))
    given = client.infer(flat(noise=noise(5)))
    with load() as policy:
        expected = policy.infer(observation(), noise=noise(5)).actions
    assert np.array_equal(given["actions"], expected)

    snapshot = urllib3.request("GET", url + "/status/snapshot").json()
    assert np.allclose(snapshot["last"]["actions"], expected, atol=1e-3)
    assert server.end(signal.SIGINT) == 0
    assert "Traceback" not in server.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_it_loads(start: Callable[..., Process], number: int) -> None:
    server = start()
    server.url()
    assert server.end(number) == 0
    assert "Traceback" not in server.text


def test_a_checkpoint_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    message = fails("--checkpoint", str(tmp_path), "--port", "0", "--device", "cpu")
    assert message.startswith(f"action_server: {tmp_path}")


def test_a_port_that_is_taken_is_found_before_weights_are_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = fails("--checkpoint", "/none", "--port", port)
    assert re.fullmatch(f"action_server: The server cannot listen on 127.0.0.1, port {port}: .*in use.*", message)


def test_a_token_of_the_environment_counts(start: Callable[..., Process]) -> None:
    url = start(PI05_ROS_TOKEN="secret").url()
    assert urllib3.request("GET", url + "/metrics").status == 401
    assert urllib3.request("GET", url + "/metrics", headers={"Authorization": "Bearer secret"}).status == 200


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--checkpoint", "x", "--max-connections", "0"), "--max-connections: expected more than 0, got 0"),
        (("--checkpoint", "x", "--token-file", "/none/token"), "/none/token"),
        (("--checkpoint", "x", "--port", "many"), "invalid int value: 'many'"),
        (("--checkpoint", "x", "--port", "0", "--certificate", "/none"), "certificate: expected a PEM file"),
        ((), "--checkpoint"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], part: str) -> None:
    assert part in fails(*arguments)
