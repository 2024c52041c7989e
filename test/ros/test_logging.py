"""Python's log records, through a real node logger."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: launch_testing's plugin makes loggers of a class that keeps records to itself.
PROGRAM = """
import logging
import rclpy.logging
from pi05_ros.ros.logging import log_through

logger = logging.getLogger("pi05_ros.somewhere")
with log_through(rclpy.logging.get_logger("policy_node")):
    for name in ("WARNING", "INFO", "ERROR", "WARNING", "DEBUG"):
        logger.log(getattr(logging, name), "one of level %s", name)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logger.info("after the end")
"""


def test_records_of_every_severity_come_out_in_any_order():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    lines = (result.stdout + result.stderr).splitlines()
    assert [(line.split("]")[0], line.split(": ")[-1]) for line in lines] == [
        ("[WARN", "one of level WARNING"),
        ("[INFO", "one of level INFO"),
        ("[ERROR", "one of level ERROR"),
        ("[WARN", "one of level WARNING"),
        ("[WARN", "Invalid HTTP request received."),
    ]
