"""Topic to chunk: how long after a robot has published what it sees is the action chunk for it there?

    source ./env.sh
    python benchmarks/topic_to_chunk.py --checkpoint DIR

Three processes talk over DDS, as on a robot: policy_node as `ros2 run` starts it, a stand-in for the robot, which
publishes a set of random camera images (rgb8, of the sizes in the robot's profile) and joint states --rate times a
second, and this one, which listens to ~/action_chunk. The node commands nothing, and nobody outside this machine hears
of it. A chunk belongs to the set whose stamp it carries; a set that the node inferred from twice counts once, with its
first chunk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pi05_ros.errors import Pi05Error
from pi05_ros.policy.profile import RobotProfile, config_folder, load_profile
from pi05_ros.tools.child_processes import ChildProcesses
from pi05_ros.tools.command_line import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rclpy.executors import Executor
    from rclpy.node import Node

PROMPT = "pick up the cube and hand it over"
NODE = "/policy_node"
DISCOVERY = 30.0  # s, to import and to be found
ENDINGS = 2.0  # s, for the chunks of the last sets
LOG_LINES = 20
MS = 1e6  # ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="see make_checkpoint")
    parser.add_argument(
        "--robot",
        default="aloha_ros2",
        help="robot profile, by name or path (default: aloha_ros2, three cameras of 640x480)",
    )
    parser.add_argument("--rate", type=float, default=30.0, metavar="HZ", help="sets a second (default: 30)")
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured (default: 20)")
    parser.add_argument("--warm-up", type=float, default=3.0, metavar="SECONDS", help="before that (default: 3)")
    parser.add_argument(
        "--replan-steps",
        type=int,
        default=1,
        metavar="N",
        help="rows of a chunk that are played before the next is inferred; 1 keeps the node busy (default: 1)",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:<index> or cpu (default: auto)")
    parser.add_argument("--precision", default="openpi", help="the node's parameter of that name (default: openpi)")
    parser.add_argument("--compile-mode", default="graphs", help="the node's parameter of that name (default: graphs)")
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS", help="for the node to load (default: 300)"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to a JSON file")
    run(parser, measure)


def measure(options: argparse.Namespace) -> None:
    profile = load_profile(options.robot)
    if compressed := [camera.name for camera in profile.cameras if camera.topic and camera.transport != "raw"]:
        raise Pi05Error(f"--robot: expected raw images; {profile.name} has compressed ones: {', '.join(compressed)}.")
    if options.rate <= 0 or options.seconds <= 0:
        raise Pi05Error(f"--rate and --seconds: expected more than 0, got {options.rate:g} and {options.seconds:g}.")
    keep_to_ourselves()
    with tempfile.TemporaryDirectory(prefix="pi05_topic_to_chunk_") as scratch, listening() as listener:
        log, robot_file = Path(scratch) / "policy_node.log", unlimited(options.robot, Path(scratch))
        with ChildProcesses(_node_command(options, robot_file), log) as node, _robot(profile, options.rate) as robot:
            try:
                listener.activate(node, options.patience)
                listener.listen(node, options.warm_up)
                began = time.time_ns()
                listener.listen(node, options.seconds)
                ended = time.time_ns()
                listener.listen(node, ENDINGS)
            except Pi05Error as error:
                words = "\n".join(f"  {line}" for line in node.last_lines(LOG_LINES))
                raise Pi05Error(f"{error} The node's last words:\n{words}") from error
            sets = [one for one in robot() if began <= one.stamp_ns < ended]
    report(options, profile, match(sets, listener.chunks))


# --- the processes ---


def keep_to_ourselves() -> None:
    """A ROS domain of this machine that no robot shares, and DDS set up as the launch files do."""
    os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 101)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    for name in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"):
        os.environ.setdefault(name, str(config_folder() / "fastdds.xml"))


def unlimited(robot: str, folder: Path) -> Path:
    """The profile, as a file, without limits: random weights ask for what no robot may do, and nobody does it here."""
    path = Path(robot) if robot.endswith((".yaml", ".yml")) else config_folder() / "robots" / f"{robot}.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for arm in data["arms"]:
        arm.pop("limits", None)
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(data | {"max_start_error": 6.28}), encoding="utf-8")
    return copy


def _node_command(options: argparse.Namespace, robot_file: Path) -> list[str]:
    parameters = {
        "checkpoint": str(options.checkpoint.resolve()),
        "robot": str(robot_file),
        "prompt": PROMPT,
        "device": options.device,
        "precision": options.precision,
        "compile_mode": options.compile_mode,
        "replan_steps": options.replan_steps,
        "dry_run": True,
        "http_port": 0,
    }
    given = [word for name, value in parameters.items() for word in ("-p", f"{name}:={json.dumps(value)}")]
    return [sys.executable, "-m", "pi05_ros.tools.policy_node", "--ros-args", *given]


@dataclass(frozen=True)
class Published:
    """A set of messages of one stamp; published_ns: when the last of them was handed to DDS. System time."""

    stamp_ns: int
    published_ns: int


@contextmanager
def _robot(profile: RobotProfile, rate: float) -> Iterator[Callable[[], list[Published]]]:
    """The stand-in, publishing. The function that is given ends it and returns what it has published."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    stop = context.Event()
    process = context.Process(target=publish_sets, args=(profile, rate, stop, theirs), daemon=True)
    process.start()

    def finish() -> list[Published]:
        stop.set()
        return [Published(*one) for one in ours.recv()] if ours.poll(DISCOVERY) else []

    try:
        yield finish
    finally:
        stop.set()
        process.join(5.0)
        process.kill()


def publish_sets(profile: RobotProfile, rate: float, stop: Event, results: Connection) -> None:
    """Publish a set every 1 / rate seconds until told to stop; then send (stamp_ns, published_ns) of each."""
    import rclpy
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import Image, JointState

    from pi05_ros.ros.conversions import to_time

    rclpy.init()
    node = rclpy.create_node("robot")
    seen = [camera for camera in profile.cameras if camera.topic]
    cameras = [node.create_publisher(Image, camera.topic, qos_profile_sensor_data) for camera in seen]
    joints = joints_of(profile)
    arms = [node.create_publisher(JointState, topic, qos_profile_sensor_data) for topic in joints]
    generator = np.random.default_rng(0)
    sent = []
    due = time.monotonic()
    while not stop.wait(max(due - time.monotonic(), 0.0)):
        due += 1.0 / rate
        states = [JointState(name=list(one), position=list(one.values())) for one in joints.values()]
        images = [random_image(Image, generator, camera.height, camera.width) for camera in seen]
        stamp_ns = time.time_ns()
        for publisher, message in zip(arms + cameras, states + images, strict=True):
            message.header.stamp = to_time(stamp_ns)
            publisher.publish(message)
        sent.append((stamp_ns, time.time_ns()))
    rclpy.shutdown()
    results.send(sent)


def random_image(kind: Any, generator: np.random.Generator, height: int, width: int) -> Any:
    pixels = array("B", generator.bytes(3 * width * height))  # of this type rclpy does not check every value
    return kind(height=height, width=width, encoding="rgb8", step=3 * width, data=pixels)


def joints_of(profile: RobotProfile) -> dict[str, dict[str, float]]:
    """By joint state topic, joint names and positions: arms at zero, grippers half open."""
    found: dict[str, dict[str, float]] = {}
    for arm in profile.arms:
        positions = found.setdefault(arm.state_topic or "", {})
        positions.update(dict.fromkeys(arm.joints, 0.0))
        if arm.gripper:
            positions[arm.gripper.joint] = (arm.gripper.state_at_0 + arm.gripper.state_at_1) / 2
    return found


@contextmanager
def listening() -> Iterator[Listener]:
    try:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.signals import SignalHandlerOptions
    except ModuleNotFoundError as error:
        raise Pi05Error(f"This needs ROS 2 ({error}): source its setup.bash first, or ./env.sh.") from error
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node, executor = rclpy.create_node("listener"), SingleThreadedExecutor()
    executor.add_node(node)
    try:
        yield Listener(node, executor)
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown()


@dataclass
class Listener:
    """Brings the node up, and keeps its chunks with the time at which each came (ns, system time)."""

    node: Node
    executor: Executor
    chunks: list[tuple[int, Any]] = field(default_factory=list)
    state: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        from pi05_ros.msg import ActionChunk, PolicyStatus
        from pi05_ros.ros.status import LATCHED_QOS

        self.node.create_subscription(ActionChunk, f"{NODE}/action_chunk", self._on_chunk, 10)
        self.node.create_subscription(PolicyStatus, f"{NODE}/status", self._on_status, LATCHED_QOS)

    def _on_chunk(self, message: Any) -> None:
        self.chunks.append((time.time_ns(), message))

    def _on_status(self, message: Any) -> None:
        self.state, self.reason = message.state, message.reason

    def activate(self, process: ChildProcesses, patience: float) -> None:
        """Returns after the first chunk."""
        from lifecycle_msgs.msg import Transition
        from lifecycle_msgs.srv import ChangeState

        from pi05_ros.msg import PolicyStatus

        done_with = {
            Transition.TRANSITION_CONFIGURE: {PolicyStatus.INACTIVE},
            Transition.TRANSITION_ACTIVATE: {PolicyStatus.WAITING, PolicyStatus.RUNNING},
        }
        client = self.node.create_client(ChangeState, f"{NODE}/change_state")
        self._wait(process, client.service_is_ready, DISCOVERY, "the node did not come up")
        for number, states in done_with.items():
            answer = client.call_async(ChangeState.Request(transition=Transition(id=number)))
            # A server that has not yet discovered this client drops its answer, so the state counts as well.
            self._wait(
                process,
                lambda answer=answer, states=states: answer.done() or self.state in states,
                patience,
                f"the node did not answer transition {number}",
            )
            if answer.done() and not answer.result().success:
                self.listen(process, 1.5)  # the reason may come after the answer
                raise Pi05Error(f"The node refused transition {number}: {self.reason}")
        self._wait(process, lambda: bool(self.chunks), patience, "no chunk came")

    def listen(self, process: ChildProcesses, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            process.check_alive()
            self.executor.spin_once(timeout_sec=min(left, 0.2))

    def _wait(self, process: ChildProcesses, done: Callable[[], bool], patience: float, failure: str) -> None:
        deadline = time.monotonic() + patience
        while not done():
            process.check_alive()
            if time.monotonic() > deadline:
                raise Pi05Error(f"Within {patience:g} s {failure}; its status: {self.reason or 'none'}.")
            self.executor.spin_once(timeout_sec=0.2)


# --- what came of it ---


@dataclass(frozen=True)
class Answer:
    """One set's first chunk. Milliseconds.

    from_stamp, from_last: from the set's stamp, and from the publication of its last message, to the chunk's receipt.
    waited: from the publication of the last message until the node began with it; negative if it did not wait for it.
    engine: the chunk's own total_ms, from submission to the finished chunk.
    """

    from_stamp: float
    from_last: float
    waited: float
    engine: float

    @property
    def overhead(self) -> float:
        """What is not the engine's: transport, waiting, assembly, postprocessing."""
        return self.from_last - self.engine


@dataclass(frozen=True)
class Found:
    """Answers in order of time, sets that were published, and chunks of sets that had one already."""

    answers: list[Answer]
    sets: int
    repeats: int


def match(sets: Sequence[Published], chunks: Sequence[tuple[int, Any]]) -> Found:
    """Chunks, each with the time of its receipt in ns, to the sets that they were inferred from."""
    from pi05_ros.ros.conversions import to_nanoseconds

    answers: dict[int, Answer] = {}
    repeats = 0
    published = {one.stamp_ns: one.published_ns for one in sets}
    for received_ns, chunk in chunks:
        stamp_ns = to_nanoseconds(chunk.header.stamp)
        if stamp_ns not in published:
            continue
        if stamp_ns in answers:
            repeats += 1
            continue
        last_ns = published[stamp_ns]
        answers[stamp_ns] = Answer(
            from_stamp=(received_ns - stamp_ns) / MS,
            from_last=(received_ns - last_ns) / MS,
            waited=chunk.observation_age_ms - (last_ns - stamp_ns) / MS,
            engine=chunk.total_ms,
        )
    return Found(list(answers.values()), len(sets), repeats)


def report(options: argparse.Namespace, profile: RobotProfile, found: Found) -> None:
    """Print the table; write the JSON file. Raises Pi05Error if no set had a chunk."""
    from pi05_ros.policy.loading import resolve_device
    from pi05_ros.tools.benchmark_table import draw, environment, rounded

    if not found.answers:
        raise Pi05Error(f"None of the {found.sets} sets that were published had a chunk.")
    rows = {
        "set's stamp to chunk": [one.from_stamp for one in found.answers],
        "last message to chunk": [one.from_last for one in found.answers],
        "last message to inference": [one.waited for one in found.answers],
        "engine": [one.engine for one in found.answers],
        "last message to chunk, without engine": [one.overhead for one in found.answers],
    }
    table = [["ms", "median", "p95", "n"]]
    table += [
        [name, f"{np.median(values):.2f}", f"{np.percentile(values, 95):.2f}", str(len(values))]
        for name, values in rows.items()
    ]
    versions = environment(resolve_device(options.device))
    cameras = ", ".join(f"{camera.name} {camera.width}x{camera.height}" for camera in profile.cameras if camera.topic)
    setting = (
        f"{options.checkpoint.name}, {options.precision}, {options.compile_mode}, on {profile.name} ({cameras}), "
        f"{options.rate:g} sets a second, replan_steps {options.replan_steps}: {found.sets} sets, {len(found.answers)} "
        f"with a chunk, {found.repeats} more chunks of the same sets."
    )
    print("\n".join(f"{'- ' if options.markdown else ''}{name}: {value}" for name, value in versions.items()))
    print(f"\n{setting}\n\n{draw(table, options.markdown)}")
    if options.json is not None:
        content = {"environment": versions, "setting": setting, "ms": rows}
        options.json.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
