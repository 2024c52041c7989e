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

SHARE = Path(get_package_share_directory("pi05_ros"))

# name: default, description. The first group are parameters of the node.
PARAMETERS = {
    "checkpoint": "folder or .safetensors file of the checkpoint, LeRobot or openpi layout",
    "robot": "robot profile: a name in config/robots or the path of a YAML file",
    "prompt": "the instruction; ~/prompt replaces it",
    "device": "auto, cuda, cuda:<index> or cpu",
    "precision": "openpi, float32, bfloat16 or fp8",
    "strategy": "how one chunk follows another: receding, ensemble or rtc",
    "http_host": "address that the HTTP server listens on",
    "http_port": "its port; 0: no server",
}
ARGUMENTS = {
    **{name: ("", f"{description}; empty: as in the YAML files") for name, description in PARAMETERS.items()},
    "params_file": ("", "YAML file whose parameters go over those of config/policy.yaml"),
    "namespace": ("", "namespace of the node"),
    "use_sim_time": ("", "follow /clock: true in simulation and with bags; empty: as in the YAML files, else false"),
    "autostart": ("true", "configure and activate the node at once"),
    "log_level": ("info", "debug, info, warn, error or fatal"),
}


CHOICES = {
    "precision": ["", "openpi", "float32", "bfloat16", "fp8"],
    "strategy": ["", "receding", "ensemble", "rtc"],
    "use_sim_time": ["", "true", "false", "True", "False"],
    "autostart": ["true", "false", "True", "False"],
    "log_level": ["debug", "info", "warn", "error", "fatal"],
}


def policy_node(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The node, with the arguments that were given, and the events that start it."""

    def argument(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        text = argument(name).lower()
        if text not in ("true", "false"):
            raise ValueError(f"{name}: expected true or false, got {text!r}.")
        return text == "true"

    # As text: launch would else read a prompt like "on" as YAML reads it.
    given: dict[str, object] = {
        name: ParameterValue(argument(name), value_type=str) for name in PARAMETERS if argument(name)
    }
    if "http_port" in given:
        if not argument("http_port").isdecimal():
            raise ValueError(f"http_port: expected a number, got {argument('http_port')!r}.")
        given["http_port"] = int(argument("http_port"))
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
        DeclareLaunchArgument(name, default_value=default, description=description, choices=CHOICES.get(name))
        for name, (default, description) in ARGUMENTS.items()
    ]
    return LaunchDescription([*profiles, *arguments, OpaqueFunction(function=policy_node)])
