"""The loop with a real (tiny) policy and a clock that the test moves: what is commanded, and what is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from robot.still_robot import CAMERAS, MS, NAMES, PERIOD, POSE, SETTINGS, Robot, play


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = make_checkpoint("tiny", tmp_path_factory.mktemp("loop") / "tiny")
    with Policy.from_checkpoint(folder, "cpu", "float32", "aloha_sim", compile_mode="plain") as policy:
        yield policy


@pytest.fixture
def robot(policy: Policy) -> Iterator[Robot]:
    robot = Robot(policy)
    yield robot
    robot.loop.stop()


def test_a_chunk_is_what_the_policy_says_and_is_played_from_its_stamp(policy: Policy, robot: Robot) -> None:
    robot.sense()
    stamp = robot.now_ns
    robot.loop.start()
    robot.wait_for_chunks(1)
    chunk = robot.chunks[0]
    images = dict.fromkeys(CAMERAS, robot.image)
    state = np.array(([*POSE[:6], 0.5]) * 2, np.float32)
    expected = policy.infer(Observation(images, state, "pick up the cube"), seed=4)
    assert np.abs(chunk.chunk.actions - expected.actions).max() < 1e-5
    assert (chunk.stamp_ns, chunk.sequence, chunk.prompt) == (stamp, 1, "pick up the cube")
    robot.now_ns += 3 * PERIOD
    setpoints = robot.loop.tick()
    assert setpoints is not None
    assert np.allclose(setpoints.rows, chunk.chunk.actions[3:13]), "0.2 s of rows, from the one that is due"
    assert robot.loop.state().state == "running"


def test_inference_waits_for_the_whole_set_of_frames(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi05_ros.robot.loop.IDLE_WAIT", 60.0)  # no looks at the inputs in between
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    for count in (2, 3):  # a chunk for each set that comes when one is due
        robot.now_ns += 10 * PERIOD
        for camera in CAMERAS:
            robot.assembler.add_image(camera, robot.now_ns, robot.image)
            for arm in robot.profile.arms:
                robot.assembler.add_joint_state(arm.state_topic or "", robot.now_ns, NAMES, POSE)
            robot.loop.notify()
            threading.Event().wait(0.05)  # the inference thread has had its chance
        robot.wait_for_chunks(count)
        assert robot.chunks[-1].stamp_ns == robot.now_ns


def test_the_next_chunk_is_asked_for_in_time(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    for step in range(1, 25):
        robot.now_ns += PERIOD
        robot.sense()
        robot.loop.tick()
        if step == 10:
            robot.wait_for_chunks(2)
    robot.wait_for_chunks(3)
    first, second = robot.chunks[0].stamp_ns, robot.chunks[1].stamp_ns
    assert second - first == 10 * PERIOD
    assert robot.loop.state().underruns == 0


def test_replan_steps_beyond_the_chunk_mean_just_before_its_end(policy: Policy) -> None:
    robot = Robot(policy, replace(SETTINGS, replan_steps=1000))
    robot.sense()
    robot.loop.start()
    try:
        robot.wait_for_chunks(1)
        play(robot, 46)
        threading.Event().wait(0.1)  # the inference thread has had its chance
        assert len(robot.chunks) == 1
        play(robot, 1)  # what is left is what a set of frames may take to come
        robot.wait_for_chunks(2)
    finally:
        robot.loop.stop()


class SlowPolicy:
    """A policy whose every inference takes three seconds of the robot's time, longer than a chunk."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.horizon = policy, policy.horizon
        self.robot: Robot | None = None
        self.requests = 0

    def submit(self, *arguments: object, **options: object) -> object:
        assert self.robot is not None
        self.robot.now_ns += 3000 * MS
        self.requests += 1
        return self.policy.submit(*arguments, **options)  # type: ignore[arg-type]


def test_a_machine_slower_than_its_chunks_stands_to_think_and_then_acts(policy: Policy) -> None:
    slow = SlowPolicy(policy)
    robot = slow.robot = Robot(slow)  # type: ignore[arg-type]
    robot.sense()
    robot.loop.start()
    try:
        for count in (1, 2, 3):
            robot.wait_for_chunks(count)
            rows = robot.chunks[-1].chunk.actions
            robot.sense()
            assert np.allclose(play(robot, 1), rows[1]), "from its first row on: the robot had not moved"  # type: ignore[arg-type]
            assert np.allclose(play(robot, 30), rows[31])  # type: ignore[arg-type]
            threading.Event().wait(0.1)  # the inference thread has had its chance
            assert slow.requests == count, "no chunk is asked for that would come too late"
            assert np.allclose(play(robot, 18), rows[49])  # type: ignore[arg-type]
            robot.now_ns += PERIOD
            robot.loop.notify()
            threading.Event().wait(0.1)
            assert slow.requests == count, "the frames at hand still show the arm moving"
            play(robot, 1)
    finally:
        robot.loop.stop()


@pytest.mark.parametrize("stream", ["camera", "joints"])
def test_a_stream_that_stops_holds_the_robot_once(robot: Robot, stream: str) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    assert robot.loop.tick() is not None
    last = robot.loop.tick()
    moved = [value + 0.01 for value in POSE]
    for _ in range(60):
        robot.now_ns += PERIOD
        if stream == "camera":
            robot.sense(cameras=CAMERAS[1:], pose=moved)
        setpoints = robot.loop.tick()
        if "stale" in robot.loop.state().reason:
            break
        last = setpoints
    assert robot.loop.state().state == "waiting"
    assert setpoints is not None
    assert last is not None
    target = setpoints.rows[0]
    arms = [index for index in range(14) if index not in (6, 13)]
    expected = np.array(moved[:6] * 2) if stream == "camera" else last.rows[0][arms]
    assert np.allclose(target[arms], expected, atol=1e-6), (
        "where it was measured; if that is what failed, the last command"
    )
    assert np.allclose(target[[6, 13]], last.rows[0][[6, 13]]), "the grippers keep their grip"
    robot.now_ns += PERIOD
    assert robot.loop.tick() is None, "latched once, not re-measured"
    chunks = len(robot.chunks)
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(chunks + 1)
    assert robot.loop.tick() is not None, "it recovers by itself"


def test_a_frame_that_does_not_decode_does_not_stop_the_arm(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.now_ns += 12 * PERIOD
    robot.sense(cameras=CAMERAS[:2])
    torn = SimpleNamespace(format="jpeg", data=b"\xff\xd8 torn")
    robot.assembler.add_image(CAMERAS[2], robot.now_ns, torn)
    robot.loop.notify()
    robot.until(lambda: robot.loop.state().corrupt_images == 1)
    assert robot.loop.state().state == "running", "the arm moves on, and the reason is said"
    assert robot.loop.state().reason
    setpoints = robot.loop.tick()
    assert setpoints is not None
    assert len(setpoints.rows) == 10, "the chunk goes on"
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(2)
    assert robot.loop.state().state == "running"


def test_disable_holds_at_once_also_during_an_inference(policy: Policy, robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    busy = [policy.submit(Observation({"cam_high": robot.image}, np.zeros(14), "x"), num_steps=300, priority=1000)]
    robot.now_ns += 12 * PERIOD
    robot.sense()  # the next inference is asked for, and waits behind the long one
    robot.until(lambda: busy[0].running() or busy[0].done())
    robot.loop.set_enabled(False)
    setpoints = robot.loop.tick()
    assert setpoints is not None
    assert len(setpoints.rows) == 1
    assert robot.loop.state().state == "disabled"
    busy[0].result(30)
    chunks = len(robot.chunks)
    policy.submit(Observation({"cam_high": robot.image}, np.zeros(14), "x"), priority=-1).result(30)
    for _ in range(60):  # the robot's own request is answered by now, and its thread has time to see it
        robot.now_ns += MS
        robot.sense()
        assert robot.loop.tick() is None
        threading.Event().wait(0.005)
    assert len(robot.chunks) == chunks, "the chunk that was under way is thrown away"
    robot.loop.set_enabled(True)
    robot.sense()
    robot.wait_for_chunks(chunks + 1)
    assert robot.loop.tick() is not None


def test_the_robot_goes_before_every_client(policy: Policy, robot: Robot) -> None:
    done: list[str] = []
    clients = [
        policy.submit(Observation({"cam_high": robot.image}, np.full(14, 0.1 * index), "x"), num_steps=60 + index)
        for index in range(4)
    ]
    for client in clients:
        client.add_done_callback(lambda _: done.append("client"))
    robot.until(clients[0].running)
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    assert len(done) < 3, "it did not wait for those that came earlier"
    for client in clients:
        client.result(30)


def test_nothing_is_commanded_before_the_first_chunk(robot: Robot) -> None:
    robot.loop.start()
    for _ in range(5):
        assert robot.loop.tick() is None
    robot.until(lambda: "no frame yet" in robot.loop.state().reason)
    robot.loop.set_enabled(False)
    assert robot.loop.tick() is None
    robot.loop.stop()
    assert robot.loop.final_hold() is None


def test_stop_then_hold(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.loop.tick()
    robot.loop.stop()
    assert not any(thread.name == "pi05-inference" and thread.is_alive() for thread in threading.enumerate())
    hold = robot.loop.final_hold()
    assert hold is not None
    assert np.allclose(hold.rows[0][:6], POSE[:6], atol=1e-6)
    assert robot.loop.final_hold() is None


def test_without_a_prompt_it_waits_and_a_new_one_counts_from_the_next_chunk(policy: Policy) -> None:
    robot = Robot(policy, prompt="")
    robot.sense()
    robot.loop.start()
    try:
        robot.until(lambda: "no prompt" in robot.loop.state().reason)
        assert robot.loop.tick() is None
        robot.loop.set_prompt("open the drawer")
        robot.sense()
        robot.wait_for_chunks(1)
        assert robot.chunks[0].prompt == "open the drawer"
        robot.loop.set_prompt("close the lid")
        robot.now_ns += 12 * PERIOD
        robot.sense()
        robot.wait_for_chunks(2)
        assert robot.chunks[1].prompt == "close the lid"
        assert not np.array_equal(robot.chunks[0].chunk.actions, robot.chunks[1].chunk.actions)
    finally:
        robot.loop.stop()


def test_a_failing_inference_holds_and_is_tried_again(policy: Policy, robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.loop.tick()
    bias = policy.engine.path.model.action_out_proj.bias
    bias[0] = float("nan")
    try:
        robot.now_ns += 12 * PERIOD
        robot.sense()
        robot.until(lambda: robot.loop.state().state == "error")
        assert "non-finite" in robot.loop.state().reason
        setpoints = robot.loop.tick()
        assert setpoints is not None
        assert np.allclose(setpoints.rows[0][:6], POSE[:6], atol=1e-6)
        assert robot.loop.tick() is None
    finally:
        bias[0] = 0.0
    robot.now_ns += PERIOD
    robot.sense()
    robot.wait_for_chunks(2)
    assert robot.loop.state().state == "running"


def test_refused_observations_are_counted_once(robot: Robot) -> None:
    robot.loop.start()
    for _ in range(10):
        robot.now_ns += PERIOD
        for camera in CAMERAS:
            robot.assembler.add_image(camera, robot.now_ns, robot.image)
        for arm in robot.profile.arms:
            robot.assembler.add_joint_state(arm.state_topic or "", robot.now_ns, NAMES[1:], POSE[1:])
        robot.loop.notify()
        robot.until(lambda: "joint waist is not in" in robot.loop.state().reason)
    assert robot.loop.state().refused_observations == 1
    assert robot.loop.tick() is None


def test_reset_forgets_and_starts_afresh(robot: Robot) -> None:
    robot.sense()
    robot.loop.start()
    robot.wait_for_chunks(1)
    robot.loop.tick()
    robot.loop.reset()
    assert robot.loop.tick() is not None, "held"
    assert robot.loop.tick() is None
    robot.sense()
    robot.wait_for_chunks(2)
    assert not robot.chunks[1].chunk.prefix_cache_hit
