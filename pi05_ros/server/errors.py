"""Errors as they go out: a status, a code, the field, and a sentence that says what was expected and what came."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import numpy as np

from pi05_ros.errors import (
    DeadlineError,
    EngineBusyError,
    EngineClosedError,
    InferenceError,
    ObservationError,
    Pi05Error,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = 1
"""Seconds, where a client may try again."""

LONGEST_MESSAGE, LONGEST_FIELD, SHOWN = 1000, 256, 100
"""Characters of an error, and of a value in it."""

CODES = {
    400: "invalid_value",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    500: "internal",
    503: "unavailable",
    504: "deadline",
}


class RequestError(Pi05Error):
    """A request is refused, or has failed.

    status: of HTTP. code: one of the documented words. field: as the client wrote it, "" if none is to blame.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "") -> None:
        message, field = _sendable(message, LONGEST_MESSAGE), _sendable(field, LONGEST_FIELD)
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.code = code or CODES.get(status, HTTPStatus(status).phrase.lower().replace(" ", "_"))

    @property
    def body(self) -> dict[str, Any]:
        """What a client reads, over HTTP and over the realtime websocket alike."""
        return {
            "error": {"code": self.code, "message": self.message, "field": self.field or None},
            "detail": self.message,
        }

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class NotReadyError(RequestError):
    """There is no policy to ask. stage: as PolicyHost has it."""

    def __init__(self, stage: str, reason: str) -> None:
        what = {
            "loading": "The checkpoint is being loaded.",
            "warming_up": "The policy is being warmed up.",
            "error": "There is no policy.",
            "closed": "The server is closing.",
        }
        super().__init__(503, reason or what.get(stage, f"The policy is {stage}."), code="not_ready")
        self.stage = stage

    @property
    def body(self) -> dict[str, Any]:
        return {**super().body, "status": self.stage}


def shown(value: Any) -> str:
    """What came, in few words, however much and however deep it is."""
    if isinstance(value, (str, bytes)):
        return repr(value[:SHOWN])
    if isinstance(value, (list, tuple)) and len(value) <= 16 and all(isinstance(one, (int, float)) for one in value):
        return f"{list(value)}"
    if isinstance(value, (Mapping, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    return f"{value!r:.{SHOWN}}"


def _sendable(text: str, longest: int) -> str:
    """A message may repeat what a client wrote, which may be long, and is not always text that can be sent."""
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def as_request_error(error: BaseException) -> RequestError:
    """What a client is told of any error. Nothing of the inside of the process goes out; that is in the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ObservationError):
        return RequestError(400, str(error), error.field)
    if isinstance(error, EngineBusyError):
        return RequestError(503, str(error), code="busy")
    if isinstance(error, EngineClosedError):
        return RequestError(503, str(error), code="closing")
    if isinstance(error, DeadlineError):
        return RequestError(504, str(error))
    if isinstance(error, InferenceError):
        return RequestError(500, str(error), code="inference_failed")
    logger.error("A request failed.", exc_info=error)
    return RequestError(500, "The server failed on this request; its log says how.")
