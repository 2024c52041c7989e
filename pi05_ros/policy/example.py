"""A valid observation of any robot, which says nothing: documentation of a profile, and input of tests and dry runs."""

from __future__ import annotations

import numpy as np

from pi05_ros.policy.observation import Observation
from pi05_ros.policy.profile import Arm, RobotProfile


def make_example(profile: RobotProfile, prompt: str = "pick up the cube") -> Observation:
    """Grey images of every camera, uint8 [height, width, 3], and the state float32 [state_dim], all at mid-range.

    The state is in robot units (rad, grippers as the profile says); a joint without limits is at 0.
    """
    images = {camera.name: np.full((camera.height, camera.width, 3), 128, np.uint8) for camera in profile.cameras}
    state = [value for arm in profile.arms for value in _mid_range(arm)]
    return Observation(images=images, state=np.array(state, np.float32), prompt=prompt)


def _mid_range(arm: Arm) -> list[float]:
    if arm.limits is None:
        values = [0.0] * len(arm.joints)
    else:
        values = [(low + high) / 2 for low, high in zip(arm.limits.lower, arm.limits.upper, strict=True)]
    return values + ([sum(arm.gripper.range) / 2] if arm.gripper else [])
