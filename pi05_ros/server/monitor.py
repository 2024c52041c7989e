"""``Monitor``: what the status page shows, gathered on the engine's thread and put together where it is asked for."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from pi05_ros.engine.images import image_to_model
from pi05_ros.errors import DeadlineError, EngineBusyError, EngineClosedError, ObservationError
from pi05_ros.policy import ActionChunk, Observation, Policy, RobotProfile
from pi05_ros.policy.inputs import as_image, as_vector
from pi05_ros.server.errors import NotReadyError, RequestError
from pi05_ros.server.host import PolicyHost

LATENCIES = 300
"""Answered requests whose latencies are kept."""
REFUSALS = 20
"""Refused requests that are kept, each with at most TEXT characters of its message."""
TEXT = 500

CLIENTS = ("http", "realtime", "openpi")
STAGES = ("queue_ms", "cache_lookup_ms", "preprocess_ms", "prefix_ms", "denoise_ms", "postprocess_ms", "total_ms")


@dataclass(frozen=True)
class _Frame:
    """The last request that was answered. number: counts them; time: in seconds since the epoch."""

    number: int
    time: float
    observation: Observation
    chunk: ActionChunk


@dataclass(frozen=True)
class _Subject:
    """What is to be known of a policy, without the policy: that may go while its last chunk is still shown."""

    metadata: dict[str, Any]
    cameras: tuple[str, ...]
    state_dim: int
    image_size: int
    resize: str


class Monitor:
    """Thread-safe. It holds the last answered request, and numbers of those before it."""

    def __init__(self, host: PolicyHost) -> None:
        """Watches the host's policy from now on."""
        self._host = host
        self._lock = threading.Lock()
        self._revision = 0
        self._frame: _Frame | None = None
        self._counts: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._latencies: deque[tuple[Any, ...]] = deque(maxlen=LATENCIES)
        self._refusals: deque[dict[str, Any]] = deque(maxlen=REFUSALS)
        self._policy: weakref.ref[Policy] | None = None
        self._subject: _Subject | None = None
        self._pictures: dict[str, tuple[int, bytes]] = {}
        self._closed = False
        host.watch(self._ended)

    # ---- what happens ----

    def _ended(self, observation: Observation, future: Future[ActionChunk]) -> None:
        """On the engine's thread: references are kept, nothing is copied or computed."""
        now = time.time()
        end = _end_of(future)
        with self._lock:
            self._revision += 1
            self._counts[end] += 1
            if end == "answered":
                chunk = future.result()
                self._counts["cache_hits" if chunk.prefix_cache_hit else "cache_misses"] += 1
                self._frame = _Frame(self._counts["answered"], now, observation, chunk)
                stages = (chunk.timings.get(stage, 0.0) for stage in STAGES)
                self._latencies.append((now, *stages, chunk.batch_size, chunk.prefix_cache_hit))

    def refused(self, route: str, error: RequestError) -> None:
        """A client was told of an error. route: as the documents name it, "/v1/actions/generations"."""
        entry = {
            "time": time.time(),
            "route": route,
            "status": error.status,
            "code": error.code,
            "field": error.field[:TEXT],
            "message": error.message[:TEXT],
        }
        with self._lock:
            self._revision += 1
            self._counts["refused"] += 1
            self._refusals.appendleft(entry)

    @contextmanager
    def connected(self, kind: str) -> Iterator[None]:
        """A client is there. kind: one of CLIENTS."""
        if kind not in CLIENTS:
            raise ValueError(f"kind: expected one of {', '.join(CLIENTS)}, got {kind!r}")
        self._count_client(kind, 1)
        try:
            yield
        finally:
            self._count_client(kind, -1)

    def _count_client(self, kind: str, change: int) -> None:
        with self._lock:
            self._revision += 1
            self._clients[kind] += change

    @property
    def clients(self) -> dict[str, int]:
        """Clients that are there now, by kind."""
        with self._lock:
            return {kind: self._clients[kind] for kind in CLIENTS}

    def close(self) -> None:
        """The server ends: who follows the events is let go."""
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed or self._host.stage == "closed"

    # ---- what is shown ----

    def mark(self) -> object:
        """Differs from an earlier one when the snapshot does. Cheap."""
        host, policy = self._host, self._ready_policy()
        stats = policy and policy.engine.stats()
        return self._revision, host.stage, host.reason, self._robot(), stats

    def snapshot(self) -> dict[str, Any]:
        """Everything but the pictures, in plain JSON types; times in seconds since the epoch, newest refusal first."""
        policy = self._ready_policy()
        subject = self._describe(policy)
        with self._lock:
            frame, latencies = self._frame, list(self._latencies)
            counts, refusals = dict(self._counts), list(self._refusals)
        ends = ("answered", "failed", "late", "turned_away", "cancelled", "refused", "cache_hits", "cache_misses")
        columns = zip(*latencies, strict=True) if latencies else [()] * (len(STAGES) + 3)
        time_column, *stage_columns, batch_sizes, hits = columns
        return {
            "now": time.time(),
            "stage": self._host.stage,
            "reason": self._host.reason,
            "robot": self._robot(),
            "metadata": subject and subject.metadata,
            "counts": {end: counts.get(end, 0) for end in ends},
            "engine": policy and policy.engine.stats(),
            "clients": self.clients,
            "last": frame and subject and _describe_frame(frame, subject),
            "latencies": {
                "time": [round(moment, 3) for moment in time_column],
                **{
                    stage: [round(value, 3) for value in column]
                    for stage, column in zip(STAGES, stage_columns, strict=True)
                },
                "batch_size": list(batch_sizes),
                "prefix_cache_hit": list(hits),
            },
            "refusals": refusals,
            "cameras": [_describe_camera(name, frame) for name in subject.cameras] if subject else [],
        }

    def camera(self, name: str) -> bytes:
        """The newest image of a camera as the model saw it, resized and padded: JPEG, RGB.

        Takes milliseconds; not for an event loop. Raises RequestError 404: no such camera, or it was not seen;
        ObservationError: whoever gave the image has written something else to its memory since.
        """
        frame, subject = self._frame, self._describe(self._ready_policy())
        if subject is None or name not in subject.cameras:
            known = ", ".join(subject.cameras) if subject else "none yet"
            raise RequestError(404, f"camera: this policy reads {known}, got {name[:TEXT]!r}.", "camera")
        if frame is None or not _is_seen(frame.observation, name):
            raise RequestError(404, f"camera: the model has not seen {name} in its last request.", "camera")
        number, picture = self._pictures.get(name, (0, b""))
        if number != frame.number:
            image = as_image(f"images.{name}", frame.observation.images[name])
            picture = _jpeg(image_to_model(image, subject.image_size, subject.resize).numpy())
            self._pictures[name] = frame.number, picture
        return picture

    def _ready_policy(self) -> Policy | None:
        try:
            return self._host.policy()
        except NotReadyError:
            return None

    def _robot(self) -> Any:
        return _plain(self._host.robot_status()) if self._host.robot_status else None

    def _describe(self, policy: Policy | None) -> _Subject | None:
        """Made once a policy. Without one, what was last known stays."""
        if policy is not None and (self._policy is None or self._policy() is not policy):
            self._subject = _Subject(
                metadata=_essentials(policy),
                cameras=policy.binding.fed_cameras,
                state_dim=policy.binding.state_dim,
                image_size=policy.checkpoint.config.vision.image_size,
                resize=policy.engine.path.resize,
            )
            self._policy = weakref.ref(policy)
        return self._subject


def _end_of(future: Future[ActionChunk]) -> str:
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    if error is None:
        return "answered"
    if isinstance(error, DeadlineError):
        return "late"
    return "turned_away" if isinstance(error, (EngineBusyError, EngineClosedError)) else "failed"


def _essentials(policy: Policy) -> dict[str, Any]:
    metadata = policy.metadata
    robot, runtime = metadata["robot"], metadata["runtime"]
    return {
        "model": metadata["model"],
        "profile": robot["profile"],
        "device": runtime["device"],
        "precision": runtime["precision"],
        "compile_mode": runtime["compile_mode"],
        "num_steps": metadata["defaults"]["num_inference_steps"],
        "horizon": policy.horizon,
        "control_hz": robot["control_hz"],
        "joint_names": robot["joint_names"],
        "units": robot["units"],
        "action_names": robot["action_names"],
        "action_units": _action_units(policy.profile, robot["units"]),
        "image_size": policy.checkpoint.config.vision.image_size,
    }


def _action_units(profile: RobotProfile | None, units: list[str] | None) -> list[str] | None:
    """As those of the state, save where an arm is moved by velocities."""
    if profile is None or units is None or profile.action_dim != len(units):
        return None
    velocity = [arm.action == "velocity" for arm in profile.arms for _ in arm.dimension_names]
    return [f"{unit}/s" if moves and unit == "rad" else unit for moves, unit in zip(velocity, units, strict=True)]


def _describe_frame(frame: _Frame, subject: _Subject) -> dict[str, Any]:
    observation, chunk = frame.observation, frame.chunk
    try:
        state = as_vector("state", observation.state, subject.state_dim, exact=False).round(5).tolist()
    except ObservationError:  # its owner has written to it since, or it is that of a policy before this one
        state = None
    return {
        "number": frame.number,
        "time": frame.time,
        "id": observation.id and str(observation.id)[:TEXT],
        "prompt": str(observation.prompt)[:TEXT],
        "state": state,
        "actions": chunk.actions.astype(np.float64).round(5).tolist(),
        "num_steps": chunk.num_steps,
    }


def _describe_camera(name: str, frame: _Frame | None) -> dict[str, Any]:
    """height, width: of the image as it came, in pixels; None without one."""
    if frame is None or name not in frame.observation.images:
        return {"name": name, "height": None, "width": None, "seen": False, "masked": False}
    shape = np.shape(frame.observation.images[name])
    height, width = shape[:2] if shape[2] == 3 else shape[1:]
    seen = _is_seen(frame.observation, name)
    return {"name": name, "height": height, "width": width, "seen": seen, "masked": not seen}


def _is_seen(observation: Observation, name: str) -> bool:
    return name in observation.images and bool((observation.image_masks or {}).get(name, True))


def _jpeg(pixels: np.ndarray) -> bytes:
    """float32 [3, size, size] in [-1, 1] -> a file."""
    levels = ((pixels + 1.0) * 127.5).round().clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(levels.transpose(1, 2, 0)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _plain(value: Any) -> Any:
    """What another part reports, so that JSON can hold it: a browser reads no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, (float, np.number)):
        return float(value) if math.isfinite(value) else None
    return str(value)
