"""Little does not become much, and what a client that leaves was sending is out of memory at once, not when the garbage
collector comes by.
"""

from __future__ import annotations

import gc
import json
import socket
import tracemalloc
from collections.abc import Iterator
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import urllib3
from websockets.sync.client import connect

from pi05_ros.server.codec import pack
from server.serving import GENERATIONS, flat, post, until

LARGE = 4 << 20
"""Bytes."""


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept() -> list[str]:
    """The server's functions that have ended, or wait, and still hold so much of what came."""
    frames = [one for one in gc.get_objects() if type(one) is FrameType]
    return [
        frame.f_code.co_name
        for frame in frames
        if "/pi05_ros/server/" in frame.f_code.co_filename and any(map(is_large, frame.f_locals.values()))
    ]


def is_large(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return sum(len(part) for part in parts if isinstance(part, bytes)) >= LARGE


def metric(url: str, line: str) -> bool:
    return f"\n{line}\n" in urllib3.request("GET", url + "/metrics").data.decode()


def test_of_a_body_that_is_broken_off_nothing_stays(url: str) -> None:
    address = urlsplit(url)
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(f"{head}Content-Length: {LARGE * 3}\r\n\r\n".encode() + bytes(LARGE * 2))
    until(lambda: metric(url, f'pi05_requests_total{{route="{GENERATIONS}",status="499"}} 1.0'))
    until(lambda: not kept())


@pytest.mark.parametrize("path", ["/v1/actions/realtime", "/openpi/policy"])
def test_of_frames_that_nobody_waits_for_nothing_stays(url: str, path: str) -> None:
    kind = path.split("/")[-1].replace("policy", "openpi")
    with connect(url.replace("http", "ws") + path) as client:
        client.recv()
        for _ in range(3):  # one is worked on, two are read ahead
            client.send(pack(flat(more=bytes(LARGE))))
        client.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: metric(url, f'pi05_connections{{kind="{kind}"}} 0.0'))
        until(lambda: not kept())


WORD = np.array("x" * 10_000)

EXPANDING: dict[str, tuple[Any, str, str]] = {
    "text among numbers": ({"state": ["x" * 10_000] + [1] * 10_000}, "state", "text in a list"),
    "text below": ({"state": [[1] * 10_000, ["x" * 10_000] + [1] * 9_999]}, "state", "text in a list"),
    "bytes among numbers": ({"state": [bytes(40_000)] + [1] * 10_000}, "state", "text in a list"),
    "an array of text among numbers": ({"state": [WORD] + [1] * 10_000}, "state", "text in a list"),
    "a scalar of text among numbers": ({"state": [WORD[()]] + [1] * 10_000}, "state", "text in a list"),
    "many wrong observations": ({"input": [1] * 200_000}, "input", "1 to 16 observations, got 200000"),
    "many observations": ({"input": [{}] * 200_000}, "input", "1 to 16 observations, got 200000"),
}


@pytest.mark.parametrize("case", EXPANDING)
def test_few_values_do_not_become_many_bytes(url: str, case: str) -> None:
    changes, field, part = EXPANDING[case]
    body = pack(changes if "input" in changes else flat(**changes))
    tracemalloc.start()
    try:
        response = post(url + GENERATIONS, body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    error = json.loads(response.data)["error"]
    assert (response.status, error["field"]) == (400, field)
    assert part in error["message"]
    assert most < 64 << 20
