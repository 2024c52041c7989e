"""``policy_node``: the policy as a lifecycle node.

configure loads the checkpoint and creates the interfaces, activate begins to infer and to command, deactivate stops,
joins and holds, cleanup frees the policy. A configure that fails says why in the log and in ~/status, and leaves the
node unconfigured, so that the parameter can be set right and configure called again: a robot's other nodes are not to
die of a wrong path.

Callbacks only store. Inference and control have threads of their own, so neither waits for the other or for a message.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from pi05_ros.errors import Pi05Error
from pi05_ros.msg import ActionChunk, PolicyStatus
from pi05_ros.policy import Policy, RobotProfile, load_profile
from pi05_ros.policy.profile import Camera
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.robot.loop import SECOND, LoopChunk, LoopState, PolicyLoop
from pi05_ros.robot.ticks import ticks
from pi05_ros.ros.commands import RobotOutput
from pi05_ros.ros.conversions import chunk_message, to_nanoseconds
from pi05_ros.ros.parameters import PolicyParameters, check_parameters, declare_parameters

# A best-effort subscription connects to any publisher (REP-2003). Of images only the newest is of use.
IMAGE_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
JOINT_QOS = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED_QOS = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
CHUNK_QOS = QoSProfile(depth=1)
STATUS_PERIOD = 1.0


class PolicyNode(LifecycleNode):
    """See the module. Raises Pi05Error: a parameter is wrong."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False, **options: Any) -> None:
        """interrupted: asked while a checkpoint loads; True gives the load up."""
        super().__init__("policy_node", **options)
        declare_parameters(self)
        self._interrupted = interrupted
        self._policy: Policy | None = None
        self._loop: PolicyLoop | None = None
        self._assembler: ObservationAssembler | None = None
        self._output: RobotOutput | None = None
        self._settings: PolicyParameters | None = None
        self._subscriptions_of_streams: list[Any] = []
        self._active = False
        self._given_prompt = ""  # on ~/prompt, also before configure
        self._reason = "Not configured yet."
        self._told_key: object = None
        self._arrivals: tuple[float, dict[str, int]] = (0.0, {})
        self._rates: dict[str, float] = {}
        self._unstamped: set[str] = set()
        self._status_lock = threading.Lock()
        self._control_stop = threading.Event()
        self._control_thread: threading.Thread | None = None

        self.add_on_set_parameters_callback(self._on_set_parameters)
        self._status_publisher = self.create_publisher(PolicyStatus, "~/status", LATCHED_QOS)
        self._chunk_publisher = self.create_publisher(ActionChunk, "~/action_chunk", CHUNK_QOS)
        self.create_subscription(String, "~/prompt", self._on_prompt, LATCHED_QOS)
        self.create_service(SetBool, "~/enable", self._on_enable)
        self.create_service(Trigger, "~/reset", self._on_reset)
        # Of a steady clock: the status must go out also while simulated time stands still.
        self.create_timer(STATUS_PERIOD, self._on_status_timer, clock=Clock(clock_type=ClockType.STEADY_TIME))

    # ---- lifecycle ----

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            self._configure()
        except Exception as error:
            if not isinstance(error, (Pi05Error, OSError)):  # not foreseen: rclpy would not say where it was
                self.get_logger().error(traceback.format_exc())
            self._release()
            self._reason = f"Not configured: {error}"
            self.get_logger().error(self._reason)
            self.publish_status()
            return TransitionCallbackReturn.FAILURE
        self._reason = ""
        self.publish_status()
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        assert self._loop is not None
        self._active = True
        self._loop.start()
        self._control_stop.clear()
        self._control_thread = threading.Thread(target=self._control, name="pi05-control", daemon=True)
        self._control_thread.start()
        self.get_logger().info("Active.")
        self.publish_status()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop_and_hold()
        self.publish_status()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._release()
        self._reason = "Cleaned up."
        self.publish_status()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._release()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._release()
        self._reason = "A transition failed; the log says why."
        self.publish_status()
        return super().on_error(state)

    def close(self) -> None:
        """Stop, join, hold, free; from any state. For whoever ends the process."""
        self._release()

    def _configure(self) -> None:
        parameters = PolicyParameters(self)
        if not parameters.checkpoint:
            raise Pi05Error("checkpoint: no checkpoint is given; set it to a folder in LeRobot or openpi layout.")
        profile = load_profile(parameters.robot)
        # What is cheap to find wrong comes before the weights.
        ObservationAssembler(profile)
        period_ns = round(SECOND / profile.control_hz)
        self._output = RobotOutput(self, profile, period_ns) if parameters.commands else None
        self._reason = f"Loading {parameters.checkpoint} for {profile.name} ..."
        self.get_logger().info(self._reason)
        self.publish_status()
        self._policy = Policy.from_checkpoint(
            parameters.checkpoint,
            parameters.device,
            parameters.precision,
            profile,
            **parameters.policy_options,
            progress=self._load_progress(),
        )
        assembler = self._make_assembler(profile, self._policy)
        self._settings, self._assembler = parameters, assembler
        prompt = self._given_prompt or parameters.prompt
        self._loop = PolicyLoop(
            self._policy, profile, assembler, self._now_ns, self._publish_chunk, parameters.loop, prompt
        )
        self._subscriptions_of_streams = [self._subscribe_camera(camera) for camera in assembler.cameras]
        self._subscriptions_of_streams += [
            self.create_subscription(JointState, topic, self._joint_callback(topic), JOINT_QOS)
            for topic in assembler.topics
        ]
        self.get_logger().info(
            f"Configured on {self._policy.engine.device}: {', '.join(camera.name for camera in assembler.cameras)}; "
            f"{profile.state_dim} dimensions at {profile.control_hz:g} Hz"
            + ("." if parameters.commands else "; command_output is none: the robot is not commanded.")
        )

    def _make_assembler(self, profile: RobotProfile, policy: Policy) -> ObservationAssembler:
        """For the cameras that the checkpoint reads, which may be others than those with a slot in the profile."""
        cameras = [name for name in policy.binding.cameras if name is not None]
        assembler = ObservationAssembler(profile, cameras, on_notice=lambda text: self.get_logger().warning(text))
        without = set(cameras) - {camera.name for camera in assembler.cameras}
        if without:
            self.get_logger().warning(
                f"The checkpoint reads camera {', '.join(sorted(without))}, for which robot profile {profile.name!r} "
                "has no topic: that input of the model is masked."
            )
        return assembler

    def _load_progress(self) -> Callable[[int, int], None]:
        """Logs how far loading is, every few seconds, and gives up when the process is to end."""
        told = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal told
            if self._interrupted():
                raise Pi05Error("Loading was interrupted.")
            if time.monotonic() - told > 2.0:
                told = time.monotonic()
                self.get_logger().info(f"Loading: {done} of {total} tensors.")

        return progress

    def _stop_and_hold(self) -> None:
        """Stop, join, then hold: nothing else may command once the hold is out."""
        if not self._active:
            return
        self._active = False
        self._control_stop.set()
        if self._control_thread is not None:
            self._control_thread.join(2.0)
            self._control_thread = None
        if self._loop is not None:
            self._loop.stop()
            hold = self._loop.final_hold()
            if hold is not None and self._output is not None:
                self._output.send(hold)
        self.get_logger().info("Stopped; holding.")

    def _release(self) -> None:
        self._stop_and_hold()
        for subscription in self._subscriptions_of_streams:
            self.destroy_subscription(subscription)
        self._subscriptions_of_streams = []
        if self._output is not None:
            self._output.destroy()
        if self._policy is not None:
            self._policy.close(timeout=3.0)
        self._policy = self._loop = self._assembler = self._output = self._settings = None

    # ---- streams in ----

    def _subscribe_camera(self, camera: Camera) -> Any:
        kind = CompressedImage if camera.transport == "compressed" else Image
        assert self._assembler is not None
        assembler, name = self._assembler, camera.name

        def on_image(message: Any) -> None:
            assembler.add_image(name, self._stamp(name, message), message)
            self._notify()

        return self.create_subscription(kind, camera.topic, on_image, IMAGE_QOS)

    def _joint_callback(self, topic: str) -> Callable[[JointState], None]:
        assert self._assembler is not None
        assembler = self._assembler

        def on_joint_state(message: JointState) -> None:
            assembler.add_joint_state(topic, self._stamp(topic, message), message.name, message.position)
            self._notify()

        return on_joint_state

    def _stamp(self, stream: str, message: Any) -> int:
        """The header's stamp; the time of arrival if it is zero, said once a stream."""
        stamp_ns = to_nanoseconds(message.header.stamp)
        if stamp_ns:
            return stamp_ns
        if stream not in self._unstamped:
            self._unstamped.add(stream)
            self.get_logger().warning(f"{stream}: header.stamp is zero; the time of arrival is used instead.")
        return self._now_ns()

    def _notify(self) -> None:
        if self._active and self._loop is not None:
            self._loop.notify()

    # ---- requests in ----

    def _on_prompt(self, message: String) -> None:
        if not message.data.strip():
            self.get_logger().warning("~/prompt: an empty prompt came and is ignored.")
            return
        self._set_prompt(message.data)

    def _set_prompt(self, prompt: str) -> None:
        self.get_logger().info(f"Prompt: {prompt!r}")
        if self._loop is not None:
            self._loop.set_prompt(prompt)
        self._given_prompt = prompt

    def _on_enable(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        if self._loop is None:
            response.success, response.message = False, "The node is not configured."
            return response
        self._loop.set_enabled(request.data)
        self.get_logger().info("Enabled." if request.data else "Disabled; holding.")
        response.success, response.message = True, "enabled" if request.data else "disabled, holding"
        self.publish_status()
        return response

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._loop is None:
            response.success, response.message = False, "The node is not configured."
            return response
        self._loop.reset()
        response.success, response.message = True, "Chunk, samples and cached prefixes are forgotten."
        return response

    def _on_set_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        result = check_parameters(parameters, configured=self._policy is not None)
        if result.successful:
            for parameter in parameters:
                if parameter.name == "prompt" and self._loop is not None:
                    self._set_prompt(str(parameter.value))
        return result

    # ---- chunks and commands out ----

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _publish_chunk(self, chunk: LoopChunk) -> None:
        assert self._policy is not None
        assert self._loop is not None
        names = self._policy.binding.action_names
        self._chunk_publisher.publish(chunk_message(chunk, names, self._loop.period_ns))

    def _control(self) -> None:
        """The control thread: a tick a period, on the robot's clock."""
        assert self._loop is not None
        loop, output = self._loop, self._output
        simulated = bool(self.get_parameter("use_sim_time").value)
        clock = (lambda: self._now_ns() / SECOND) if simulated else time.monotonic
        try:
            for _ in ticks(loop.period_ns / SECOND, clock, self._control_stop, simulated):
                setpoints = loop.tick()
                if setpoints is not None and output is not None:
                    output.send(setpoints)
                self._publish_status_on_change()
        except Exception:
            self.get_logger().fatal("The control thread failed; the robot is held and not commanded any more.")
            loop.set_enabled(False)
            hold = loop.final_hold()
            if hold is not None and output is not None:
                output.send(hold)
            raise

    # ---- status ----

    def _on_status_timer(self) -> None:
        self._measure_rates()
        self.publish_status()

    def _measure_rates(self) -> None:
        if self._assembler is None:
            return
        now, counts = time.monotonic(), {name: count for name, (count, _) in self._assembler.arrivals().items()}
        before, earlier = self._arrivals
        if earlier.keys() == counts.keys():
            self._rates = {name: (count - earlier[name]) / (now - before) for name, count in counts.items()}
        self._arrivals = (now, counts)

    def _publish_status_on_change(self) -> None:
        if self._loop is not None and self._loop.state().key != self._told_key:
            self.publish_status()

    def publish_status(self) -> None:
        """Publish ~/status now. Safe from any thread."""
        with self._status_lock:
            message = PolicyStatus(state=PolicyStatus.UNCONFIGURED, reason=self._reason)
            message.header.stamp = self.get_clock().now().to_msg()
            loop, policy, parameters = self._loop, self._policy, self._settings
            if loop is not None and policy is not None and parameters is not None:
                state = loop.state()
                self._told_key = state.key
                self._describe(message, state, policy, parameters)
            self._status_publisher.publish(message)

    def _describe(self, message: PolicyStatus, state: LoopState, policy: Policy, parameters: PolicyParameters) -> None:
        message.state, message.reason = state.state, state.reason
        if not self._active:
            message.state, message.reason = PolicyStatus.INACTIVE, "Configured; not activated."
        message.prompt = self._loop.prompt if self._loop else ""
        message.checkpoint, message.robot = parameters.checkpoint, parameters.robot
        message.adapt_to_pi = policy.binding.adapt_to_pi
        arrivals = self._assembler.arrivals() if self._assembler else {}
        now_ns = self._now_ns()
        message.streams = list(arrivals)
        message.stream_ages = [-1.0 if stamp is None else (now_ns - stamp) / SECOND for _, stamp in arrivals.values()]
        message.stream_rates = [self._rates.get(name, 0.0) for name in arrivals]
        if state.latencies_ms:
            message.latency_p50_ms, message.latency_p95_ms = map(float, np.percentile(state.latencies_ms, [50, 95]))
        message.queue_left = state.rows_left
        message.chunks, message.refused_observations = state.chunks, state.refused_observations
        message.refused_chunks, message.corrupt_images = state.refused_chunks, state.corrupt_images
        message.underruns = state.underruns
        if policy.engine.device.type == "cuda":
            message.device_memory = torch.cuda.memory_allocated(policy.engine.device)
