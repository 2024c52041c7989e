"""Robot numbers <-> model tensors."""

from pi05_ros.policy.example import make_example
from pi05_ros.policy.observation import ActionChunk, Observation
from pi05_ros.policy.policy import Listener, Policy
from pi05_ros.policy.profile import RobotProfile, load_profile, profile_names

__all__ = [
    "ActionChunk",
    "Listener",
    "Observation",
    "Policy",
    "RobotProfile",
    "load_profile",
    "make_example",
    "profile_names",
]
