"""A server before its policy, with a busy or failing one, and at its end: every request is answered or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import urllib3
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from pi05_ros.policy import Policy
from pi05_ros.server.codec import pack, unpack
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import ServerSettings, Sidecar
from server.serving import (
    GENERATIONS,
    PATIENCE,
    STATE,
    Held,
    answer,
    flat,
    load,
    noise,
    observation,
    post,
    serving,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore:connect:Warning")  # the client is of before its websocket library's

REALTIME, OPENPI = "/v1/actions/realtime", "/openpi/policy"


@pytest.fixture
def policy() -> Iterator[Policy]:
    with load(batch_delay_ms=0.0) as policy:
        yield policy


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


Ask = Callable[[Sidecar, dict[str, Any]], Any]


def over_http(sidecar: Sidecar, message: dict[str, Any]) -> Any:
    """The reply's body, an error's too."""
    return answer(post(sidecar.url + GENERATIONS, message))


def over_realtime(sidecar: Sidecar, message: dict[str, Any]) -> Any:
    with connect(sidecar.url.replace("http", "ws") + REALTIME) as ws:
        assert unpack(ws.recv(PATIENCE, decode=False))["status"] == "ready"
        ws.send(pack(message))
        return unpack(ws.recv(PATIENCE, decode=False))


def over_openpi(sidecar: Sidecar, message: dict[str, Any]) -> Any:
    client = WebsocketClientPolicy(urlsplit(sidecar.url).netloc)
    assert client.get_server_metadata()["status"] == "ready"
    try:
        return client.infer(message)
    finally:
        client._ws.close()


def actions(reply: Any) -> np.ndarray:
    """float32 [50, 14], of whatever protocol."""
    values: np.ndarray = reply["actions"] if "actions" in reply else reply["data"][0]["action"]["values"]
    return values


def get(sidecar: Sidecar, path: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request("GET", sidecar.url + path, retries=False)


# ---- before there is a policy ----


@pytest.mark.parametrize("ask", [over_realtime, over_openpi])
def test_sockets_wait_for_the_policy(policy: Policy, threads: ThreadPoolExecutor, ask: Ask) -> None:
    """The metadata comes when there is one."""
    host = PolicyHost()
    with serving(None, host) as sidecar:
        waiting = threads.submit(ask, sidecar, flat())
        until(lambda: _sockets(sidecar) == 1)
        host.tell("warming_up", "Kernels are compiled.")
        assert not waiting.done()
        host.serve(policy)
        assert actions(waiting.result(PATIENCE)).shape == (50, 14)


def _sockets(sidecar: Sidecar) -> int:
    clients = get(sidecar, "/status/snapshot").json()["clients"]
    return int(clients["realtime"] + clients["openpi"])


def test_http_says_what_it_waits_for(policy: Policy) -> None:
    host = PolicyHost()
    with serving(None, host) as sidecar:
        for stage, reason in (("loading", ""), ("warming_up", "3 of 5 requests"), ("error", "No such checkpoint.")):
            host.tell(stage, reason)
            for response in (
                post(sidecar.url + GENERATIONS, flat()),
                get(sidecar, "/readyz"),
                get(sidecar, "/v1/actions/metadata"),
            ):
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                body = response.json()
                assert (body["status"], body["error"]["code"]) == (stage, "not_ready")
                assert reason in body["detail"]
            assert get(sidecar, "/healthz").data == b"OK\n"
        host.serve(policy)
        assert get(sidecar, "/readyz").json() == {"status": "ready"}
        assert actions(over_http(sidecar, flat())).shape == (50, 14)


@pytest.mark.parametrize("path", [REALTIME, OPENPI, "/"])
def test_sockets_are_told_why_there_will_be_no_policy(path: str) -> None:
    """And closed: there is nothing to wait for."""
    host = PolicyHost()
    with serving(None, host) as sidecar, connect(sidecar.url.replace("http", "ws") + path) as ws:
        host.tell("error", "config.json: no such file.")
        message = ws.recv(PATIENCE)
        if path == REALTIME:
            assert isinstance(message, bytes)
            assert unpack(message)["status"] == "error"
            message = unpack(message)["detail"]
        assert isinstance(message, str)
        assert message.endswith("config.json: no such file.")
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(PATIENCE)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1011


# ---- busy, late, failing ----


def test_a_full_queue_is_said_and_the_others_are_answered(policy: Policy, threads: ThreadPoolExecutor) -> None:
    policy.engine.max_queue = 2
    with serving(policy) as sidecar, Held(policy) as held:
        waiting = [threads.submit(over_http, sidecar, flat()) for _ in range(2)]
        held.wait_for_waiting(2)
        response = post(sidecar.url + GENERATIONS, flat())
        assert (response.status, response.json()["error"]["code"]) == (503, "busy")
        assert int(response.headers["Retry-After"]) >= 1
        assert over_realtime(sidecar, flat())["error"]["code"] == "busy"
        with pytest.raises(RuntimeError, match="The engine is busy: 2 requests are waiting"):
            over_openpi(sidecar, flat())
        held.let_go()
        assert all(actions(one.result(PATIENCE)).shape == (50, 14) for one in waiting)


@pytest.mark.parametrize("ask", [over_http, over_realtime])
def test_a_request_may_be_too_late(policy: Policy, threads: ThreadPoolExecutor, ask: Ask) -> None:
    """Then it is not run."""
    with serving(policy) as sidecar, Held(policy) as held:
        late = threads.submit(ask, sidecar, {"input": {"observation": flat()}, "runtime": {"timeout_ms": 10}})
        until(lambda: held.stats["refused"]["deadline"] == 1)
        held.let_go()
        error = late.result(PATIENCE)["error"]
        assert (error["code"], error["field"]) == ("deadline", None)
        assert "deadline passed" in error["message"]
    assert policy.engine.stats()["answered"] == 1


def test_of_several_observations_all_are_good_or_none_runs(policy: Policy) -> None:
    good = {"observation": flat()}
    with serving(policy) as sidecar:
        reply = over_http(sidecar, {"input": [good, {"observation": flat(state=STATE * np.nan)}, good]})
    assert (reply["error"]["code"], reply["error"]["field"]) == ("invalid_value", "state")
    assert policy.engine.stats()["requests"] == 0


def test_a_request_fails_alone(policy: Policy, threads: ThreadPoolExecutor) -> None:
    """In the batch that it shares with others, here by noise that is finite until it is used."""
    bad = {**flat(), "noise": np.full((50, 32), 3e38, np.float32)}
    with serving(policy) as sidecar, Held(policy) as held:
        good = [threads.submit(over_http, sidecar, flat(noise=noise(seed))) for seed in range(3)]
        failing = threads.submit(post, sidecar.url + GENERATIONS, bad)
        held.wait_for_waiting(4)
        held.let_go()
        assert all(np.isfinite(actions(one.result(PATIENCE))).all() for one in good)
        response = failing.result(PATIENCE)
        assert (response.status, response.json()["error"]["code"]) == (500, "inference_failed")
        assert "non-finite actions" in response.json()["detail"]
        with pytest.raises(RuntimeError, match="non-finite actions"):
            over_openpi(sidecar, bad)


def test_when_one_of_several_fails_the_rest_is_not_run(policy: Policy) -> None:
    """Nobody would get it."""
    policy.engine.max_batch = 1
    bad = {"observation": flat(), "noise": np.full((50, 32), 3e38, np.float32)}
    good = [{"observation": flat()}] * 8
    with serving(policy) as sidecar:
        body = {"input": [bad, *good], "parameters": {"num_inference_steps": 100}}
        assert over_http(sidecar, body)["error"]["code"] == "inference_failed"
        until(lambda: policy.engine.stats()["running"] == 0)
    assert policy.engine.stats()["cancelled"] >= 6


def test_what_breaks_inside_is_in_the_log_alone(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: Any) -> Any:
        raise RuntimeError("device-side assert at 0xdeadbeef")

    monkeypatch.setattr(policy.engine.path, "run", run)
    with serving(policy) as sidecar:
        response = post(sidecar.url + GENERATIONS, flat())
        assert (response.status, response.json()["error"]["code"]) == (500, "internal")
        assert "0xdeadbeef" not in str(response.json())
        assert "0xdeadbeef" in caplog.text
        monkeypatch.undo()
        assert actions(over_http(sidecar, flat())).shape == (50, 14)


def test_a_policy_that_was_closed(policy: Policy) -> None:
    with serving(policy) as sidecar:
        policy.close()
        response = post(sidecar.url + GENERATIONS, flat())
        assert (response.status, response.json()["error"]["code"]) == (503, "closing")


def test_every_client_gets_his_own_chunk(policy: Policy, threads: ThreadPoolExecutor) -> None:
    """16 at a time, over all protocols, in whatever batches."""
    asks = (over_http, over_realtime, over_openpi, over_http)
    expected = [policy.infer(observation(), noise=noise(seed)).actions for seed in range(16)]

    def client(number: int) -> list[np.ndarray]:
        start.wait(PATIENCE)
        message = flat(noise=noise(number))
        return [actions(asks[(number + turn) % 4](sidecar, message)) for turn in range(4)]

    start = threading.Barrier(16)
    with serving(policy) as sidecar:
        for number, chunks in enumerate(threads.map(client, range(16))):
            distances = [[float(np.abs(chunk - one).max()) for one in expected] for chunk in chunks]
            assert all(distance[number] < 1e-4 < sorted(distance)[1] for distance in distances)
    assert max(policy.engine.stats()["batches"]) > 1


# ---- the end ----


def in_flight(sidecar: Sidecar, threads: ThreadPoolExecutor, held: Held) -> list[Future[Any]]:
    asked = [threads.submit(ask, sidecar, flat()) for ask in (over_http, over_realtime, over_openpi) * 2]
    held.wait_for_waiting(6)
    return asked


def test_at_the_end_what_is_in_flight_is_answered(policy: Policy, threads: ThreadPoolExecutor) -> None:
    with serving(policy) as sidecar, Held(policy) as held:
        asked = in_flight(sidecar, threads, held)
        closing = threads.submit(sidecar.close, PATIENCE)
        until(lambda: sidecar._service._closing)
        assert over_http(sidecar, flat())["error"]["code"] == "closing", "nobody else is let in"
        held.let_go()
        assert all(actions(one.result(PATIENCE)).shape == (50, 14) for one in asked)
        closing.result(PATIENCE)
    assert not sidecar._thread.is_alive()


def test_at_the_end_what_takes_too_long_is_refused(policy: Policy, threads: ThreadPoolExecutor) -> None:
    """None hangs, the thread ends, and the port is free again."""
    with serving(policy) as sidecar, Held(policy) as held:
        asked = in_flight(sidecar, threads, held)
        sidecar.close(timeout=1.0)
        assert not sidecar._thread.is_alive()
        for one in asked:
            error = one.exception(PATIENCE)  # of openpi's client
            assert "The server was closed" in str(error or one.result()["error"])
        assert held.stats["waiting"] == 0
    again = Sidecar(PolicyHost(), ServerSettings(port=urlsplit(sidecar.url).port or 0))
    again.close()
    sidecar.close()
