"""What the status page is told, and how: the monitor, the events and the pictures, without a browser."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import math
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.engine.images import DIALECTS, image_to_model
from pi05_ros.errors import ObservationError
from pi05_ros.server import status
from pi05_ros.server.errors import RequestError
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.limits import Limits
from pi05_ros.server.monitor import LATENCIES, REFUSALS, STAGES, TEXT, Monitor
from pi05_ros.server.status import page_files, status_routes

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
STATE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("monitor") / "tiny")


def load(folder: Path, **options: Any) -> Policy:
    return Policy.from_checkpoint(folder, **{"device": "cpu", "precision": "float32", "robot": "aloha_sim", **options})


@pytest.fixture(scope="module")
def policy(tiny: Path) -> Iterator[Policy]:
    with load(tiny) as policy:
        yield policy


@pytest.fixture
def host(policy: Policy) -> PolicyHost:
    policy.reset()
    host = PolicyHost()
    host.serve(policy)
    return host


@pytest.fixture
def monitor(host: PolicyHost) -> Monitor:
    return Monitor(host)


def observation(**changes: Any) -> Observation:
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in CAMERAS}
    return Observation(**{"images": images, "state": STATE, "prompt": "pick up the cube", **changes})


def test_an_answered_request_is_all_there(monitor: Monitor, policy: Policy) -> None:
    chunk = policy.infer(observation(id="a"), seed=0)
    policy.infer(observation(), seed=0)
    snapshot = monitor.snapshot()
    assert snapshot["metadata"]["joint_names"][:2] == ["left_waist", "left_shoulder"]
    assert snapshot["metadata"]["units"] == snapshot["metadata"]["action_units"] == (["rad"] * 6 + ["0..1"]) * 2
    last = snapshot["last"]
    assert (last["number"], last["prompt"], last["state"]) == (2, "pick up the cube", STATE.tolist())
    assert np.array_equal(last["actions"], chunk.actions.astype(float).round(5))
    assert snapshot["latencies"]["prefix_cache_hit"] == [False, True]
    assert snapshot["latencies"]["batch_size"] == [1, 1]
    assert snapshot["latencies"]["total_ms"][0] == pytest.approx(chunk.timings["total_ms"], abs=1e-3)
    assert set(snapshot["latencies"]) == {"time", *STAGES, "batch_size", "prefix_cache_hit"}
    counts = snapshot["counts"]
    assert (counts["answered"], counts["cache_hits"], counts["cache_misses"]) == (2, 1, 1)
    assert snapshot["engine"]["answered"] >= 2
    assert snapshot["cameras"][0] == {"name": "cam_high", "height": 48, "width": 64, "seen": True, "masked": False}


def test_ends_other_than_an_answer_are_counted_and_leave_the_last_one(monitor: Monitor, policy: Policy) -> None:
    policy.infer(observation(prompt="seen"))
    late = policy.submit(observation(prompt="late"), deadline=0.0)
    with policy.engine.together():
        cancelled = policy.submit(observation(prompt="cancelled"))
        assert cancelled.cancel()
    wait([late])
    policy.infer(observation(prompt="seen"))  # after it the engine has told of those before
    counts = monitor.snapshot()["counts"]
    assert (counts["answered"], counts["late"], counts["cancelled"], counts["failed"]) == (2, 1, 1, 0)
    assert monitor.snapshot()["last"]["prompt"] == "seen"


def test_a_failed_inference_is_counted(tiny: Path) -> None:
    host = PolicyHost()
    monitor = Monitor(host)
    with load(tiny) as policy:
        host.serve(policy)
        policy.engine.path.model.action_out_proj.bias.data.fill_(math.nan)  # type: ignore[attr-defined]
        wait([policy.submit(observation())])
        policy.engine.close(drain=True)
    assert monitor.snapshot()["counts"]["failed"] == 1
    assert monitor.snapshot()["last"] is None


def test_of_many_requests_the_newest_are_kept(monitor: Monitor, policy: Policy) -> None:
    future = policy.submit(observation())
    future.result()
    for _ in range(LATENCIES + 5):
        monitor._ended(observation(), future)
    assert len(monitor.snapshot()["latencies"]["time"]) == LATENCIES


def test_refusals_are_kept_newest_first_and_clipped(monitor: Monitor) -> None:
    for number in range(REFUSALS + 5):
        monitor.refused("/v1/actions/generations", RequestError(400, f"{number} " + "x" * 10_000, "f" * 10_000))
    snapshot = monitor.snapshot()
    assert snapshot["counts"]["refused"] == REFUSALS + 5
    assert [one["message"].split()[0] for one in snapshot["refusals"]] == [
        str(REFUSALS + 4 - i) for i in range(REFUSALS)
    ]
    first = snapshot["refusals"][0]
    assert (first["route"], first["status"], first["code"]) == ("/v1/actions/generations", 400, "invalid_value")
    assert len(first["message"]) == TEXT
    assert len(first["field"]) <= TEXT


def test_clients_are_counted_while_they_are_there(monitor: Monitor) -> None:
    with monitor.connected("http"), monitor.connected("openpi"), monitor.connected("openpi"):
        assert monitor.snapshot()["clients"] == {"http": 1, "realtime": 0, "openpi": 2}
    assert monitor.snapshot()["clients"] == {"http": 0, "realtime": 0, "openpi": 0}
    with (
        pytest.raises(ValueError, match="kind: expected one of http, realtime, openpi, got 'ftp'"),
        monitor.connected("ftp"),
    ):
        pass


def test_before_and_after_a_policy_there_is_a_reason(policy: Policy) -> None:
    host = PolicyHost(lambda: {"state": "waiting", "reason": "no frame yet", "age": math.nan, "rates": np.ones(2)})
    monitor = Monitor(host)
    host.tell("loading", "Loading: 3 of 8 tensors.")
    snapshot = json.loads(json.dumps(monitor.snapshot(), allow_nan=False))
    assert (snapshot["stage"], snapshot["reason"]) == ("loading", "Loading: 3 of 8 tensors.")
    assert (snapshot["metadata"], snapshot["last"], snapshot["engine"], snapshot["cameras"]) == (None, None, None, [])
    assert snapshot["robot"] == {"state": "waiting", "reason": "no frame yet", "age": None, "rates": [1.0, 1.0]}
    host.serve(policy)
    policy.infer(observation())
    monitor.snapshot()
    host.tell("error", "The GPU is gone.")
    snapshot = monitor.snapshot()
    assert (snapshot["stage"], snapshot["reason"]) == ("error", "The GPU is gone.")
    assert snapshot["last"]["number"] == 1, "what it last did stays to be looked at"


def test_a_policy_is_not_kept_alive(tiny: Path) -> None:
    host = PolicyHost()
    monitor = Monitor(host)
    policy = load(tiny)
    host.serve(policy)
    policy.infer(observation())
    assert monitor.snapshot()["last"]
    host.tell("closed")
    gone = weakref.ref(policy)
    policy.close()
    del policy
    gc.collect()
    assert gone() is None
    assert monitor.snapshot()["last"]


@pytest.mark.parametrize("resize", DIALECTS)
def test_a_picture_is_what_the_model_saw(tiny: Path, resize: str) -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    image[:, ::3] = 255  # stripes, of which the two dialects make different things
    with load(tiny, resize=resize) as policy:
        host = PolicyHost()
        host.serve(policy)
        monitor = Monitor(host)
        policy.infer(observation(images={"cam_high": image}))
        picture = monitor.camera("cam_high")
        size = policy.checkpoint.config.vision.image_size
        seen = {
            dialect: (image_to_model(image, size, dialect).numpy().transpose(1, 2, 0) + 1) * 127.5
            for dialect in DIALECTS
        }
        shown = np.asarray(Image.open(io.BytesIO(picture)), dtype=float)
        assert shown.shape == (size, size, 3)
        error = {dialect: np.abs(shown - wanted).mean() for dialect, wanted in seen.items()}
        assert error[resize] < 6.0, "that of a JPEG"
        assert error[resize] < 0.3 * max(error.values())
        assert monitor.camera("cam_high") is picture, "made once"
        policy.infer(observation(images={"cam_high": image[:, ::-1].copy()}))
        assert monitor.camera("cam_high") != picture


def test_a_picture_that_there_is_not_is_refused_with_the_reason(monitor: Monitor, policy: Policy) -> None:
    with pytest.raises(RequestError, match="has not seen cam_high"):
        monitor.camera("cam_high")
    policy.infer(observation(image_masks={"cam_left_wrist": False}))
    with pytest.raises(RequestError, match="has not seen cam_left_wrist") as refusal:
        monitor.camera("cam_left_wrist")
    assert refusal.value.status == 404
    assert monitor.snapshot()["cameras"][1]["masked"]
    with pytest.raises(RequestError, match=r"reads cam_high, cam_left_wrist, cam_right_wrist, got '\.\./x'"):
        monitor.camera("../x")


def test_memory_that_its_owner_writes_to_again_does_no_harm(monitor: Monitor, policy: Policy) -> None:
    state, image = STATE.copy(), np.full((48, 64, 3), 0.5, np.float32)
    policy.infer(observation(state=state, images={"cam_high": image}))
    state[:], image[:] = math.nan, 255.0
    assert monitor.snapshot()["last"]["state"] is None
    with pytest.raises(ObservationError, match=r"images\.cam_high"):
        monitor.camera("cam_high")


# ---- events, spoken to as uvicorn does ----


class Reader:
    """One client of /status/events. reads: False for one that takes nothing any more."""

    def __init__(self, app: Starlette, reads: bool = True) -> None:
        self.app, self.reads = app, reads
        self.said: list[bytes] = []
        self.changed = asyncio.Condition()
        self.gone = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        scope = {"type": "http", "method": "GET", "path": "/status/events", "query_string": b"", "headers": []}
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        async with self.changed:
            self.ended = message.get("more_body") is False
            self.said.append(message.get("body", b""))
            self.changed.notify_all()

    async def event(self, holds: Any) -> dict[str, Any]:
        """The first event for which that is true."""
        async with self.changed:
            while True:
                for text in self.said:
                    if text.startswith(b"data: ") and holds(event := json.loads(text[6:])):
                        return event
                await self.changed.wait()

    async def says(self, text: bytes) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: text in self.said)


def told(test: Any) -> None:
    """Run it; what never comes fails it."""

    async def bounded() -> None:
        with anyio.fail_after(30):
            await test()

    asyncio.run(bounded())


def test_events_follow_what_happens_and_are_made_once_for_all(monitor: Monitor, policy: Policy) -> None:
    app = Starlette(routes=status_routes(monitor))

    async def follow() -> None:
        readers = [Reader(app) for _ in range(5)]
        async with anyio.create_task_group() as group:
            for reader in readers:
                group.start_soon(reader.run)
            for reader in readers:
                await reader.event(lambda event: event["last"] is None)
            policy.submit(observation())
            events = [await reader.event(lambda event: event["counts"]["answered"] == 1) for reader in readers]
            assert len({event["now"] for event in events}) == 1
            monitor.close()
        assert all(reader.ended for reader in readers)

    told(follow)


@pytest.mark.parametrize("how", ["monitor", "host"])
def test_a_server_that_closes_ends_its_events(monitor: Monitor, host: PolicyHost, how: str) -> None:
    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.event(lambda event: True)
            monitor.close() if how == "monitor" else host.tell("closed")

    told(follow)


def test_a_reader_that_leaves_is_forgotten(monitor: Monitor) -> None:
    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.event(lambda event: True)
            reader.gone.set()

    told(follow)


def test_a_reader_that_does_not_read_is_let_go_and_no_other_waits_for_it(monitor: Monitor) -> None:
    app = Starlette(routes=status_routes(monitor, replace(Limits(), send_seconds=0.1)))

    async def follow() -> None:
        await Reader(app, reads=False).run()

    told(follow)


def test_a_connection_without_news_says_that_it_lives(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SIGN_OF_LIFE", 0.0)

    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.says(b": nothing new\n\n")
            reader.gone.set()

    told(follow)


def test_the_engine_is_not_held_up(monitor: Monitor, policy: Policy) -> None:
    """A listener never waits for one who reads: it gets by while a snapshot is being made."""
    answered = []

    def robot_status() -> dict[str, Any]:  # within a snapshot
        answered.extend(policy.submit(observation()).result(timeout=30) for _ in range(2))
        return {}

    monitor._host.robot_status = robot_status
    monitor.snapshot()
    assert len(answered) == 2


def test_the_page_needs_nothing_from_elsewhere_and_puts_text_in_as_text() -> None:
    files = page_files()
    assert {"/", "/docs", "/page/page.js", "/page/style.css"} <= set(files)
    for path, file in files.items():
        text = file.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", "style="):
            assert word not in text, f"{path}: {word}"
