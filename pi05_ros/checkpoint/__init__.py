"""Files -> weights, features and statistics."""

from pi05_ros.checkpoint.description import Checkpoint, RelativeActions, read_checkpoint
from pi05_ros.checkpoint.making import make_checkpoint
from pi05_ros.checkpoint.norm_stats import NormStats, read_norm_stats
from pi05_ros.checkpoint.random_weights import random_model
from pi05_ros.checkpoint.weights import load_model

__all__ = [
    "Checkpoint",
    "NormStats",
    "RelativeActions",
    "load_model",
    "make_checkpoint",
    "random_model",
    "read_checkpoint",
    "read_norm_stats",
]
