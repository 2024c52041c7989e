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

from pi05_ros.sim.node import PARAMETERS

POLICY_ARGUMENTS = {
    "checkpoint": (None, "folder or .safetensors file of the checkpoint (make_checkpoint writes one to try)"),
    "prompt": ("Transfer cube", "what the robot is told to do; the default is what gym-aloha's data sets say"),
    "device": ("", "auto, cpu, cuda or cuda:N"),
    "precision": ("", "openpi, float32, bfloat16 or fp8"),
    "strategy": ("", "how one chunk follows another: receding, ensemble or rtc"),
    "params_file": ("", "YAML file with parameters of the policy node"),
    "http_host": ("", "address that its HTTP server listens on"),
    "http_port": ("", "port of that; 0: no server"),
    "autostart": ("true", "configure and activate the policy node at once"),
    "log_level": ("info", "of both nodes: debug, info, warn, error"),
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


def check_arguments(context: LaunchContext) -> None:
    """Before anything starts."""
    robot_parameters(context)


def start_robot(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    robot = Node(
        package="pi05_ros",
        executable="aloha_sim",
        name="aloha_sim",
        output="screen",
        parameters=[robot_parameters(context)],
        arguments=["--ros-args", "--log-level", ["aloha_sim:=", LaunchConfiguration("log_level")]],
        on_exit=shut_down,
    )
    return [robot]


def shut_down(_event: object, context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Without the robot there is no clock. If all is being shut down anyway, a second time would be an error."""
    return [] if context.is_shutdown else [Shutdown(reason="the simulated robot has ended")]


def generate_launch_description() -> LaunchDescription:
    policy = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(__file__).with_name("policy.launch.py"))),
        launch_arguments={
            **{name: LaunchConfiguration(name) for name in POLICY_ARGUMENTS},
            "robot": "aloha_sim",
            "use_sim_time": "true",
        }.items(),
    )
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, description=f"(policy) {description}", default_value=default)
                for name, (default, description) in POLICY_ARGUMENTS.items()
            ),
            *(
                DeclareLaunchArgument(name, description=f"(robot) {description} Default: {default}.", default_value="")
                for name, (default, _, _, description) in PARAMETERS.items()
            ),
            OpaqueFunction(function=check_arguments),
            policy,  # before the robot: it sets the middleware's profile, for the robot too
            OpaqueFunction(function=start_robot),
        ]
    )
