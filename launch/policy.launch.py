"""The policy node, configured and activated.

    ros2 launch pi05_ros policy.launch.py checkpoint:=/path/to/checkpoint robot:=aloha_ros2 prompt:="uncap the pen"

Parameters come from config/policy.yaml, then from params_file, then from the arguments that are not empty.
"""

from __future__ import annotations

import os
from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterValue
from lifecycle_msgs.msg import Transition

from pi05_ros.ros.declarations import PARAMETERS, Spec

SHARE = Path(get_package_share_directory("pi05_ros"))

# Of the launch file itself: default, description, choices. All parameters of the node are arguments too.
ARGUMENTS = {
    "params_file": ("", "YAML file whose parameters go over those of config/policy.yaml.", None),
    "namespace": ("", "Namespace of the node.", None),
    "use_sim_time": (
        "",
        "Follow /clock: true in simulation and with bags. Not given: as in the YAML files, else false.",
        ["", "true", "false", "True", "False"],
    ),
    "autostart": ("true", "Configure and activate the node at once.", ["true", "false", "True", "False"]),
    "log_level": ("info", "Of the node.", ["debug", "info", "warn", "error", "fatal"]),
}


def declare(spec: Spec) -> DeclareLaunchArgument:
    """A parameter of the node as an argument."""
    span = f" {spec.legal}." if spec.legal and not spec.words else ""
    return DeclareLaunchArgument(
        spec.name,
        default_value="",
        description=f"{spec.description}{span} Not given: as in the YAML files.",
        choices=["", *filter(None, spec.words)] if spec.words else None,
    )


def policy_node(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The node, with the arguments that were given, and the events that start it."""

    def argument(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        text = argument(name).lower()
        if text not in ("true", "false"):
            raise ValueError(f"{name}: expected true or false, got {text!r}.")
        return text == "true"

    given: dict[str, object] = {}
    for spec in PARAMETERS:
        if text := argument(spec.name):
            value = spec.parse(text)
            # Said to be text: launch would else read a prompt like "on" as YAML reads it.
            given[spec.name] = ParameterValue(value, value_type=str) if isinstance(value, str) else value
    if argument("use_sim_time"):
        given["use_sim_time"] = flag("use_sim_time")
    parameters: list[object] = [str(SHARE / "config" / "policy.yaml")]
    if argument("params_file"):
        if not Path(argument("params_file")).is_file():
            raise ValueError(f"params_file: there is no file {argument('params_file')!r}.")
        parameters.append(argument("params_file"))
    parameters.append(given)
    node = LifecycleNode(
        package="pi05_ros",
        executable="policy_node",
        name="policy_node",
        namespace=argument("namespace"),
        output="screen",
        emulate_tty=True,
        parameters=parameters,
        arguments=["--ros-args", "--log-level", f"policy_node:={argument('log_level')}"],
    )
    if not flag("autostart"):
        return [node]
    configure = EmitEvent(
        event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=Transition.TRANSITION_CONFIGURE)
    )
    activate = RegisterEventHandler(
        OnStateTransition(
            target_lifecycle_node=node,
            start_state="configuring",
            goal_state="inactive",
            entities=[
                EmitEvent(
                    event=ChangeState(
                        lifecycle_node_matcher=matches_action(node), transition_id=Transition.TRANSITION_ACTIVATE
                    )
                )
            ],
        )
    )
    return [node, activate, configure]


def generate_launch_description() -> LaunchDescription:
    # Fast DDS 2 reads the first name, 3 the second; your own file stays.
    profiles = [
        SetEnvironmentVariable(name, os.environ.get(name) or str(SHARE / "config" / "fastdds.xml"))
        for name in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")
    ]
    arguments = [
        DeclareLaunchArgument(name, default_value=default, description=description, choices=choices)
        for name, (default, description, choices) in ARGUMENTS.items()
    ]
    return LaunchDescription([*profiles, *map(declare, PARAMETERS), *arguments, OpaqueFunction(function=policy_node)])
