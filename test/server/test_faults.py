"""Clients that leave, stall or do not read: none of them holds up the others, nor keeps what it asked for."""

from __future__ import annotations

import base64
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
from websockets.sync.client import ClientConnection, connect

from pi05_ros.policy import Policy
from pi05_ros.server import sidecar as sidecar_module
from pi05_ros.server.codec import pack, unpack
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import Sidecar
from server.serving import GENERATIONS, PATIENCE, Held, flat, load, post, serving, until

SOCKETS = ("/v1/actions/realtime", "/openpi/policy", "/")
STALLS = [1.0, 25.0] if os.environ.get("PI05_ROS_SOAK") == "1" else [1.0]
"""Seconds. The long one is beyond what libraries wait for a sign of life."""


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with load(max_batch=1, batch_delay_ms=0.0) as policy:
        yield policy


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[Sidecar]:
    with serving(policy) as sidecar:
        yield sidecar


@contextmanager
def websocket(sidecar: Sidecar, path: str, **options: Any) -> Iterator[ClientConnection]:
    """After the metadata."""
    with connect(sidecar.url.replace("http", "ws") + path, **options) as ws:
        ws.recv(PATIENCE)
        yield ws


def raw(sidecar: Sidecar, *lines: str, body: bytes = b"", buffer: int = 0) -> socket.socket:
    """A request by hand. buffer: bytes that the machine keeps for a client that does not read."""
    address = urlsplit(sidecar.url)
    client = socket.socket()
    client.settimeout(PATIENCE)
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect(("127.0.0.1", address.port))
    client.sendall("\r\n".join((lines[0], f"Host: {address.netloc}", *lines[1:], "", "")).encode() + body)
    return client


def request_lines(body: bytes, length: int | None = None) -> tuple[str, ...]:
    size = len(body) if length is None else length
    return f"POST {GENERATIONS} HTTP/1.1", "Content-Type: application/msgpack", f"Content-Length: {size}"


def upgrade(sidecar: Sidecar, path: str, message: bytes, **options: Any) -> socket.socket:
    """A websocket by hand, with its first message. It answers no pings, and reads nothing more unless it is told to."""
    key = base64.b64encode(b"0" * 16).decode()
    lines = ("Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13")
    client = raw(sidecar, f"GET {path} HTTP/1.1", *lines, **options)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += client.recv(1)
    assert answer.startswith(b"HTTP/1.1 101 ")
    client.sendall(frame(message))
    return client


def frame(message: bytes) -> bytes:
    """Binary, and masked, if only by zeros."""
    return b"\x82\xff" + struct.pack(">Q", len(message)) + b"\0\0\0\0" + message


def read_to_the_end(client: socket.socket) -> bytes:
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def reset(client: socket.socket) -> None:
    """As the machine of a client that crashes does it."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def metric(sidecar: Sidecar, line: str) -> float:
    """0 if there is no such line."""
    lines = urllib3.request("GET", f"{sidecar.url}/metrics").data.decode().splitlines()
    return next((float(one.removeprefix(line)) for one in lines if one.startswith(line + " ")), 0.0)


def refusals(sidecar: Sidecar) -> list[str]:
    """As the status page shows them."""
    return [one["message"] for one in urllib3.request("GET", f"{sidecar.url}/status/snapshot").json()["refusals"]]


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["crash", "close"])
@pytest.mark.parametrize("path", [GENERATIONS, *SOCKETS])
def test_who_leaves_gives_up_his_place(
    policy: Policy, server: Sidecar, path: str, leave: Callable[[socket.socket], None]
) -> None:
    cancelled = policy.engine.stats()["cancelled"]
    with Held(policy) as held:
        body = pack(flat())
        http = path == GENERATIONS
        client = raw(server, *request_lines(body), body=body) if http else upgrade(server, path, body)
        held.wait_for_waiting(1)
        leave(client)
        until(lambda: held.stats["cancelled"] == cancelled + 1)
        assert held.stats["waiting"] == 0
    assert post(server.url + GENERATIONS, flat()).status == 200


def test_who_leaves_is_no_error_of_the_server(
    policy: Policy, server: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of his body, or while he waits."""
    gone = f'pi05_requests_total{{route="{GENERATIONS}",status="499"}}'
    before = metric(server, gone)
    client = raw(server, *request_lines(b"", length=1000), body=b"\0" * 10)
    until(lambda: metric(server, 'pi05_connections{kind="http"}') == 1)
    client.close()
    until(lambda: metric(server, gone) == before + 1)
    with Held(policy) as held:
        body = pack(flat())
        client = raw(server, *request_lines(body), body=body)
        held.wait_for_waiting(1)
        client.close()
        until(lambda: metric(server, gone) == before + 2)
    assert metric(server, f'pi05_requests_total{{route="{GENERATIONS}",status="500"}}') == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_who_does_not_read_is_dropped(policy: Policy) -> None:
    """His reply is larger than what lies between him and the server, and he asks for one more."""
    inputs = [{"observation": flat()}] * 16
    body = pack({"input": inputs, "parameters": {"num_inference_steps": 1}, "runtime": {"output_format": "list"}})
    with serving(policy, limits={"send_seconds": 0.2}) as sidecar:
        sidecar._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # also of what it accepts
        with upgrade(sidecar, "/v1/actions/realtime", body, buffer=2048) as client:
            client.sendall(frame(body))
            until(lambda: refusals(sidecar))
            assert refusals(sidecar) == ["The client did not read its reply within 0.2 s."]
            until(lambda: metric(sidecar, 'pi05_connections{kind="realtime"}') == 0)
        assert post(sidecar.url + GENERATIONS, flat()).status == 200


@pytest.mark.parametrize("path", SOCKETS)
def test_a_half_open_socket_is_dropped(policy: Policy, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no pings, also while it waits for an answer."""
    monkeypatch.setattr(sidecar_module, "PING_SECONDS", 0.1)
    cancelled = policy.engine.stats()["cancelled"]
    with serving(policy) as sidecar, Held(policy) as held, upgrade(sidecar, path, pack(flat())) as client:
        held.wait_for_waiting(1)
        until(lambda: held.stats["cancelled"] == cancelled + 1)
        read_to_the_end(client)


@pytest.mark.parametrize("path", SOCKETS)
def test_pings_are_answered_while_an_inference_runs(policy: Policy, server: Sidecar, path: str) -> None:
    with websocket(server, path) as ws, Held(policy) as held:
        ws.send(pack(flat()))
        held.wait_for_waiting(1)
        assert all(ws.ping().wait(PATIENCE) for _ in range(3))
        held.let_go()
        assert isinstance(ws.recv(PATIENCE), bytes)


def test_pings_are_answered_while_the_model_computes(policy: Policy, server: Sidecar) -> None:
    with websocket(server, "/") as ws:
        ws.send(pack({**flat(), "num_inference_steps": 1000}))
        until(lambda: policy.engine.stats()["running"])
        assert all(ws.ping().wait(PATIENCE) for _ in range(3))
        assert policy.engine.stats()["running"], "still"
        assert isinstance(ws.recv(PATIENCE), bytes)


@pytest.mark.parametrize("path", SOCKETS)
def test_pings_are_answered_before_there_is_a_policy(policy: Policy, path: str) -> None:
    host = PolicyHost()
    with serving(None, host) as sidecar, connect(sidecar.url.replace("http", "ws") + path) as ws:
        assert all(ws.ping().wait(PATIENCE) for _ in range(3))
        host.serve(policy)
        assert unpack(ws.recv(PATIENCE, decode=False))["object"] == "action.metadata"


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("seconds", STALLS)
def test_a_client_may_take_its_time(policy: Policy, path: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests; the short form has pings so often that several go by."""
    if seconds < sidecar_module.PING_SECONDS:
        monkeypatch.setattr(sidecar_module, "PING_SECONDS", seconds / 4)
    with serving(policy) as sidecar, websocket(sidecar, path, ping_interval=None) as ws:
        ws.send(pack(flat()))
        first = unpack(ws.recv(PATIENCE, decode=False))
        time.sleep(seconds)
        ws.send(pack(flat()))
        second = unpack(ws.recv(PATIENCE, decode=False))
    assert first.keys() == second.keys(), "and no error"
