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
        self._levels = (
            (logging.ERROR, logger.error),
            (logging.WARNING, logger.warning),
            (logging.INFO, logger.info),
            (logging.DEBUG, logger.debug),
        )

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        for level, say in self._levels:
            if record.levelno >= level:
                say(text)
                return


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
