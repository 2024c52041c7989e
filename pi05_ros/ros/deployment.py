"""One checkpoint on one robot: everything that a node has between configure and cleanup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from rclpy.node import Node

from pi05_ros.errors import Pi05Error
from pi05_ros.policy import Policy, RobotProfile, load_profile
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.robot.execution import Setpoints
from pi05_ros.robot.loop import SECOND, LoopChunk, PolicyLoop
from pi05_ros.robot.ticks import Regularity, TickRecord, ticks
from pi05_ros.ros.commands import RobotOutput
from pi05_ros.ros.parameters import PolicyParameters
from pi05_ros.ros.streams import PATIENCE, Streams
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import Sidecar

SERVER_CLOSE_TIMEOUT = 1.0
"""Seconds that clients of the server get for their last answers; then they are refused."""
CLOSE_TIMEOUT = 2.0
"""Seconds that a running inference gets to end; then it is left behind."""
CONTROL_FAILED = "The control thread failed; deactivate, activate and enable the node."


class Deployment:
    """Loads the checkpoint, warms up and subscribes; from ``start`` to ``stop`` it infers and commands on own threads.

    Clients are served over HTTP from before the weights load, when they hear what it is at, until ``close``. They share
    the policy, after the robot, and command nothing.

    settings: as the node's parameters were when it was configured.
    prompt: the first instruction, "" for none yet.
    on_chunk: called on the inference thread with every chunk. on_tick: on the control thread, after every tick.
    on_stage: called here with what begins. robot_status: state, reason, prompt and robot, for the server's clients.
    interrupted: asked while the checkpoint loads and the policy warms up; True gives it up.

    Raises Pi05Error: checkpoint, profile, command output or the server's address cannot be used; nothing is left behind
    then.
    """

    def __init__(
        self,
        node: Node,
        settings: PolicyParameters,
        prompt: str,
        on_chunk: Callable[[LoopChunk], None],
        on_tick: Callable[[], None],
        on_stage: Callable[[str], None],
        robot_status: Callable[[], dict[str, str]],
        interrupted: Callable[[], bool],
    ) -> None:
        if not settings.checkpoint:
            raise Pi05Error("checkpoint: no checkpoint is given; set it to a folder in LeRobot or openpi layout.")
        self.settings, self.profile = settings, load_profile(settings.robot)
        self._node, self._on_tick, self._on_stage = node, on_tick, on_stage
        self._host = PolicyHost(robot_status)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._due_hold: Setpoints | None = None
        self._holding = threading.Lock()
        self._simulated = False  # as use_sim_time is when it starts
        self._look_for_listeners_at = float("inf")  # time.monotonic(): once, when they have been discovered
        self.sidecar: Sidecar | None = None
        with ExitStack() as undo:
            # What is cheap to find wrong comes before the weights.
            ObservationAssembler(self.profile)
            self._output = self._make_output(undo)
            end_of_policy = undo.enter_context(ExitStack())  # made after the server, it is closed after it too
            self._serve(undo)
            self._begin("loading", f"Loading {settings.checkpoint} for {settings.robot} ...")
            self.policy = Policy.from_checkpoint(
                settings.checkpoint,
                settings.device,
                settings.precision,
                self.profile,
                **settings.policy_options,
                progress=self._progress("loading", "Loading", "tensors", interrupted),
            )
            end_of_policy.callback(self.policy.close, timeout=CLOSE_TIMEOUT)
            self.assembler = _make_assembler(node, self.profile, self.policy)
            self._warm_up(self._progress("warming_up", "Warming up", "batches", interrupted))
            self.loop = PolicyLoop(
                self.policy, self.profile, self.assembler, self._now_ns, on_chunk, settings.loop, prompt
            )
            self._ticks = TickRecord(self.profile.command_period_ns / SECOND)
            self.streams = Streams(node, self.assembler, on_data=self._on_data)
            undo.callback(self.streams.destroy)
            self._host.serve(self.policy)
            self._resources = undo.pop_all()

    @property
    def active(self) -> bool:
        """True from start to stop."""
        return self._thread is not None

    @property
    def in_control(self) -> bool:
        """False if the control thread has died, or is not running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to infer and to command."""
        self._stop.clear()
        if self._output is not None:
            self._output.warn_of_others()
        self._look_for_listeners_at = time.monotonic() + PATIENCE
        self._simulated = bool(self._node.get_parameter("use_sim_time").value)
        self._ticks.clear()
        self.streams.start()
        self.loop.start()
        thread = threading.Thread(target=self._control, name="pi05-control", daemon=True)
        thread.start()
        self._thread = thread  # from now on ``watch`` takes one that is not alive for dead

    def stop(self) -> None:
        """Stop, join what commands, then hold: nothing else may command once the hold is out. Idempotent."""
        if self._thread is None:
            return
        self.streams.stop()
        self._stop.set()
        self._thread.join(2.0)
        self._thread = None
        self.loop.end()  # an inference may take seconds to end, and commands nothing any more
        held = self._hold()
        self.loop.stop()
        self._node.get_logger().info("Stopped; holding." if held else "Stopped; nothing was commanded.")

    def watch(self) -> None:
        """Hold in place of a control thread that is gone and did not manage to. Now and then, on any one thread."""
        thread = self._thread
        if thread is None or self._stop.is_set():
            return
        if self._output is not None and time.monotonic() > self._look_for_listeners_at:
            self._look_for_listeners_at = float("inf")
            self._output.warn_of_silence()
        if not thread.is_alive() and not self._stop.is_set():  # in this order: a thread that was stopped has ended too
            self.loop.fail(CONTROL_FAILED)
            self._hold()

    def close(self) -> None:
        """Stop, and give everything back. Idempotent."""
        self.stop()
        self._resources.close()

    def regularity(self) -> Regularity | None:
        """Of the last ticks of the control thread; None: there were not two yet. Any thread."""
        return self._ticks.regularity(self._control_time())

    def measured_state(self) -> np.ndarray | None:
        """The newest measured state, float32 [state_dim] in robot units; None: it is not known. Any thread."""
        return self.assembler.measured_state(self._now_ns())

    def _control(self) -> None:
        """The control thread: a tick a period, on a steady clock on a robot, on the simulated one in a simulation."""
        try:
            for _ in ticks(self.profile.command_period_ns / SECOND, self._control_time, self._stop, self._simulated):
                self._ticks.add(self._control_time())
                setpoints = self.loop.tick()
                if setpoints is not None and self._output is not None:
                    self._output.send(setpoints)
                self._on_tick()
        except Exception as error:
            self._node.get_logger().fatal(f"{CONTROL_FAILED} Nothing is commanded but a hold. It was: {error}")
            self.loop.fail(CONTROL_FAILED)
            self._hold()
            raise

    def _control_time(self) -> float:
        """Of the clock that the control thread follows, in seconds."""
        return self._now_ns() / SECOND if self._simulated else time.monotonic()

    def _hold(self) -> bool:
        """Command the hold that is due, if there is one. It stays due until it has been sent."""
        with self._holding:
            self._due_hold = self.loop.final_hold() or self._due_hold
            if self._due_hold is None or self._output is None:
                return False
            self._output.send(self._due_hold)
            self._due_hold = None
            return True

    def _on_data(self) -> None:
        if self.active:
            self.loop.notify()

    def _now_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)

    def _serve(self, undo: ExitStack) -> None:
        """From now on clients are answered; as long as there is no policy, with the reason."""
        server = self.settings.server
        if server is None:
            return
        try:
            self.sidecar = Sidecar(self._host, server)
        except Pi05Error as error:
            where = f"http_host {server.host}, http_port {server.port} (0: none)"
            raise Pi05Error(f"HTTP server of {where}: {error}") from error
        undo.callback(self.sidecar.close, timeout=SERVER_CLOSE_TIMEOUT)
        undo.callback(self._host.tell, "closed")
        self.sidecar.start()

    def _begin(self, stage: str, what: str) -> None:
        """Tell clients and operators."""
        self._host.tell(stage, what)
        self._on_stage(what)

    def _progress(
        self, stage: str, activity: str, units: str, interrupted: Callable[[], bool]
    ) -> Callable[[int, int], None]:
        """Says how far it is, every few seconds, and gives up when the process is to end."""
        told = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal told
            if interrupted():
                raise Pi05Error(f"{activity} was interrupted.")
            if time.monotonic() - told > 2.0:
                told = time.monotonic()
                self._begin(stage, f"{activity}: {done} of {total} {units}.")

        return progress

    def _warm_up(self, progress: Callable[[int, int], None]) -> None:
        """What will be asked for, before the robot moves. No chunk comes of it, and it counts in no latency."""
        if not self.policy.compiles:  # and an inference at full size may take half a minute
            self._node.get_logger().info("No warm-up: on a CPU nothing is compiled.")
            return
        shapes = {camera.name: (camera.height, camera.width) for camera in self.assembler.cameras}
        sizes = ", ".join(f"{name} {width} x {height}" for name, (height, width) in shapes.items())
        self._begin("warming_up", f"Warming up for {sizes} ...")
        # The robot's own run alone; a batch of clients, compiled when it first came, would keep the robot waiting.
        largest = 1 if self.settings.server is None else self.policy.engine.max_batch
        steps = self.settings.loop.num_steps
        seconds = self.policy.warm_up(shapes, batches=range(1, largest + 1), num_steps=steps, progress=progress)
        self._node.get_logger().info(f"Warmed up in {seconds:.1f} s.")

    def _make_output(self, undo: ExitStack) -> RobotOutput | None:
        if self.settings.dry_run:
            return None
        output = RobotOutput(self._node, self.profile, self.profile.command_period_ns)
        undo.callback(output.destroy)
        return output


def _make_assembler(node: Node, profile: RobotProfile, policy: Policy) -> ObservationAssembler:
    """For the cameras that the checkpoint reads, which may be others than those with a slot in the profile."""
    cameras = [name for name in policy.binding.cameras if name is not None]
    assembler = ObservationAssembler(profile, cameras, on_notice=lambda text: node.get_logger().warning(text))
    without = set(cameras) - {camera.name for camera in assembler.cameras}
    if without:
        node.get_logger().warning(
            f"The checkpoint reads camera {', '.join(sorted(without))}, for which robot profile {profile.name!r} has "
            "no topic: that input of the model is masked."
        )
    return assembler
