"""The network in plain PyTorch."""

import torch

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

# MKL sets its vector functions (cos, tanh, ...) up at their first call. Where several threads of PyTorch make it
# together, one of them may compute its share with a relative error of 1e-4, and a table made then stays so. One
# element is one thread's work.
torch.ones(1).cos()
