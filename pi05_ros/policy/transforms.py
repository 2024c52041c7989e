"""Robot transforms: from a robot's own conventions into pi's, and back out.

A transform is a pair, ``state_to_model`` and ``actions_to_robot``, and reads what openpi's clients send for that robot
(``observation``). ``make_example`` of each shows such a message; it serves documentation and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pi05_ros.errors import ObservationError
from pi05_ros.policy.observation import Observation


def absolute_actions(actions: np.ndarray, state: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Actions [horizon, dims], relative to the state [dims] where ``relative`` [dims] is True -> absolute ones."""
    state = state[: len(relative)]  # there may be more state than there are actions
    return actions + np.where(relative, state, np.zeros_like(state))


def relative_actions(actions: np.ndarray, state: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Inverse of ``absolute_actions``."""
    state = state[: len(relative)]
    return actions - np.where(relative, state, np.zeros_like(state))


class RobotTransform(Protocol):
    """All directions keep float64 where they get it; arrays are not changed in place."""

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """Robot state [dims] -> pi's conventions, not yet normalised."""

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        """Absolute actions [horizon, dims] in pi's conventions -> the robot's."""

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        """Inverse of ``actions_to_robot``: absolute actions [horizon, dims] of the robot -> pi's conventions."""

    def observation(self, message: Mapping[str, Any]) -> Observation:
        """An observation as openpi's clients write it."""


class IdentityTransform:
    """A robot whose conventions are the checkpoint's own."""

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        return state

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        return actions

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        return actions

    def observation(self, message: Mapping[str, Any]) -> Observation:
        return Observation(images=_field(message, "images"), state=_field(message, "state"), prompt=_prompt(message))


# ALOHA 1 (Interbotix vx300s as in the ALOHA paper), from openpi's aloha policy: finger travel in m, motor angle in rad.
_FINGER_CLOSED, _FINGER_OPEN = 0.01844, 0.05800
_MOTOR_CLOSED, _MOTOR_OPEN = -0.6213, 1.4910
_ARM_LENGTH, _HORN_RADIUS = 0.036, 0.022
_PI_CLOSED, _PI_OPEN = 0.5476, 1.6296
_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
_GRIPPERS = np.array([6, 13])


class AlohaTransform(IdentityTransform):
    """Two arms of six joints and a gripper each, in the order left arm, left gripper, right arm, right gripper.

    adapt_to_pi: flip the joints that pi's internal runtime counts the other way, and convert grippers between ALOHA's
    finger travel (0 closed, 1 open) and pi's motor angle. The constants are ALOHA 1's.
    """

    def __init__(self, adapt_to_pi: bool) -> None:
        self.adapt_to_pi = adapt_to_pi

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return state
        state = state * _SIGNS
        state[..., _GRIPPERS] = gripper_to_angle(state[..., _GRIPPERS])
        return state

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return actions
        actions = actions * _SIGNS
        actions[..., _GRIPPERS] = gripper_from_angle(actions[..., _GRIPPERS])
        return actions

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return actions
        actions = actions * _SIGNS
        actions[..., _GRIPPERS] = _unscale(actions[..., _GRIPPERS], _MOTOR_CLOSED, _MOTOR_OPEN) - _PI_CLOSED
        return actions

    @staticmethod
    def make_example() -> dict[str, Any]:
        """What an ALOHA client of openpi sends; images are channels first."""
        cameras = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
        return {
            "state": np.ones(14),
            "images": {name: np.full((3, 224, 224), 128, dtype=np.uint8) for name in cameras},
            "prompt": "uncap the pen",
        }


def gripper_to_angle(travel: np.ndarray) -> np.ndarray:
    """ALOHA's gripper state (0..1 of the finger's travel) -> pi's (0..1 of the motor's angle), by the linkage."""
    finger = _unscale(travel, _FINGER_CLOSED, _FINGER_OPEN)
    sine = (_HORN_RADIUS**2 + finger**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * finger)
    return _scale(np.arcsin(np.clip(sine, -1.0, 1.0)), _PI_CLOSED, _PI_OPEN)


def gripper_from_angle(action: np.ndarray) -> np.ndarray:
    """pi's gripper action (an angle from its closed position, rad) -> ALOHA's command (0..1 of the motor's range)."""
    return _scale(action + _PI_CLOSED, _MOTOR_CLOSED, _MOTOR_OPEN)


class DroidTransform(IdentityTransform):
    """A Franka as in DROID: seven joints and a gripper (0 open, 1 closed)."""

    def observation(self, message: Mapping[str, Any]) -> Observation:
        gripper = np.atleast_1d(_field(message, "observation/gripper_position"))
        joints = np.atleast_1d(_field(message, "observation/joint_position"))
        return Observation(
            images={
                name: message[f"observation/{name}"]
                for name in ("exterior_image_1_left", "wrist_image_left")
                if f"observation/{name}" in message
            },
            state=np.concatenate([joints, gripper]),
            prompt=_prompt(message),
        )

    @staticmethod
    def make_example() -> dict[str, Any]:
        """What a DROID client of openpi sends."""
        return {
            "observation/exterior_image_1_left": np.full((224, 224, 3), 128, dtype=np.uint8),
            "observation/wrist_image_left": np.full((224, 224, 3), 128, dtype=np.uint8),
            "observation/joint_position": np.ones(7),
            "observation/gripper_position": np.ones(1),
            "prompt": "put the marker in the cup",
        }


class LiberoTransform(IdentityTransform):
    """LIBERO: end effector position (m), axis-angle (rad), two fingers; the client turns images by 180 degrees."""

    def observation(self, message: Mapping[str, Any]) -> Observation:
        return Observation(
            images={
                name: message[f"observation/{name}"]
                for name in ("image", "wrist_image")
                if f"observation/{name}" in message
            },
            state=_field(message, "observation/state"),
            prompt=_prompt(message),
        )

    @staticmethod
    def make_example() -> dict[str, Any]:
        """What a LIBERO client of openpi sends."""
        return {
            "observation/image": np.full((224, 224, 3), 128, dtype=np.uint8),
            "observation/wrist_image": np.full((224, 224, 3), 128, dtype=np.uint8),
            "observation/state": np.ones(8),
            "prompt": "put the bowl on the plate",
        }


def make_transform(name: str, adapt_to_pi: bool) -> RobotTransform:
    """The transform of a robot profile."""
    if name == "aloha":
        return AlohaTransform(adapt_to_pi)
    return {"droid": DroidTransform, "libero": LiberoTransform, "identity": IdentityTransform}[name]()


def _scale(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return (x - low) / (high - low)


def _unscale(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return x * (high - low) + low


def _field(message: Mapping[str, Any], name: str) -> Any:
    if name not in message:
        raise ObservationError(name, f"missing; got {', '.join(map(str, message)) or 'nothing'}")
    return message[name]


def _prompt(message: Mapping[str, Any]) -> str:
    """Prompts come as str, as UTF-8 bytes (DROID) or as a zero-dimensional string array."""
    prompt = _field(message, "prompt")
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        prompt = prompt.item()
    if isinstance(prompt, bytes):
        try:
            return prompt.decode()
        except UnicodeDecodeError as error:
            raise ObservationError("prompt", f"expected UTF-8 text: {error}") from error
    if not isinstance(prompt, str):
        raise ObservationError("prompt", f"expected text, got {type(prompt).__name__}")
    return prompt
