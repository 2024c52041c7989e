"""What the pure rooms log with Python's logging comes out where a ROS operator looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _RosHandler(logging.Handler):
    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        # One line of code for each severity: rclpy remembers a call by its line, and refuses another severity there.
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        elif record.levelno >= logging.INFO:
            self._logger.info(text)
        else:
            self._logger.debug(text)


@contextmanager
def log_through(logger: Any) -> Iterator[None]:
    """Send records of ``pi05_ros`` to a node's logger while inside."""
    package, handler = logging.getLogger("pi05_ros"), _RosHandler(logger)
    before = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(before)
