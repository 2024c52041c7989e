"""Requests over HTTP: a connection that is kept open, msgpack in both directions."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

from pi05_ros.client.errors import ClientError, ServerUnavailable, Timeout, refusal, seconds_left
from pi05_ros.errors import ObservationError
from pi05_ros.server.codec import pack, unpack

JSON, MSGPACK = "application/json", "application/msgpack"


class Response(NamedTuple):
    """body: the map that came, or None if it was no map."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any] | None

    def error(self) -> ClientError:
        return refusal(self.status, self.body, f"The server answered with HTTP status {self.status}.")

    def map(self) -> dict[str, Any]:
        """Raises ServerRefusal, Timeout: the reply is an error; ClientError: it is no map."""
        if not 200 <= self.status < 300:
            raise self.error()
        if self.body is None:
            raise ClientError(f"reply: expected a JSON or msgpack map, got {self.headers.get('Content-Type')!r}.")
        return self.body


class HttpTransport:
    """Thread-safe. Nothing is sent twice: whether a request that failed was worked on, a client cannot know."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = urllib3.PoolManager(retries=False, ssl_context=context)

    def exchange(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Answer one request. deadline: time.monotonic(). Raises ClientError and its subclasses, ObservationError."""
        return self.send("POST", "/v1/actions/generations", deadline, pack(request)).map()

    def send(self, method: str, path: str, deadline: float, body: bytes | None = None) -> Response:
        """Raises ServerUnavailable, Timeout."""
        headers = {"Accept": JSON} if body is None else {"Accept": MSGPACK, "Content-Type": MSGPACK}
        limit = urllib3.Timeout(total=seconds_left(deadline))
        try:
            response = self._pool.request(
                method, self._url + path, body=body, headers=self._headers | headers, timeout=limit, redirect=False
            )
        except HTTPError as error:
            late = isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)
            if late or time.monotonic() >= deadline:
                raise Timeout(f"{self._url} did not answer in time.") from error
            raise ServerUnavailable(f"{self._url} cannot be reached: {error}") from error
        return read_response(response.status, response.headers, response.data)

    def close(self) -> None:
        self._pool.clear()


def read_response(status: int, headers: Mapping[str, str], data: bytes) -> Response:
    """data: as headers say, msgpack, or else JSON."""
    try:
        value = unpack(data) if "msgpack" in headers.get("Content-Type", "") else json.loads(data)
    except (ObservationError, ValueError, RecursionError):
        value = None
    return Response(status, headers, value if isinstance(value, dict) else None)
