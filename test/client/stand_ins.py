"""Servers that do what a real one does only when something goes wrong: late, mixed up, silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection, serve

from pi05_ros.server.codec import pack, unpack

METADATA = {"object": "action.metadata"}


def envelope(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An answer whose actions are the request's state, so that whose answer it is can be seen."""
    state = np.asarray(request["input"]["observation"]["state"], np.float32)
    return {
        "id": request["request_id"],
        "model": "stand-in",
        "data": [{"input_index": 0, "action": {"values": state[None]}}],
        "usage": {"prefix_cache_hit": False},
        "timings": {"total_ms": 1.0},
        **changes,
    }


Answer = Callable[[ServerConnection, dict[str, Any]], None]


@contextmanager
def websocket_server(answer: Answer) -> Iterator[str]:
    """answer: called with the connection and each request that comes on it."""

    def hold(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            connection.send(pack(METADATA))
            for message in connection:
                answer(connection, unpack(message))

    with serve(hold, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def server_that_stops_reading() -> Iterator[str]:
    """It greets like any other, and then lets messages pile up."""

    def greet() -> None:
        connection, _ = listening.accept()
        protocol = ServerProtocol()
        while not (events := protocol.events_received()):
            protocol.receive_data(connection.recv(4096))
        assert isinstance(events[0], Request)
        protocol.send_response(protocol.accept(events[0]))
        protocol.send_binary(pack(METADATA))
        for data in protocol.data_to_send():
            connection.sendall(data)
        done.wait()
        connection.close()

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@contextmanager
def http_server(answer: Callable[[dict[str, Any]], tuple[int, str, bytes]]) -> Iterator[str]:
    """answer: status, content type and body for a POST's request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = unpack(self.rfile.read(int(self.headers["Content-Length"])))
            status, kind, body = answer(request)
            with contextlib.suppress(ConnectionError):  # who asked may be gone
                self.send_response(status)
                self.send_header("Content-Type", kind)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
