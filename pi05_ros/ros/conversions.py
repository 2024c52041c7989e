"""Between ROS messages and our own types. Stateless."""

from __future__ import annotations

import numpy as np
from builtin_interfaces.msg import Duration, Time

from pi05_ros.msg import ActionChunk
from pi05_ros.robot.loop import SECOND, LoopChunk


def to_time(nanoseconds: int) -> Time:
    return Time(sec=nanoseconds // SECOND, nanosec=nanoseconds % SECOND)


def to_duration(nanoseconds: int) -> Duration:
    return Duration(sec=nanoseconds // SECOND, nanosec=nanoseconds % SECOND)


def to_nanoseconds(stamp: Time) -> int:
    return stamp.sec * SECOND + stamp.nanosec


def chunk_message(loop_chunk: LoopChunk, names: tuple[str, ...], period_ns: int) -> ActionChunk:
    """The message of a chunk; names: of its columns."""
    chunk = loop_chunk.chunk
    horizon, action_dim = chunk.actions.shape
    message = ActionChunk(
        sequence=loop_chunk.sequence,
        prompt=loop_chunk.prompt,
        joint_names=list(names),
        period=to_duration(period_ns),
        horizon=horizon,
        action_dim=action_dim,
        data=np.ascontiguousarray(chunk.actions, np.float32).reshape(-1).tolist(),
        prefix_cache_hit=chunk.prefix_cache_hit,
        observation_age_ms=loop_chunk.age_ms,
        **{name: float(value) for name, value in chunk.timings.items()},
    )
    message.header.stamp = to_time(loop_chunk.stamp_ns)
    return message
