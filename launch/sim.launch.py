"""The policy on a simulated ALOHA: the robot ``aloha_sim`` and the policy node, both on simulated time.

    ros2 launch pi05_ros sim.launch.py checkpoint:=/path/to/checkpoint prompt:="Transfer cube"

The arguments of policy.launch.py are passed on to it; an empty one keeps what the YAML files or the node say.
"""

from __future__ import annotations

from pathlib import Path

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction, Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from pi05_ros.ros.declarations import PARAMETERS as POLICY_PARAMETERS
from pi05_ros.ros.declarations import Spec
from pi05_ros.sim.node import PARAMETERS

# Of the policy's parameters all but these are arguments here; both have a seed.
FIXED = {"robot": "aloha_sim", "use_sim_time": "true"}
RENAMED = {"seed": "policy_seed"}
DEFAULTS = {"checkpoint": None, "prompt": "Transfer cube"}  # as gym-aloha's data sets say
POLICY_ARGUMENTS = {RENAMED.get(spec.name, spec.name): spec for spec in POLICY_PARAMETERS if spec.name not in FIXED}
ARGUMENTS = {
    "params_file": ("", "YAML file with parameters of the policy node."),
    "autostart": ("true", "Configure and activate the policy node at once."),
    "log_level": ("info", "Of both nodes: debug, info, warn, error, fatal."),
}


def robot_parameters(context: LaunchContext) -> dict[str, float | int | str]:
    """Those that were given, each as its type."""
    parameters: dict[str, float | int | str] = {}
    for name, (default, *_) in PARAMETERS.items():
        text = LaunchConfiguration(name).perform(context)
        try:
            if text:
                parameters[name] = type(default)(text)
        except ValueError as error:
            raise ValueError(f"{name}: expected {type(default).__name__}, got {text!r}.") from error
    return parameters


def robot_node(parameters: dict[str, float | int | str]) -> Node:
    return Node(
        package="pi05_ros",
        executable="aloha_sim",
        name="aloha_sim",
        output="screen",
        parameters=[parameters],
        arguments=["--ros-args", "--log-level", ["aloha_sim:=", LaunchConfiguration("log_level")]],
        on_exit=shut_down,
    )


def shut_down(_event: object, context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Without the robot there is no clock. If all is being shut down anyway, a second time would be an error."""
    return [] if context.is_shutdown else [Shutdown(reason="the simulated robot has ended")]


def declare(name: str, spec: Spec) -> DeclareLaunchArgument:
    """A parameter of the policy node as an argument."""
    span = f" {spec.legal}." if spec.legal and not spec.words else ""
    otherwise = "" if name in DEFAULTS else " Not given: as in the YAML files."
    return DeclareLaunchArgument(
        name,
        default_value=DEFAULTS.get(name, ""),
        description=f"(policy) {spec.description}{span}{otherwise}",
        choices=["", *filter(None, spec.words)] if spec.words else None,
    )


def generate_launch_description() -> LaunchDescription:
    arguments = {**{name: spec.name for name, spec in POLICY_ARGUMENTS.items()}, **{name: name for name in ARGUMENTS}}
    policy = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(__file__).with_name("policy.launch.py"))),
        launch_arguments={**{theirs: LaunchConfiguration(ours) for ours, theirs in arguments.items()}, **FIXED}.items(),
    )
    # Read before the policy's arguments are set: they go into the same scope, and it has a seed too.
    robot: dict[str, float | int | str] = {}
    return LaunchDescription(
        [
            *(declare(name, spec) for name, spec in POLICY_ARGUMENTS.items()),
            *(
                DeclareLaunchArgument(name, description=f"(policy) {description}", default_value=default)
                for name, (default, description) in ARGUMENTS.items()
            ),
            *(
                DeclareLaunchArgument(name, description=f"(robot) {description} Default: {default}.", default_value="")
                for name, (default, _, _, description) in PARAMETERS.items()
            ),
            OpaqueFunction(function=lambda context: robot.update(robot_parameters(context))),
            policy,  # before the robot: it sets the middleware's profile, for the robot too
            OpaqueFunction(function=lambda _: [robot_node(robot)]),
        ]
    )
