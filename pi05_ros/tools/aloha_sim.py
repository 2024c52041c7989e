"""``aloha_sim``: the simulated ALOHA robot as a ROS node."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pi05_ros.errors import Pi05Error

DESCRIPTION = """\
A simulated ALOHA (MuJoCo, two ViperX 300 S, three cameras, a cube to hand over) as a ROS robot named aloha_sim.
It is the clock master: it publishes /clock, one message for each physics step of 2 ms."""

EPILOG = """\
parameters (--ros-args -p NAME:=VALUE), with units and defaults:
{parameters}

topics out: ~/top/image_raw, ~/left_wrist/image_raw, ~/right_wrist/image_raw, ~/left/joint_states,
            ~/right/joint_states, /clock, ~/reward (0 to 4), ~/success, ~/real_time_factor
topics in:  ~/left/joint_trajectory, ~/right/joint_trajectory (trajectory_msgs/JointTrajectory, rad and metres)
service:    ~/reset (std_srvs/Trigger): the next episode begins

example: aloha_sim --ros-args -p camera_rate:=20.0 -p seed:=7"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM. Returns the exit code: 0, or 1 after a user error."""
    try:
        import rclpy
        from rclpy.utilities import remove_ros_args
    except ModuleNotFoundError as error:
        print(f"aloha_sim needs ROS 2: source its setup.bash first ({error}).", file=sys.stderr)
        return 1
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="aloha_sim",
        description=DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(remove_ros_args(arguments))

    from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
    from rclpy.signals import SignalHandlerOptions

    # Without rclpy's signal handlers: they would pull the context away from under a running publish.
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    try:
        _run()
    except (Pi05Error, InvalidParameterTypeException, InvalidParameterValueException) as error:
        if options.debug:
            raise
        print(f"aloha_sim: {error}", file=sys.stderr)
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # all is done: another one would only spoil the exit code
            signal.signal(number, signal.SIG_IGN)
        rclpy.shutdown()
    return 0


def _run() -> None:
    from rclpy.executors import SingleThreadedExecutor

    from pi05_ros.sim.node import AlohaSim

    node = AlohaSim()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: node.stop())
    with ThreadPoolExecutor(1, thread_name_prefix="callbacks") as pool:
        callbacks = pool.submit(executor.spin)
        callbacks.add_done_callback(lambda _: node.stop())  # a callback that fails ends the simulation
        try:
            node.run()
        finally:
            executor.shutdown()
        callbacks.result()  # raises what a callback raised
    node.destroy_node()


def _epilog() -> str:
    from pi05_ros.sim.node import PARAMETERS

    rows = [f"  {name:<21} {default!s:<5} {description}" for name, (default, _, _, description) in PARAMETERS.items()]
    return EPILOG.format(parameters="\n".join(rows))


if __name__ == "__main__":
    sys.exit(main())
