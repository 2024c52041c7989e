"""A robot that stands still, for tests of the loop: its streams, and a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pi05_ros import Policy
from pi05_ros.policy import RobotProfile, load_profile
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.robot.loop import LoopChunk, LoopSettings, PolicyLoop

MS = 1_000_000
PERIOD = 20 * MS
CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
NAMES = ["waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "left_finger"]
POSE = [0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.03822]  # the finger half open
SETTINGS = LoopSettings(seed=4, replan_steps=10)
SIM = load_profile("aloha_sim")
# A network that means nothing jumps about; most tests want to see its rows as it says them.
UNLIMITED = replace(SIM, arms=tuple(replace(arm, limits=None) for arm in SIM.arms))


class Robot:
    """Streams of a robot that stands still, a clock, and the loop between them."""

    def __init__(
        self,
        policy: Policy,
        settings: LoopSettings = SETTINGS,
        profile: RobotProfile = UNLIMITED,
        **options: object,
    ) -> None:
        self.profile = profile
        self.now_ns = 1000 * MS
        self.assembler = ObservationAssembler(self.profile)
        self.chunks: list[LoopChunk] = []
        self.came = threading.Condition()
        self.image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        self.loop = PolicyLoop(
            policy,
            self.profile,
            self.assembler,
            lambda: self.now_ns,
            self.on_chunk,
            settings,
            **{"prompt": "pick up the cube", **options},  # type: ignore[arg-type]
        )

    def on_chunk(self, chunk: LoopChunk) -> None:
        with self.came:
            self.chunks.append(chunk)
            self.came.notify_all()

    def sense(self, cameras: tuple[str, ...] = CAMERAS, pose: list[float] | None = None) -> None:
        for camera in cameras:
            self.assembler.add_image(camera, self.now_ns, self.image)
        for arm in self.profile.arms:
            self.assembler.add_joint_state(arm.state_topic or "", self.now_ns, NAMES, pose or POSE)
        self.loop.notify()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the inference thread does."""
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"it did not come about; state {self.loop.state()}")

    def wait_for_chunks(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.chunks) >= count, 20), self.loop.state()


def play(robot: Robot, steps: int) -> np.ndarray | None:
    """So many periods of the control thread with all streams alive; the row that was commanded last."""
    for _ in range(steps):
        robot.now_ns += PERIOD
        robot.sense()
        setpoints = robot.loop.tick()
    return None if setpoints is None else setpoints.rows[0]
