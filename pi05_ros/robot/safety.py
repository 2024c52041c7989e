"""What must hold of numbers before they may become motion. Pure functions; the rest of the chain goes here."""

from __future__ import annotations

import numpy as np

from pi05_ros.policy.profile import RobotProfile


def chunk_problem(actions: np.ndarray, action_dim: int) -> str | None:
    """Why a chunk must be refused whole, as a sentence; None: it may be played.

    actions: [horizon, action_dim], robot units.
    """
    if actions.ndim != 2 or actions.shape[0] == 0 or actions.shape[1] != action_dim:
        return f"A chunk of shape {list(actions.shape)} came, expected [horizon, {action_dim}]."
    bad = np.argwhere(~np.isfinite(actions))
    if bad.size:
        row, column = bad[0]
        return f"A chunk came with {actions[row, column]} in row {row}, column {column}."
    return None


def hold_target(
    profile: RobotProfile, measured: np.ndarray | None, last_command: np.ndarray | None
) -> np.ndarray | None:
    """Where to hold a robot, float [action_dim] in robot units; None: nothing is known, nothing can be commanded.

    Arms stay where they were measured (at the last command if joint states are the stream that failed), grippers at
    their last command, so that what they hold is not dropped; what is commanded as a velocity stops.
    """
    if profile.action_names is not None:
        return None  # actions of another kind than joints: no position of theirs is a hold
    source = measured if measured is not None else last_command
    if source is None:
        return None
    target = np.array(source, dtype=np.float64)
    if last_command is not None:
        grippers = np.array(profile.gripper_mask)
        target[grippers] = last_command[grippers]
    target[velocity_mask(profile)] = 0.0
    return target


def velocity_mask(profile: RobotProfile) -> np.ndarray:
    """bool [state_dim]: True at joints that are commanded as velocities; grippers never are."""
    velocity = [arm.action == "velocity" for arm in profile.arms for _ in arm.dimension_names]
    return np.array(velocity) & ~np.array(profile.gripper_mask)
