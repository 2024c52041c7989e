"""What the other rooms and the web server log with Python's logging comes out where a ROS operator looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LEVELS = {"pi05_ros": logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
"""Of what is worth an operator's attention, by logger."""


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
    """Send records of LEVELS' loggers to a node's logger while inside."""
    handler = _RosHandler(logger)
    before = {name: logging.getLogger(name).level for name in LEVELS}
    for name, level in LEVELS.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)
