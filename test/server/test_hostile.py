"""What nobody sends by mistake: little that becomes much, and messages that never end. Each is refused by name."""

from __future__ import annotations

import io
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgpack
import numpy as np
import psutil
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from pi05_ros.policy import Policy
from pi05_ros.server.codec import pack
from server.serving import CAMERAS, GENERATIONS, PROMPT, STATE, answer, flat, images, observation, post, serving
from server.test_action_server import Process

JSON = {"Content-Type": "application/json"}
PATIENCE = 10.0
"""Seconds, for what is to come at once."""


def png(width: int, height: int, *chunks: bytes, rows: int | None = None) -> bytes:
    """A black picture, with more chunks; rows: that are there of it."""
    pixels = zlib.compress((b"\0" * (1 + 3 * width)) * (height if rows is None else rows), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def gif() -> bytes:
    file = io.BytesIO()
    Image.fromarray(images(8, 8)["cam_high"]).save(file, "GIF")
    return file.getvalue()


def nested(depth: int, inner: Any, key: str = "values") -> Any:
    for _ in range(depth):
        inner = {key: inner}
    return inner


def wire(dtype: Any = "<f4", shape: Any = (14,), data: bytes | None = None) -> Any:
    """An array as it is on the wire, good or bad. data: None: 56 bytes."""
    return {b"__ndarray__": True, b"data": STATE.tobytes() if data is None else data, b"dtype": dtype, b"shape": shape}


def packed(**changes: Any) -> bytes:
    data: bytes = msgpack.packb({"state": STATE.tolist(), "images": {}, "prompt": PROMPT, **changes}, use_bin_type=True)
    return data


def camera(value: Any) -> bytes:
    return pack(flat(images={**images(), "cam_high": value}))


def as_json(**changes: Any) -> bytes:
    """NaN and the like as Python writes them."""
    small = {name: image.tolist() for name, image in images(2, 2).items()}
    return json.dumps({"state": STATE.tolist(), "images": small, "prompt": PROMPT, **changes}).encode()


Case = tuple[Callable[[], bytes], int, str, str]

MSGPACK_CASES: dict[str, Case] = {
    "deep maps": (lambda: b"\x81\xa1a" * 100_000, 400, "message", "msgpack"),
    "deep lists": (lambda: b"\x91" * 1_000_000, 400, "message", "msgpack"),
    "deep lists, closed": (lambda: b"\x91" * 5000 + b"\xc0", 400, "message", "msgpack"),
    "lists that claim to be long": (lambda: b"\xdd\x00\x3d\x09\x00" * 500, 400, "message", "msgpack"),
    "a map that claims to be long": (lambda: b"\xdf\xff\xff\xff\xff", 400, "message", "msgpack"),
    "many lists": (lambda: b"\xdd\x00\x3d\x09\x00" + b"\x90" * 4_000_000, 400, "message", "4000000 values"),
    "no end": (lambda: pack(flat())[:-1], 400, "message", "msgpack"),
    "more after the end": (lambda: pack(flat()) + b"\x00", 400, "message", "msgpack"),
    "text that is none": (lambda: packed(prompt="@@").replace(b"@@", b"\xff\xfe"), 400, "message", "utf-8"),
    "a huge shape": (lambda: packed(state=wire(shape=[2**30] * 4)), 400, "data", "do not hold"),
    "a shape that overflows": (lambda: packed(state=wire(shape=[2**62, 4])), 400, "shape", "a list of sizes"),
    "a negative shape": (lambda: packed(state=wire(shape=[-14])), 400, "shape", "got [-14]"),
    "two negative sides": (lambda: packed(state=wire(shape=[-2, -7])), 400, "shape", "got [-2, -7]"),
    "many dimensions": (lambda: packed(state=wire(shape=[1] * 1000)), 400, "shape", "16 dimensions"),
    "objects": (lambda: packed(state=wire("|O")), 400, "dtype", "'|O' is not supported"),
    "complex": (lambda: packed(state=wire("<c8", [7])), 400, "dtype", "'<c8' is not supported"),
    "void": (lambda: packed(state=wire("|V8", [7])), 400, "dtype", "'|V8' is not supported"),
    "fields": (lambda: packed(state=wire("f4,O", [7])), 400, "dtype", "not supported"),
    "a pickle": (lambda: packed(state=wire("O", [1], b"cos\nsystem\n.")), 400, "dtype", "'O' is not supported"),
    "a dtype of its own": (lambda: packed(state=wire("f4," * 100_000)), 400, "dtype", "dtype string"),
    "zeros by number": (
        lambda: packed(state={b"__npgeneric__": True, b"data": 10**12, b"dtype": "|S1"}),
        400,
        "data",
        "expected a value of |S1",
    ),
    "infinite state": (lambda: pack(flat(state=np.full(14, np.inf))), 400, "state", "got inf at [0]"),
    "state beyond float32": (lambda: pack(flat(state=np.full(14, 1e300))), 400, "state", "float32"),
    "NaN in noise": (lambda: pack(flat(noise=np.full((50, 32), np.nan))), 400, "noise", "got nan at [0, 0]"),
    "empty noise": (lambda: pack(flat(noise=np.zeros((0, 32)))), 400, "noise", "got [0, 32]"),
    "NaN in an image": (lambda: camera(np.full((4, 4, 3), np.nan)), 400, "images.cam_high", "finite"),
    "an empty image": (lambda: camera(np.zeros((0, 4, 3), np.uint8)), 400, "images.cam_high", "[0, 4, 3]"),
    "truth values as state": (lambda: pack(flat(state=np.ones(14, bool))), 400, "state", "dtype bool"),
    "a picture of 3.6 gigapixels": (lambda: camera(png(60_000, 60_000, rows=1)), 413, "images.cam_high", "larger"),
    "a picture of 100 megapixels": (lambda: camera(png(10_000, 10_000, rows=1)), 413, "images.cam_high", "4096 pixels"),
    "a thin picture": (lambda: camera(png(1_000_000, 1)), 413, "images.cam_high", "4096 pixels"),
    "large pictures": (
        lambda: pack(flat(images=dict.fromkeys(CAMERAS, png(4096, 4096)))),
        413,
        "images.cam_left_wrist",
        "16777216 pixels in all images",
    ),
    "a picture without its pixels": (lambda: camera(png(640, 480, rows=3)), 400, "images.cam_high", "cannot be read"),
    "a text in a picture": (
        lambda: camera(png(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(b"\0" * 10**8, 9)))),
        400,
        "images.cam_high",
        "JPEG or PNG",
    ),
    "another kind of file": (lambda: camera(gif()), 400, "images.cam_high", "JPEG or PNG"),
    "a name of a file": (lambda: camera("/etc/hostname"), 400, "images.cam_high", "base64"),
    "an address": (lambda: camera("http://127.0.0.1/x.png"), 400, "images.cam_high", "base64"),
}

JSON_CASES: dict[str, Case] = {
    "deep lists": (lambda: b"[" * 1_000_000, 400, "request", "expected JSON"),
    "deep maps": (lambda: b'{"input":' * 100_000, 400, "request", "expected JSON"),
    "maps in maps": (lambda: as_json(state=nested(400, [0.0])), 400, "state", "a map in a map"),
    "deep order": (lambda: as_json(camera_order=[nested(400, 1)]), 400, "camera_order", "camera names"),
    "deep mask": (lambda: as_json(image_masks={"cam_high": nested(400, 1)}), 400, "image_masks.cam_high", "true or"),
    "many lists": (lambda: b"[" + b"[]," * 4_000_000 + b"[]]", 413, "request", "4000000 values"),
    "no text": (lambda: b'{"prompt": "\xff\xfe"}', 400, "request", "expected JSON"),
    "nothing": (lambda: b"", 400, "request", "expected JSON"),
    "half a character in the prompt": (lambda: as_json(prompt="lift \ud800"), 400, "prompt", "valid Unicode"),
    "half a character in a name": (lambda: as_json(images={"\ud800": [[[1, 2, 3]]]}), 400, "images.\\ud800", "unknown"),
    "half a character in the id": (lambda: as_json(id="\ud800"), 400, "id", "got '\\ud800'"),
    "a number beyond floats": (lambda: as_json(state=[0] * 13 + ["@"]).replace(b'"@"', b"1e400"), 400, "state", "inf"),
    "NaN": (lambda: as_json(state=[float("nan")] * 14), 400, "state", "got nan at [0]"),
    "a number beyond integers": (lambda: as_json(state=[10**400] + [0] * 13), 400, "state", "array of numbers"),
    "a number of many digits": (lambda: as_json(state="@").replace(b'"@"', b"1" * 100_000), 400, "request", "JSON"),
    "a huge shape": (
        lambda: as_json(state={"values": [0], "shape": [2**40, 2**40]}),
        400,
        "state.shape",
        "expected one for 1 values",
    ),
    "a negative shape": (lambda: as_json(state={"values": [0] * 14, "shape": [-14]}), 400, "state.shape", "got [-14]"),
    "objects": (
        lambda: as_json(state={"values": [0] * 14, "dtype": "object"}),
        400,
        "state.dtype",
        "'object' is not supported",
    ),
    "a name without end": (
        lambda: as_json(images={"x" * 10**6: [[[1, 2, 3]]]}),
        400,
        "images." + "x" * 249,
        "images.xxx",
    ),
}


def check(url: str, headers: dict[str, str], case: Case) -> None:
    make, status, field, part = case
    response = post(url + GENERATIONS, make(), headers=headers)
    assert response.headers["Content-Type"] == "application/json"
    assert len(response.data) < 5000
    error = response.json()
    assert (response.status, (error["error"]["field"] or "")[:256]) == (status, field[:256]), error
    assert part in error["error"]["message"]
    assert error["error"]["code"] == {400: "invalid_value", 413: "too_large"}[status]
    assert error["detail"] == error["error"]["message"]


@pytest.mark.parametrize("name", MSGPACK_CASES)
def test_msgpack(url: str, name: str) -> None:
    check(url, {}, MSGPACK_CASES[name])


@pytest.mark.parametrize("name", JSON_CASES)
def test_json(url: str, name: str) -> None:
    check(url, JSON, JSON_CASES[name])


def test_of_a_key_that_comes_twice_the_last_counts(url: str, policy: Policy) -> None:
    """As in every JSON reader that people test their requests with."""
    body = as_json(seed=3).replace(b'{"state"', b'{"state": "left", "state"')
    expected = policy.infer(observation(images=images(2, 2)), seed=3).actions
    chunk = answer(post(url + GENERATIONS, body, headers=JSON))["data"][0]["action"]["values"]
    assert np.array_equal(np.float32(chunk), expected)


def test_a_body_that_is_too_large_is_not_read(policy: Policy) -> None:
    """Neither one that says so, nor one that does not."""
    with serving(policy, limits={"body": 100_000}) as sidecar:
        refused = {"code": "too_large", "message": "The body is larger than 100000 bytes, which is the limit."}
        with open_request(sidecar.url, "Content-Length: 100001") as client:
            assert read_reply(client)["error"] == {**refused, "field": "request"}
        with open_request(sidecar.url, "Transfer-Encoding: chunked") as client:
            client.sendall(b"%x\r\n%s\r\n" % (60_000, b"\0" * 60_000) * 2)
            assert read_reply(client)["error"] == {**refused, "field": "request"}
        assert post(sidecar.url + GENERATIONS, pack(flat())).status == 200


@pytest.mark.parametrize("path", ["/v1/actions/realtime", "/openpi/policy", "/"])
def test_a_frame_that_is_too_large_ends_the_socket(policy: Policy, path: str) -> None:
    """Its length stands before it: nothing of it is kept."""
    with serving(policy, limits={"body": 100_000}) as sidecar, connect(sidecar.url.replace("http", "ws") + path) as ws:
        ws.recv()
        with pytest.raises(ConnectionClosed) as caught:
            exchange(ws, b"\0" * 100_001)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


def test_a_body_that_does_not_come_is_not_waited_for(policy: Policy) -> None:
    with serving(policy, limits={"body_seconds": 0.2}) as sidecar:
        with open_request(sidecar.url, "Content-Length: 1000") as client:
            client.sendall(b"\0" * 10)
            error = read_reply(client)["error"]
        assert error == {"code": "timeout", "message": "The body did not come within 0.2 s.", "field": "request"}


@pytest.mark.parametrize("header", ["Content-Length: 90000", "Transfer-Encoding: chunked"])
def test_no_more_is_taken_in_than_memory_is_there_for(policy: Policy, header: str) -> None:
    with serving(policy, limits={"bodies": 100_000}) as sidecar:
        with open_request(sidecar.url, header) as slow:
            slow.sendall(b"%x\r\n" % 90_000 + b"\0" * 80_000)
            poll(lambda: sidecar._service._bodies, lambda held: held >= 80_000)
            response = post(sidecar.url + GENERATIONS, pack(flat()))
            assert response.status == 503
            assert response.json()["error"]["code"] == "busy"
            assert int(response.headers["Retry-After"]) >= 1
        poll(lambda: post(sidecar.url + GENERATIONS, pack(flat())), lambda reply: reply.status == 200)


def test_what_is_refused_leaves_no_memory_behind(tmp_path: Path) -> None:
    """In a process of its own, as it is started by a user. Large bodies are gone at once, not when garbage is looked
    for: few objects were made with them.
    """
    large = [b"\xc1" * (16 << 20), pack(flat(state=np.zeros(3), more=np.zeros(16 << 20, np.uint8)))]
    cases = [*((case, {}) for case in MSGPACK_CASES.items()), *((case, JSON) for case in JSON_CASES.items())]
    bombs = [(make(), headers) for (name, (make, *_)), headers in cases if name != "many lists"]  # for time
    process = Process(tmp_path / "log")
    try:
        url = process.url()
        process.wait_for("Ready")
        with connect(url.replace("http", "ws") + "/v1/actions/realtime") as ws:
            ws.recv()

            def memory_after(bodies: Sequence[tuple[bytes, dict[str, str]]], rounds: int) -> int:
                for body, headers in [*bodies] * rounds:
                    assert post(url + GENERATIONS, body, headers=headers).status in (400, 413)
                    assert headers or b"error" in exchange(ws, body)
                return int(psutil.Process(process.process.pid).memory_info().rss)

            before = memory_after(bombs, 2)  # every thread has had its buffers
            after = [memory_after([(body, {}) for body in large], 10), memory_after(bombs, 4)]
            assert max(after) - before < 150 << 20
    finally:
        process.process.kill()
        process.process.wait()


def exchange(ws: ClientConnection, frame: bytes) -> bytes:
    ws.send(frame)
    reply = ws.recv()
    assert isinstance(reply, bytes)
    return reply


def open_request(url: str, header: str) -> socket.socket:
    """A request of which the body is yet to come."""
    address = urlsplit(url)
    client = socket.create_connection(("127.0.0.1", address.port or 0), PATIENCE)
    lines = (f"POST {GENERATIONS} HTTP/1.1", f"Host: {address.netloc}", "Content-Type: application/msgpack", header)
    client.sendall("\r\n".join((*lines, "", "")).encode())
    return client


def read_reply(client: socket.socket) -> Any:
    """The body, as far as it comes."""
    data = b""
    while b"}}" not in data and b'"}' not in data and (part := client.recv(65536)):
        data += part
    return json.loads(data.partition(b"\r\n\r\n")[2])


def poll(ask: Callable[[], Any], good: Callable[[Any], bool]) -> None:
    """Return with the first good answer."""
    end = time.monotonic() + PATIENCE
    while not good(answer := ask()):
        assert time.monotonic() < end, answer
        time.sleep(0.01)
