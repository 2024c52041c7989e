"""What was seen and done in one episode, as plain numbers: for the demo's report. numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ChunkRecord:
    """One run of the policy.

    time: simulated seconds at which the chunk arrived. observation_time: stamp of what it was computed from.
    latency_ms: by stage, wall clock, and in all under "total". state: [dim] the robot at the observation's time, in
    policy units. first_target: [dim] first row of the chunk.
    """

    sequence: int
    time: float
    observation_time: float
    observation_age_ms: float
    latency_ms: dict[str, float]
    prefix_cache_hit: bool
    state: np.ndarray
    first_target: np.ndarray

    def line(self, joint_names: tuple[str, ...]) -> str:
        """The chunk in one line of text."""
        stages, joint = self.latency_ms, int(np.argmax(np.abs(self.first_target - self.state)))
        unit = "" if joint_names[joint].endswith("gripper") else " rad"
        parts = (
            f"chunk {self.sequence:3d} at {self.time:6.2f} s",
            f"saw {self.observation_age_ms:4.0f} ms old input",
            f"took {stages['total']:5.0f} ms (prefix {stages['prefix']:.0f}, denoise {stages['denoise']:.0f})",
            f"cache {'hit ' if self.prefix_cache_hit else 'miss'}",
            f"largest step {joint_names[joint]} {self.state[joint]:+.3f} -> {self.first_target[joint]:+.3f}{unit}",
        )
        return " | ".join(parts)


@dataclass
class Recording:
    """Everything of one episode, times in simulated seconds, states and commands in policy units (rad; gripper 0..1).

    joint_names: [dim]. camera_names: in the order of the profile.
    measured, commanded: (time, [dim]) rows; a command before the first one of an arm is NaN.
    frames: by camera, (time, uint8 RGB [height, width, 3]).
    """

    joint_names: tuple[str, ...]
    camera_names: tuple[str, ...]
    prompt: str = ""
    chunks: list[ChunkRecord] = field(default_factory=list)
    measured: list[tuple[float, np.ndarray]] = field(default_factory=list)
    commanded: list[tuple[float, np.ndarray]] = field(default_factory=list)
    frames: dict[str, list[tuple[float, np.ndarray]]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    success: bool = False
    real_time_factors: list[float] = field(default_factory=list)

    @property
    def start(self) -> float:
        """Simulated time of the first joint state that was recorded."""
        return self.measured[0][0] if self.measured else 0.0

    @property
    def end(self) -> float:
        return self.measured[-1][0] if self.measured else 0.0

    def summary(self) -> dict[str, Any]:
        """The episode in numbers, ready for JSON. A median over nothing is None."""
        stages = {name for chunk in self.chunks for name in chunk.latency_ms}
        following = _largest_errors(self)
        return {
            "simulated_seconds": round(self.end - self.start, 3),
            "real_time_factor": _spread(self.real_time_factors),
            "prompt": self.prompt,
            "chunks": len(self.chunks),
            "prefix_cache_hits": sum(chunk.prefix_cache_hit for chunk in self.chunks),
            "observation_age_ms": _spread([chunk.observation_age_ms for chunk in self.chunks]),
            "latency_ms": {name: _spread([chunk.latency_ms[name] for chunk in self.chunks]) for name in sorted(stages)},
            "joint_states": len(self.measured),
            "frames_kept": {camera: len(self.frames.get(camera, [])) for camera in self.camera_names},
            "largest_following_error": following,
            "reward": {"last": self.rewards[-1] if self.rewards else 0.0, "best": max(self.rewards, default=0.0)},
            "success": self.success,
            "each_chunk": [
                {
                    "sequence": chunk.sequence,
                    "time": round(chunk.time, 3),
                    "observation_time": round(chunk.observation_time, 3),
                    "observation_age_ms": round(chunk.observation_age_ms, 1),
                    "latency_ms": {name: round(value, 2) for name, value in chunk.latency_ms.items()},
                    "prefix_cache_hit": chunk.prefix_cache_hit,
                    "state": np.round(chunk.state, 4).tolist(),
                    "first_target": np.round(chunk.first_target, 4).tolist(),
                }
                for chunk in self.chunks
            ],
        }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, p95 = np.percentile(values, [50, 95])
    return {"median": round(float(median), 3), "p95": round(float(p95), 3), "max": round(max(values), 3)}


def _largest_errors(recording: Recording) -> dict[str, float]:
    """By joint, the largest difference between a command and what was measured when it was due."""
    if not recording.commanded:
        return {}
    commanded = np.array([row for _, row in recording.commanded])
    measured = np.array([row for _, row in recording.measured])[-len(commanded) :]
    errors = np.abs(commanded - measured)
    return {
        name: round(float(np.max(column[np.isfinite(column)])), 4)
        for name, column in zip(recording.joint_names, errors.T, strict=True)
        if np.isfinite(column).any()
    }
