"""``policy_node``: the policy as a lifecycle node.

configure loads the checkpoint, warms up and creates the interfaces, activate begins to infer and to command,
deactivate stops, joins and holds, cleanup frees the policy. A configure that fails says why in the log and in ~/status,
and leaves the node unconfigured, so that the parameter can be set right and configure called again: a robot's other
nodes are not to die of a wrong path.

Callbacks only store. Inference and control have threads of their own, so neither waits for the other or for a message.
So has the HTTP server, which a configured node is; its clients get chunks and command nothing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from pi05_ros.errors import Pi05Error
from pi05_ros.msg import ActionChunk
from pi05_ros.robot.loop import LoopChunk
from pi05_ros.ros.conversions import chunk_message
from pi05_ros.ros.deployment import Deployment
from pi05_ros.ros.diagnostics import Diagnostics, find
from pi05_ros.ros.heartbeat import Heartbeat
from pi05_ros.ros.parameters import PolicyParameters, check_parameters, declare_parameters
from pi05_ros.ros.status import LATCHED_QOS, StatusPublisher

CHUNK_QOS = QoSProfile(depth=1)
STATUS_PERIOD = 1.0
NOT_CONFIGURED = "The node is not configured."


class PolicyNode(LifecycleNode):
    """See the module. Raises Pi05Error: a parameter is wrong."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False, **options: Any) -> None:
        """interrupted: asked while a checkpoint loads and is warmed up; True gives it up."""
        super().__init__("policy_node", **options)
        declare_parameters(self)
        self._interrupted = interrupted
        self._deployment: Deployment | None = None
        self._given_prompt = ""  # on ~/prompt, also before configure
        self._reason = "Not configured yet."
        self._failed = False  # the last transition; the reason is why
        self._publishing = threading.Lock()  # what is published last is what is the case

        self.add_on_set_parameters_callback(self._on_set_parameters)
        self._status = StatusPublisher(self)
        self._diagnostics = Diagnostics(self)
        self._chunk_publisher = self.create_publisher(ActionChunk, "~/action_chunk", CHUNK_QOS)
        self.create_subscription(String, "~/prompt", self._on_prompt, LATCHED_QOS)
        self.create_service(SetBool, "~/enable", self._on_enable)
        self.create_service(Trigger, "~/reset", self._on_reset)
        # The status must go out also while weights load or simulated time stands still.
        self._heartbeat = Heartbeat(STATUS_PERIOD, self._on_beat)

    def destroy_node(self) -> None:
        self._heartbeat.stop()
        super().destroy_node()

    # ---- lifecycle ----

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            self._deployment = self._deploy()
        except Exception as error:
            if not isinstance(error, (Pi05Error, OSError)):  # not foreseen: rclpy would not say where it was
                self.get_logger().error(traceback.format_exc())
            self._reason, self._failed = f"Not configured: {error}", True
            self.get_logger().error(self._reason)
            self.publish_status()
            return TransitionCallbackReturn.FAILURE
        self.publish_status()
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self._deployment is None:
            return TransitionCallbackReturn.FAILURE
        try:
            self._deployment.start()
        except Pi05Error as error:
            self.get_logger().error(f"Not activated: {error}")
            return TransitionCallbackReturn.FAILURE
        self.get_logger().info("Active.")
        self.publish_status()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self._deployment is not None:
            self._deployment.stop()
        self.publish_status()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.close("Cleaned up.")
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.close("Shut down.")
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._failed = True
        self.close("A transition failed; the log says why.")
        return super().on_error(state)

    def close(self, reason: str) -> None:
        """Stop, join, hold, free; from any state. Whoever ends the process calls it too."""
        deployment, self._deployment = self._deployment, None
        if deployment is not None:
            deployment.close()
        self._reason = reason
        self.publish_status()

    def _deploy(self) -> Deployment:
        self._failed = False
        settings = PolicyParameters(self)
        prompt = self._given_prompt or settings.prompt
        deployment = Deployment(
            self,
            settings,
            prompt,
            self._publish_chunk,
            self._publish_status_on_change,
            self._tell_stage,
            lambda: self._status.summary,
            self._interrupted,
        )
        cameras = ", ".join(camera.name for camera in deployment.assembler.cameras)
        profile = deployment.profile
        self.get_logger().info(
            f"Configured on {deployment.policy.engine.device}: {cameras}; {profile.state_dim} dimensions at "
            f"{profile.control_hz:g} Hz" + ("; dry run: the robot is not commanded." if settings.dry_run else ".")
        )
        return deployment

    def _tell_stage(self, stage: str) -> None:
        """What configure is at, in the log and in ~/status."""
        self._reason = stage
        self.get_logger().info(stage)
        self.publish_status()

    def _LifecycleNodeMixin__on_change_state(self, request: Any, response: Any) -> Any:
        """rclpy's own answer to ~/change_state, but a transition that is not possible is refused.

        rclpy lets the error of one out of the executor, and a client's mistake would end the process.
        """
        try:
            return super()._LifecycleNodeMixin__on_change_state(request, response)
        except Exception as error:
            self.get_logger().error(f"~/change_state: transition {request.transition.id} is refused: {error}")
            response.success = False
            return response

    # ---- requests in ----

    def _on_prompt(self, message: String) -> None:
        if not message.data.strip():
            self.get_logger().warning("~/prompt: an empty prompt came and is ignored.")
            return
        self._set_prompt(message.data)

    def _set_prompt(self, prompt: str) -> None:
        """Of ~/prompt and the parameter the later one counts."""
        self.get_logger().info(f"Prompt: {prompt!r}")
        if self._deployment is not None:
            self._deployment.loop.set_prompt(prompt)
        self._given_prompt = prompt

    def _on_enable(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        deployment = self._deployment
        if deployment is None:
            response.success, response.message = False, NOT_CONFIGURED
            return response
        if request.data and deployment.active and not deployment.in_control:
            response.success = False
            response.message = "The control thread has failed; deactivate and activate the node."
            return response
        deployment.loop.set_enabled(request.data)
        self.get_logger().info("Enabled." if request.data else "Disabled; holding.")
        response.success, response.message = True, "enabled" if request.data else "disabled, holding"
        self.publish_status()
        return response

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._deployment is None:
            response.success, response.message = False, NOT_CONFIGURED
            return response
        self._deployment.loop.reset()
        response.success, response.message = True, "Chunk, samples and cached prefixes are forgotten."
        return response

    def _on_set_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        result = check_parameters(parameters, configured=self._deployment is not None)
        if result.successful:
            for parameter in parameters:
                if parameter.name == "prompt":
                    self._set_prompt(str(parameter.value))
        return result

    # ---- chunks and status out ----

    def _publish_chunk(self, chunk: LoopChunk) -> None:
        deployment = self._deployment
        if deployment is not None:
            names = deployment.policy.binding.action_names
            self._chunk_publisher.publish(chunk_message(chunk, names, deployment.loop.period_ns))

    def _on_beat(self) -> None:
        """On the heartbeat's thread."""
        if not self.context.ok():  # the process ends
            return
        deployment = self._deployment
        tasks: list[Callable[[], object]] = [self.publish_status, lambda: self._diagnose(deployment)]
        if deployment is not None:
            look = (lambda: self._status.measure_rates(deployment.assembler), deployment.streams.look)
            tasks = [deployment.watch, *look, *tasks]
        for task in tasks:
            try:
                task()
            except Exception:  # whatever it is, it must not silence the status
                self.get_logger().error(traceback.format_exc())

    def _diagnose(self, deployment: Deployment | None) -> None:
        status = self._status.message
        self._diagnostics.publish(lambda: find(status, deployment, self._failed), status.robot)

    def _publish_status_on_change(self) -> None:
        if self._deployment is not None and not self._status.has_told(self._deployment.loop):
            self.publish_status()

    def publish_status(self) -> None:
        """Publish ~/status now. Safe from any thread."""
        with self._publishing:
            deployment = self._deployment
            if deployment is None:
                self._status.publish_unconfigured(self._reason)
            else:
                self._status.publish(
                    deployment.settings,
                    deployment.policy,
                    deployment.assembler,
                    deployment.loop,
                    deployment.active,
                    deployment.streams.faults,
                )
