"""Robot profiles: what a robot's cameras, joints and grippers are called, and how they map to the model.

A profile is a YAML file in ``config/robots/`` (or any path). It is read once into frozen dataclasses; whatever is
wrong with it is said in one error that names the field. A profile knows names and numbers only; how a state becomes
model input is in ``transforms.py``, how a message becomes a state is in the ``robot`` room.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

import pi05_ros
from pi05_ros.errors import ProfileError
from pi05_ros.policy.gripper import Gripper, gripper_problem, spell_out

CAMERA_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The three image inputs of pi05_base, in the order in which the model reads them."""


MAX_SIDE = 16384
"""Of a camera image, in pixels."""

TRANSFORM_DIMS = {"aloha": (14, 14), "droid": (8, 8), "libero": (8, 7)}
"""Dimensions of state and action that a robot transform is for."""


@dataclass(frozen=True)
class Camera:
    """One camera of the robot.

    name: the key in ``Observation.images``.
    slot: the input of the base model that it feeds (one of ``CAMERA_SLOTS``), or None: accepted and ignored, as
        openpi does with ALOHA's ``cam_low``.
    topic: ROS topic, None if the robot is not driven over ROS.
    transport: "raw" (sensor_msgs/Image) or "compressed" (sensor_msgs/CompressedImage).
    aliases: other names that checkpoints have for this image.
    required: the node does not act without a fresh frame of it. A camera that is not required is masked out while
        it is absent.
    height, width: of its images in pixels, as its driver is set. The node warms up for these; images of another size
        are read as well, and the first of them wait for it.
    """

    name: str
    slot: str | None
    topic: str | None = None
    transport: Literal["raw", "compressed"] = "raw"
    required: bool = True
    aliases: tuple[str, ...] = ()
    height: int = 480
    width: int = 640


@dataclass(frozen=True)
class Command:
    """Where an arm's commands go.

    type: "joint_trajectory" (trajectory_msgs/JointTrajectory, arm joints and gripper in one message unless the gripper
        has a topic of its own), "joint_state" (sensor_msgs/JointState, positions of arm joints and gripper),
        "float64_multi_array" (std_msgs/Float64MultiArray, arm joints then gripper) or
        "interbotix" (interbotix_xs_msgs: JointGroupCommand on ``topic``, JointSingleCommand on ``gripper_topic``).
    topic: ROS topic of the arm's commands.
    gripper_topic: ROS topic of the gripper's commands where they are separate (interbotix, joint_trajectory).
    """

    type: Literal["joint_trajectory", "joint_state", "float64_multi_array", "interbotix"]
    topic: str
    gripper_topic: str | None = None


@dataclass(frozen=True)
class Limits:
    """How far and how fast an arm may be commanded; one number a joint, its gripper not among them.

    lower, upper: positions in radians. What is commanded as a velocity stops there.
    velocity: rad/s, either way.
    gripper_speed: of the gripper's command, in the policy's units per second; None: it jumps. Its range is limited
        anyway.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    velocity: tuple[float, ...]
    gripper_speed: float | None = None


@dataclass(frozen=True)
class Arm:
    """One arm: its joints in the order of the model's state vector, then its gripper if there is one.

    name: prefix of the names of its dimensions (``left`` -> ``left_waist`` ...); "" for none.
    joints: names in the JointState message, radians.
    state_topic: ROS topic of its JointState, None if the robot is not driven over ROS.
    action: what the policy's actions are: joint "position" (rad) or "velocity" (rad/s).
    limits: what commands are limited to; None: nothing, which the node warns of.
    """

    name: str
    joints: tuple[str, ...]
    gripper: Gripper | None = None
    state_topic: str | None = None
    command: Command | None = None
    action: Literal["position", "velocity"] = "position"
    limits: Limits | None = None

    @property
    def dimension_names(self) -> tuple[str, ...]:
        prefix = f"{self.name}_" if self.name else ""
        names = self.joints + (("gripper",) if self.gripper else ())
        return tuple(prefix + name for name in names)


@dataclass(frozen=True)
class OpenpiConventions:
    """What openpi's code, not its checkpoint, says about a robot. LeRobot checkpoints say it themselves.

    asset_id: the folder of its norm stats below ``assets/``.
    delta_actions: joints (not grippers) are predicted relative to the present state.
    state_in_prompt: the discretised state is part of the prompt (pi05_libero was trained without it).
    """

    asset_id: str | None = None
    delta_actions: bool = False
    state_in_prompt: bool = True


@dataclass(frozen=True)
class RobotProfile:
    """A robot as the policy sees it. Angles in radians, times in seconds, rates in hertz.

    transform: the robot transform of ``transforms.py``: "aloha", "droid", "libero" or "identity".
    adapt_to_pi: (aloha) flip joints and convert grippers to pi's convention; None: the profile does not say, and
        an openpi checkpoint then needs the argument of the same name.
    control_hz: rate at which rows of a chunk are played out; the chunk's period is its inverse.
    command_hz: rate of commands, from control_hz on; between two rows they are interpolated. None: control_hz.
    stale_after: a stream whose newest sample is older than this is stale, and the robot is held.
    max_skew: largest difference between the stamps of the samples of one observation.
    max_start_error: rad; a motion whose first target is further than this from the measured pose at any joint does not
        begin. Nearer ones are ramped to at the joints' speed limits.
    max_limit_excess: rad; a chunk that goes further than this beyond a joint's limits is refused whole. What is less,
        as of an arm that was trained to lean on its stop, is cut off.
    reset_pose: joint positions of one arm to move to before a run, as openpi's servers announce it.
    action_names: names of the action's dimensions where they differ from the state's; None: ``joint_names``.
    """

    name: str
    description: str
    transform: Literal["aloha", "droid", "libero", "identity"]
    cameras: tuple[Camera, ...]
    arms: tuple[Arm, ...]
    control_hz: float
    command_hz: float | None = None
    adapt_to_pi: bool | None = None
    stale_after: float = 0.5
    max_skew: float = 0.1
    max_start_error: float = 0.5
    max_limit_excess: float = 0.2
    reset_pose: tuple[float, ...] | None = None
    action_names: tuple[str, ...] | None = None
    openpi: OpenpiConventions = OpenpiConventions()

    @property
    def joint_names(self) -> tuple[str, ...]:
        """Names of the state's dimensions, in order, grippers included."""
        return tuple(name for arm in self.arms for name in arm.dimension_names)

    @property
    def gripper_mask(self) -> tuple[bool, ...]:
        """True at the dimensions that are grippers."""
        return tuple(
            arm.gripper is not None and name == arm.dimension_names[-1]
            for arm in self.arms
            for name in arm.dimension_names
        )

    @property
    def command_period_ns(self) -> int:
        """Time between two commands, in nanoseconds."""
        return round(1e9 / (self.command_hz or self.control_hz))

    @property
    def state_dim(self) -> int:
        return len(self.joint_names)

    @property
    def action_dim(self) -> int:
        return len(self.action_names or self.joint_names)


def config_folder() -> Path:
    """The folder of YAML files that ship with the package, installed or in the source tree."""
    candidates = [folder / "config" for entry in pi05_ros.__path__ for folder in (Path(entry), Path(entry).parent)]
    for candidate in candidates:
        if (candidate / "robots").is_dir():
            return candidate
    raise ProfileError(
        f"The package's config/robots folder was not found; looked at {', '.join(map(str, candidates))}."
    )


def profile_names() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in (config_folder() / "robots").glob("*.yaml"))


def load_profile(name_or_path: str | Path) -> RobotProfile:
    """Read the profile of that name in ``config/robots/``, or the YAML file at that path.

    Raises ProfileError: no such profile; or a field is missing, unknown or wrong.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = config_folder() / "robots" / f"{name_or_path}.yaml"
    if not path.is_file():
        raise ProfileError(
            f"There is no robot profile {str(name_or_path)!r}; the package has {', '.join(profile_names())}, "
            "and a path that ends in .yaml is read as a file."
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not readable as YAML: {error}") from error
    profile = _build(RobotProfile, data, "", path)
    _validate(profile, path)
    return profile


def _build(kind: type, data: Any, where: str, path: Path) -> Any:
    """A dataclass of that kind from a YAML mapping, every field checked against its annotation."""
    label = where or "the file"
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: {label}: expected a mapping, got {data!r}.")
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    unknown = sorted(str(key) for key in set(data) - set(hints))
    if unknown:
        raise ProfileError(f"{path}: {label}: unknown field {', '.join(unknown)}; known are {', '.join(hints)}.")
    if kind is Gripper:
        try:
            data = spell_out(data)
        except ValueError as error:
            raise ProfileError(f"{path}: {label}: {error}") from error
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in data
    ]
    if missing:
        raise ProfileError(f"{path}: {label}: missing {', '.join(missing)}.")
    prefix = f"{where}." if where else ""
    return kind(**{name: _convert(hints[name], value, prefix + name, path) for name, value in data.items()})


def _convert(hint: Any, value: Any, where: str, path: Path) -> Any:
    """One YAML value as the annotated type: a dataclass, tuple, literal, optional or plain scalar."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(hint, value, where, path)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, path)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise ProfileError(f"{path}: {where}: expected a list, got {value!r}.")
        return tuple(_convert(arguments[0], item, f"{where}[{index}]", path) for index, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise ProfileError(f"{path}: {where}: expected one of {', '.join(map(str, arguments))}, got {value!r}.")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is float and not math.isfinite(value)):
        raise ProfileError(
            f"{path}: {where}: expected a {'finite ' if hint is float else ''}{hint.__name__}, got {value!r}."
        )
    return value


def _validate(profile: RobotProfile, path: Path) -> None:
    """What a type cannot say."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ProfileError(f"{path}: {message}")

    require(len(profile.cameras) > 0, "cameras: at least one is needed.")
    require(len(profile.arms) > 0, "arms: at least one is needed.")
    for label, names in (
        ("cameras: name", [camera.name for camera in profile.cameras]),
        ("cameras: slot", [camera.slot for camera in profile.cameras if camera.slot]),
        ("arms: dimension", profile.joint_names),
        ("action_names:", profile.action_names or ()),
        ("arms: command topic", [topic for arm in profile.arms for topic in _command_topics(arm)]),
        ("arms: joint", [f"{arm.state_topic} {joint}" for arm in profile.arms for joint in _state_joints(arm)]),
    ):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        require(not twice, f"{label} {', '.join(twice)} is used twice.")
    for index, camera in enumerate(profile.cameras):
        require(
            camera.slot is None or camera.slot in CAMERA_SLOTS,
            f"cameras[{index}].slot: expected one of {', '.join(CAMERA_SLOTS)} or null, got {camera.slot!r}.",
        )
        for name in ("height", "width"):
            side = getattr(camera, name)
            require(0 < side <= MAX_SIDE, f"cameras[{index}].{name}: expected 1 to {MAX_SIDE} pixels, got {side}.")
    for index, arm in enumerate(profile.arms):
        require(len(arm.joints) > 0, f"arms[{index}].joints: at least one is needed.")
        if arm.gripper is not None:
            problem = gripper_problem(arm.gripper)
            require(problem is None, f"arms[{index}].gripper: {problem}")
        problem = _limits_problem(arm)
        require(problem is None, f"arms[{index}].limits{problem}")
        problem = _command_problem(arm)
        require(problem is None, f"arms[{index}].command.{problem}")
    if profile.reset_pose is not None:
        joints = {len(arm.joints) for arm in profile.arms}
        require(
            joints == {len(profile.reset_pose)}, f"reset_pose: expected {max(joints)} positions, one a joint of an arm."
        )
    dims, needed = (profile.state_dim, profile.action_dim), TRANSFORM_DIMS.get(profile.transform)
    require(
        needed is None or dims == needed,
        f"transform: {profile.transform} is for state and actions of {needed} dimensions, the arms have {dims}.",
    )
    aloha_grippers = [index for index, gripper in enumerate(profile.gripper_mask) if gripper] == [6, 13]
    require(
        profile.transform != "aloha" or aloha_grippers, "transform: aloha has a gripper after six joints of each arm."
    )
    require(
        profile.transform != "aloha" or not any(arm.gripper and arm.gripper.passed_through for arm in profile.arms),
        "transform: aloha has grippers of 0 to 1; a robot whose grippers are passed_through has identity.",
    )
    for name, most in (
        ("control_hz", 1000.0),
        ("stale_after", 10.0),
        ("max_skew", 10.0),
        ("max_start_error", 2 * math.pi),
        ("max_limit_excess", 2 * math.pi),
    ):
        value = getattr(profile, name)
        require(value > 0, f"{name}: expected a positive number, got {value}.")
        require(value <= most, f"{name}: expected at most {most:g}, got {value}.")
    require(
        profile.command_hz is None or profile.control_hz <= profile.command_hz <= 1000.0,
        f"command_hz: expected {profile.control_hz:g} (control_hz) to 1000, got {profile.command_hz}.",
    )


def _command_problem(arm: Arm) -> str | None:
    """What is wrong with the command of an arm, from the field's name on."""
    command = arm.command
    if command is None:
        return None
    if command.type == "interbotix" and arm.gripper is not None and command.gripper_topic is None:
        return "gripper_topic: needed for type interbotix with a gripper."
    if command.gripper_topic is not None and command.type not in ("interbotix", "joint_trajectory"):
        return f"gripper_topic: type {command.type} has the gripper in the arm's message, so there is nothing to send."
    if command.gripper_topic is not None and arm.gripper is None:
        return "gripper_topic: the arm has no gripper."
    return None


def _limits_problem(arm: Arm) -> str | None:
    """What is wrong with the limits of an arm, from the field's name on."""
    limits = arm.limits
    if limits is None:
        return None
    for name in ("lower", "upper", "velocity"):
        values = getattr(limits, name)
        if len(values) != len(arm.joints):
            return f".{name}: expected {len(arm.joints)} numbers, one a joint, got {len(values)}."
    for joint, lower, upper, velocity in zip(arm.joints, limits.lower, limits.upper, limits.velocity, strict=True):
        if lower >= upper:
            return f".upper: expected more than lower ({lower:g}) for joint {joint}, got {upper:g}."
        if velocity <= 0:
            return f".velocity: expected a positive number for joint {joint}, got {velocity:g}."
    if limits.gripper_speed is not None:
        if arm.gripper is None:
            return ".gripper_speed: the arm has no gripper."
        if limits.gripper_speed <= 0:
            return f".gripper_speed: expected a positive number, got {limits.gripper_speed:g}."
    return None


def _command_topics(arm: Arm) -> list[str]:
    command = arm.command
    return [] if command is None else [topic for topic in (command.topic, command.gripper_topic) if topic]


def _state_joints(arm: Arm) -> tuple[str, ...]:
    return arm.joints + ((arm.gripper.joint,) if arm.gripper else ())
