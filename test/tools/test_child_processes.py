"""Commands and all that they start: ended together, however unwilling."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from pi05_ros.tools import child_processes
from pi05_ros.tools.child_processes import ChildProcesses, ProcessError

PARENT_OF_A_STUBBORN_CHILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, {on_interrupt})
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    "print('ready', flush=True); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("on_interrupt", ["signal.SIG_IGN", "lambda *_: sys.exit(0)"])
def test_nobody_is_left_even_if_they_ignore_signals(
    on_interrupt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "INTERRUPT_PATIENCE", 0.5)
    monkeypatch.setattr(child_processes, "FORCE_PATIENCE", 1.0)
    script = PARENT_OF_A_STUBBORN_CHILD.format(on_interrupt=on_interrupt)
    with ChildProcesses([sys.executable, "-c", script], tmp_path / "log") as processes:
        deadline = time.monotonic() + 10
        while len(processes.last_lines(5)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int(next(line for line in processes.last_lines(5) if line.isdigit()))
        processes.check_alive()
        assert is_running(child)
    assert not is_running(child)
    processes.end()  # once more does no harm


def test_an_error_inside_ends_them_too(tmp_path: Path) -> None:
    processes = ChildProcesses([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with contextlib.suppress(KeyboardInterrupt), processes:
        assert is_running(processes._process.pid)
        raise KeyboardInterrupt
    assert not is_running(processes._process.pid)


def test_an_early_end_is_told_with_its_exit_code_and_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('one'); print('two'); sys.exit(3)"]
    with ChildProcesses(command, tmp_path / "log") as processes:
        os.waitid(os.P_PID, processes._process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessError, match="exit code 3"):
            processes.check_alive()
        assert processes.last_lines(1) == ["two"]


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no command 'no-such-command'"):
        ChildProcesses(["no-such-command"], tmp_path / "log")
