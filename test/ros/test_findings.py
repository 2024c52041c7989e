"""What /diagnostics says of numbers: levels that follow ~/status, sentences that name what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pi05_ros.msg import PolicyStatus
from pi05_ros.policy import load_profile
from pi05_ros.robot.ticks import Regularity
from pi05_ros.ros import findings
from pi05_ros.ros.findings import ERROR, OK, STALE, TASKS, WARN, Finding

PROFILE = load_profile("aloha_ros2")  # stale after 0.5 s, skew up to 0.1 s
ENGINE = {"cache": {"hits": 3, "misses": 4}, "waiting": 1, "running": 2, "batches": {1: 7, 4: 2}}
EVEN = Regularity(251, 50.0, 0.0001, 0.0012, 0, 3, 0.01)
JOINTS = ("waist", "shoulder", "elbow", "gripper")


def status(state: str = PolicyStatus.RUNNING, reason: str = "", **fields: Any) -> PolicyStatus:
    return PolicyStatus(state=state, reason=reason, **fields)


def of_ages(ages: list[float], counts: list[int], state: str = PolicyStatus.RUNNING, **faults: str) -> Finding:
    names = ["cam_high", "cam_low", "/joints"]
    message = status(state, streams=names, stream_ages=ages, stream_rates=[30.0, 29.96, 100.0])
    corrupt = {"cam_high": 2, "cam_low": 0}
    return findings.of_streams(message, PROFILE, dict(zip(names, counts, strict=True)), corrupt, faults)


@pytest.mark.parametrize(
    ("state", "reason", "level", "message"),
    [
        (PolicyStatus.RUNNING, "", OK, "Running."),
        (PolicyStatus.RUNNING, "A passing fault.", WARN, "A passing fault."),
        (PolicyStatus.WAITING, "No frame yet.", WARN, "No frame yet."),
        (PolicyStatus.DISABLED, "Disabled by ~/enable.", OK, "Disabled by ~/enable."),
        (PolicyStatus.ERROR, "Inference failed.", ERROR, "Inference failed."),
        (PolicyStatus.INACTIVE, "Configured; not activated.", OK, "Inactive."),
    ],
)
def test_the_policy_is_as_the_status_says(state: str, reason: str, level: bytes, message: str) -> None:
    finding = findings.of_policy(status(state, reason, chunks=5, clamps=6), ENGINE)
    assert (finding.level, finding.message) == (level, message)
    wanted = {"chunks": "5", "clamps": "6", "prefix_cache_hits": "3", "batches_by_size": "1: 7, 4: 2"}
    assert wanted.items() <= finding.values.items()


@pytest.mark.parametrize(("failed", "level"), [(False, STALE), (True, ERROR)])
def test_before_configure_the_policy_says_what_it_is_at(failed: bool, level: bytes) -> None:
    found = findings.of_unconfigured(status(PolicyStatus.UNCONFIGURED, "Loading x ..."), failed)
    assert tuple(found) == TASKS
    assert found[findings.POLICY] == Finding(level, "Loading x ...")
    assert {finding.level for task, finding in found.items() if task != findings.POLICY} == {STALE}


def test_fresh_streams_are_well() -> None:
    finding = of_ages([0.01, -0.05, 0.5], [10, 20, 30])
    assert (finding.level, finding.message) == (OK, "All streams are fresh.")
    assert finding.values == {
        "cam_high.rate_hz": "30.0",
        "cam_high.age_s": "0.010",
        "cam_high.count": "10",
        "cam_high.corrupt": "2",
        "cam_high.stale": "false",
        "cam_low.rate_hz": "30.0",
        "cam_low.age_s": "-0.050",
        "cam_low.count": "20",
        "cam_low.corrupt": "0",
        "cam_low.stale": "false",
        "/joints.rate_hz": "100.0",
        "/joints.age_s": "0.500",
        "/joints.count": "30",
        "/joints.stale": "false",
    }


def test_every_stream_that_is_not_is_told_of_and_why() -> None:
    finding = of_ages([0.7, -1.0, -0.3], [10, 0, 30], cam_low="Nobody publishes /cam_low.")
    assert finding.level == WARN
    assert finding.message == (
        "cam_high: stale: the newest sample is 0.7 s old, limit 0.5 s. "
        "cam_low: nothing has come yet. Nobody publishes /cam_low. "
        "/joints: the newest sample is stamped 0.30 s ahead of this node's clock."
    )
    assert finding.values["cam_low.age_s"] == "none"
    assert all(finding.values[f"{name}.stale"] == "true" for name in ("cam_high", "cam_low", "/joints"))
    inactive = of_ages([0.7, -1.0, -0.3], [10, 0, 30], PolicyStatus.INACTIVE)
    assert (inactive.level, inactive.message) == (OK, "Inactive.")
    assert inactive.values == finding.values


@pytest.mark.parametrize(
    ("alive", "last", "level", "message"),
    [
        (True, EVEN, OK, "50.0 Hz."),
        (True, replace(EVEN, overruns=2), WARN, "2 of the last 251 ticks came more than half a period late."),
        (True, replace(EVEN, since_last=1.5), ERROR, "The last tick was 1.5 s ago."),
        (True, None, STALE, "There were not two ticks yet"),
        (False, EVEN, ERROR, "The control thread has failed"),
    ],
)
def test_the_control_loop(alive: bool, last: Regularity | None, level: bytes, message: str) -> None:
    finding = findings.of_control(status(), alive, last)
    assert finding.level == level
    assert finding.message.startswith(message)
    if last is not None:
        assert finding.values["jitter_p99_ms"] == "1.20"
    inactive = findings.of_control(status(PolicyStatus.INACTIVE), alive=False, last=last)
    assert (inactive.level, inactive.message) == (OK, "Inactive.")


@pytest.mark.parametrize(("outside", "level"), [([], OK), ([1], OK), ([1, 3], WARN)])
def test_a_state_far_from_the_data_is_a_warning_that_names_its_dimensions(outside: list[int], level: bytes) -> None:
    unusual = np.isin(np.arange(4), outside)
    finding = findings.of_state(status(), JOINTS, np.array([0.1, 0.2, 0.3, 0.4]), unusual)
    assert finding.level == level
    assert finding.message.startswith(f"{len(outside)} of 4 dimensions lie outside of q01..q99")
    values = {"shoulder": "0.2000", "gripper": "0.4000"}
    named = {JOINTS[index]: values[JOINTS[index]] for index in outside}
    assert finding.values == {"fraction_outside": f"{len(outside) / 4:.3f}", **named}


def test_what_is_not_known_of_the_state_is_said() -> None:
    assert findings.of_state(status(), JOINTS, None, None).level == STALE
    without = findings.of_state(status(), JOINTS, np.zeros(4), None)
    assert (without.level, without.message) == (OK, "The checkpoint's statistics have no q01 and q99 of the state.")


def test_the_server() -> None:
    assert findings.of_server(None, False, {}).level == OK
    clients = {"http": 2, "realtime": 0, "openpi": 1}
    finding = findings.of_server("http://127.0.0.1:8000", True, clients)
    assert (finding.level, finding.message) == (OK, "Serving on http://127.0.0.1:8000.")
    assert finding.values == {
        "address": "http://127.0.0.1:8000",
        "clients_http": "2",
        "clients_realtime": "0",
        "clients_openpi": "1",
    }
    assert findings.of_server("http://127.0.0.1:8000", False, clients).level == ERROR
