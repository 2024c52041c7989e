"""How one robot and one checkpoint fit together: decided once, when a policy is made, and refused if they do not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.checkpoint.norm_stats import FeatureStats
from pi05_ros.errors import ProfileError
from pi05_ros.policy.profile import CAMERA_SLOTS, RobotProfile
from pi05_ros.policy.transforms import IdentityTransform, RobotTransform, make_transform


@dataclass(frozen=True)
class Binding:
    """A robot, seen through a checkpoint.

    cameras: for every image input of the model, in its order, the robot's name of the camera that feeds it; None: the
        robot has none, the input is masked.
    ignored_cameras: cameras that an observation may bring and the model has no input for.
    state_names, action_names: names of the robot's dimensions.
    required_cameras: without them there is no observation; of the others any may be masked, as long as one is left.
    delta_mask: [action_dim], True where actions are relative to the present state; None: nowhere.
    raw: states and actions are in normalised model space already.
    """

    cameras: tuple[str | None, ...]
    ignored_cameras: tuple[str, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    transform: RobotTransform
    adapt_to_pi: bool = False
    delta_mask: np.ndarray | None = None
    state_in_prompt: bool = True
    required_cameras: tuple[str, ...] = ()
    raw: bool = False

    @property
    def fed_cameras(self) -> tuple[str, ...]:
        """Names of the cameras that feed an input of the model, in its order."""
        return tuple(name for name in self.cameras if name is not None and not name.startswith("empty_camera_"))

    @property
    def state_dim(self) -> int:
        return len(self.state_names)

    @property
    def action_dim(self) -> int:
        return len(self.action_names)


def bind(
    checkpoint: Checkpoint,
    profile: RobotProfile | None,
    raw: bool,
    adapt_to_pi: bool | None,
    delta_actions: bool | None,
) -> Binding:
    """Fit a profile to a checkpoint; without a profile, the checkpoint's own features are the robot.

    raw: as without a profile, and in model space. adapt_to_pi, delta_actions: None leaves them to checkpoint and
    profile. Raises ProfileError that says both sides.
    """
    if profile is None:
        return _bind_features(checkpoint, raw, delta_actions)
    width = checkpoint.config.action_dim
    action_names = profile.action_names or profile.joint_names
    _check_dim("state", profile.joint_names, checkpoint.state_dim, width, profile)
    _check_dim("action", action_names, checkpoint.action_dim, width, profile)
    _check_order(action_names, checkpoint.relative_actions.action_names or (), profile)
    adapt = _adapt_to_pi(checkpoint, profile, adapt_to_pi)
    cameras = _match_cameras(checkpoint, profile)
    return Binding(
        cameras=cameras,
        ignored_cameras=tuple(camera.name for camera in profile.cameras if camera.name not in cameras),
        state_names=profile.joint_names,
        action_names=action_names,
        transform=make_transform(profile.transform, adapt),
        adapt_to_pi=adapt,
        delta_mask=_delta_mask(checkpoint, profile, delta_actions),
        state_in_prompt=checkpoint.layout == "lerobot" or profile.openpi.state_in_prompt,
        required_cameras=_required_cameras(checkpoint, profile),
    )


def _bind_features(checkpoint: Checkpoint, raw: bool, delta_actions: bool | None) -> Binding:
    width = checkpoint.config.action_dim
    state_dim, action_dim = width, width
    if not raw:
        # An openpi checkpoint names no features, but its statistics have the robot's dimensions.
        stats = checkpoint.norm_stats if checkpoint.layout == "openpi" else None
        state_dim = checkpoint.state_dim or (stats and _stats_dim(stats.state)) or width
        action_dim = checkpoint.action_dim or (stats and _stats_dim(stats.action)) or width
    names = checkpoint.relative_actions.action_names
    if names is None or len(names) != action_dim:
        names = tuple(f"action_{index}" for index in range(action_dim))
    return Binding(
        cameras=checkpoint.cameras or CAMERA_SLOTS,
        ignored_cameras=(),
        state_names=tuple(f"state_{index}" for index in range(state_dim)),
        action_names=names,
        transform=IdentityTransform(),
        delta_mask=None if raw else _delta_mask(checkpoint, None, delta_actions),
        raw=raw,
    )


def _stats_dim(stats: FeatureStats) -> int | None:
    return next((len(values) for values in stats.values()), None)


def _check_dim(what: str, names: tuple[str, ...], checkpoint: int | None, width: int, profile: RobotProfile) -> None:
    """A checkpoint whose feature is as wide as the model is a base checkpoint: it takes any robot, padded."""
    has = f"{what}: robot profile {profile.name!r} has {len(names)} dimensions ({', '.join(names)})"
    if len(names) > width:
        raise ProfileError(f"{has}, the model has room for {width}.")
    if checkpoint not in (None, width, len(names)):
        raise ProfileError(f"{has}, the checkpoint {checkpoint}.")


def _check_order(names: tuple[str, ...], checkpoint: tuple[str, ...], profile: RobotProfile) -> None:
    """Data sets have names of their own for joints, so others are no mistake; the same at another place would be."""
    theirs = [name.removesuffix(".pos") for name in checkpoint]  # as LeRobot's robots write them
    moved = [name for place, name in enumerate(names) if name in theirs and theirs[place : place + 1] != [name]]
    if moved:
        raise ProfileError(
            f"action: robot profile {profile.name!r} has the dimensions {', '.join(names)}, in this order; the "
            f"checkpoint has {', '.join(checkpoint)}. At another place: {', '.join(moved)}."
        )


def _adapt_to_pi(checkpoint: Checkpoint, profile: RobotProfile, given: bool | None) -> bool:
    """It flips joints, so it is never guessed."""
    if profile.transform != "aloha":
        if given:
            raise ProfileError(f"adapt_to_pi: only the aloha transform has it, not {profile.transform!r}.")
        return False
    if checkpoint.layout == "lerobot":
        if given:
            raise ProfileError("adapt_to_pi: a LeRobot checkpoint is never adapted; leave it out or set it to false.")
        return False
    decided = profile.adapt_to_pi if given is None else given
    if decided is None:
        raise ProfileError(
            f"adapt_to_pi: an openpi checkpoint on robot {profile.name!r} needs it said, and neither the profile nor "
            "an argument does. true: a checkpoint in pi's own convention (their ALOHA base checkpoints); false: one "
            "that was trained on the robot's own joint values. The wrong one moves four joints the wrong way."
        )
    return decided


def _match_cameras(checkpoint: Checkpoint, profile: RobotProfile) -> tuple[str | None, ...]:
    """The profile's camera for every image input: by its own name, by LeRobot's rename map, or by its slot."""
    inputs = checkpoint.cameras or CAMERA_SLOTS
    by_name = {name: camera.name for camera in profile.cameras for name in (*camera.aliases, camera.name)}
    renamed = {new: old for old, new in checkpoint.rename_map.items() if old in by_name}
    by_slot = {camera.slot: camera.name for camera in profile.cameras if camera.slot}
    matched = tuple(by_name.get(one) or renamed.get(one) or by_slot.get(one) for one in inputs)
    unfed = [one for one, camera in zip(inputs, matched, strict=True) if camera is None and not _may_be_absent(one)]
    unused = [camera.name for camera in profile.cameras if camera.slot and camera.name not in matched]
    if unfed or unused or not any(matched):
        raise ProfileError(
            f"cameras: the checkpoint reads {', '.join(inputs)}; robot profile {profile.name!r} has "
            f"{', '.join(f'{camera.name} (slot {camera.slot})' for camera in profile.cameras)}. "
            f"Without a camera: {', '.join(unfed) or 'none'}; without an input: {', '.join(unused) or 'none'}."
        )
    return matched


def _required_cameras(checkpoint: Checkpoint, profile: RobotProfile) -> tuple[str, ...]:
    """openpi's robots insist on their base camera; LeRobot takes whatever is there."""
    if checkpoint.layout == "lerobot":
        return ()
    return tuple(camera.name for camera in profile.cameras if camera.slot == CAMERA_SLOTS[0])


def _may_be_absent(image_input: str) -> bool:
    return image_input in CAMERA_SLOTS or image_input.startswith("empty_camera_")


def _delta_mask(checkpoint: Checkpoint, profile: RobotProfile | None, given: bool | None) -> np.ndarray | None:
    """Which actions are relative, refused where there is no state that they could be relative to."""
    mask = _wanted_delta_mask(checkpoint, profile, given)
    state_dim = profile.state_dim if profile else checkpoint.state_dim or checkpoint.config.action_dim
    if mask is not None and mask[state_dim:].any():
        raise ProfileError(f"delta_actions: {len(mask)} actions are relative to a state of {state_dim} dimensions.")
    return mask


def _wanted_delta_mask(checkpoint: Checkpoint, profile: RobotProfile | None, given: bool | None) -> np.ndarray | None:
    """LeRobot's checkpoints say it themselves; openpi's leave it to the robot."""
    relative = checkpoint.relative_actions
    if checkpoint.layout == "lerobot":
        enabled = relative.enabled
    else:
        enabled = profile is not None and profile.openpi.delta_actions
    if not (enabled if given is None else given):
        return None
    dims = (profile.action_dim if profile else checkpoint.action_dim) or checkpoint.config.action_dim
    names = relative.action_names
    if checkpoint.layout == "lerobot" and (names is not None or profile is None):
        if names is None:
            return np.ones(dims, dtype=bool)
        if len(names) != dims:
            raise ProfileError(f"action_names: the checkpoint names {len(names)} dimensions, the robot has {dims}.")
        return np.array([not _excluded(name, relative.exclude_joints) for name in names])
    if profile is None:
        raise ProfileError(
            "delta_actions: an openpi checkpoint needs a robot profile to know which joints are relative."
        )
    if checkpoint.layout == "lerobot" and given is None:
        return np.ones(dims, dtype=bool)  # as LeRobot has it where no names are known
    grippers = np.zeros(dims, dtype=bool)
    grippers[: profile.state_dim] = profile.gripper_mask[:dims]
    return ~grippers


def _excluded(name: str, tokens: tuple[str, ...]) -> bool:
    return any(token.lower() in name.lower() for token in tokens)
