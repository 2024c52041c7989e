"""The demo, whole: a tiny checkpoint, the policy node, the simulated robot, a report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pi05_ros.policy.profile import load_profile

pytestmark = pytest.mark.needs_launch


def demo(output: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pi05_ros.tools.demo", "--output", str(output), *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_that_mention(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in environment and "pi05_ros" in command:
            found.append(command)
    return found


@pytest.fixture
def nobody_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Everything that the demo starts inherits a mark in its environment, and must be gone afterwards."""
    monkeypatch.setenv("PI05_ROS_TEST_MARK", str(tmp_path))
    yield
    assert processes_that_mention(f"PI05_ROS_TEST_MARK={tmp_path}") == []


@pytest.mark.usefixtures("nobody_is_left")
def test_an_episode_is_told_and_reported(tmp_path: Path) -> None:
    process = demo(tmp_path / "report", "--seconds", "2")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    told = [line for line in output.splitlines() if line.startswith("chunk ")]
    assert "| cache miss |" in told[0]
    assert "untrained (random weights): the motion is meaningless" in output
    assert "Where to look next" in output

    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["chunks"] == len(told) >= 1
    assert summary["simulated_seconds"] == pytest.approx(2.0, abs=0.1)  # between the first and the last sample
    assert 0.0 < summary["latency_ms"]["total"]["median"] <= summary["latency_ms"]["total"]["p95"]
    assert summary["each_chunk"][0]["observation_age_ms"] < 1000
    assert set(summary["largest_following_error"]) == set(load_profile("aloha_sim").joint_names), "all were commanded"
    assert all(count > 0 for count in summary["frames_kept"].values())
    for name in ("cameras.png", "joints.png", "launch.log"):
        assert (tmp_path / "report" / name).stat().st_size > 100


@pytest.mark.usefixtures("nobody_is_left")
def test_a_checkpoint_that_is_none_ends_with_the_nodes_last_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    process = demo(tmp_path / "report", "--checkpoint", str(tmp_path / "empty"), "--patience", "12")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "last words" in output
    assert str(tmp_path / "empty") in output.split("last words")[1]
    assert "Traceback" not in output


@pytest.mark.usefixtures("nobody_is_left")
def test_an_interrupted_demo_ends_all_that_it_started(tmp_path: Path) -> None:
    process = demo(tmp_path / "report")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Starting robot and policy"):
            break
    time.sleep(2.0)  # into the start of the nodes, where it is least convenient
    assert len(processes_that_mention(f"PI05_ROS_TEST_MARK={tmp_path}")) > 1
    process.send_signal(signal.SIGTERM)  # taken as Ctrl-C is
    process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.usefixtures("nobody_is_left")
def test_a_second_simulation_in_the_same_domain_is_refused(tmp_path: Path) -> None:
    robot = subprocess.Popen([sys.executable, "-m", "pi05_ros.tools.aloha_sim"])
    try:
        process = demo(tmp_path / "report")
        output, _ = process.communicate(timeout=60)
    finally:
        robot.send_signal(signal.SIGINT)
        robot.wait(10)
    assert process.returncode == 1
    assert "Someone publishes /clock in this ROS domain already" in output
