"""The client against a real server: what it returns equals the policy's own answer, what it raises says why."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from server.serving import CAMERAS, PROMPT, STATE, images, load, noise, observation, serving

from pi05_ros import Policy
from pi05_ros.client import ActionClient, ClientError, Observation, ServerRefusal, ServerUnavailable, Timeout
from pi05_ros.errors import ObservationError
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import ServerSettings, Sidecar

TRANSPORTS = ("realtime", "http")
PATIENCE = 30.0  # s, that nothing here needs


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with load() as policy:
        yield policy


@pytest.fixture(scope="module")
def url(policy: Policy) -> Iterator[str]:
    with serving(policy) as sidecar:
        yield sidecar.url


@pytest.fixture(params=TRANSPORTS)
def client(url: str, request: pytest.FixtureRequest) -> Iterator[ActionClient]:
    with ActionClient(url, transport=request.param) as client:
        yield client


def test_it_imports_no_torch() -> None:
    program = "import sys, pi05_ros.client; print(sorted({'torch', 'pi05_ros.policy', 'cv2'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"


def test_a_chunk_is_what_the_policy_infers(client: ActionClient, policy: Policy) -> None:
    chunk = client.infer(images(), STATE, PROMPT, noise=noise(1), num_steps=3, id="a", stamp=12.5)
    expected = policy.infer(observation(), noise=noise(1), num_steps=3)
    assert np.array_equal(chunk.actions, expected.actions)
    assert (chunk.actions.dtype, chunk.actions.shape, chunk.actions.flags.writeable) == (np.float32, (50, 14), True)
    assert (chunk.id, chunk.stamp, chunk.model) == ("a", 12.5, "tiny")
    assert chunk.timings["total_ms"] > 0
    assert chunk.reply["usage"]["denoise_steps"] == 3


def test_seed_and_cache_are_passed_on(client: ActionClient, policy: Policy) -> None:
    policy.reset()
    expected = policy.infer(observation(), seed=7, prefix_cache=False).actions
    chunks = [client.infer(images(), STATE, PROMPT, seed=7, prefix_cache=cache) for cache in (None, None, False)]
    assert [chunk.cache_hit for chunk in chunks] == [False, True, False]
    assert all(np.array_equal(chunk.actions, expected) for chunk in chunks)


def test_image_files_lists_and_masks_are_sent(client: ActionClient, policy: Policy) -> None:
    files = {name: cv2.imencode(".png", image[..., ::-1])[1].tobytes() for name, image in images().items()}
    masks = {"cam_left_wrist": False}
    expected = policy.infer(observation(image_masks=masks), seed=0).actions
    chunk = client.infer(files, STATE.tolist(), PROMPT, seed=0, image_masks=masks)
    assert np.array_equal(chunk.actions, expected)


def test_a_batch_comes_in_its_order(client: ActionClient, policy: Policy) -> None:
    batch = [Observation(images(), STATE, PROMPT, noise=noise(seed), id=str(seed), stamp=seed) for seed in range(3)]
    chunks = client.infer_batch(batch)
    assert [(chunk.id, chunk.stamp) for chunk in chunks] == [("0", 0.0), ("1", 1.0), ("2", 2.0)]
    for seed, chunk in enumerate(chunks):
        expected = policy.infer(observation(), noise=noise(seed)).actions
        np.testing.assert_allclose(chunk.actions, expected, atol=1e-4)
    assert client.infer_batch([]) == []


def test_a_refusal_names_the_field_and_the_connection_stays(client: ActionClient) -> None:
    with pytest.raises(ServerRefusal, match="state: expected 14 numbers") as caught:
        client.infer(images(), STATE[:3], PROMPT)
    refusal = caught.value
    assert (refusal.code, refusal.field) == ("invalid_value", "state")
    assert refusal.status in (400, None)
    with pytest.raises(ServerRefusal) as caught:
        client.infer_batch([Observation(images(), STATE, PROMPT), Observation(images(), STATE, "")])
    assert caught.value.field == "prompt"
    assert client.infer(images(), STATE, PROMPT).actions.shape == (50, 14)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_that_is_too_large_is_refused_as_such(policy: Policy, transport: str) -> None:
    with (
        serving(policy, limits={"body": 40_000}) as sidecar,
        ActionClient(sidecar.url, transport=transport) as client,
    ):
        client.infer(images(), STATE, PROMPT)
        with pytest.raises(ServerRefusal) as caught:
            client.infer(images(70, 70), STATE, PROMPT)
        assert caught.value.code == "too_large"
        assert client.infer(images(), STATE, PROMPT).actions.shape == (50, 14)


def test_what_cannot_be_sent_is_said_here(client: ActionClient) -> None:
    with pytest.raises(ObservationError, match="dtype object is not supported"):
        client.infer({"cam_high": np.array([None])}, STATE, PROMPT)


def test_metadata(client: ActionClient, policy: Policy) -> None:
    metadata = client.metadata()
    assert metadata["input"]["image_keys"] == list(CAMERAS)
    assert metadata["output"] == policy.metadata["output"]
    assert metadata["status"] == "ready"


def test_server_timing_comes_over_the_websocket_only(url: str) -> None:
    with ActionClient(url) as client:
        first, second = (client.infer(images(), STATE, PROMPT).server_timing for _ in range(2))
        assert set(first) == {"infer_ms"}
        assert set(second) == {"infer_ms", "prev_total_ms"}
    with ActionClient(url, transport="http") as client:
        assert client.infer(images(), STATE, PROMPT).server_timing == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_engine_answers_late_and_then_to_the_right_request(transport: str) -> None:
    with load() as policy, serving(policy) as sidecar, ActionClient(sidecar.url, transport=transport) as client:
        began, gate = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            began.set()
            gate.wait(PATIENCE)

        policy.watch(hold)  # runs on the engine's thread, which so has no time
        policy.submit(observation(), seed=0)
        assert began.wait(PATIENCE)
        with pytest.raises(Timeout):
            client.infer(images(), STATE, PROMPT, seed=1, timeout=0.5)
        gate.set()
        for seed in (2, 3):
            assert np.array_equal(
                client.infer(images(), STATE, PROMPT, seed=seed).actions,
                policy.infer(observation(), seed=seed).actions,
            )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_comes_back_is_found_again(policy: Policy, transport: str) -> None:
    host = PolicyHost()
    host.serve(policy)

    def start(port: int) -> Sidecar:
        sidecar = Sidecar(host, ServerSettings(port=port))
        sidecar.start()
        return sidecar

    first = start(0)
    with ActionClient(first.url, transport=transport) as client:
        before = client.infer(images(), STATE, PROMPT, seed=1).actions
        first.close()
        with pytest.raises(ServerUnavailable):
            client.infer(images(), STATE, PROMPT, seed=1)
        second = start(int(first.url.rpartition(":")[2]))
        after = client.infer(images(), STATE, PROMPT, seed=1).actions
        second.close()
        third = start(int(first.url.rpartition(":")[2]))  # this time nobody asked in between
        client.wait_until_ready(PATIENCE)
        last = client.infer(images(), STATE, PROMPT, seed=1).actions
        third.close()
    assert np.array_equal(before, after)
    assert np.array_equal(before, last)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_token_opens_and_a_wrong_one_does_not(policy: Policy, transport: str) -> None:
    with serving(policy, token="open sesame") as sidecar:
        for token in ("", "wrong"):
            with ActionClient(sidecar.url, token, transport=transport) as client:
                client.wait_until_ready(PATIENCE)
                for call in (client.metadata, lambda client=client: client.infer(images(), STATE, PROMPT)):
                    with pytest.raises(ServerRefusal, match="A token is needed") as caught:
                        call()
                    assert (caught.value.status, caught.value.code) == (401, "unauthorized")
        with ActionClient(sidecar.url, "open sesame", transport=transport) as client:
            assert client.infer(images(), STATE, PROMPT).actions.shape == (50, 14)
            assert client.metadata()["status"] == "ready"


def test_it_waits_for_a_server_that_loads(policy: Policy) -> None:
    host = PolicyHost()
    host.tell("loading", "a large checkpoint")
    with serving(None, host) as sidecar, ActionClient(sidecar.url) as client:
        with pytest.raises(Timeout, match=r"within 0.2 s: .*a large checkpoint"):
            client.wait_until_ready(0.2)
        with pytest.raises(ServerRefusal, match="a large checkpoint") as caught:
            ActionClient(sidecar.url, transport="http").infer(images(), STATE, PROMPT)
        assert (caught.value.status, caught.value.code) == (503, "not_ready")
        threading.Timer(0.3, host.serve, [policy]).start()
        client.wait_until_ready(PATIENCE)
        assert client.infer(images(), STATE, PROMPT).actions.shape == (50, 14)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_does_not_wait_for_what_will_never_be(transport: str) -> None:
    host = PolicyHost()
    host.tell("error", "no such checkpoint")
    with serving(None, host) as sidecar, ActionClient(sidecar.url, transport=transport) as client:
        for call in (lambda: client.wait_until_ready(PATIENCE), lambda: client.infer(images(), STATE, PROMPT)):
            with pytest.raises(ServerRefusal, match="no such checkpoint") as caught:
                call()
            assert caught.value.code == "not_ready"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tls_is_checked_against_the_given_authority(policy: Policy, transport: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        *subject,
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    subprocess.run(command, check=True, capture_output=True)
    with serving(policy, certificate=str(certificate), key=str(key)) as sidecar:
        with ActionClient(sidecar.url, transport=transport, ca_file=certificate) as client:
            assert client.infer(images(), STATE, PROMPT).actions.shape == (50, 14)
        stranger = ActionClient(sidecar.url, transport=transport)
        with stranger, pytest.raises(ServerUnavailable, match="certificate verify failed"):
            stranger.infer(images(), STATE, PROMPT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url: expected http://HOST:PORT"),
        ({"url": "ws://127.0.0.1:8000"}, "url: expected http://HOST:PORT"),
        ({"url": "http://a/?b"}, "url: expected http://HOST:PORT"),
        ({"transport": "udp"}, "transport: expected one of realtime, http, got 'udp'"),
        ({"timeout": 0}, "timeout: expected seconds, more than 0, got 0"),
        ({"timeout": float("nan")}, "timeout: expected seconds"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        ActionClient(**{"url": "http://127.0.0.1:8000", **arguments})
