"""Requests over the websocket ``/v1/actions/realtime``: no handshake and no headers for each of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from pi05_ros.client.errors import ClientError, ServerRefusal, ServerUnavailable, Timeout, refusal, seconds_left
from pi05_ros.client.http import read_response
from pi05_ros.errors import ObservationError
from pi05_ros.server.codec import pack, unpack

GOODBYE = 1.0  # s, that the server has to end a websocket in good order
LATE = "did not answer in time."


class RealtimeTransport:
    """One request at a time. A websocket whose request got no answer is not used again: the answer may still come."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None) -> None:
        """url: http or https."""
        self._url, self._context = url, context
        self._uri = "ws" + url.removeprefix("http") + "/v1/actions/realtime"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._socket: ClientConnection | None = None

    def exchange(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Answer one request. deadline: time.monotonic(). Raises ClientError and its subclasses, ObservationError."""
        message = pack(request)
        try:
            reply = self._receive(self._send(message, deadline), request["request_id"], deadline)
        except ConnectionClosed as error:
            self.drop()
            seconds_left(deadline)  # if none are, sending took too long
            if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
                text = f"The request has {len(message)} bytes, more than the server takes."
                raise ServerRefusal(None, "too_large", "", text) from error
            raise ServerUnavailable(f"{self._url} ended the connection before it answered: {error}") from error
        except BaseException:  # also Ctrl-C: nobody waits for the answer any more
            self.drop()
            raise
        if "error" in reply:
            raise refusal(None, reply, "The server refused the request and does not say why.")
        return reply

    def close(self) -> None:
        """A call that waits in another thread raises ServerUnavailable."""
        open_socket, self._socket = self._socket, None
        if open_socket is not None:
            open_socket.close()

    def drop(self) -> None:
        """As ``close``, without waiting for the server to agree."""
        open_socket, self._socket = self._socket, None
        if open_socket is not None:
            _cut(open_socket)
            open_socket.close()

    def _send(self, message: bytes, deadline: float) -> ClientConnection:
        """The websocket it went to: the one of the last request, or a new one if the server has ended that."""
        kept = self._socket  # which another thread may close
        if kept is not None:
            try:
                _send(kept, message, deadline)
                return kept
            except ConnectionClosed:
                self.drop()
        self._socket = opened = self._connect(deadline)
        _send(opened, message, deadline)
        return opened

    def _receive(self, open_socket: ClientConnection, request_id: str, deadline: float) -> dict[str, Any]:
        while True:
            reply = _read(open_socket, deadline)
            # What cannot be read as a request has no id either; only one is on its way.
            if reply.get("id", reply.get("request_id")) == request_id or _is_error_without_id(reply):
                return reply

    def _connect(self, deadline: float) -> ClientConnection:
        try:
            connecting = connect(
                self._uri,
                additional_headers=self._headers,
                ssl=self._context,
                compression=None,  # images do not shrink, and time counts
                max_size=None,
                proxy=None,
                open_timeout=seconds_left(deadline),
                close_timeout=GOODBYE,
            )
            opened = connecting.__enter__()  # the only way in for all versions; it is left by closing
        except InvalidStatus as error:
            answer = error.response
            response = read_response(answer.status_code, answer.headers, bytes(answer.body or b""))
            raise response.error() from error
        except TimeoutError as error:
            raise Timeout(f"{self._url} {LATE}") from error
        except (OSError, WebSocketException) as error:
            raise ServerUnavailable(f"{self._url} cannot be reached: {error}") from error
        try:
            metadata = _read(opened, deadline)
        except BaseException:
            _cut(opened)
            opened.close()
            raise
        if "error" in metadata:
            opened.close()
            raise refusal(None, metadata, "The server refused the connection and does not say why.")
        return opened


def _read(open_socket: ClientConnection, deadline: float) -> dict[str, Any]:
    try:
        data = open_socket.recv(seconds_left(deadline))
    except TimeoutError as error:
        raise Timeout(f"The server {LATE}") from error
    try:
        reply = unpack(data) if isinstance(data, bytes) else None
    except ObservationError:
        reply = None
    if not isinstance(reply, dict):
        raise ClientError(f"reply: expected a msgpack map, got {data[:100]!r}.")
    return reply


def _is_error_without_id(reply: dict[str, Any]) -> bool:
    return "error" in reply and reply.get("request_id") is None


def _cut(open_socket: ClientConnection) -> None:
    with contextlib.suppress(OSError):  # closed already
        open_socket.socket.shutdown(socket.SHUT_RDWR)


def _send(open_socket: ClientConnection, message: bytes, deadline: float) -> None:
    """Sending knows no timeout, and a server that reads nothing would hold it for ever; so the system is told one."""
    seconds, rest = divmod(seconds_left(deadline) + 1e-3, 1.0)  # all zeros would mean none
    limit = struct.pack("@ll", int(seconds), int(rest * 1e6))  # a timeval of POSIX
    with contextlib.suppress(OSError):  # closed already, which sending says
        open_socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    open_socket.send(message)
