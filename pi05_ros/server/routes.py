"""The HTTP routes of the action API."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pi05_ros.server.errors import NotReadyError, RequestError
from pi05_ros.server.metrics import CONTENT_TYPE
from pi05_ros.server.openapi import openapi_document
from pi05_ros.server.reply import JSON, MSGPACK, pack_reply
from pi05_ros.server.service import ActionService, ClientGoneError

GENERATIONS, METADATA = "/v1/actions/generations", "/v1/actions/metadata"
CLIENT_CLOSED = 499
"""The status that logs and metrics have for a client that went away; nobody receives it."""


def error_response(error: RequestError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, no such method."""
    assert isinstance(error, HTTPException)
    what = {404: "is not here; /openapi.json lists what is", 405: f"does not take {request.method}"}
    message = f"{request.url.path} {what.get(error.status_code, error.detail)}."
    response = error_response(RequestError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def on_exception(_: Request, __: Exception) -> Response:
    """Whatever nobody foresaw; uvicorn logs it with its traceback."""
    return error_response(RequestError(500, "The server failed on this request; its log says how."))


class ActionRoutes:
    """Handlers, all of one service."""

    def __init__(self, service: ActionService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route(GENERATIONS, self.generations, methods=["POST"]),
            Route(METADATA, self.metadata),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]

    async def generations(self, request: Request) -> Response:
        """Observations in, action chunks out."""
        service, began = self._service, time.monotonic()
        with service.connected("http"):
            try:
                response = await self._generate(request)
            except ClientGoneError:
                service.metrics.count(GENERATIONS, CLIENT_CLOSED, began)
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                return error_response(service.refuse(GENERATIONS, error, began))
            service.metrics.count(GENERATIONS, 200, began)
            return response

    async def _generate(self, request: Request) -> Response:
        service = self._service
        kind = request.headers.get("content-type", JSON).lower()
        msgpack_in = "msgpack" in kind
        if not msgpack_in and "json" not in kind:
            raise RequestError(415, f"Content-Type: expected {JSON} or {MSGPACK}, got {kind[:100]!r}.", "Content-Type")
        msgpack_out = msgpack_in or "msgpack" in request.headers.get("accept", "").lower()
        service.host.policy()  # before a body is read for nothing
        with ExitStack() as memory:
            data = await self._body(request, memory)
            gone = asyncio.ensure_future(_until_gone(request))
            try:
                reply = await service.act(data, gone, msgpack=msgpack_in, numpy=msgpack_in)
            finally:
                gone.cancel()
            return Response(pack_reply(reply, msgpack_out), media_type=MSGPACK if msgpack_out else JSON)

    async def _body(self, request: Request, memory: ExitStack) -> bytes:
        """Raises RequestError: too large (413), too slow (408), too much at once (503); ClientGoneError."""
        limits = self._service.limits
        too_large = RequestError(413, f"The body is larger than {limits.body} bytes, which is the limit.", "request")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.body:
            raise too_large
        if length.isdecimal():
            memory.enter_context(self._service.hold(int(length)))

        async def read() -> bytes:
            parts: list[bytes] = []
            size = 0
            try:
                async for part in request.stream():
                    size += len(part)
                    if size > limits.body:
                        raise too_large
                    if not length.isdecimal():
                        memory.enter_context(self._service.hold(len(part)))
                    parts.append(part)
                return b"".join(parts)
            finally:
                parts.clear()  # what is raised here and the task of wait_for hold each other, and this

        try:
            return await asyncio.wait_for(read(), limits.body_seconds)
        except asyncio.TimeoutError:
            raise RequestError(408, f"The body did not come within {limits.body_seconds:g} s.", "request") from None
        except ClientDisconnect:
            raise ClientGoneError from None

    async def metadata(self, _: Request) -> Response:
        try:
            return JSONResponse(self._service.host.metadata())
        except NotReadyError as error:
            return error_response(error)

    async def healthz(self, _: Request) -> Response:
        """The server lives, whatever the policy does. The body is what openpi's server answers."""
        return PlainTextResponse("OK\n")

    async def readyz(self, _: Request) -> Response:
        host = self._service.host
        if host.stage == "ready":
            return JSONResponse({"status": "ready"})
        return error_response(NotReadyError(host.stage, host.reason))

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi_document())


async def _until_gone(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
