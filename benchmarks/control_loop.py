"""How evenly does the policy node command a robot while it infers, and while clients load its server?

    source ./env.sh
    python benchmarks/control_loop.py --checkpoint DIR

As on a robot: policy_node as `ros2 run` starts it, and a stand-in for the robot, which publishes random camera images
(rgb8, of the sizes in the robot's profile) --camera-hz times a second and joint states --joint-hz times a second. The
node infers as its parameters say, and commands nothing (dry_run). First it has the robot alone, then --clients as well,
who ask its server for chunks without a pause, over all protocols. Ticks of the control thread are the node's own, from
/diagnostics, second by second; jitter is by how much the time between two ticks differs from the period.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from load_clients import PROTOCOLS, Crowd, Server, Task, alone, crowd
from topic_to_chunk import LOG_LINES, NODE, Listener, joints_of, keep_to_ourselves, listening, random_image, unlimited

from pi05_ros.errors import Pi05Error
from pi05_ros.policy.profile import RobotProfile, load_profile
from pi05_ros.tools.child_processes import ChildProcesses
from pi05_ros.tools.command_line import run

PROMPT = "pick up the cube and hand it over"
TASK = f"{NODE[1:]}: control loop"
JITTER_P99_MS = 5.0  # the aim
SECOND = 1_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="see make_checkpoint")
    parser.add_argument("--robot", default="aloha_ros2", help="robot profile, by name or path (default: aloha_ros2)")
    parser.add_argument("--camera-hz", type=float, default=30.0, help="sets of images a second (default: 30)")
    parser.add_argument("--joint-hz", type=float, default=100.0, help="joint states a second (default: 100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: 20)")
    parser.add_argument("--warm-up", type=float, default=6.0, metavar="SECONDS", help="before each (default: 6)")
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="of the server (default: 64)")
    parser.add_argument("--strategy", default="receding", help="the node's parameter of that name (default: receding)")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:<index> or cpu (default: auto)")
    parser.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help="to load (default: 300)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to a JSON file")
    run(parser, measure)


@dataclass
class Row:
    """One measurement. Milliseconds; jitter_p99 and jitter_p50 by second of it, of the 5 s before."""

    name: str
    rate_hz: list[float] = field(default_factory=list)
    jitter_p50: list[float] = field(default_factory=list)
    jitter_p99: list[float] = field(default_factory=list)
    overruns: int = 0
    underruns: int = 0
    chunks: int = 0
    answers: int = 0
    errors: int = 0


class Watch:
    """What the node says of itself while a listener listens."""

    def __init__(self, listener: Listener) -> None:
        from diagnostic_msgs.msg import DiagnosticArray

        from pi05_ros.msg import PolicyStatus
        from pi05_ros.ros.status import LATCHED_QOS

        self._loops: list[dict[str, str]] = []
        self._statuses: list[Any] = []
        listener.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)
        listener.node.create_subscription(PolicyStatus, f"{NODE}/status", self._statuses.append, LATCHED_QOS)

    def _on_diagnostics(self, message: Any) -> None:
        for status in message.status:
            if status.name == TASK and status.values:
                self._loops.append({one.key: one.value for one in status.values})

    def begin(self) -> None:
        del self._loops[:-1], self._statuses[:-1]

    def row(self, name: str) -> Row:
        """Since ``begin``. Raises Pi05Error: nothing was heard."""
        before, *loops = self._loops
        if not loops or len(self._statuses) < 2:
            raise Pi05Error("The node said nothing of its control loop; is diagnostic_msgs of its environment?")
        first, last = self._statuses[0], self._statuses[-1]
        total = "overruns_since_activation"
        return Row(
            name,
            [float(one["rate_hz"]) for one in loops],
            [float(one["jitter_p50_ms"]) for one in loops],
            [float(one["jitter_p99_ms"]) for one in loops],
            int(loops[-1][total]) - int(before[total]),
            last.underruns - first.underruns,
            last.chunks - first.chunks,
        )


def measure(options: argparse.Namespace) -> None:
    profile = load_profile(options.robot)
    if min(options.camera_hz, options.joint_hz, options.seconds) <= 0:
        raise Pi05Error("--camera-hz, --joint-hz and --seconds: expected more than 0.")
    keep_to_ourselves()
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="pi05_control_loop_") as scratch, listening() as listener:
        watch, log = Watch(listener), Path(scratch) / "policy_node.log"
        command = _command(options, unlimited(options.robot, Path(scratch)), port)
        with ChildProcesses(command, log) as node, _streams(profile, options):
            try:
                listener.activate(node, options.patience)
                rows = [_alone(options, listener, watch, node)]
                if options.clients:
                    server = Server(f"http://127.0.0.1:{port}", "", node.pid)
                    rows.append(_crowded(options, listener, watch, node, server))
            except Pi05Error as error:
                words = "\n".join(f"  {line}" for line in node.last_lines(LOG_LINES))
                raise Pi05Error(f"{error} The node's last words:\n{words}") from error
    report(options, profile, rows)


def _alone(options: argparse.Namespace, listener: Listener, watch: Watch, node: ChildProcesses) -> Row:
    listener.listen(node, options.warm_up)
    watch.begin()
    listener.listen(node, options.seconds)
    return watch.row("robot alone")


def _crowded(
    options: argparse.Namespace, listener: Listener, watch: Watch, node: ChildProcesses, server: Server
) -> Row:
    from threading import Thread

    task = Task.of(server)
    expected = alone(server, task, options.clients)
    found: list[Crowd] = []
    seconds = options.warm_up + options.seconds
    thread = Thread(target=lambda: found.append(crowd(server, task, expected, seconds, PROTOCOLS)))
    thread.start()
    listener.listen(node, options.warm_up)
    watch.begin()
    listener.listen(node, options.seconds)
    row = watch.row(f"and {options.clients} clients")
    while thread.is_alive():
        listener.listen(node, 0.5)
    if not found:
        raise Pi05Error("The clients failed; what they wrote stands above.")
    row.answers, row.errors = found[0].total("ms"), found[0].total("errors")
    return row


def _command(options: argparse.Namespace, robot_file: Path, port: int) -> list[str]:
    parameters = {
        "checkpoint": str(options.checkpoint.resolve()),
        "robot": str(robot_file),
        "prompt": PROMPT,
        "device": options.device,
        "strategy": options.strategy,
        "dry_run": True,
        "http_port": port,
    }
    given = [word for name, value in parameters.items() for word in ("-p", f"{name}:={json.dumps(value)}")]
    return [sys.executable, "-m", "pi05_ros.tools.policy_node", "--ros-args", *given]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def _streams(profile: RobotProfile, options: argparse.Namespace) -> Iterator[None]:
    """The stand-in, publishing in two processes: a driver of cameras and one of joints."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes = [
        context.Process(target=publish_images, args=(profile, options.camera_hz, stop), daemon=True),
        context.Process(target=publish_joints, args=(profile, options.joint_hz, stop), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(5.0)
            process.kill()


def publish_images(profile: RobotProfile, rate: float, stop: Event) -> None:
    """A set of images every 1 / rate seconds until told to stop. A few are made beforehand: making them is no work."""
    from sensor_msgs.msg import Image

    generator = np.random.default_rng(0)
    seen = [camera for camera in profile.cameras if camera.topic]
    sets = [[random_image(Image, generator, one.height, one.width) for one in seen] for _ in range(5)]
    _publish("cameras", [(Image, camera.topic) for camera in seen], sets, rate, stop)


def publish_joints(profile: RobotProfile, rate: float, stop: Event) -> None:
    """Joint states every 1 / rate seconds until told to stop."""
    from sensor_msgs.msg import JointState

    joints = joints_of(profile)
    states = [JointState(name=list(one), position=list(one.values())) for one in joints.values()]
    _publish("joints", [(JointState, topic) for topic in joints], [states], rate, stop)


def _publish(name: str, topics: list[tuple[Any, Any]], sets: list[list[Any]], rate: float, stop: Event) -> None:
    import rclpy
    from rclpy.qos import qos_profile_sensor_data

    from pi05_ros.ros.conversions import to_time

    rclpy.init()
    node = rclpy.create_node(name)
    publishers = [node.create_publisher(kind, topic, qos_profile_sensor_data) for kind, topic in topics]
    due, number = time.monotonic(), 0
    while not stop.wait(max(due - time.monotonic(), 0.0)):
        due += 1.0 / rate
        stamp = to_time(time.time_ns())
        for publisher, message in zip(publishers, sets[number % len(sets)], strict=True):
            message.header.stamp = stamp
            publisher.publish(message)
        number += 1
    rclpy.shutdown()


def report(options: argparse.Namespace, profile: RobotProfile, rows: list[Row]) -> None:
    """Print the table and what of the aims was reached; write the JSON file."""
    from pi05_ros.policy.loading import resolve_device
    from pi05_ros.tools.benchmark_table import draw, environment, rounded

    versions = environment(resolve_device(options.device))
    setting = (
        f"{options.checkpoint.name} on {profile.name}, {profile.control_hz:g} Hz, strategy {options.strategy}; images "
        f"{options.camera_hz:g} Hz, joint states {options.joint_hz:g} Hz; {options.seconds:g} s each."
    )
    table = [
        ["", "ticks/s", "jitter p50 ms", "p99 ms", "p99 ms, worst", "late ticks", "underruns", "chunks", "answers"],
        *(
            [
                row.name,
                f"{np.median(row.rate_hz):.2f}",
                f"{np.median(row.jitter_p50):.2f}",
                f"{np.median(row.jitter_p99):.2f}",
                f"{max(row.jitter_p99):.2f}",
                str(row.overruns),
                str(row.underruns),
                str(row.chunks),
                f"{row.answers}" + (f" ({row.errors} errors)" if row.errors else ""),
            ]
            for row in rows
        ),
    ]
    print("\n".join(f"{'- ' if options.markdown else ''}{name}: {value}" for name, value in versions.items()))
    print(f"\n{setting}\n\n{draw(table, options.markdown)}")
    print(
        "\nJitter of the 5 s before each second (median and largest of them); late: more than half a period late; "
        "underrun: a tick that found no row to play."
    )
    for row in rows:
        reached = max(row.jitter_p99) < JITTER_P99_MS and row.underruns == 0
        print(f"{row.name}: p99 under {JITTER_P99_MS:g} ms throughout and no underrun: {'yes' if reached else 'NO'}")
    if options.json is not None:
        content = {"environment": versions, "setting": setting, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
