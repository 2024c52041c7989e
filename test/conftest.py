"""What every test process gets, before anything of ROS, torch or Triton is imported.

Where ROS is absent or only a part of it was installed, files that need the missing part are left out, and the end of
the run says which. `make test` demands all of it (PI05_ROS_TEST_NODES=1) unless that part was declined at set-up.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 101)  # test runs beside each other do not hear each other
os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # torch takes it as its number of threads
logging.setLoggerClass(logging.Logger)  # not launch's, whose loggers keep their records from pytest's caplog

import torch  # noqa: E402

if not torch.cuda.is_available():  # kernels are tested in Triton's interpreter, which is chosen when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("busy machine", deadline=None)  # the first example of a test may pay for an import
settings.load_profile("busy machine")

OPTIONAL = ("rclpy", "launch", "launch_ros", "launch_testing", "mujoco")
MISSING = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
NEEDS_MISSING = re.compile(rf"^(?:import|from) (?:{'|'.join(MISSING)})\b", re.MULTILINE) if MISSING else None
LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = []
    if MISSING and os.environ.get("PI05_ROS_TEST_NODES") == "1":
        raise pytest.UsageError(f"{', '.join(MISSING)} cannot be imported; run `make setup`, then `make test`.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if NEEDS_MISSING and collection_path.suffix == ".py" and NEEDS_MISSING.search(collection_path.read_text("utf-8")):
        config.stash[LEFT_OUT].append(collection_path.name)
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "launch_ros" not in MISSING:
        return
    deselected = [item for item in items if item.get_closest_marker("needs_launch")]
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=deselected)
    config.stash[LEFT_OUT] += [item.nodeid for item in deselected]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section(f"NOT RUN, for want of {', '.join(MISSING)}", red=True, bold=True)
        for name in sorted(left_out):
            terminalreporter.write_line(name)
