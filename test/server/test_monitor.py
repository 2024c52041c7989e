"""What the status page is told: numbers, reasons and pictures."""

from __future__ import annotations

import gc
import io
import json
import math
import weakref
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pi05_ros.engine.images import DIALECTS, image_to_model
from pi05_ros.errors import ObservationError
from pi05_ros.policy import Policy
from pi05_ros.server.errors import RequestError
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.monitor import LATENCIES, REFUSALS, STAGES, TEXT, Monitor
from server.serving import STATE, load, observation


@pytest.fixture
def host(policy: Policy) -> PolicyHost:
    policy.reset()
    host = PolicyHost()
    host.serve(policy)
    return host


@pytest.fixture
def monitor(host: PolicyHost) -> Monitor:
    return Monitor(host)


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


def test_a_failed_inference_is_counted() -> None:
    host = PolicyHost()
    monitor = Monitor(host)
    with load() as policy:
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


def test_a_policy_is_not_kept_alive() -> None:
    host = PolicyHost()
    monitor = Monitor(host)
    policy = load()
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
def test_a_picture_is_what_the_model_saw(resize: str) -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    image[:, ::3] = 255  # stripes, of which the two dialects make different things
    with load(resize=resize) as policy:
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


def test_the_engine_is_not_held_up(monitor: Monitor, policy: Policy) -> None:
    """A listener never waits for one who reads: it gets by while a snapshot is being made."""
    answered = []

    def robot_status() -> dict[str, Any]:  # within a snapshot
        answered.extend(policy.submit(observation()).result(timeout=30) for _ in range(2))
        return {}

    monitor._host.robot_status = robot_status
    monitor.snapshot()
    assert len(answered) == 2
