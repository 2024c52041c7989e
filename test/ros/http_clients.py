"""Clients of the node's HTTP server: the action API as plain as it can be asked, and several that keep it busy."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import urllib3

from pi05_ros.server.codec import pack, unpack
from ros.robot_stand_in import ENCODINGS, STATE, picture

TIMEOUT = 30.0
IMAGES = {camera: picture(100 + index) for index, camera in enumerate(ENCODINGS)}
PROMPT = "asked over HTTP"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """body: of JSON or msgpack, else the text."""

    status: int
    body: Any

    @property
    def actions(self) -> np.ndarray:
        """float32 [horizon, action_dim] of an answered request."""
        assert self.status == 200, self.body
        return np.asarray(self.body["data"][0]["action"]["values"])


class HttpClient:
    def __init__(self, port: int, token: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = urllib3.HTTPConnectionPool("127.0.0.1", port, maxsize=8, retries=False, timeout=TIMEOUT)

    def get(self, path: str) -> Answer:
        return _read(self._pool.request("GET", path, headers=self._headers))

    def act(self, seed: int = 0, **parameters: Any) -> Answer:
        """An action chunk for IMAGES, STATE and PROMPT."""
        observation = {"images": IMAGES, "state": STATE, "prompt": PROMPT}
        body = pack({"input": {"observation": observation}, "parameters": {"seed": seed, **parameters}})
        headers = {**self._headers, "Content-Type": "application/msgpack"}
        return _read(self._pool.request("POST", "/v1/actions/generations", body=body, headers=headers))

    def follow(self, path: str) -> urllib3.BaseHTTPResponse:
        """An answer that goes on; its body is still to be read."""
        return self._pool.request("GET", path, headers=self._headers, preload_content=False)

    def engine(self, gauge: str) -> float:
        """A number of /metrics without labels."""
        lines = self.get("/metrics").body.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{gauge} ")), 0.0)

    def listens(self) -> bool:
        try:
            self.get("/healthz")
        except urllib3.exceptions.HTTPError:
            return False
        return True


def _read(response: urllib3.BaseHTTPResponse) -> Answer:
    kind, data = response.headers.get("Content-Type", ""), response.data
    if "msgpack" in kind:
        return Answer(response.status, unpack(data))
    return Answer(response.status, json.loads(data) if "json" in kind else data.decode())


class Asking:
    """Requests on threads of their own, each client with its own seed, until ``stop`` or once."""

    def __init__(self, port: int, clients: int, once: bool = False, **parameters: Any) -> None:
        self.answers: list[list[Answer | Exception]] = [[] for _ in range(clients)]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(HttpClient(port), seed, once, parameters), daemon=True)
            for seed in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: HttpClient, seed: int, once: bool, parameters: dict[str, Any]) -> None:
        while not self._stop.is_set():
            try:
                self.answers[seed].append(client.act(seed, **parameters))
            except Exception as error:
                self.answers[seed].append(error)
                return
            if once:
                return

    def finish(self) -> list[list[Answer | Exception]]:
        """By client, what came. None may still hang."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a client still waits for its answer"
        return self.answers
