"""A process of policy_node for a test to drive."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters

from ros.robot_stand_in import Robot

CONFIGURE, CLEANUP = Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_CLEANUP
ACTIVATE, DEACTIVATE = Transition.TRANSITION_ACTIVATE, Transition.TRANSITION_DEACTIVATE


class Node:
    """A process of policy_node, and how to drive it. It serves nothing over HTTP unless a port is given."""

    def __init__(self, log: Path, *arguments: str, **parameters: Any) -> None:
        values = {"http_port": 0, **parameters}
        given = [word for name, value in values.items() for word in ("-p", f"{name}:={value}")]
        self.log = log
        command = [sys.executable, "-m", "pi05_ros.tools.policy_node", *arguments, "--ros-args", *given]
        self.process = subprocess.Popen(command, stderr=log.open("w"), stdout=subprocess.DEVNULL)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for_text(self, pattern: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; the log: {self.text}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}; the log: {self.text}"
            time.sleep(0.01)

    def end(self, number: int = signal.SIGINT) -> tuple[int, float]:
        """Exit code and seconds that it took after the signal."""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(20), time.monotonic() - began

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def change_state(robot: Robot, transition: int) -> bool:
    request = ChangeState.Request(transition=Transition(id=transition))
    return bool(robot.call(ChangeState, "/policy_node/change_state", request).success)


def state(robot: Robot) -> str:
    return str(robot.call(GetState, "/policy_node/get_state", GetState.Request()).current_state.label)


def set_parameter(robot: Robot, name: str, value: str | int | float) -> Any:
    if isinstance(value, str):
        typed = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=value)
    elif isinstance(value, int):
        typed = ParameterValue(type=ParameterType.PARAMETER_INTEGER, integer_value=value)
    else:
        typed = ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=value)
    request = SetParameters.Request(parameters=[Parameter(name=name, value=typed)])
    return robot.call(SetParameters, "/policy_node/set_parameters", request).results[0]


def assert_ended_well(node: Node, number: int) -> None:
    code, seconds = node.end(number)
    assert code == 0, node.text
    assert seconds < 5, node.text
    assert "Traceback" not in node.text
