"""Routes of the status page: the page itself, which holds no data, and the data that it asks for."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pi05_ros.errors import Pi05Error
from pi05_ros.server.errors import as_request_error
from pi05_ros.server.limits import Limits
from pi05_ros.server.monitor import Monitor

logger = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two looks at whether something has changed."""
SIGN_OF_LIFE = 2.0
"""Seconds after which a reader hears something though nothing has changed."""

FOLDER = Path(__file__).parent / "page"
PAGES = {"/": "index.html", "/docs": "docs.html"}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def page_files() -> dict[str, Path]:
    """The files of the page by the path at which they are served. They hold no data: nobody needs a token for them."""
    parts = (path for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES and path.suffix != ".html")
    return {
        **{path: FOLDER / name for path, name in PAGES.items()},
        **{f"/page/{part.name}": part for part in parts},
    }


def status_routes(monitor: Monitor, limits: Limits | None = None) -> list[Route]:
    """``/`` and ``/docs`` with their parts, ``/status/snapshot``, ``/status/events`` and ``/status/cameras/NAME.jpg``.

    One list for one server: the readers of its events share what is serialised.
    """
    events = _Events(monitor, (limits or Limits()).send_seconds)
    one_at_a_time = anyio.CapacityLimiter(1)  # pictures are made on one thread: they are no reason to slow inference

    async def snapshot(request: Request) -> Response:
        return Response(await run_sync(partial(_serialise, monitor)), media_type="application/json", headers=NOT_KEPT)

    async def camera(request: Request) -> Response:
        try:
            picture = await run_sync(monitor.camera, request.path_params["name"], limiter=one_at_a_time)
        except Pi05Error as error:
            refusal = as_request_error(error)
            return JSONResponse(refusal.body, refusal.status, headers=refusal.headers)
        return Response(picture, media_type="image/jpeg", headers=NOT_KEPT)

    async def follow(request: Request) -> Response:
        return _EventStream(events)

    return [
        *(Route(path, _page(file), name=f"page:{path}") for path, file in page_files().items()),
        Route("/status/snapshot", snapshot),
        Route("/status/events", follow),
        Route("/status/cameras/{name}.jpg", camera),
    ]


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

    async def page(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return page


def _serialise(monitor: Monitor) -> bytes:
    return json.dumps(monitor.snapshot(), allow_nan=False, separators=(",", ":")).encode()


class _Events:
    """The newest snapshot as a server-sent event, made once a change and PERIOD for however many read it."""

    def __init__(self, monitor: Monitor, send_seconds: float) -> None:
        self.monitor, self.send_seconds = monitor, send_seconds
        self._lock = asyncio.Lock()
        self._mark: object = None
        self._made = -PERIOD
        self._number, self._event = 0, b""

    async def newest(self) -> tuple[int, bytes]:
        """Its number, which counts changes, and the event."""
        async with self._lock:
            mark = self.monitor.mark()
            if mark != self._mark and time.monotonic() - self._made >= 0.9 * PERIOD:
                data = await run_sync(partial(_serialise, self.monitor))
                self._mark, self._made = mark, time.monotonic()
                self._number, self._event = self._number + 1, b"data: " + data + b"\n\n"
            return self._number, self._event


class _EventStream(Response):
    """Events until the client leaves, the server closes, or the client has not read one for too long."""

    media_type = "text/event-stream"

    def __init__(self, events: _Events) -> None:
        super().__init__(headers={**NOT_KEPT, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def end_with_the_client() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(end_with_the_client)
            try:
                await self._tell(send)
            except TimeoutError:
                logger.info("A reader of the status events is let go: it does not read them.")
            group.cancel_scope.cancel()

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        told, spoke = 0, 0.0
        while not self._events.monitor.closed:
            number, event = await self._events.newest()
            if number != told or time.monotonic() - spoke > SIGN_OF_LIFE:
                with anyio.fail_after(self._events.send_seconds):
                    await send(
                        {
                            "type": "http.response.body",
                            "body": event if number != told else b": nothing new\n\n",
                            "more_body": True,
                        }
                    )
                told, spoke = number, time.monotonic()
            await anyio.sleep(PERIOD)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
