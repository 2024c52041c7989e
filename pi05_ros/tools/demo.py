"""demo: one short episode of the policy on the simulated ALOHA, told chunk by chunk, with a report folder.

Without --checkpoint it makes one with random weights, so that nothing has to be downloaded; the robot then moves
without meaning, but all else is what a trained policy would go through.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi05_ros import __version__
from pi05_ros.errors import Pi05Error
from pi05_ros.tools.child_processes import ChildProcesses
from pi05_ros.tools.command_line import run

if TYPE_CHECKING:
    from rclpy.executors import Executor

    from pi05_ros.sim.recording import Recording

POLICY_NODE = "/policy_node"
LOG_LINES = 20  # of the launched nodes, shown when something went wrong
DISCOVERY = 1.0  # s; what is already there answers sooner
UNTRAINED = "The checkpoint is untrained (random weights): the motion is meaningless, all else is real."


class DemoError(Pi05Error):
    """The demo did not come to its end."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default="demo_report", metavar="DIR", help="report folder")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the episode, simulated")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="of your own, in place of random weights")
    parser.add_argument("--prompt", default="Transfer cube", help="what the robot is told to do")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and of the cube's place")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds to wait for the first chunk")
    run(parser, demonstrate)


def demonstrate(options: argparse.Namespace) -> None:
    """Make a checkpoint, launch, listen, report. Raises Pi05Error with the nodes' last words if it came to nothing."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the nodes are ended whatever ends the demo
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pi05_demo_") as scratch, _ros():
        _refuse_company()
        checkpoint = options.checkpoint or _make_checkpoint(Path(scratch) / "tiny", options.seed)
        port = _free_port()
        command = [
            *("ros2", "launch", "pi05_ros", "sim.launch.py"),
            *(f"checkpoint:={checkpoint.resolve()}", f"prompt:={options.prompt}", f"device:={options.device}"),
            *(f"seed:={options.seed}", "render_quality:=fast", f"http_port:={port}"),
        ]
        print(f"Starting robot and policy:\n  {shlex.join(command)}", flush=True)
        print(f"Status page as long as they run: http://127.0.0.1:{port}/", flush=True)
        with ChildProcesses(command, options.output / "launch.log") as nodes:
            try:
                recording = _record_episode(options, nodes)
            except Pi05Error as error:
                last_words = "\n".join(f"  {line}" for line in nodes.last_lines(LOG_LINES))
                raise DemoError(f"{error} The nodes' last words ({nodes.log}):\n{last_words}") from error
    _report(options, recording, time.monotonic() - began)


def _free_port() -> int:
    """The usual one may be taken, of which the demo is not to fail."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _make_checkpoint(folder: Path, seed: int) -> Path:
    from pi05_ros.checkpoint import make_checkpoint

    print(f"Making a tiny checkpoint (the real network has 3.35 billion weights).\n{UNTRAINED}", flush=True)
    return make_checkpoint("tiny", folder, "lerobot", seed)


@contextmanager
def _ros() -> Iterator[None]:
    try:
        import rclpy
        from rclpy.signals import SignalHandlerOptions
    except ModuleNotFoundError as error:
        raise DemoError(f"The demo needs ROS 2 ({error}): source its setup.bash first, or call make demo.") from error
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        yield
    finally:
        rclpy.shutdown()


def _refuse_company() -> None:
    """A second robot in the same ROS domain would drive the same clock, a second policy the same robot."""
    import rclpy

    node = rclpy.create_node("demo_probe")
    topics = ("/clock", f"{POLICY_NODE}/status")
    company: list[str] = []
    deadline = time.monotonic() + DISCOVERY
    while not company and time.monotonic() < deadline:
        rclpy.spin_once(node, timeout_sec=0.1)
        company = [topic for topic in topics if node.count_publishers(topic) > 0]
    node.destroy_node()
    if company:
        raise DemoError(
            f"Someone publishes {company[0]} in this ROS domain already: end that simulation, or set another "
            "ROS_DOMAIN_ID."
        )


def _record_episode(options: argparse.Namespace, nodes: ChildProcesses) -> Recording:
    from rclpy.executors import SingleThreadedExecutor

    from pi05_ros.policy.profile import load_profile
    from pi05_ros.sim.recorder import Recorder

    profile = load_profile("aloha_sim")
    recorder = Recorder(
        profile,
        POLICY_NODE,
        on_chunk=lambda chunk: print(chunk.line(profile.joint_names), flush=True),
        on_status=_status_printer(),
    )
    executor = SingleThreadedExecutor()
    executor.add_node(recorder)
    try:
        _spin(executor, nodes, lambda: recorder.started, options.patience, "no action chunk came")
        end = recorder.recording.chunks[0].time + options.seconds
        limit = 30.0 + 10.0 * options.seconds  # a slow machine gives a slow episode
        _spin(executor, nodes, lambda: recorder.recording.end >= end, limit, "the episode did not end")
    finally:
        executor.shutdown()
        recorder.destroy_node()
    return recorder.recording


def _spin(executor: Executor, nodes: ChildProcesses, done: Callable[[], bool], patience: float, failure: str) -> None:
    deadline = time.monotonic() + patience
    while not done():
        if time.monotonic() > deadline:
            raise DemoError(f"Within {patience:.0f} s {failure}.")
        nodes.check_alive()
        executor.spin_once(timeout_sec=0.2)


def _status_printer() -> Callable[[Any], None]:
    """Prints the policy node's state and reason whenever either changes; a failed configure ends the demo."""
    told = [("", "")]

    def on_status(message: Any) -> None:
        if (message.state, message.reason) != told[0]:
            told[0] = (message.state, message.reason)
            print(f"policy node: {message.state}{': ' + message.reason if message.reason else ''}", flush=True)
        if message.state == message.UNCONFIGURED and message.reason.startswith(
            ("Not configured:", "A transition fail")
        ):
            raise DemoError("The policy node could not be configured.")

    return on_status


def _report(options: argparse.Namespace, recording: Recording, wall_seconds: float) -> None:
    import mujoco
    import torch

    from pi05_ros.sim.report import write_report

    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    facts = {
        "checkpoint": str(options.checkpoint or "tiny, random weights: the motion is meaningless"),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
        "wall_seconds": round(wall_seconds, 1),
        "versions": {
            "pi05_ros": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mujoco": mujoco.__version__,
        },
    }
    paths = write_report(recording, options.output, facts)
    numbers = recording.summary()
    latency, speed = numbers["latency_ms"]["total"], numbers["real_time_factor"]
    print(f"""
{numbers["chunks"]} chunks in {numbers["simulated_seconds"]:.1f} simulated seconds, {wall_seconds:.0f} s in all; \
latency {latency["median"]:.0f} ms median, {latency["p95"]:.0f} ms p95; real-time factor \
{f"{speed['median']:.2f}" if speed else "unknown"}; best reward {numbers["reward"]["best"]:.0f} of 4.
{UNTRAINED if options.checkpoint is None else ""}

The report:
  {paths[0]}   what the cameras saw
  {paths[1]}    what the joints were told, and did
  {paths[2]}  all numbers, chunk by chunk
  {options.output / "launch.log"}    what the nodes logged

Where to look next:
  README.md                                      a real ALOHA, a real checkpoint
  make demo DEMO_ARGS="--checkpoint PATH"        this report for a trained checkpoint
  source ./env.sh, then
  ros2 launch pi05_ros sim.launch.py -s          robot and policy by themselves, with arguments of your own
  ros2 topic echo /policy_node/status            while they run: what the policy does, and if not, why""")


if __name__ == "__main__":
    main()
