"""A server on a free port, as it is in use: real sockets, a real policy with small random weights."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.policy import Observation, Policy
from pi05_ros.server.codec import pack, unpack
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.limits import Limits
from pi05_ros.server.sidecar import ServerSettings, Sidecar

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
STATE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2, np.float32)
PROMPT = "pick up the cube"
GENERATIONS = "/v1/actions/generations"

PATIENCE = 30.0
"""Seconds, after which a test that waits for what should have happened fails."""


@functools.cache
def tiny_checkpoint() -> Path:
    """Made once in a test process; float32 weights, so that batches equal single requests closely."""
    return make_checkpoint("tiny", Path(tempfile.mkdtemp(prefix="pi05_server_")) / "tiny")


def load(robot: Any = "aloha_sim", **options: Any) -> Policy:
    return Policy.from_checkpoint(tiny_checkpoint(), "cpu", "float32", robot, **options)


def images(height: int = 48, width: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """RGB uint8 [height, width, 3] by camera."""
    rng = np.random.default_rng(seed)
    return {camera: rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for camera in CAMERAS}


def noise(seed: int) -> np.ndarray:
    """float32 [50, 32]."""
    return np.random.default_rng(seed).standard_normal((50, 32), dtype=np.float32)


def observation(**changes: Any) -> Observation:
    return Observation(**{"images": images(), "state": STATE, "prompt": PROMPT, **changes})


def flat(**changes: Any) -> dict[str, Any]:
    """The same as openpi's ALOHA clients write it."""
    return {"images": images(), "state": STATE, "prompt": PROMPT, **changes}


@contextmanager
def serving(policy: Policy | None, host: PolicyHost | None = None, **settings: Any) -> Iterator[Sidecar]:
    """None: a server whose policy still loads. settings: of ServerSettings; limits as a dictionary of changes."""
    host = host or PolicyHost()
    limits = Limits(**settings.pop("limits", {}))
    sidecar = Sidecar(host, ServerSettings(port=0, limits=limits, **settings))
    sidecar.start()
    if policy is not None:
        host.serve(policy)
    try:
        yield sidecar
    finally:
        sidecar.close()


def post(url: str, body: Any, **options: Any) -> urllib3.BaseHTTPResponse:
    """body: bytes as they are, anything else as msgpack. options: of urllib3's request."""
    headers = {"Content-Type": "application/msgpack", **options.pop("headers", {})}
    data = body if isinstance(body, bytes) else pack(body)
    options = {"timeout": 30.0, "retries": False, **options}
    return urllib3.request("POST", url, body=data, headers=headers, **options)


def answer(response: urllib3.BaseHTTPResponse) -> Any:
    """The body of a reply, whatever it is written in."""
    if "msgpack" in response.headers.get("Content-Type", ""):
        return unpack(response.data)
    return response.json()


def until(condition: Callable[[], Any]) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


class Held:
    """The policy's inferences wait until they are let go, each batch before it runs; then they are the real ones.

    Taking one up is what it does at first: requests of a test wait behind it.
    """

    def __init__(self, policy: Policy) -> None:
        self._path, self._engine = policy.engine.path, policy.engine
        self._run = self._path.run
        self._gate = threading.Event()
        self._path.run = self._wait_and_run  # type: ignore[method-assign]
        self.first = policy.submit(observation(), num_steps=1)
        until(lambda: self.stats["running"] == 1)

    def _wait_and_run(self, requests: Any) -> Any:
        assert self._gate.wait(PATIENCE)
        return self._run(requests)

    @property
    def stats(self) -> dict[str, Any]:
        """Of the engine."""
        return self._engine.stats()

    def wait_for_waiting(self, number: int) -> None:
        """Return when so many requests wait for their turn."""
        until(lambda: self.stats["waiting"] == number)

    def let_go(self) -> None:
        self._gate.set()
        self._path.run = self._run  # type: ignore[method-assign]

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self.first.result(PATIENCE)
