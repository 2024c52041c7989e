"""The websockets: the action API's realtime socket and OpenPI's, which differ in the maps and in how an error looks.

Strictly one request after another. While one runs the next frame is read already, which is how a client that goes away
is noticed; the server library answers pings all the while.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from pi05_ros.errors import ObservationError
from pi05_ros.server.codec import pack
from pi05_ros.server.errors import NotReadyError, RequestError
from pi05_ros.server.service import ActionService, ClientGoneError, milliseconds_since

READY_POLL = 0.05
"""Seconds between looks at a policy that is not ready yet."""

CLOSE_PATIENCE = 1.0
INTERNAL_ERROR = 1011


class Sockets:
    """Handlers, all of one service."""

    def __init__(self, service: ActionService) -> None:
        self._service = service

    def routes(self) -> list[WebSocketRoute]:
        return [
            WebSocketRoute("/v1/actions/realtime", self.realtime),
            WebSocketRoute("/openpi/policy", self.openpi),
            WebSocketRoute("/", self.openpi),  # where openpi's clients connect
            WebSocketRoute("/{path:path}", self.nowhere),
        ]

    async def realtime(self, socket: WebSocket) -> None:
        await self._serve(socket, openpi=False)

    async def openpi(self, socket: WebSocket) -> None:
        await self._serve(socket, openpi=True)

    async def nowhere(self, socket: WebSocket) -> None:
        """Without this, Starlette answers 403, which is another mistake."""
        here = "/v1/actions/realtime, /openpi/policy and /"
        error = RequestError(404, f"{socket.url.path} is no websocket; {here} are.")
        await socket.send_denial_response(JSONResponse(error.body, error.status))

    async def _serve(self, socket: WebSocket, openpi: bool) -> None:
        await socket.accept()
        conversation = _Conversation(self._service, socket, openpi)
        with self._service.connected("openpi" if openpi else "realtime"):
            try:
                await conversation.hold()
            except (ClientGoneError, WebSocketDisconnect) as gone:
                gone.__traceback__ = None  # a circle: it holds the message, and the task of wait_for, which holds it
            finally:
                conversation.end()


class _Conversation:
    """One client's websocket, from the metadata to its end."""

    def __init__(self, service: ActionService, socket: WebSocket, openpi: bool) -> None:
        self._service, self._socket, self._openpi = service, socket, openpi
        self._route = "/openpi/policy" if openpi else "/v1/actions/realtime"
        self._frames: asyncio.Queue[bytes | str] = asyncio.Queue(1)
        self._gone: asyncio.Future[None] = asyncio.ensure_future(self._read())

    async def hold(self) -> None:
        """Raises ClientGoneError, also for a client that does not read what it is sent."""
        if not await self._greet():
            return
        previous_ms: float | None = None
        while True:
            began = time.monotonic()
            frame = await self._next_frame()
            received = time.monotonic()
            reply = await self._answer(frame, received, previous_ms)
            await self._send(reply)
            previous_ms = milliseconds_since(began)

    def end(self) -> None:
        self._gone.cancel()

    async def _greet(self) -> bool:
        """Send the metadata as soon as there is a policy; False if there will be none."""
        host = self._service.host
        while host.stage not in ("ready", "error", "closed"):
            await asyncio.wait([self._gone], timeout=READY_POLL)
            if self._gone.done():
                raise ClientGoneError
        try:
            metadata = host.metadata()
        except NotReadyError as error:
            self._service.monitor.refused(self._route, error)
            await self._send(self._error(error, None))
            await self._close(INTERNAL_ERROR, "There is no policy.")
            return False
        if self._openpi and (pose := metadata["robot"].get("reset_pose")) is not None:
            metadata = {**metadata, "reset_pose": pose}
        await self._send(pack(metadata))
        return True

    async def _answer(self, frame: bytes | str, received: float, previous_ms: float | None) -> bytes | str:
        service = self._service
        try:
            if isinstance(frame, str):
                raise ObservationError("message", "expected a binary frame of msgpack, got a text frame")
            with service.hold(len(frame)):
                reply = await service.act(frame, self._gone, openpi=self._openpi)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            refusal = service.refuse(self._route, error, received)
            return self._error(refusal, None if self._openpi else await service.request_id(frame))
        service.metrics.count(self._route, 200, received)
        timing = {"infer_ms": milliseconds_since(received)}
        if previous_ms is not None:
            timing["prev_total_ms"] = previous_ms
        return pack({**reply, "server_timing": timing})

    def _error(self, error: RequestError, request_id: str | None) -> bytes | str:
        """OpenPI's clients raise on a text frame, and would take a map for a result. The socket stays."""
        if self._openpi:
            return " ".join(str(error).split())
        return pack({**error.body, "request_id": request_id})

    async def _read(self) -> None:
        """Ends when the client has gone, or is not listened to any more."""
        with suppress(asyncio.CancelledError):  # which the task would keep, and with it the frame that is read
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                frame = message.get("bytes")
                await self._frames.put(frame if frame is not None else message.get("text") or "")

    async def _next_frame(self) -> bytes | str:
        waiting = asyncio.ensure_future(self._frames.get())
        try:
            ends: set[asyncio.Future[Any]] = {waiting, self._gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientGoneError
            return waiting.result()
        finally:
            waiting.cancel()

    async def _send(self, frame: bytes | str) -> None:
        """A client that does not read is dropped rather than waited for."""
        send = self._socket.send_text(frame) if isinstance(frame, str) else self._socket.send_bytes(frame)
        try:
            await asyncio.wait_for(send, self._service.limits.send_seconds)
        except asyncio.TimeoutError:
            slow = f"The client did not read its reply within {self._service.limits.send_seconds:g} s."
            self._service.monitor.refused(self._route, RequestError(408, slow))
            await self._close(1008, slow)
            raise ClientGoneError from None
        except RuntimeError as error:  # Starlette's, after a disconnect
            raise ClientGoneError from error

    async def _close(self, code: int, reason: str) -> None:
        with suppress(asyncio.TimeoutError, RuntimeError):  # else the connection ends with its next ping
            await asyncio.wait_for(self._socket.close(code, reason), CLOSE_PATIENCE)
