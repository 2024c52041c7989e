"""Streams of camera frames and joint states -> one observation of one moment.

Callbacks only store; all work happens in ``assemble``, on the newest frames. Time comes in as arguments and stamps are
the messages' own, so the same assembler reads a live robot, a simulation and a bag.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi05_ros.errors import ProfileError
from pi05_ros.policy.profile import Arm, Camera, RobotProfile
from pi05_ros.robot.images import CorruptImageError, ImageError, decode_image
from pi05_ros.robot.joints import SECOND, JointHistory, JointSample, read_joints
from pi05_ros.robot.refusal import Problem, Refusal

logger = logging.getLogger(__name__)

JUST_NOW = 100_000_000
"""Nanoseconds for which a measured position is where a moving joint is."""


@dataclass(frozen=True)
class AssembledObservation:
    """Everything the policy needs but the prompt.

    images: by camera name, RGB uint8 [height, width, 3]; a camera that is not required may be left out.
    state: float32 [state_dim], in the profile's order: joints in radians, grippers 0..1.
    stamp_ns: time of the observation: the oldest frame's of the cameras that are required.
    stamps_ns: by camera name and joint state topic, the stamp of the sample that was used (a topic's: its oldest).
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    stamp_ns: int
    stamps_ns: dict[str, int]


@dataclass
class _Frames:
    """The newest frame of one camera, undecoded."""

    camera: Camera
    newest_ns: int | None = None
    message: Any = None
    count: int = 0
    corrupt: int = 0
    corrupt_ns: int | None = None  # stamp of the one that was counted last

    def clear(self) -> None:
        self.newest_ns, self.message = None, None


class ObservationAssembler:
    """Keeps the newest frame per camera and a short history of joint states, and makes observations of them.

    Any thread may call any method. Cameras that the model does not read, and cameras that are not required and have no
    topic, are not part of it. A stream whose stamps go back by more than ``profile.stale_after`` has begun anew
    (a bag that loops); a smaller step back is a message that came late.

    cameras: names of the cameras that the model reads; None: those that have a slot in the profile.
    on_notice: told, in one sentence, what an operator should hear of: a clock or a stream that went back in time (the
        first of them, if all did).

    Raises ProfileError: the robot is not driven over ROS (a required camera or an arm has no topic).
    """

    def __init__(
        self,
        profile: RobotProfile,
        cameras: Collection[str] | None = None,
        on_notice: Callable[[str], None] = logger.warning,
    ) -> None:
        read = [camera for camera in profile.cameras if (camera.slot if cameras is None else camera.name in cameras)]
        nameless = [f"camera {camera.name}" for camera in read if camera.required and not camera.topic]
        nameless += [f"arm {arm.name or index}" for index, arm in enumerate(profile.arms) if not arm.state_topic]
        if nameless:
            raise ProfileError(f"Robot profile {profile.name}: no topic is given for {', '.join(nameless)}.")
        self.profile = profile
        self._stale_ns = round(profile.stale_after * SECOND)
        self._skew_ns = round(profile.max_skew * SECOND)
        self._notice = on_notice
        self._lock = threading.Lock()
        self._newest_now_ns: int | None = None
        self._jump: tuple[int, set[str]] = (0, set())  # the last one back in time: by how much, who has followed it
        self._set_ns = 0  # of the newest frame in the last set that was complete
        self._frames = {camera.name: _Frames(camera) for camera in read if camera.topic}
        self._joints: dict[str, JointHistory] = {}
        window_ns = self._stale_ns + 2 * self._skew_ns  # whatever a usable frame may want to be matched with
        for topic in dict.fromkeys(arm.state_topic or "" for arm in profile.arms):
            wanted = [name for arm in profile.arms if arm.state_topic == topic for name in _joint_names(arm)]
            self._joints[topic] = JointHistory(topic, wanted, window_ns, restart_ns=self._stale_ns)

    @property
    def cameras(self) -> tuple[Camera, ...]:
        """The cameras that are read, in profile order."""
        return tuple(frames.camera for frames in self._frames.values())

    @property
    def topics(self) -> tuple[str, ...]:
        """The joint state topics that are read, in profile order."""
        return tuple(self._joints)

    # --- storing ---

    def add_image(self, camera: str, stamp_ns: int, image: Any) -> None:
        """Store a frame: an image message, or an RGB array uint8 [height, width, 3]. It is decoded only if it is used.

        Raises KeyError: no such camera is read.
        """
        with self._lock:
            frames = self._frames[camera]
            went_back = 0 if frames.newest_ns is None else frames.newest_ns - stamp_ns
            restarted = went_back > self._stale_ns
            if went_back <= 0 or restarted:
                frames.newest_ns, frames.message = stamp_ns, image
            frames.count += 1
            if restarted:
                self._set_ns = 0
        if restarted:
            self._notice_restart(f"camera {camera}: its stamps", went_back)

    def add_joint_state(self, topic: str, stamp_ns: int, names: Sequence[str], positions: Sequence[float]) -> None:
        """Store a joint sample: positions in radians (finger joints in metres) of the joints of these names, any order.

        Raises KeyError: no such topic is read.
        """
        with self._lock:
            went_back = self._joints[topic].add(JointSample(stamp_ns, names, positions))
        if went_back:
            self._notice_restart(f"{topic}: its stamps", went_back)

    def reset(self) -> None:
        """Forget every sample."""
        with self._lock:
            self._forget()

    # --- looking ---

    def arrivals(self) -> dict[str, tuple[int, int | None]]:
        """By camera name and joint state topic, in profile order: samples that came so far, stamp of the newest."""
        with self._lock:
            return {name: (stream.count, stream.newest_ns) for name, stream in self._streams()}

    def corrupt_frames(self) -> dict[str, int]:
        """By camera name, frames so far that did not decode. One that is not used is not decoded, and not counted."""
        with self._lock:
            return {name: frames.corrupt for name, frames in self._frames.items()}

    def completes_set(self) -> bool:
        """True once, when every required camera has brought a frame since this was last true, going by stamps.

        Frames of one moment arrive one after the other, and an observation that is made in between shows two moments
        (or is refused for that). Where no camera is required there is nothing to wait for: always true.
        """
        with self._lock:
            stamps = [frames.newest_ns or 0 for frames in self._frames.values() if frames.camera.required]
            if stamps and min(stamps) <= self._set_ns:
                return False
            self._set_ns = max(stamps, default=0)
            return True

    def check(self, now_ns: int) -> Refusal | None:
        """What stands against an observation at this time, going by stamps alone; None: nothing. Decodes nothing."""
        self._follow_clock(now_ns)
        with self._lock:
            problems = tuple(self._stream_problems(now_ns))
        return Refusal(problems) if problems else None

    def check_joints(self) -> Refusal | None:
        """What stands against the newest joint states, whose values are looked at; None: nothing, or none has come."""
        with self._lock:
            newest = self._newest_joints()
        problems = [] if newest is None else self._state(*newest)[2]
        return Refusal(tuple(problems)) if problems else None

    def measured_state(self, now_ns: int) -> np.ndarray | None:
        """The newest measured state, float32 [state_dim], as in an observation; None if it is not known.

        Looks at joint states alone, so that it is known although a camera has failed.
        """
        with self._lock:
            newest = None if any(self._freshness(name, now_ns) for name in self._joints) else self._newest_joints()
        if newest is None:
            return None
        state, _, problems = self._state(*newest)
        return None if problems else state

    def standing_state(self, now_ns: int) -> np.ndarray:
        """Where the robot was measured just now, float32 [state_dim]; NaN where that is not known.

        Each topic speaks for itself, by its newest sample, which is at most ``JUST_NOW`` old: a moving arm is to be
        held where it is, not where it was.
        """
        with self._lock:
            newest = {topic: (history.newest_ns, history.samples()) for topic, history in self._joints.items()}
        found = {}
        for topic, (stamp_ns, samples) in newest.items():
            if stamp_ns is not None and abs(now_ns - stamp_ns) <= JUST_NOW:
                joints = read_joints(topic, self._joints[topic].wanted, samples, stamp_ns, JUST_NOW)
                if not isinstance(joints, Problem):
                    found[topic] = joints
        unknown = dict.fromkeys((name for arm in self.profile.arms for name in _joint_names(arm)), (float("nan"), 0))
        values = [
            value for arm in self.profile.arms for value in _arm_state(arm, found.get(arm.state_topic or "", unknown))
        ]
        return np.array(values, np.float32)

    def assemble(self, now_ns: int) -> AssembledObservation | Refusal:
        """The observation at hand, or every reason why there is none.

        now_ns: of the clock that stamps the messages.
        """
        self._follow_clock(now_ns)
        with self._lock:
            problems = list(self._stream_problems(now_ns))
            if problems:
                return Refusal(tuple(problems))
            stamp_ns, names = self._moment(now_ns)
            messages = {name: self._frames[name].message for name in names}
            stamps = {name: self._frames[name].newest_ns or 0 for name in names}
            samples = {topic: history.samples() for topic, history in self._joints.items()}
        # What is stored is never changed afterwards, so the work goes on without the lock and no callback waits for it.
        state, joint_stamps, problems = self._state(samples, stamp_ns)
        images: dict[str, np.ndarray] = {}
        for name, message in messages.items():
            image = _decode(self._frames[name].camera, message)
            if isinstance(image, Problem):
                problems.append(image)
                if image.kind == "corrupt":
                    self._count_corrupt(self._frames[name], stamps[name])
            else:
                images[name] = image
        if problems:
            return Refusal(tuple(problems))
        return AssembledObservation(images, state, stamp_ns, {**stamps, **joint_stamps})

    # --- under the lock ---

    def _streams(self) -> Iterator[tuple[str, _Frames | JointHistory]]:
        yield from self._frames.items()
        yield from self._joints.items()

    def _newest_joints(self) -> tuple[dict[str, tuple[JointSample, ...]], int] | None:
        """Samples by topic, and the newest moment that all topics have come to; None: one has not come at all."""
        stamps = [history.newest_ns for history in self._joints.values() if history.newest_ns is not None]
        if not stamps or len(stamps) < len(self._joints):
            return None
        return {topic: history.samples() for topic, history in self._joints.items()}, min(stamps)

    def _stream_problems(self, now_ns: int) -> Iterator[Problem]:
        """Missing, stale and future streams; if there are none, cameras that are too far apart."""
        required = [name for name, frames in self._frames.items() if frames.camera.required]
        problems = [problem for name in (*required, *self._joints) if (problem := self._freshness(name, now_ns))]
        yield from problems
        if problems:
            return
        if not any(self._freshness(name, now_ns) is None for name in self._frames):
            yield Problem("", "missing", "no camera has a fresh frame.")
        stamps = {name: self._frames[name].newest_ns or 0 for name in required}
        if stamps:
            first, last = min(stamps, key=stamps.__getitem__), max(stamps, key=stamps.__getitem__)
            apart_ns = stamps[last] - stamps[first]
            if apart_ns > self._skew_ns:
                message = f"camera {first}: newest frame is {apart_ns / SECOND:.2f} s older than {last}'s"
                yield Problem(first, "skew", f"{message}, limit {self.profile.max_skew:g} s.")

    def _freshness(self, name: str, now_ns: int) -> Problem | None:
        """What is wrong with the age of that stream's newest sample."""
        if name in self._frames:
            stream: _Frames | JointHistory = self._frames[name]
            label, sample, where = f"camera {name}", "frame", f" on {self._frames[name].camera.topic}"
        else:
            stream = self._joints[name]
            label, sample, where = name, "joint state", ""
        if stream.newest_ns is None:
            return Problem(name, "missing", f"{label}: no {sample} yet{where}.")
        age_ns = now_ns - stream.newest_ns
        if age_ns > self._stale_ns:
            limit = f"limit {self.profile.stale_after:g} s"
            if stream.newest_ns == 0:
                return Problem(name, "stale", f"{label}: stale: its header.stamp is zero, so it has no age; {limit}.")
            return Problem(name, "stale", f"{label}: stale: newest {sample} is {age_ns / SECOND:.1f} s old, {limit}.")
        if -age_ns > self._skew_ns:
            message = f"{label}: newest {sample} is stamped {-age_ns / SECOND:.2f} s ahead of this node's clock"
            return Problem(name, "ahead", f"{message}; clocks differ, or use_sim_time is set on one side only.")
        return None

    def _moment(self, now_ns: int) -> tuple[int, list[str]]:
        """The time of the observation, and the cameras that show it: all required ones, and others of that moment."""
        fresh = {
            name: frames.newest_ns or 0
            for name, frames in self._frames.items()
            if frames.camera.required or self._freshness(name, now_ns) is None
        }
        required = [stamp for name, stamp in fresh.items() if self._frames[name].camera.required]
        moment = min(required) if required else max(fresh.values())
        names = [
            name
            for name, stamp in fresh.items()
            if self._frames[name].camera.required or abs(stamp - moment) <= self._skew_ns
        ]
        return moment, names

    def _forget(self) -> None:
        self._set_ns = 0
        for _, stream in self._streams():
            stream.clear()

    # --- not under the lock ---

    def _count_corrupt(self, frames: _Frames, stamp_ns: int) -> None:
        """Once a frame: the same one is looked at again until the next has come."""
        with self._lock:
            if frames.corrupt_ns != stamp_ns:
                frames.corrupt, frames.corrupt_ns = frames.corrupt + 1, stamp_ns

    def _state(
        self, samples: dict[str, tuple[JointSample, ...]], at_ns: int
    ) -> tuple[np.ndarray, dict[str, int], list[Problem]]:
        """State vector (zeros if there are problems), by topic the oldest stamp used, problems."""
        problems: list[Problem] = []
        found: dict[str, dict[str, tuple[float, int]]] = {}
        for topic, history in samples.items():
            joints = read_joints(topic, self._joints[topic].wanted, history, at_ns, self._skew_ns)
            if isinstance(joints, Problem):
                problems.append(joints)
            else:
                found[topic] = joints
        if problems:
            return np.zeros(self.profile.state_dim, np.float32), {}, problems
        values = [value for arm in self.profile.arms for value in _arm_state(arm, found[arm.state_topic or ""])]
        stamps = {topic: min(stamp for _, stamp in joints.values()) for topic, joints in found.items()}
        return np.array(values, np.float32), stamps, []

    def _follow_clock(self, now_ns: int) -> None:
        """Forget everything if the clock itself went back (a simulation was reset, a bag starts anew)."""
        with self._lock:
            went_back = 0 if self._newest_now_ns is None else self._newest_now_ns - now_ns
            restarted = went_back > self._stale_ns
            if restarted:
                self._forget()
            if went_back <= 0 or restarted:
                self._newest_now_ns = now_ns
        if restarted:
            self._notice_restart("the clock", went_back)

    def _notice_restart(self, what: str, went_back_ns: int) -> None:
        """Say so, once a jump: where the clock goes back, or a bag begins anew, all streams do so one by one."""
        with self._lock:
            by_ns, followed = self._jump
            is_new = what in followed or abs(went_back_ns - by_ns) > self._stale_ns
            self._jump = (went_back_ns, {what}) if is_new else (by_ns, followed | {what})
        if not is_new:
            return
        self._notice(f"{what} went back by {went_back_ns / SECOND:.2f} s; earlier samples are forgotten.")


def _decode(camera: Camera, message: Any) -> np.ndarray | Problem:
    try:
        return decode_image(message)
    except ImageError as error:
        kind = "corrupt" if isinstance(error, CorruptImageError) else "image"
        return Problem(camera.name, kind, f"camera {camera.name} on {camera.topic}: {error}")


def _joint_names(arm: Arm) -> tuple[str, ...]:
    return arm.joints + ((arm.gripper.joint,) if arm.gripper else ())


def _arm_state(arm: Arm, joints: dict[str, tuple[float, int]]) -> Iterator[float]:
    for name in arm.joints:
        yield joints[name][0]
    if arm.gripper:
        yield arm.gripper.state_to_unit(joints[arm.gripper.joint][0])
