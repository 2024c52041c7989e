"""A command and all that it starts, ended together: what the demo runs its launch file with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pi05_ros.errors import Pi05Error

POLL_PERIOD = 0.05
INTERRUPT_PATIENCE = 15.0  # launch waits 5 s for its nodes, then 5 s more after a SIGTERM
FORCE_PATIENCE = 3.0


class ProcessError(Pi05Error):
    """The command cannot be started, or has ended before it should."""


class ChildProcesses:
    """A running command, in a process group of its own, as a context manager.

    Its output goes to a log file. On leaving, however that comes about, the command is interrupted as by Ctrl-C and
    given time to end what it started; what is then left of the group is terminated, and at last killed.

    Raises ProcessError: there is no such command.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("w", encoding="utf-8") as output:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            except FileNotFoundError as error:
                raise ProcessError(f"There is no command {command[0]!r}; is its environment sourced?") from error

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raises ProcessError if the command has ended."""
        if self._process.poll() is not None:
            raise ProcessError(f"The nodes ended early, with exit code {self._process.returncode}.")

    def last_lines(self, count: int) -> list[str]:
        """Of what they have written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]

    def end(self) -> None:
        """End the whole group; returns when none of it runs any more. A second call does nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the signals below do not ask
                self._process.wait(INTERRUPT_PATIENCE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._is_empty() or self._signal_group(number):
                return

    def _signal_group(self, number: int) -> bool:
        """Send it to everyone; True once nobody is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + FORCE_PATIENCE
        while time.monotonic() < deadline:
            if self._is_empty():
                return True
            time.sleep(POLL_PERIOD)  # grandchildren cannot be waited for
        return False

    def _is_empty(self) -> bool:
        self._process.poll()  # a zombie would count as alive
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False
