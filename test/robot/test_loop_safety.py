"""The loop with a robot's limits: where a motion begins, how it goes on, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pi05_ros import Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.errors import Pi05Error
from pi05_ros.robot.loop import LoopSettings
from pi05_ros.robot.safety import SafetySettings
from robot.still_robot import PERIOD, POSE, SETTINGS, SIM, UNLIMITED, Robot, play

STEP = np.pi * 0.02 + 1e-6
ARMS = [index for index in range(14) if index not in (6, 13)]
STATE = np.array([*POSE[:6], 0.5] * 2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = make_checkpoint("tiny", tmp_path_factory.mktemp("safety") / "tiny")
    with Policy.from_checkpoint(folder, "cpu", "float32", "aloha_sim", compile_mode="plain") as policy:
        yield policy


class GatedPolicy:
    """A policy whose inferences take until they are let through."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.horizon = policy, policy.horizon
        self.gate, self.asked = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.asked.release()
        assert self.gate.acquire(timeout=20)
        return self._policy.submit(*arguments, **options)


@pytest.fixture
def gated(policy: Policy) -> Iterator[GatedPolicy]:
    gated = GatedPolicy(policy)
    yield gated
    for _ in range(100):
        gated.gate.release()


@pytest.fixture
def robot(policy: Policy) -> Iterator[Robot]:
    robot = Robot(policy, profile=SIM)
    yield robot
    robot.loop.stop()


def moved(by: float) -> list[float]:
    return [POSE[0] + by, *POSE[1:]]


def test_a_motion_ramps_from_the_pose_that_was_measured(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    rows = robot.chunks[0].chunk.actions
    assert np.abs(rows[0] - STATE)[ARMS].max() > STEP, "else there would be nothing to ramp"
    before = STATE
    for _ in range(30):
        robot.now_ns += PERIOD
        robot.sense()
        setpoints = robot.loop.tick()
        assert setpoints is not None
        path = np.vstack([before, setpoints.rows])[:, ARMS]
        assert np.abs(np.diff(path, axis=0)).max() <= STEP
        before = setpoints.rows[0]
    assert robot.loop.state().clamps > 0


def test_a_first_target_that_is_far_is_refused_until_the_robot_is_near(robot: Robot) -> None:
    robot.sense(pose=moved(-1.0))
    robot.loop.start()
    robot.until(lambda: robot.loop.state().refused_chunks > 0)
    state = robot.loop.state()
    assert state.state == "error"
    assert state.reason.startswith("The first target of right_waist is "), "the worst joint"
    assert "it was measured at -1 rad; at most 0.5 rad may lie between (max_start_error)" in state.reason
    assert robot.loop.tick() is None
    assert not robot.chunks
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(1)
    assert robot.loop.tick() is not None
    assert robot.loop.state().state == "running"


def test_how_far_is_far_can_be_said(policy: Policy) -> None:
    robot = Robot(policy, LoopSettings(seed=4, safety=SafetySettings(max_start_error=2.0)), SIM)
    robot.sense(pose=moved(-1.0))
    robot.loop.start()
    try:
        robot.wait_for_chunks(1)
        setpoints = robot.loop.tick()
        assert setpoints is not None
        assert setpoints.rows[0][0] == pytest.approx(-1.0 + STEP, abs=1e-5)
    finally:
        robot.loop.stop()


def test_a_chunk_beyond_the_limits_holds_and_is_refused(policy: Policy, robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.loop.tick()
    bias = policy.engine.path.model.action_out_proj.bias
    kept = bias.clone()
    bias[1] += 1e3
    try:
        play(robot, 12)
        robot.until(lambda: robot.loop.state().refused_chunks > 0)
        assert "for left_shoulder in row" in robot.loop.state().reason
        setpoints = robot.loop.tick()
        assert setpoints is not None
        assert np.allclose(setpoints.rows[0][ARMS], STATE[ARMS], atol=1e-6)
        assert robot.loop.tick() is None
    finally:
        bias.copy_(kept)
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(len(robot.chunks) + 1)


def test_after_a_hold_it_goes_on_from_where_it_is_measured_then(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    play(robot, 5)
    robot.loop.set_enabled(False)
    last = robot.loop.tick()
    assert last is not None
    robot.now_ns += PERIOD
    robot.sense(pose=moved(0.3))  # somebody moves it by hand
    robot.loop.set_enabled(True)
    robot.wait_for_chunks(len(robot.chunks) + 1)
    setpoints = robot.loop.tick()
    assert setpoints is not None
    assert setpoints.rows[0][0] == pytest.approx(0.3 - STEP, abs=1e-5)
    assert np.abs(setpoints.rows[0] - last.rows[0])[[6, 13]].max() <= 3.1 * 0.02 + 1e-6, "the grippers go on"


def test_if_joint_states_fail_the_hold_is_the_last_that_was_commanded(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    last = robot.loop.tick()
    raw = robot.chunks[0].chunk.actions
    assert last is not None
    robot.now_ns += 2 * round(SIM.stale_after * 1e9)
    held = robot.loop.tick()
    assert held is not None
    assert np.array_equal(held.rows[0], last.rows[0])
    assert not np.allclose(held.rows[0], raw[0], atol=0.01), "and not what the network had wanted"


def late(robot: Robot) -> np.ndarray:
    """The hold that comes when no chunk does."""
    for _ in range(200):
        robot.now_ns += PERIOD
        robot.sense(pose=moved(0.01))
        setpoints = robot.loop.tick()
        if "late" in robot.loop.state().reason:
            assert setpoints is not None
            return setpoints.rows[0]
    raise AssertionError(f"no hold; state {robot.loop.state()}")


def test_a_late_chunk_is_held_for_and_thrown_away(gated: GatedPolicy) -> None:
    robot = Robot(gated, SETTINGS, UNLIMITED)  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    gated.gate.release()
    robot.wait_for_chunks(1)
    try:
        play(robot, 12)
        assert gated.asked.acquire(timeout=20)
        assert gated.asked.acquire(timeout=20), "while the arm moves, the next one is asked for"
        held = late(robot)
        assert np.allclose(held[ARMS], np.array(moved(0.01)[:6] * 2), atol=1e-6)
        assert 1.0 < (robot.now_ns - robot.chunks[0].stamp_ns) / 1e9 - 50 * 0.02 < 1.1, "a second after the last row"
        assert robot.loop.state().reason == "The next chunk is late: rows ran out more than 1 s ago; holding."
        assert robot.loop.state().state == "waiting"
        robot.now_ns += PERIOD
        robot.sense()
        assert robot.loop.tick() is None, "latched once"
        gated.gate.release()  # it comes, of an arm that moved, and another one is asked for
        assert gated.asked.acquire(timeout=20)
        assert len(robot.chunks) == 1
        gated.gate.release()
        robot.wait_for_chunks(2)
        assert np.allclose(play(robot, 1), robot.chunks[1].chunk.actions[1])  # type: ignore[arg-type]
        assert robot.loop.state().state == "running"
    finally:
        for _ in range(10):
            gated.gate.release()
        robot.loop.stop()


def test_who_is_too_slow_is_held_for_and_his_chunk_is_good(gated: GatedPolicy) -> None:
    robot = Robot(gated, SETTINGS, UNLIMITED)  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    try:
        assert gated.asked.acquire(timeout=20)
        robot.now_ns += 100 * PERIOD  # the first takes longer than a chunk lasts, so the next will too
        gated.gate.release()
        robot.wait_for_chunks(1)
        play(robot, 50)
        play(robot, 2)
        assert gated.asked.acquire(timeout=20), "asked for when the arm stands"
        late(robot)
        gated.gate.release()
        robot.wait_for_chunks(2)
        assert np.allclose(play(robot, 1), robot.chunks[1].chunk.actions[1])  # type: ignore[arg-type]
    finally:
        for _ in range(10):
            gated.gate.release()
        robot.loop.stop()


def test_what_commands_the_robot_may_fail(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.loop.tick()
    robot.loop.fail("The bus is gone.")
    assert (robot.loop.state().state, robot.loop.state().reason) == ("error", "The bus is gone.")
    hold = robot.loop.tick()
    assert hold is not None
    assert np.allclose(hold.rows[0][ARMS], STATE[ARMS], atol=1e-6)
    robot.loop.stop()
    robot.loop.start()
    assert robot.loop.state().state == "disabled", "begun anew, it still waits for a person"
    assert robot.loop.state().reason == "Not enabled since: The bus is gone."
    chunks = len(robot.chunks)
    robot.loop.set_enabled(True)
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(chunks + 1)
    assert robot.loop.state().state == "running"


def test_a_moving_arm_is_not_held_where_it_was_half_a_second_ago(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    last = play(robot, 5)
    for _ in range(150):  # nothing is heard any more
        robot.now_ns += PERIOD
        setpoints = robot.loop.tick()
        if setpoints is not None and setpoints.holds:
            assert np.abs(setpoints.rows[0] - last)[ARMS].max() <= STEP, "at its last command, not back at a stale pose"
            return
        if setpoints is not None:
            last = setpoints.rows[0]
    raise AssertionError("it was not held")


def test_a_clock_that_goes_back_during_the_first_inference_leaves_nothing_behind(gated: GatedPolicy) -> None:
    robot = Robot(gated, profile=UNLIMITED)  # type: ignore[arg-type]
    robot.now_ns = 1_000 * 1_000 * 1_000_000
    robot.sense()
    robot.loop.start()
    try:
        assert gated.asked.acquire(timeout=20)
        robot.now_ns = 2_000 * 1_000_000
        robot.loop.tick()
        robot.sense()
        gated.gate.release()
        assert gated.asked.acquire(timeout=20), "it asks anew, of what is seen now"
        gated.gate.release()
        robot.wait_for_chunks(1)
        assert robot.chunks[0].stamp_ns <= robot.now_ns
        left = robot.loop.state().rows_left
        play(robot, 3)
        assert robot.loop.state().rows_left == left - 3, "rows pass"
    finally:
        for _ in range(9):
            gated.gate.release()
        robot.loop.stop()


def test_a_loop_whose_last_inference_runs_still_is_not_started_again(gated: GatedPolicy) -> None:
    robot = Robot(gated, profile=UNLIMITED)  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    assert gated.asked.acquire(timeout=20)
    robot.loop.stop(timeout=0.01)
    with pytest.raises(Pi05Error, match="has not ended yet"):
        robot.loop.start()
    gated.gate.release()
    robot.loop.stop()
    robot.loop.start()
    for _ in range(9):
        gated.gate.release()
    robot.sense()
    robot.wait_for_chunks(1)
    robot.loop.stop()


def test_a_joint_that_turns_nan_is_held_for_at_once(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    play(robot, 3)
    robot.now_ns += PERIOD
    robot.sense(pose=[float("nan"), *POSE[1:]])
    setpoints = robot.loop.tick()
    assert setpoints is not None
    assert setpoints.holds
    assert "joint waist in" in robot.loop.state().reason
    assert np.isfinite(setpoints.rows).all()
