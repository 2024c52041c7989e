"""What a client does when its server is late, mixes up answers, breaks off or talks nonsense."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection
from websockets.sync.server import ServerConnection

from client.stand_ins import envelope, http_server, server_that_stops_reading, websocket_server
from pi05_ros.client import ActionClient, ClientError, ServerRefusal, ServerUnavailable, Timeout
from pi05_ros.server.codec import pack

MSGPACK = "application/msgpack"
PATIENCE = 20.0  # s, that nothing here needs


def ask(client: ActionClient, number: float, **options: Any) -> float:
    """A request that the stand-ins answer with its own number."""
    return float(client.infer({}, [number], "", **options).actions[0, 0])


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """The stand-in answers no sooner than this is set."""
    event = threading.Event()
    yield event
    event.set()


def test_a_late_answer_finds_its_websocket_closed(gate: threading.Event) -> None:
    connections: list[ServerConnection] = []
    late_answer_sent = threading.Event()

    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connections.append(connection)
        if len(connections) == 1:
            gate.wait()
            try:
                connection.send(pack(envelope(request)))
            finally:
                late_answer_sent.set()
        else:
            connection.send(pack(envelope(request)))

    with websocket_server(answer) as url, ActionClient(url) as client:
        with pytest.raises(Timeout):
            ask(client, 1, timeout=0.3)
        gate.set()
        assert late_answer_sent.wait(PATIENCE)
        assert [ask(client, number) for number in (2, 3)] == [2, 3]
        assert connections[1] is not connections[0]
        assert connections[2] is connections[1], "a connection is kept"


def test_an_answer_to_another_request_is_discarded() -> None:
    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connection.send(pack(envelope(request, id="another", data=[])))
        connection.send(pack({"error": {"code": "busy", "message": "no"}, "request_id": "another"}))
        connection.send(pack(envelope(request)))

    with websocket_server(answer) as url, ActionClient(url) as client:
        assert [ask(client, number) for number in (1, 2)] == [1, 2]


def test_only_answers_to_other_requests_are_no_answer() -> None:
    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connection.send(pack(envelope(request, id="another")))

    with websocket_server(answer) as url, ActionClient(url) as client, pytest.raises(Timeout):
        ask(client, 1, timeout=0.3)


def test_ctrl_c_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[ServerConnection] = []

    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connections.append(connection)
        connection.send(pack(envelope(request)))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with websocket_server(answer) as url, ActionClient(url) as client:
        assert ask(client, 1) == 1
        with monkeypatch.context() as patch:
            patch.setattr(ClientConnection, "recv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(client, 2)
        assert ask(client, 3) == 3
    assert connections[-1] is not connections[0]


def test_a_server_that_reads_nothing_holds_nobody() -> None:
    with server_that_stops_reading() as url:
        client = ActionClient(url)
        more_than_buffers_hold = np.zeros((4000, 4000, 3), np.uint8)
        raised: list[BaseException] = []

        def call() -> None:
            try:
                client.infer({"cam": more_than_buffers_hold}, [1.0], "", timeout=0.5)
            except ClientError as error:
                raised.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert [type(error) for error in raised] == [Timeout]
        client.close()


def test_a_connection_that_breaks_is_said_and_made_anew() -> None:
    broken = threading.Event()

    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        if not broken.is_set():
            broken.set()
            connection.socket.shutdown(socket.SHUT_RDWR)
        else:
            connection.send(pack(envelope(request)))

    with websocket_server(answer) as url, ActionClient(url) as client:
        with pytest.raises(ServerUnavailable, match="ended the connection before it answered"):
            ask(client, 1)
        assert ask(client, 2) == 2


def test_a_connection_that_the_server_ended_meanwhile_costs_no_request() -> None:
    ended: queue.Queue[ServerConnection] = queue.Queue()

    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connection.send(pack(envelope(request)))
        connection.close()
        ended.put(connection)

    with websocket_server(answer) as url, ActionClient(url) as client:
        for number in (1, 2, 3):
            assert ask(client, number) == number
            ended.get(timeout=PATIENCE)


def test_close_ends_a_call_of_another_thread(gate: threading.Event) -> None:
    asked = threading.Event()

    def answer(*_: Any) -> None:
        asked.set()
        gate.wait()

    raised: list[BaseException] = []

    def call() -> None:
        try:
            ask(client, 1, timeout=PATIENCE)
        except ClientError as error:
            raised.append(error)

    with websocket_server(answer) as url:
        client = ActionClient(url)
        thread = threading.Thread(target=call)
        thread.start()
        assert asked.wait(PATIENCE)
        began = time.monotonic()
        client.close()
        thread.join()
        gate.set()
    assert time.monotonic() - began < PATIENCE
    assert [type(error) for error in raised] == [ServerUnavailable]
    with pytest.raises(ClientError, match="closed"):
        ask(client, 2)


def test_a_second_thread_waits_for_its_turn_as_long_as_it_may(gate: threading.Event) -> None:
    asked = threading.Event()

    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        asked.set()
        gate.wait()
        connection.send(pack(envelope(request)))

    results: list[float] = []
    with websocket_server(answer) as url, ActionClient(url) as client:
        thread = threading.Thread(target=lambda: results.append(ask(client, 1)))
        thread.start()
        assert asked.wait(PATIENCE)
        with pytest.raises(Timeout, match="busy with a request of another thread"):
            ask(client, 2, timeout=0.2)
        gate.set()
        assert ask(client, 3) == 3
        thread.join()
    assert results == [1]


@pytest.mark.parametrize("frame", ["text", b"\xc1", pack([1]), pack({"id": None})])
def test_nonsense_over_the_websocket_is_said(frame: bytes | str) -> None:
    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connection.send(frame)

    with websocket_server(answer) as url, ActionClient(url, timeout=0.5) as client, pytest.raises(ClientError):
        ask(client, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": None},
        {"data": []},
        {"data": [{"input_index": 0}]},
        {"data": [{"input_index": 1, "action": {"values": [[0.0]]}}]},
        {"data": [{"input_index": 0, "action": {"values": [0.0]}}]},
        {"data": [{"input_index": 0, "action": {"values": [["a"]]}}]},
        {"usage": None},
    ],
)
def test_a_reply_without_the_chunk_is_no_reply(changes: dict[str, Any]) -> None:
    def answer(connection: ServerConnection, request: dict[str, Any]) -> None:
        connection.send(pack(envelope(request, **changes)))

    with websocket_server(answer) as url, ActionClient(url) as client, pytest.raises(ClientError, match=r"^reply: "):
        ask(client, 1)


def test_a_late_answer_over_http_is_nobodys(gate: threading.Event) -> None:
    seen: list[float] = []

    def answer(request: dict[str, Any]) -> tuple[int, str, bytes]:
        seen.append(request["input"]["observation"]["state"][0])
        if len(seen) == 1:
            gate.wait()
        return 200, MSGPACK, pack(envelope(request))

    with http_server(answer) as url, ActionClient(url, transport="http") as client:
        with pytest.raises(Timeout):
            ask(client, 1, timeout=0.3)
        gate.set()
        assert [ask(client, number) for number in (2, 3)] == [2, 3]
    assert seen == [1, 2, 3], "nothing is sent twice"


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        ((200, MSGPACK, pack({"id": "another"})), ClientError, "reply: expected id"),
        ((200, "text/html", b"<html>"), ClientError, "expected a JSON or msgpack map, got 'text/html'"),
        ((502, "text/html", b"<html>"), ServerRefusal, "HTTP status 502"),
        ((302, "text/html", b""), ServerRefusal, "HTTP status 302"),
        ((400, "application/json", b'{"detail": "of another server"}'), ServerRefusal, "of another server"),
        (
            (504, "application/json", b'{"error": {"code": "deadline", "message": "too late"}, "detail": "too late"}'),
            Timeout,
            "too late",
        ),
    ],
)
def test_other_answers_over_http(reply: tuple[int, str, bytes], kind: type[ClientError], message: str) -> None:
    with http_server(lambda _: reply) as url, ActionClient(url, transport="http") as client:
        with pytest.raises(kind, match=message) as caught:
            ask(client, 1)
        assert type(caught.value) is kind


@pytest.mark.parametrize("transport", ["realtime", "http"])
def test_nobody_listens(transport: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with ActionClient(url, transport=transport) as client:
            with pytest.raises(ServerUnavailable, match=f"{url} cannot be reached"):
                ask(client, 1)
            with pytest.raises(Timeout, match=r"was not ready within 0.3 s: .*cannot be reached"):
                client.wait_until_ready(0.3)
