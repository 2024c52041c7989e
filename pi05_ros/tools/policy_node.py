"""``policy_node``: the Pi0.5 policy as a ROS 2 lifecycle node."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from pi05_ros.errors import Pi05Error

PATIENCE = 3.0
"""Seconds after which another SIGINT or SIGTERM ends the process at once."""

DESCRIPTION = """\
The Pi0.5 policy as a ROS 2 lifecycle node: cameras and joint states in, action chunks and commands out.
It starts unconfigured; policy.launch.py configures and activates it (autostart), or call ~/change_state."""

EPILOG = """\
parameters (--ros-args -p NAME:=VALUE, or --params-file FILE):
{parameters}

topics out: ~/action_chunk, ~/status, and the commands that the robot profile names
topics in:  ~/prompt, and the cameras and joint states that the robot profile names
services:   ~/enable (std_srvs/SetBool; false holds the robot), ~/reset (std_srvs/Trigger)
HTTP:       from configure on a status page, the action API and openpi's websocket, by default on
            http://127.0.0.1:8000/; clients must send the token of PI05_ROS_TOKEN or http_token_file, if there is one

example: policy_node --ros-args -p checkpoint:=/path/to/checkpoint -p robot:=aloha_ros2 -p prompt:="uncap the pen\""""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM. Returns the exit code: 0, or 1 after a user error."""
    stop = _Stop()
    try:
        import rclpy
        from rclpy.utilities import remove_ros_args
    except ModuleNotFoundError as error:
        print(f"policy_node needs ROS 2: source its setup.bash first ({error}).", file=sys.stderr)
        return 1
    arguments = list(sys.argv if arguments is None else ["policy_node", *arguments])
    parser = argparse.ArgumentParser(
        prog="policy_node",
        description=DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    try:
        options = parser.parse_args(remove_ros_args(arguments)[1:])

        from rclpy.signals import SignalHandlerOptions

        # Without rclpy's signal handlers: they would take the context away before the robot is held.
        rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # rclpy's own, for ROS arguments that it cannot read
        print(f"policy_node: {error}", file=sys.stderr)
        return 1
    try:
        _run(stop)
    except Exception as error:
        if options.debug or not isinstance(error, Pi05Error):
            raise
        print(f"policy_node: {error}", file=sys.stderr)
        return 1
    finally:
        stop.done()
        rclpy.shutdown()
    if any(thread.name == "pi05-engine" for thread in threading.enumerate()):
        # An inference still runs and cannot be interrupted. The robot is held, all is said: do not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


class _Stop:
    """What SIGINT and SIGTERM do: while the process starts they end it, later they ask the node to end.

    They often come in pairs (a terminal signals launch and the node, and launch forwards its own), so the next one
    counts as a repetition until the node has had time to hold the robot.
    """

    def __init__(self) -> None:
        self.starting = True
        self._asked_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it, which wants it to go on
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.starting:  # importing takes seconds and cannot be broken off cleanly; there is nothing to clean up yet
            os._exit(0)
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > PATIENCE:
            os._exit(1)

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def done(self) -> None:
        """The robot is held and the process ends by itself: a signal now would only spoil its exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _run(stop: _Stop) -> None:
    from rclpy.executors import SingleThreadedExecutor

    from pi05_ros.ros.logging import log_through
    from pi05_ros.ros.node import PolicyNode

    stop.starting = False
    node = PolicyNode(interrupted=lambda: stop.asked)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        with log_through(node.get_logger()):
            try:
                while not stop.asked:
                    executor.spin_once(timeout_sec=0.1)
            finally:
                node.close("The process ends.")  # whatever ends it: the robot is held
    finally:
        executor.shutdown()
        node.destroy_node()


def _epilog() -> str:
    from pi05_ros.ros.declarations import PARAMETERS

    lines = [f"  {spec.name} ({spec.default!r}): {spec.description}" for spec in PARAMETERS]
    return EPILOG.format(parameters="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
