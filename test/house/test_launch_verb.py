"""``ros2 launch`` behaves as users of ROS 2 know it, also where the verb is our own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_launch

LAUNCH_FILE = """
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess
from launch.substitutions import LaunchConfiguration

CHILD = '''
import signal, sys
def stop(*_):
    print("interrupted", flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
print("started with", sys.argv[1], flush=True)
signal.pause()
'''

def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("needed", description="has no default"),
        DeclareLaunchArgument("colour", default_value="blue", description="what it is painted"),
        ExecuteProcess(cmd=["python3", "-c", CHILD, LaunchConfiguration("colour")], output="screen"),
    ])
"""


@pytest.fixture
def launch_file(tmp_path) -> Path:
    path = tmp_path / "example.launch.py"
    path.write_text(LAUNCH_FILE)
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ros2", "launch", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(*arguments: object) -> tuple[int, str]:
    process = start(*arguments)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_an_interrupt_reaches_the_processes_and_launch_waits_for_them(launch_file):
    with start(launch_file, "needed:=1", "colour:=red") as process:
        assert process.stdout is not None
        lines = []
        while "started with red" not in "".join(lines):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert "interrupted" in rest
    assert "process has finished cleanly" in rest
    assert process.returncode == 0


def test_arguments_are_listed_with_description_and_default(launch_file):
    for arguments in (["-s", launch_file], [launch_file, "--show-args"]):
        code, output = finish(*arguments)
        assert code == 0
        for expected in ("'needed':", "has no default", "'colour':", "what it is painted", "blue"):
            assert expected in output


def test_a_launch_file_of_a_package_is_found():
    code, output = finish("pi05_ros", "policy.launch.py", "-s")
    assert code == 0
    assert "'checkpoint':" in output


def test_a_failed_launch_has_a_return_code(launch_file):
    code, output = finish(launch_file)
    assert code == 1
    assert "missing required argument 'needed'" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("no_such_package", "policy.launch.py"),
        ("pi05_ros", "no_such.launch.py"),
        ("pi05_ros", "policy.launch.py", "checkpoint=/tmp"),
        ("pi05_ros",),
    ],
)
def test_wrong_arguments_are_an_error_that_repeats_them(arguments):
    code, output = finish(*arguments)
    assert code != 0
    assert "Traceback" not in output
    assert any(argument in output for argument in arguments)
