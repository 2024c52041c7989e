"""Joint samples of one topic: a short history, read by joint name at a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pi05_ros.robot.refusal import Problem

SECOND = 1_000_000_000
"""Nanoseconds."""

FLOAT32_MAX = 3.4028234e38
"""States are float32; more would be infinite."""

MAX_SAMPLES = 4096
"""The time window bounds a history first, unless a broken driver repeats one stamp for ever."""


@dataclass(frozen=True)
class JointSample:
    """What one JointState message says of positions; velocities and efforts are of no interest."""

    stamp_ns: int
    names: Sequence[str]
    positions: Sequence[float]


class JointHistory:
    """The newest samples of one topic.

    window_ns: samples older than this, counted from the newest, are dropped.
    restart_ns: a stamp further back than this is a new beginning, not a message that came late.
    """

    def __init__(self, topic: str, wanted: Sequence[str], window_ns: int, restart_ns: int) -> None:
        self.topic = topic
        self.wanted = tuple(dict.fromkeys(wanted))
        self.newest_ns: int | None = None
        self.count = 0
        self._window_ns = window_ns
        self._restart_ns = restart_ns
        self._samples: deque[JointSample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: JointSample) -> int:
        """Store a sample; returns by how many nanoseconds the stream restarted in the past, 0 if it did not."""
        went_back = 0 if self.newest_ns is None else self.newest_ns - sample.stamp_ns
        restarted = went_back > self._restart_ns
        if restarted:
            self.clear()
        self._samples.append(sample)
        self.newest_ns = sample.stamp_ns if self.newest_ns is None else max(self.newest_ns, sample.stamp_ns)
        while self._samples[0].stamp_ns < self.newest_ns - self._window_ns:
            self._samples.popleft()
        self.count += 1
        return went_back if restarted else 0

    def clear(self) -> None:
        """Forget the samples; the count goes on."""
        self._samples.clear()
        self.newest_ns = None

    def samples(self) -> tuple[JointSample, ...]:
        """The samples at hand, in order of arrival."""
        return tuple(self._samples)


def read_joints(
    topic: str, wanted: Sequence[str], samples: Sequence[JointSample], at_ns: int, max_skew_ns: int
) -> dict[str, tuple[float, int]] | Problem:
    """By joint name, its position (rad or m) in the sample nearest to ``at_ns`` that has it, and that sample's stamp.

    Each joint is looked up by itself, since two drivers may share a topic (an arm and its gripper) and publish only
    their own joints.
    """
    found: dict[str, tuple[float, int]] = {}
    seen: dict[str, None] = {}
    for sample in sorted(samples, key=lambda sample: abs(sample.stamp_ns - at_ns)):
        if len(sample.positions) == 0:  # legal: a message of velocities or efforts only
            continue
        if len(sample.positions) != len(sample.names):
            message = f"{topic}: a message has {len(sample.names)} names but {len(sample.positions)} positions."
            return Problem(topic, "joints", message)
        positions = dict(zip(sample.names, sample.positions, strict=True))
        if len(positions) != len(sample.names):
            twice = sorted({name for name in sample.names if list(sample.names).count(name) > 1})
            return Problem(topic, "joints", f"{topic}: joint {', '.join(twice)} occurs twice in one message.")
        seen.update(dict.fromkeys(sample.names))
        for name in wanted:
            if name in positions and name not in found:
                found[name] = (float(positions[name]), sample.stamp_ns)
        if len(found) == len(wanted):
            break
    missing = [name for name in wanted if name not in found]
    if missing:
        has = ", ".join(seen) or "no positions at all"
        return Problem(topic, "joints", f"joint {', '.join(missing)} is not in {topic}; it has {has}.")
    for name, (value, stamp_ns) in found.items():
        if not abs(value) <= FLOAT32_MAX:  # NaN is not either
            return Problem(topic, "joints", f"joint {name} in {topic}: its position is {value}.")
        apart_ns = abs(stamp_ns - at_ns)
        if apart_ns > max_skew_ns:
            message = f"{topic}: nearest sample of joint {name} is {apart_ns / SECOND:.2f} s from the cameras' frames"
            return Problem(topic, "skew", f"{message}, limit {max_skew_ns / SECOND:g} s.")
    return found
