"""What a client may ask for. Everything that comes from outside is measured against these before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """body: bytes of one request or websocket message. bodies: bytes of all that are being read or worked on.
    values: numbers, texts and containers in one message that are not inside arrays of bytes.
    image_side: pixels of an image along one axis. image_pixels: of all images of one request together.
    prompt: characters. inputs: observations in one request.
    connections: HTTP requests and websockets at the same time.
    body_seconds: to send a request. send_seconds: to read a reply; who takes longer is dropped.
    request_seconds: that a request may wait for its turn, if it does not say less itself.
    """

    body: int = 64 << 20
    bodies: int = 512 << 20
    values: int = 4_000_000
    image_side: int = 4096
    image_pixels: int = 4096 * 4096
    prompt: int = 4096
    inputs: int = 16
    connections: int = 256
    body_seconds: float = 30.0
    send_seconds: float = 10.0
    request_seconds: float = 60.0
