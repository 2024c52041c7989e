"""Grippers: from what is measured to the policy's units, and from those to what is commanded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GENERATIONS: Mapping[str, Mapping[str, float]] = {
    # Measured: the finger, in metres. Commanded: the motor, in radians. At 0 closed, at 1 open.
    # openpi, examples/aloha_real/constants.py, the PUPPET_GRIPPER_ constants, which are the ALOHA paper's.
    "aloha1": {"state_at_0": 0.01844, "state_at_1": 0.05800, "command_at_0": -0.6213, "command_at_1": 1.4910},
    # Interbotix/aloha (ROS 2), aloha/robot_utils.py, the FOLLOWER_GRIPPER_ constants.
    "aloha2": {"state_at_0": 0.0440, "state_at_1": 0.0579, "command_at_0": 0.6197, "command_at_1": 1.6214},
}
_AS_IT_IS = {"state_at_0": 0.0, "state_at_1": 1.0, "command_at_0": 0.0, "command_at_1": 1.0}
_NUMBERS = tuple(_AS_IT_IS)
_SHORT_FORMS = ("generation", "passed_through")


@dataclass(frozen=True)
class Gripper:
    """A gripper, 0 to 1 in the policy's units, linear in what is measured and in what is commanded.

    Which end is 0 is the robot's convention: closed on ALOHA, open on DROID. A profile gives the four numbers, or one
    of the short forms that stand for them.

    joint: its name in the JointState message.
    state_at_0, state_at_1: values of that joint at 0 and at 1 (metres for a finger, radians for a motor).
    command_joint: its name in commands; None: the same as ``joint``.
    command_at_0, command_at_1: values to command for 0 and for 1, in the command's own unit.
    generation: (short form) of the hardware: "aloha1" or "aloha2", which are not interchangeable.
    passed_through: (short form) the joint's value is the policy's, in its own unit, and is commanded as it is; the two
        numbers are its least and greatest value.
    """

    joint: str
    state_at_0: float
    state_at_1: float
    command_at_0: float
    command_at_1: float
    command_joint: str | None = None
    generation: Literal["aloha1", "aloha2"] | None = None
    passed_through: tuple[float, ...] | None = None

    @property
    def range(self) -> tuple[float, float]:
        """Its ends, in the policy's units."""
        return (self.passed_through[0], self.passed_through[1]) if self.passed_through else (0.0, 1.0)

    def state_to_unit(self, value: float) -> float:
        """Measured value -> the policy's units; not clipped."""
        return (value - self.state_at_0) / (self.state_at_1 - self.state_at_0)

    def unit_to_command(self, value: float) -> float:
        """The policy's units -> the value to command; not clipped."""
        return value * (self.command_at_1 - self.command_at_0) + self.command_at_0


def spell_out(written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a gripper as a profile writes them, with the numbers that its short form stands for.

    Raises ValueError: the numbers are given in two ways or in none, or there is no such generation.
    """
    ways = [name for name in _SHORT_FORMS if written.get(name) is not None]
    numbers = [name for name in _NUMBERS if name in written]
    if len(ways) + bool(numbers) != 1:
        raise ValueError(
            f"expected either {' or '.join(_SHORT_FORMS)} or the numbers {', '.join(_NUMBERS)}, "
            f"got {', '.join(ways + numbers) or 'none of them'}."
        )
    if numbers:
        return dict(written)
    if ways == ["passed_through"]:
        return {**written, **_AS_IT_IS}
    generation = written["generation"]
    if not isinstance(generation, str) or generation not in GENERATIONS:
        raise ValueError(f"generation: expected one of {', '.join(GENERATIONS)}, got {generation!r}.")
    return {**written, **GENERATIONS[generation]}


def gripper_problem(gripper: Gripper) -> str | None:
    """What is wrong with the numbers of a gripper, from the field's name on."""
    if gripper.state_at_1 == gripper.state_at_0:
        return "state_at_0 equals state_at_1."
    if gripper.command_at_1 == gripper.command_at_0:
        return "command_at_0 equals command_at_1."
    ends = gripper.passed_through
    if ends is not None and (len(ends) != 2 or ends[0] >= ends[1]):
        return f"passed_through: expected two numbers, the least first, got {list(ends)}."
    return None
