"""What the node says of itself under /diagnostics: per task a level, a sentence and values. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus

from pi05_ros.msg import PolicyStatus
from pi05_ros.policy import RobotProfile
from pi05_ros.robot.ticks import Regularity

OK, WARN = DiagnosticStatus.OK, DiagnosticStatus.WARN
ERROR, STALE = DiagnosticStatus.ERROR, DiagnosticStatus.STALE

STREAMS, POLICY, CONTROL, STATE, SERVER = "streams", "policy", "control loop", "state distribution", "server"
TASKS = (STREAMS, POLICY, CONTROL, STATE, SERVER)

UNUSUAL = 0.25
"""Fraction of the state's dimensions outside of q01..q99 from which on it is worth a warning. Of the data that a
checkpoint was trained on, 2 % lie outside in each dimension."""
SILENCE = 1.0
"""Seconds without a control tick that are an error."""
INACTIVE = "Inactive."


@dataclass(frozen=True)
class Finding:
    """level: OK, WARN, ERROR or STALE. message: one sentence or several. values: by key, as text."""

    level: bytes
    message: str
    values: dict[str, str] = field(default_factory=dict)


def of_unconfigured(status: PolicyStatus, failed: bool) -> dict[str, Finding]:
    """By task, while there is nothing to look at. failed: a transition has failed, the status says why."""
    nothing = dict.fromkeys(TASKS, Finding(STALE, "Not configured."))
    return {**nothing, POLICY: Finding(ERROR if failed else STALE, status.reason)}


def of_streams(
    status: PolicyStatus,
    profile: RobotProfile,
    counts: Mapping[str, int],
    corrupt: Mapping[str, int],
    faults: Mapping[str, str],
) -> Finding:
    """Cameras and joint state topics. By name, counts: samples so far; corrupt: frames that did not decode; faults:
    why no publisher reaches it.
    """
    values, problems = {}, []
    for name, age, rate in zip(status.streams, status.stream_ages, status.stream_rates, strict=True):
        came = counts.get(name, 0) > 0
        late = _lateness(age, profile) if came else "nothing has come yet."
        if late or name in faults:
            problems.append(" ".join(filter(None, (late and f"{name}: {late}", faults.get(name)))))
        values[f"{name}.rate_hz"] = f"{rate:.1f}"
        values[f"{name}.age_s"] = f"{age:.3f}" if came else "none"
        values[f"{name}.count"] = str(counts.get(name, 0))
        if name in corrupt:
            values[f"{name}.corrupt"] = str(corrupt[name])
        values[f"{name}.stale"] = str(bool(late)).lower()
    if status.state == PolicyStatus.INACTIVE:
        return Finding(OK, INACTIVE, values)
    return Finding(WARN if problems else OK, " ".join(problems) or "All streams are fresh.", values)


def _lateness(age: float, profile: RobotProfile) -> str:
    if age > profile.stale_after:
        return f"stale: the newest sample is {age:.1f} s old, limit {profile.stale_after:g} s."
    if -age > profile.max_skew:
        return f"the newest sample is stamped {-age:.2f} s ahead of this node's clock."
    return ""


def of_policy(status: PolicyStatus, engine: Mapping[str, Any]) -> Finding:
    """What ~/status says, and the engine's counters as of ``Engine.stats``."""
    level = {PolicyStatus.WAITING: WARN, PolicyStatus.ERROR: ERROR}.get(status.state, OK)
    if status.state == PolicyStatus.RUNNING and status.reason:
        level = WARN  # a passing fault
    message = status.reason or f"{status.state.capitalize()}."
    values = {
        "state": status.state,
        "latency_p50_ms": f"{status.latency_p50_ms:.1f}",
        "latency_p95_ms": f"{status.latency_p95_ms:.1f}",
        **{
            name: str(getattr(status, name))
            for name in ("chunks", "refused_chunks", "refused_observations", "clamps", "underruns", "queue_left")
        },
        "prefix_cache_hits": str(engine["cache"]["hits"]),
        "prefix_cache_misses": str(engine["cache"]["misses"]),
        "device_memory_bytes": str(status.device_memory),
        "requests_waiting": str(engine["waiting"]),
        "requests_running": str(engine["running"]),
        "batches_by_size": ", ".join(f"{size}: {number}" for size, number in engine["batches"].items()) or "none",
    }
    return Finding(level, INACTIVE if status.state == PolicyStatus.INACTIVE else message, values)


def of_control(status: PolicyStatus, alive: bool, last: Regularity | None) -> Finding:
    """The control thread, and how evenly it ticked in the last seconds."""
    values = {}
    if last is not None:
        values = {
            "rate_hz": f"{last.rate_hz:.2f}",
            "jitter_p50_ms": f"{last.jitter_p50 * 1e3:.2f}",
            "jitter_p99_ms": f"{last.jitter_p99 * 1e3:.2f}",
            "overruns": str(last.overruns),
            "overruns_since_activation": str(last.total_overruns),
        }
    if status.state == PolicyStatus.INACTIVE:
        return Finding(OK, INACTIVE, values)
    if not alive:
        return Finding(ERROR, "The control thread has failed; deactivate, activate and enable the node.", values)
    if last is None:
        return Finding(STALE, "There were not two ticks yet; under use_sim_time they need a /clock that runs.")
    if last.since_last > SILENCE:
        return Finding(ERROR, f"The last tick was {last.since_last:.1f} s ago.", values)
    if last.overruns:
        message = f"{last.overruns} of the last {last.ticks} ticks came more than half a period late."
        return Finding(WARN, message, values)
    return Finding(OK, f"{last.rate_hz:.1f} Hz.", values)


def of_state(
    status: PolicyStatus, names: Sequence[str], state: np.ndarray | None, unusual: np.ndarray | None
) -> Finding:
    """Whether the robot is where the checkpoint knows its way: state [dims] in robot units, bool [dims] where it lies
    outside of what the checkpoint was trained on; None: not known.
    """
    values: dict[str, str] = {}
    level, message = OK, "The checkpoint's statistics have no q01 and q99 of the state."
    if state is None:
        level, message = STALE, "The state is not known: joint states are missing or refused."
    elif unusual is not None:
        outside = [name for name, is_outside in zip(names, unusual, strict=True) if is_outside]
        fraction = len(outside) / len(names)
        values = {"fraction_outside": f"{fraction:.3f}"}
        values.update((name, f"{value:.4f}") for name, value in zip(names, state, strict=True) if name in outside)
        where = f": {', '.join(outside)}." if outside else "."
        message = f"{len(outside)} of {len(names)} dimensions lie outside of q01..q99 of the checkpoint's data{where}"
        level = WARN if fraction > UNUSUAL else OK
    return Finding(OK, INACTIVE, values) if status.state == PolicyStatus.INACTIVE else Finding(level, message, values)


def of_server(url: str | None, serving: bool, clients: Mapping[str, int]) -> Finding:
    """The HTTP server. url: None if there is none. clients: connected now, by kind."""
    if url is None:
        return Finding(OK, "Nothing is served: http_port is 0.")
    values = {"address": url, **{f"clients_{kind}": str(number) for kind, number in clients.items()}}
    if not serving:
        return Finding(ERROR, f"The server on {url} has ended; the log says why.", values)
    return Finding(OK, f"Serving on {url}.", values)
