"""What HTTP and websockets share: a message is read, its inferences are run, and given up when nobody waits any more.

Reading a message (parsing, images, text) takes milliseconds and happens on threads, inference on the engine's; the
event loop only passes things on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pi05_ros.errors import Pi05Error
from pi05_ros.policy import ActionChunk, Policy
from pi05_ros.server.errors import RequestError, as_request_error
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.limits import Limits
from pi05_ros.server.metrics import Metrics
from pi05_ros.server.monitor import Monitor
from pi05_ros.server.reply import action_reply, openpi_reply
from pi05_ros.server.request import ActionRequest, read_action_request, read_body, read_openpi

READERS = 4

IDLE_POLL = 0.02
"""Seconds between looks at whether the last request has ended, when the server closes."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class ActionService:
    """One per server. Everything but ``close`` belongs to the event loop."""

    def __init__(self, host: PolicyHost, limits: Limits) -> None:
        self.host, self.limits = host, limits
        self.metrics, self.monitor = Metrics(host), Monitor(host)
        self._bodies = 0
        self._acting, self._closing = 0, False
        self._giving_up = asyncio.Event()
        self._readers = ThreadPoolExecutor(READERS, "pi05-server")

    async def finish(self, seconds: float) -> None:
        """Begin nothing more, let what is in flight end, and refuse what has not ended by then: the server closes,
        and a running inference may take longer.
        """
        self._closing = True
        await self._until_idle(seconds)
        self._giving_up.set()
        await self._until_idle(seconds / 4)  # they are told now

    async def _until_idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._acting and time.monotonic() < end:
            await asyncio.sleep(IDLE_POLL)

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def act(
        self, data: bytes, gone: asyncio.Future[None], *, msgpack: bool = True, numpy: bool = True, openpi: bool = False
    ) -> dict[str, object]:
        """The reply to one message. gone: done when the client is.

        Raises whatever ``as_request_error`` reads, and ClientGoneError.
        """
        if self._closing:
            raise RequestError(503, "The server is closing.", code="closing")
        loop = asyncio.get_running_loop()
        self._acting += 1
        try:
            read = loop.run_in_executor(self._readers, self._begin, data, msgpack, numpy, openpi)
            policy, request, futures = await read
            chunks = await _answers(futures, gone, self._giving_up)
        finally:
            self._acting -= 1
        return openpi_reply(request, chunks[0], policy) if openpi else action_reply(request, chunks, policy)

    def _begin(
        self, data: bytes, msgpack: bool, numpy: bool, openpi: bool
    ) -> tuple[Policy, ActionRequest, list[Future[ActionChunk]]]:
        policy = self.host.policy()
        body = read_body(data, msgpack, self.limits)
        if openpi:
            request = read_openpi(body, policy, self.limits)
        else:
            request = read_action_request(body, policy, self.limits, numpy)
        options = [request.options(index) for index in range(len(request.observations))]
        return policy, request, policy.submit_batch(request.observations, options)

    async def request_id(self, frame: bytes | str) -> str | None:
        """Of a request that was refused, where it can be read."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, _request_id, frame, self.limits)

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Memory for a message of so many bytes. Raises RequestError (503): too much is in work already."""
        if self._bodies + size > self.limits.bodies:
            raise RequestError(503, f"Messages of {self._bodies} bytes are in work, which is the limit.", code="busy")
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size

    def refuse(self, route: str, error: BaseException, began: float) -> RequestError:
        """What the client is told, counted and shown on the status page."""
        refusal = as_request_error(error)
        error.__traceback__ = None  # a circle: it holds the message, and the future, which holds the error
        self.metrics.count(route, refusal.status, began)
        self.monitor.refused(route, refusal)
        return refusal

    @contextmanager
    def connected(self, kind: str) -> Iterator[None]:
        """A client of that kind is here: "http", "realtime" or "openpi"."""
        with self.metrics.connections.labels(kind).track_inprogress(), self.monitor.connected(kind):
            yield


async def _answers(
    futures: Sequence[Future[ActionChunk]], gone: asyncio.Future[None], giving_up: asyncio.Event
) -> list[ActionChunk]:
    """Raises the first error, ClientGoneError, or RequestError (503) when the server ends before them; what has not
    begun then is not run any more.
    """
    answers: asyncio.Future[list[ActionChunk]] = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
    end = asyncio.ensure_future(giving_up.wait())
    try:
        ends: set[asyncio.Future[Any]] = {answers, gone, end}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            return list(answers.result())
        if gone.done():
            raise ClientGoneError
        raise RequestError(503, "The server was closed before this request's answer.", code="closing")
    finally:
        end.cancel()
        answers.add_done_callback(_look_at)
        answers.cancel()
        for future in futures:
            future.cancel()


def _look_at(answers: asyncio.Future[list[ActionChunk]]) -> None:
    """asyncio logs an error that nobody has looked at; nobody waits for this one any more."""
    if not answers.cancelled():
        answers.exception()


def _request_id(frame: bytes | str, limits: Limits) -> str | None:
    if isinstance(frame, str):
        return None
    try:
        body = read_body(frame, True, limits)
    except Pi05Error:
        return None
    identity = body.get("id") or body.get("request_id")
    return identity if isinstance(identity, str) and len(identity) <= 256 else None


def milliseconds_since(began: float) -> float:
    """began: time.monotonic()."""
    return (time.monotonic() - began) * 1e3
