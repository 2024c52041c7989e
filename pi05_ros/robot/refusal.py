"""Why there is no observation, stream by stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Why one stream cannot be used.

    stream: camera name or joint state topic; "" where it is none in particular.
    kind: "missing", "stale", "skew", "ahead" (stamped in the future), "joints" (names or values), "image" (encoding or
        layout) or "corrupt" (a frame that does not decode).
    message: one full sentence.
    """

    stream: str
    kind: str
    message: str


@dataclass(frozen=True)
class Refusal:
    """All that stands against an observation."""

    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        """All problems, as sentences."""
        return " ".join(problem.message for problem in self.problems)

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What stays equal while the same streams fail in the same way (the numbers in the sentences move on)."""
        return tuple((problem.stream, problem.kind) for problem in self.problems)

    @property
    def is_waiting(self) -> bool:
        """True if data is only absent or late; False if data came and was refused."""
        return all(problem.kind in ("missing", "stale", "skew") for problem in self.problems)

    @property
    def is_passing(self) -> bool:
        """True if the next sample may mend it: frames of different moments, a frame that does not decode."""
        return all(problem.kind in ("skew", "corrupt") for problem in self.problems)

    def has(self, kind: str) -> bool:
        """True if one of the problems is of that kind."""
        return any(problem.kind == kind for problem in self.problems)
