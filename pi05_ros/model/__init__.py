"""The network in plain PyTorch."""

from pi05_ros.model.config import ExpertConfig, Pi05Config, PrefixConfig, VisionConfig
from pi05_ros.model.pi05 import Pi05Model, Prefix
from pi05_ros.model.precision import PRECISIONS, census
from pi05_ros.model.rtc import RtcGuidance

__all__ = [
    "PRECISIONS",
    "ExpertConfig",
    "Pi05Config",
    "Pi05Model",
    "Prefix",
    "PrefixConfig",
    "RtcGuidance",
    "VisionConfig",
    "census",
]
