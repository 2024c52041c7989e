"""The benchmark of the node: real processes and real DDS, and chunks matched to what was published."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import rclpy  # noqa: F401  # without ROS this file is left out

from pi05_ros.checkpoint import make_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/topic_to_chunk.py"
MS = 1_000_000
SECOND = 1000 * MS


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("topic_to_chunk", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def chunk(stamp_ns: int, age_ms: float, total_ms: float) -> SimpleNamespace:
    stamp = SimpleNamespace(sec=stamp_ns // SECOND, nanosec=stamp_ns % SECOND)
    return SimpleNamespace(header=SimpleNamespace(stamp=stamp), observation_age_ms=age_ms, total_ms=total_ms)


def test_it_measures_the_node_over_real_topics(tmp_path: Path) -> None:
    checkpoint, found = make_checkpoint("tiny", tmp_path / "tiny"), tmp_path / "found.json"
    options = ["--robot", "aloha_sim", "--device", "cpu", "--rate", "10", "--seconds", "1", "--warm-up", "0"]
    result = run("--checkpoint", checkpoint, *options, "--json", found)
    assert result.returncode == 0, result.stderr
    assert "cam_right_wrist 320x240), 10 sets a second" in result.stdout
    measured = json.loads(found.read_text())["ms"]
    whole, engine = measured["set's stamp to chunk"], measured["engine"]
    assert 0 < len(whole) == len(engine) <= 11
    assert all(0 < inner < outer for inner, outer in zip(engine, whole, strict=True))


def test_why_the_node_did_not_come_up_is_said(tmp_path: Path) -> None:
    result = run("--checkpoint", tmp_path / "nothing", "--device", "cpu")
    assert result.returncode == 1
    assert "The node refused transition 1: Not configured:" in result.stderr
    assert str(tmp_path / "nothing") in result.stderr


def test_a_chunk_is_held_against_the_set_of_its_stamp(script: ModuleType) -> None:
    sets = [script.Published(stamp, stamp + 2 * MS) for stamp in (5 * SECOND, 6 * SECOND, 7 * SECOND)]
    chunks = [
        (4 * SECOND + 9 * MS, chunk(4 * SECOND, 1.0, 5.0)),  # of a set from before the measurement
        (6 * SECOND + 30 * MS, chunk(6 * SECOND, 3.5, 20.0)),
        (6 * SECOND + 60 * MS, chunk(6 * SECOND, 33.5, 20.0)),  # once more from the same
        (7 * SECOND + 25 * MS, chunk(7 * SECOND, 1.5, 18.0)),
    ]
    found = script.match(sets, chunks)
    assert (found.sets, found.repeats) == (3, 1)
    assert found.answers == [
        script.Answer(from_stamp=30.0, from_last=28.0, waited=1.5, engine=20.0),
        script.Answer(from_stamp=25.0, from_last=23.0, waited=-0.5, engine=18.0),
    ]
    assert [one.overhead for one in found.answers] == [8.0, 5.0]
