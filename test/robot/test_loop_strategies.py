"""What the loop asks of a real (tiny) policy for each strategy, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pi05_ros import ActionChunk, Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.model import RtcGuidance
from robot.still_robot import MS, PERIOD, POSE, SETTINGS, UNLIMITED, Robot, play

RTC = replace(SETTINGS, strategy="rtc")
MOVED = [value + 0.02 for value in POSE]


@pytest.fixture(scope="module")
def relative_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    """Its actions are relative to the state."""
    folder = make_checkpoint("tiny", tmp_path_factory.mktemp("loop") / "tiny", "openpi")
    with Policy.from_checkpoint(folder, "cpu", "float32", "aloha_sim", compile_mode="plain") as policy:
        yield policy


class WatchedPolicy:
    """The policy, and what was asked of it when. Every inference takes ``takes_ns`` of the robot's time."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.horizon = policy, policy.horizon
        self.robot: Robot | None = None
        self.takes_ns = 0
        self.then_ns: int | None = None  # what the others take after the next
        self.gate = threading.Semaphore(1000)  # each of them passes it
        self.requests: list[tuple[int, Observation, RtcGuidance | None]] = []

    def submit(self, observation: Observation, **options: Any) -> Future[ActionChunk]:
        assert self.robot is not None
        self.requests.append((self.robot.now_ns, observation, options["rtc"]))
        assert self.gate.acquire(timeout=30)
        future = self._policy.submit(observation, **options)
        future.result(30)  # the robot's time goes on when the chunk is there, so that no tick comes in between
        self.robot.now_ns += self.takes_ns
        self.takes_ns = self.takes_ns if self.then_ns is None else self.then_ns
        self.robot.sense()
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@pytest.fixture
def watched(relative_policy: Policy) -> WatchedPolicy:
    return WatchedPolicy(relative_policy)


def begin(watched: WatchedPolicy, settings: Any) -> Robot:
    """A robot on that policy that has its first chunk."""
    robot = watched.robot = Robot(watched, settings)  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    return robot


def replan(robot: Robot, rows: int, pose: list[float] | None = None) -> tuple[int, Observation, RtcGuidance | None]:
    """Play so many rows and wait for the chunk that is then asked for; the request for it."""
    count = len(robot.chunks)
    play(robot, rows - 1)
    robot.now_ns += PERIOD
    robot.sense(pose=pose)
    robot.wait_for_chunks(count + 1)
    robot.loop.tick()
    return robot.loop._policy.requests[count]  # type: ignore[attr-defined]


def test_the_next_chunk_is_guided_by_what_is_left_of_this_one(watched: WatchedPolicy, relative_policy: Policy) -> None:
    watched.takes_ns = 60 * MS
    robot = begin(watched, RTC)
    try:
        assert watched.requests[0][2] is None, "nothing is there to be guided by"
        first = robot.chunks[0]
        began_ns = first.stamp_ns + watched.takes_ns  # the robot stood still until the chunk had come
        now_ns, seen, guidance = replan(robot, 10, MOVED)
        assert guidance is not None
        assert now_ns == began_ns + 10 * PERIOD
        assert not np.array_equal(seen.state, watched.requests[0][1].state)
        expected = relative_policy.actions_to_model(first.chunk.actions[10:], seen.state)
        assert np.abs(guidance.prev_chunk.numpy() - expected).max() < 1e-5, "relative to where the robot is now"
        assert (guidance.inference_delay, guidance.execution_horizon) == (3, 10)
        assert guidance.jacobian == "identity"
        # What passes while the chunk is made, and so the row at the seam, goes on as before.
        onward = robot.chunks[1].chunk.actions[:4] - first.chunk.actions[10:14]
        alone = relative_policy.infer(replace(seen, stamp=None), seed=4).actions[:4] - first.chunk.actions[10:14]
        assert np.abs(onward[:3]).max() < 0.1 * np.abs(alone).max()
    finally:
        robot.loop.stop()


def test_nothing_guides_a_chunk_after_the_motion_before_it_is_over(watched: WatchedPolicy) -> None:
    robot = begin(watched, RTC)
    try:
        assert replan(robot, 10)[2] is not None
        robot.loop.set_prompt("close the lid")
        assert replan(robot, 10)[2] is None, "another task"
        assert replan(robot, 10)[2] is not None
        for end in (
            lambda: (robot.loop.set_enabled(False), robot.loop.tick(), robot.loop.set_enabled(True)),
            lambda: (robot.loop.reset(), robot.loop.tick()),
        ):
            count = len(robot.chunks)
            end()
            robot.now_ns += PERIOD
            robot.sense()
            robot.wait_for_chunks(count + 1)
            assert watched.requests[-1][2] is None, "held in between"
            assert replan(robot, 10)[2] is not None
        count = len(robot.chunks)
        robot.now_ns -= 10_000 * MS
        robot.loop.tick()
        robot.now_ns += PERIOD
        robot.sense()
        robot.wait_for_chunks(count + 1)
        assert watched.requests[-1][2] is None, "the clock was set back"
    finally:
        robot.loop.stop()


@pytest.mark.parametrize("strategy", ["receding", "ensemble"])
def test_the_other_strategies_are_not_guided(watched: WatchedPolicy, strategy: str) -> None:
    robot = begin(watched, replace(SETTINGS, strategy=strategy))
    try:
        assert replan(robot, 10)[2] is None
    finally:
        robot.loop.stop()


def test_an_ensemble_commands_the_average_of_the_chunks_of_one_prompt(watched: WatchedPolicy) -> None:
    robot = begin(watched, replace(SETTINGS, strategy="ensemble", ensemble_decay=0.7))
    try:
        replan(robot, 10, MOVED)
        first, second = (chunk.chunk.actions for chunk in robot.chunks)
        weights = [1, np.exp(-0.7)]
        average = np.average([first[11:40], second[1:30]], axis=0, weights=weights)
        commanded = [play(robot, 1) for _ in range(5)]
        assert np.allclose(commanded, average[:5], atol=1e-6)
        robot.loop.set_prompt("close the lid")
        replan(robot, 5)
        assert np.allclose(play(robot, 1), robot.chunks[-1].chunk.actions[1], atol=1e-6)  # type: ignore[arg-type]
    finally:
        robot.loop.stop()


@pytest.mark.parametrize("strategy", ["receding", "ensemble", "rtc"])
def test_a_slow_machine_asks_early_and_its_rows_do_not_run_out(watched: WatchedPolicy, strategy: str) -> None:
    robot = begin(watched, replace(SETTINGS, strategy=strategy, replan_steps=1000))
    watched.gate = gate = threading.Semaphore(0)

    def chunk_of_15_rows(asked_after: int) -> None:
        """The next chunk, which takes 300 ms, during which the robot goes on."""
        chunks, requests, began_ns = len(robot.chunks), len(watched.requests), robot.loop._player._chunks[-1].stamp_ns
        play(robot, asked_after - robot.loop._player.rows_played(robot.now_ns))
        robot.until(lambda: len(watched.requests) > requests)
        assert watched.requests[-1][0] - began_ns == asked_after * PERIOD
        play(robot, 15)
        gate.release()
        robot.wait_for_chunks(chunks + 1)

    try:
        for _ in range(2):
            chunk_of_15_rows(asked_after=47)  # 3 rows are left for the frames to come, the rest is not known yet
        underruns = robot.loop.state().underruns
        assert underruns == 2 * (47 + 15 - 50 + 1)
        for _ in range(4):
            chunk_of_15_rows(asked_after=32)
        assert robot.loop.state().underruns == underruns
        guidance = watched.requests[-1][2]
        assert (guidance is not None) == (strategy == "rtc")
        if guidance is not None:
            assert (guidance.inference_delay, guidance.execution_horizon) == (15, 30), "fixed, then as long to fade"
    finally:
        gate.release(10)
        robot.loop.stop()


def test_commands_come_at_their_own_rate(watched: WatchedPolicy) -> None:
    robot = watched.robot = Robot(watched, SETTINGS, replace(UNLIMITED, command_hz=100.0))  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    try:
        robot.wait_for_chunks(1)
        rows = robot.chunks[0].chunk.actions
        robot.now_ns += PERIOD + PERIOD // 2
        setpoints = robot.loop.tick()
        assert setpoints is not None
        assert len(setpoints.rows) == 20, "0.2 s"
        assert np.allclose(setpoints.rows[0::2], rows[1:11], atol=1e-6)
        assert np.allclose(setpoints.rows[1::2], (rows[1:11] + rows[2:12]) / 2, atol=1e-6)
        play(robot, 9)
        robot.wait_for_chunks(2)
        assert watched.requests[1][0] - watched.requests[0][0] <= 11 * PERIOD, "replan_steps counts rows, not commands"
    finally:
        robot.loop.stop()


def test_a_chunk_that_comes_too_late_is_not_played(watched: WatchedPolicy) -> None:
    robot = begin(watched, SETTINGS)
    try:
        watched.takes_ns = 1100 * MS
        watched.then_ns = 0
        play(robot, 10)
        robot.wait_for_chunks(2)
        assert len(watched.requests) == 3, "one came when all its rows had passed, and the next was asked for at once"
        assert robot.chunks[1].stamp_ns == robot.now_ns
        assert np.allclose(play(robot, 1), robot.chunks[1].chunk.actions[1], atol=1e-6)  # type: ignore[arg-type]
        replan(robot, 9)
        assert robot.loop.state().underruns == 0, "one outlier makes no slow machine"
    finally:
        robot.loop.stop()
