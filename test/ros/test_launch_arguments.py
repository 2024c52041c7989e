"""What `ros2 launch ... --show-args` lists is what the nodes take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import LaunchContext
from launch.actions import DeclareLaunchArgument
from launch.launch_description_sources import PythonLaunchDescriptionSource

from pi05_ros.ros.declarations import PARAMETERS, Spec
from pi05_ros.sim.node import PARAMETERS as ROBOT_PARAMETERS

LAUNCH = Path(__file__).parents[2] / "launch"
BY_NAME = {spec.name: spec for spec in PARAMETERS}


def arguments(file: str) -> dict[str, DeclareLaunchArgument]:
    """Of the file itself, not of one that it includes."""
    description = PythonLaunchDescriptionSource(str(LAUNCH / file)).get_launch_description(LaunchContext())
    declared = [one for one in description.entities if isinstance(one, DeclareLaunchArgument)]
    assert len({one.name for one in declared}) == len(declared), "none is declared twice"
    return {one.name: one for one in declared}


def assert_says(argument: DeclareLaunchArgument, spec: Spec) -> None:
    assert spec.description in argument.description
    limited = bool(spec.choices) or isinstance(spec.default, bool)
    assert set(spec.choices) <= set(argument.choices or ())
    assert (argument.choices is not None) == limited
    if not limited and spec.low is not None:
        assert f" {spec.low} " in argument.description


def test_every_parameter_of_the_policy_node_is_an_argument() -> None:
    declared = arguments("policy.launch.py")
    for spec in PARAMETERS:
        assert_says(declared[spec.name], spec)
    own = {"params_file", "namespace", "use_sim_time", "autostart", "log_level"}
    assert set(declared) == {*BY_NAME, *own}
    assert all(one.description for one in declared.values())


def test_the_simulation_has_the_policys_arguments_and_the_robots() -> None:
    """But for the robot, which is the simulated one. Both have a seed; that of the episode was there first."""
    declared = arguments("sim.launch.py")
    for name in BY_NAME.keys() - {"robot", "seed"}:
        assert_says(declared[name], BY_NAME[name])
    assert_says(declared["policy_seed"], BY_NAME["seed"])
    for name, (_, _, _, description) in ROBOT_PARAMETERS.items():
        assert description in declared[name].description
    expected = {*BY_NAME, *ROBOT_PARAMETERS, "policy_seed", "params_file", "autostart", "log_level"} - {"robot"}
    assert set(declared) == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("prompt", "on", "on"),
        ("http_port", "0", 0),
        ("seed", "-1", -1),
        ("max_ahead", "0.3", 0.3),
        ("max_ahead", "1", 1.0),
        ("dry_run", "True", True),
        ("dry_run", "false", False),
    ],
)
def test_text_of_a_command_line_becomes_the_parameters_type(name: str, text: str, value: Any) -> None:
    parsed = BY_NAME[name].parse(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("http_port", "http", "http_port: expected a whole number, got 'http'"),
        ("http_port", "1.5", r"http_port: expected a whole number, got '1\.5'"),
        ("max_ahead", "soon", "max_ahead: expected a number, got 'soon'"),
        ("dry_run", "yes", "dry_run: expected true or false, got 'yes'"),
    ],
)
def test_text_that_is_of_no_such_type_is_refused_by_name(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BY_NAME[name].parse(text)


def test_launching_costs_no_import_of_torch() -> None:
    """The launch process stays beside the nodes for as long as they run."""
    files = [str(LAUNCH / name) for name in ("policy.launch.py", "sim.launch.py")]
    code = f"import runpy, sys; [runpy.run_path(file) for file in {files!r}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
