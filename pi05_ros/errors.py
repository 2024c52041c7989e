"""The errors that a user can cause. Each is one sentence (or list of them) to read, and needs no traceback."""

from __future__ import annotations


class Pi05Error(Exception):
    """Base of all of them. Command-line tools print it as one line and exit with code 1."""


class CheckpointError(Pi05Error):
    """A checkpoint cannot be used: files, tensors, statistics or tokenizer are missing, surplus or malformed."""


class ProfileError(Pi05Error):
    """A robot profile cannot be used: unknown name, wrong field, or it does not fit the checkpoint."""


class ObservationError(Pi05Error, ValueError):
    """An observation or a request parameter is not acceptable.

    ``field`` names the offending field as the caller wrote it (for example ``images.cam_high`` or ``state``).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class InferenceError(Pi05Error, RuntimeError):
    """There is no result, or none that may be used (non-finite actions); the subclasses say why it did not even run."""


class EngineBusyError(InferenceError):
    """The engine's queue is full of requests that are at least as urgent; try again later."""


class EngineClosedError(InferenceError):
    """The engine is closed, or was before the request's turn."""


class DeadlineError(InferenceError):
    """The request's deadline passed while it waited."""
