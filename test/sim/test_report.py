"""The demo's report, from a recording of the scripted handover."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pi05_ros.policy.profile import load_profile
from pi05_ros.sim.recording import ChunkRecord, Recording
from pi05_ros.sim.report import MOMENTS, ReportError, write_report
from pi05_ros.sim.scene import ARMS, CAMERAS, HOME_POSE, AlohaScene
from sim import handover

PROFILE = load_profile("aloha_sim")
CAMERA_NAMES = tuple(camera.name for camera in PROFILE.cameras)
GRIPPERS = np.array(PROFILE.gripper_mask)


def in_policy_units(joints: np.ndarray) -> np.ndarray:
    values = joints.copy()
    for index, arm in enumerate(PROFILE.arms):
        assert arm.gripper is not None
        values[7 * index + 6] = arm.gripper.state_to_unit(values[7 * index + 6])
    return values


def chunk(sequence: int, time: float, state: np.ndarray, target: np.ndarray, hit: bool = False) -> ChunkRecord:
    stages = {
        "queue": 0.1,
        "preprocess": 2.0,
        "prefix": 0.0 if hit else 30.0,
        "denoise": 15.0,
        "total": 50.0 + sequence,
    }
    return ChunkRecord(sequence, time, time - 0.05, 40.0, stages, hit, state, target)


@pytest.fixture(scope="module")
def recording() -> Recording:
    scene = AlohaScene(quality="fast")
    kept = Recording(PROFILE.joint_names, CAMERA_NAMES, prompt="Transfer cube")
    present = np.array(HOME_POSE * 2)
    for sequence, (seconds, targets) in enumerate(handover.waypoints(scene), start=1):
        steps = int(seconds * 500)
        kept.chunks.append(chunk(sequence, 3.0 + scene.time, in_policy_units(present), in_policy_units(targets)))
        for step in range(steps):
            command = present + (targets - present) * min(1.0, step / (0.8 * steps))
            scene.set_targets(command)
            scene.step()
            if step % 10 == 0:
                time = 3.0 + scene.time
                joints = np.concatenate([scene.positions(arm)[:7] for arm in ARMS])
                kept.measured.append((time, in_policy_units(joints)))
                kept.commanded.append((time, in_policy_units(command)))
            if step % 250 == 0:
                for camera, name in zip(CAMERAS, CAMERA_NAMES, strict=True):
                    kept.frames.setdefault(name, []).append((3.0 + scene.time, scene.render(camera, 240, 320)))
        kept.rewards.append(scene.reward)
        present = targets
    kept.success = scene.success
    kept.real_time_factors += [0.5, 0.7]
    scene.close()
    return kept


def test_the_report_has_two_pictures_and_a_summary(recording: Recording, tmp_path: Path) -> None:
    paths = write_report(recording, tmp_path / "report", {"device": "cpu"})
    assert [path.name for path in paths] == ["cameras.png", "joints.png", "summary.json"]
    strip = np.asarray(Image.open(paths[0]).convert("RGB"))
    assert strip.shape[0] > 3 * 240
    assert strip.shape[1] > MOMENTS * 320
    # Every picture of the strip is a picture: neither blank nor all the same.
    cells = [
        strip[30 + row * 246 : 270 + row * 246, 34 + column * 326 : 354 + column * 326]
        for row in range(3)
        for column in range(MOMENTS)
    ]
    assert all(cell.std() > 10 for cell in cells)
    assert all((cells[0] != cell).any() for cell in cells[1:])
    assert np.asarray(Image.open(paths[1]).convert("L")).std() > 5
    summary = json.loads(paths[2].read_text())
    assert summary["device"] == "cpu"


def test_the_summary_counts_what_happened(recording: Recording) -> None:
    summary = recording.summary()
    assert summary["chunks"] == len(summary["each_chunk"]) == 8
    assert summary["latency_ms"]["total"] == {"median": 54.5, "p95": 57.65, "max": 58.0}
    assert summary["observation_age_ms"]["median"] == 40.0
    assert summary["real_time_factor"] == {"median": 0.6, "p95": 0.69, "max": 0.7}
    assert summary["reward"] == {"last": 4, "best": 4}
    assert summary["success"] is True
    assert summary["simulated_seconds"] == pytest.approx(7.9, abs=0.05)
    assert summary["frames_kept"] == {name: len(frames) for name, frames in recording.frames.items()}
    # The servos of the scene follow the script to within a few hundredths.
    errors = summary["largest_following_error"]
    assert set(errors) == set(PROFILE.joint_names)
    assert 0.001 < max(value for name, value in errors.items() if not name.endswith("gripper")) < 0.3


def test_a_joint_that_was_never_commanded_has_no_following_error() -> None:
    half = Recording(("a", "b"), ("c",))
    half.measured.append((0.0, np.array([1.0, 2.0])))
    half.commanded.append((0.0, np.array([1.25, np.nan])))
    assert half.summary()["largest_following_error"] == {"a": 0.25}


def test_a_chunk_is_told_in_one_line() -> None:
    state, target = np.zeros(14), np.zeros(14)
    target[9] = -0.125
    line = chunk(7, 12.0, state, target, hit=True).line(PROFILE.joint_names)
    assert "\n" not in line
    for part in ("chunk   7 at  12.00 s", "saw   40 ms old", "57 ms", "cache hit", "right_elbow +0.000 -> -0.125 rad"):
        assert part in line


def test_an_empty_recording_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no joint state was recorded"):
        write_report(Recording(("a",), ("b",)), tmp_path, {})
