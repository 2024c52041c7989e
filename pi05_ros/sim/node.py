"""The simulated ALOHA as an ordinary ROS robot: cameras, joint states and /clock out, joint trajectories in.

The simulation is the clock master. Physics, rendering and publishing take turns in one thread, so that simulated time
stands still while a picture is drawn: a slow machine gives a slow but correct episode. Callbacks run in a second
thread and only store what they are told; one lock keeps the two apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from builtin_interfaces.msg import Time
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool, Float32
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.sim.backend import SimulationError
from pi05_ros.sim.scene import ARMS, CAMERAS, COMMAND_NAMES, HOME_POSE, JOINT_NAMES, AlohaScene
from pi05_ros.sim.trajectory import TrajectoryError, TrajectoryFollower

NANOSECONDS = 1_000_000_000
REPORT_PERIOD = 1 * NANOSECONDS
LOG_PERIOD = 5 * NANOSECONDS
# A pause between two steps overshoots by some 0.1 ms; so much lag is made up for, the time of a picture is not. Else
# the steps after a picture would run in a burst, and whoever listens would seem slow.
FORGIVEN_LAG = 0.01

# Drivers offer reliable (REP-2003), so that any subscriber connects, best effort or not. Of pictures only the newest
# matters; joint states are small, and a recorder wants all of them.
IMAGE_QOS = QoSProfile(depth=1)
STATE_QOS = QoSProfile(depth=10)
COMMAND_QOS = QoSProfile(depth=1)
CLOCK_QOS = QoSProfile(depth=10)
LATCHED_QOS = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@dataclass(frozen=True)
class SimSettings:
    """The node's parameters; all are read once, at start."""

    camera_width: int
    camera_height: int
    camera_rate: float
    joint_rate: float
    max_real_time_factor: float
    seed: int
    episode_length: float
    render_quality: Literal["full", "fast"]


# name: default, lowest, highest, description.
PARAMETERS: dict[str, tuple[Any, Any, Any, str]] = {
    # A raw 640 x 480 image is larger than the shared memory segment that Fast DDS has by default, and then gets lost;
    # 320 x 240 works with any middleware as it comes, and the policy reduces images to 224 x 168 anyway.
    "camera_width": (320, 16, 3840, "Width of all camera images in pixels."),
    "camera_height": (240, 16, 2160, "Height of all camera images in pixels."),
    "camera_rate": (10.0, 0.1, 100.0, "Images of each camera per simulated second."),
    "joint_rate": (50.0, 1.0, 500.0, "Joint states of each arm per simulated second."),
    "max_real_time_factor": (1.0, 0.0, 1000.0, "Simulated seconds per second at most; 0: as fast as the machine can."),
    "seed": (0, 0, 2**32 - 1, "Seed of the first episode's cube position; every reset adds one."),
    "episode_length": (0.0, 0.0, 86400.0, "Simulated seconds of an episode; 0: only ~/reset ends it."),
    "render_quality": ("full", None, None, "full: as the scene asks; fast: coarse shadows, no antialiasing."),
}


class AlohaSim(Node):
    """See the module. Topics are in ``config/robots/aloha_sim.yaml``; beside them are ~/reward and ~/success (on
    change and once a simulated second), ~/real_time_factor, and the service ~/reset.

    Raises SimulationError: a parameter is wrong, or the scene cannot be loaded or rendered.
    """

    def __init__(self) -> None:
        super().__init__("aloha_sim")
        self._settings = _declare_parameters(self)
        self._scene = AlohaScene(self._settings.seed, self._settings.render_quality)
        self._followers = {arm: TrajectoryFollower(COMMAND_NAMES, HOME_POSE) for arm in ARMS}
        self._lock = threading.Lock()
        self._stopped = False  # a flag, not an Event: setting an Event in a signal handler can deadlock

        self._timestep = round(self._scene.timestep * NANOSECONDS)
        self._now = 0  # simulated nanoseconds since start; goes on over resets, as no listener likes time to jump back
        self._episode = 0
        self._episode_start = 0
        self._best_reward = 0
        self._told_reward: int | None = None

        self._clock_publisher = self.create_publisher(Clock, "/clock", CLOCK_QOS)
        self._image_publishers = {
            camera: self.create_publisher(Image, f"~/{camera}/image_raw", IMAGE_QOS) for camera in CAMERAS
        }
        self._state_publishers = {
            arm: self.create_publisher(JointState, f"~/{arm}/joint_states", STATE_QOS) for arm in ARMS
        }
        self._reward_publisher = self.create_publisher(Float32, "~/reward", LATCHED_QOS)
        self._success_publisher = self.create_publisher(Bool, "~/success", LATCHED_QOS)
        self._speed_publisher = self.create_publisher(Float32, "~/real_time_factor", LATCHED_QOS)
        for arm in ARMS:
            self.create_subscription(
                JointTrajectory, f"~/{arm}/joint_trajectory", self._command_callback(arm), COMMAND_QOS
            )
        self.create_service(Trigger, "~/reset", self._on_reset)

    # The simulation's thread.

    def run(self) -> None:
        """Simulate until ``stop`` is called. Renders, so it has to be called in one thread only."""
        settings = self._settings
        state_period = round(NANOSECONDS / settings.joint_rate)
        image_period = round(NANOSECONDS / settings.camera_rate)
        deadline = report_time = log_time = time.monotonic()
        self.get_logger().info(
            f"Simulating in steps of {self._timestep / 1e6:g} ms; three {settings.camera_width} x "
            f"{settings.camera_height} cameras at {settings.camera_rate:g} Hz."
        )
        try:
            while not self._stopped:
                self._step()
                if self._is_due(state_period):
                    self._publish_joint_states()
                if self._is_due(image_period):
                    self._publish_images()
                # The clock ticks last: whoever acts on a tick finds all that was seen and measured at that time.
                self._clock_publisher.publish(Clock(clock=self._stamp()))
                self._publish_reward(self._is_due(REPORT_PERIOD))
                if self._is_due(REPORT_PERIOD):
                    now = time.monotonic()
                    self._speed_publisher.publish(Float32(data=REPORT_PERIOD / NANOSECONDS / (now - report_time)))
                    report_time = now
                if self._is_due(LOG_PERIOD):
                    now = time.monotonic()
                    self._log_progress(LOG_PERIOD / NANOSECONDS / (now - log_time))
                    log_time = now
                if settings.max_real_time_factor > 0:
                    pause = self._timestep / NANOSECONDS / settings.max_real_time_factor
                    deadline = max(deadline, time.monotonic() - FORGIVEN_LAG) + pause
                    while (left := deadline - time.monotonic()) > 0 and not self._stopped:
                        time.sleep(min(left, 0.1))
        finally:
            self._scene.close()

    def stop(self) -> None:
        """Make ``run`` return after the present step. May be called from any thread and from a signal handler."""
        self._stopped = True

    def _is_due(self, period: int) -> bool:
        """Whether the present step is the first one at or after a multiple of the period (in nanoseconds)."""
        return self._now // period != (self._now - self._timestep) // period

    def _step(self) -> None:
        with self._lock:
            if 0 < self._settings.episode_length <= self._elapsed:
                self._begin_next_episode()
            seconds = self._now / NANOSECONDS
            self._scene.set_targets(np.concatenate([self._followers[arm].sample(seconds) for arm in ARMS]))
            self._scene.step()
            self._now += self._timestep

    def _stamp(self) -> Time:
        return Time(sec=self._now // NANOSECONDS, nanosec=self._now % NANOSECONDS)

    def _publish_joint_states(self) -> None:
        for arm, publisher in self._state_publishers.items():
            message = JointState(name=list(JOINT_NAMES))
            message.header.stamp = self._stamp()
            with self._lock:
                message.position = self._scene.positions(arm).tolist()
                message.velocity = self._scene.velocities(arm).tolist()
            publisher.publish(message)

    def _publish_images(self) -> None:
        height, width = self._settings.camera_height, self._settings.camera_width
        with self._lock:  # of one moment, all of them
            images = {camera: self._scene.render(camera, height, width) for camera in CAMERAS}
        for camera, image in images.items():
            message = Image(height=height, width=width, encoding="rgb8", step=width * 3)
            message.header.stamp = self._stamp()
            message.header.frame_id = camera
            message.data = image.tobytes()  # not the array: rclpy would copy that byte by byte
            self._image_publishers[camera].publish(message)

    def _publish_reward(self, anyway: bool) -> None:
        with self._lock:
            reward, success = self._scene.reward, self._scene.success
            first_success = success and self._best_reward < reward
            self._best_reward = max(self._best_reward, reward)
        if first_success:
            self.get_logger().info(f"Episode {self._episode}: the cube was handed over after {self._elapsed:.1f} s.")
        if anyway or reward != self._told_reward:
            self._reward_publisher.publish(Float32(data=float(reward)))
            self._success_publisher.publish(Bool(data=success))
            self._told_reward = reward

    def _log_progress(self, speed: float) -> None:
        self.get_logger().info(
            f"Episode {self._episode}, {self._elapsed:.1f} s: best reward {self._best_reward}, "
            f"real-time factor {speed:.2f}."
        )

    @property
    def _seed(self) -> int:
        return (self._settings.seed + self._episode) % 2**32

    @property
    def _elapsed(self) -> float:
        """Simulated seconds of this episode."""
        return (self._now - self._episode_start) / NANOSECONDS

    def _begin_next_episode(self) -> None:
        """With the lock held."""
        self.get_logger().info(
            f"Episode {self._episode} ended after {self._elapsed:.1f} s with a best reward of {self._best_reward}."
        )
        self._episode += 1
        self._episode_start = self._now
        self._best_reward = 0
        self._scene.reset(self._seed)
        for follower in self._followers.values():
            follower.reset(HOME_POSE)

    # The callbacks' thread.

    def _command_callback(self, arm: str) -> Callable[[JointTrajectory], None]:
        def on_trajectory(message: JointTrajectory) -> None:
            start = _seconds(message.header.stamp)
            try:
                with self._lock:
                    self._followers[arm].follow(
                        message.joint_names,
                        [_seconds(point.time_from_start) for point in message.points],
                        [point.positions for point in message.points],
                        start=start or None,  # zero means at once, as for a joint_trajectory_controller
                        now=self._now / NANOSECONDS,
                    )
            except TrajectoryError as error:
                self.get_logger().error(f"Trajectory of the {arm} arm refused: {error}")

        return on_trajectory

    def _on_reset(self, _request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._lock:
            self._begin_next_episode()
            response.message = f"Episode {self._episode} began, seed {self._seed}."
        response.success = True
        return response


def _seconds(stamp: Any) -> float:
    """builtin_interfaces Time or Duration -> seconds."""
    return stamp.sec + stamp.nanosec / NANOSECONDS


def _declare_parameters(node: Node) -> SimSettings:
    values: dict[str, Any] = {}
    for name, (default, low, high, description) in PARAMETERS.items():
        descriptor = ParameterDescriptor(description=description, read_only=True)
        if isinstance(default, int):
            descriptor.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
        elif isinstance(default, float):
            descriptor.floating_point_range = [FloatingPointRange(from_value=low, to_value=high, step=0.0)]
        values[name] = node.declare_parameter(name, default, descriptor).value
    if values["render_quality"] not in ("full", "fast"):
        raise SimulationError(f"render_quality: expected full or fast, got {values['render_quality']!r}.")
    return SimSettings(**{field.name: values[field.name] for field in fields(SimSettings)})
