"""What can go wrong between a client and its server, and the time that a call has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pi05_ros.errors import Pi05Error


class ClientError(Pi05Error):
    """Base of all that a client raises, and by itself: the client was used wrongly, or the reply makes no sense."""


class ServerUnavailable(ClientError, ConnectionError):
    """There is no connection, or it broke before the answer came. The request may be sent again."""


class Timeout(ClientError, TimeoutError):
    """No answer in time. The one that may still come is given to nobody."""


class ServerRefusal(ClientError):
    """The server answered, with an error.

    status: of HTTP; None from an open websocket, which has none. code: "invalid_value", "unauthorized", "not_ready",
    "busy" ...; field: of the request, as it was written, "" if none is to blame. message: the server's sentence.
    """

    def __init__(self, status: int | None, code: str, field: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.field, self.message = status, code, field, message


DEADLINE_CODE = "deadline"
"""Of a request whose time was over before the engine began with it."""


def refusal(status: int | None, body: Any, text: str) -> ClientError:
    """The error in a reply. body: the reply's map, or whatever came; text: said if nothing can be read from it."""
    body = body if isinstance(body, Mapping) else {}
    error = body.get("error")
    if not isinstance(error, Mapping):  # of another server, or of a proxy
        return ServerRefusal(status, "", "", str(body.get("detail") or error or text))
    message = str(error.get("message") or text)
    if error.get("code") == DEADLINE_CODE:
        return Timeout(message)
    return ServerRefusal(status, str(error.get("code") or ""), str(error.get("field") or ""), message)


def seconds_left(deadline: float) -> float:
    """Until deadline (time.monotonic()). Raises Timeout if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise Timeout("The server did not answer in time.")
    return left
