"""``~/status``: what the node is doing, and if it is not acting, why."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
import torch
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile

from pi05_ros.msg import PolicyStatus
from pi05_ros.policy import Policy
from pi05_ros.robot.assembly import ObservationAssembler
from pi05_ros.robot.loop import SECOND, PolicyLoop
from pi05_ros.ros.parameters import PolicyParameters

DRY_RUN = "Dry run: nothing is commanded."
LATCHED_QOS = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class StatusPublisher:
    """Publishes on request, from any thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._publisher = node.create_publisher(PolicyStatus, "~/status", LATCHED_QOS)
        self._lock = threading.Lock()
        self._told_key: object = None
        self._rates: dict[str, float] = {}
        self._arrivals: tuple[float, dict[str, int]] = (0.0, {})
        self._message = PolicyStatus(state=PolicyStatus.UNCONFIGURED)

    @property
    def message(self) -> PolicyStatus:
        """As last published. Not to be changed. Safe from any thread."""
        return self._message

    @property
    def summary(self) -> dict[str, str]:
        """state, reason, prompt and robot as last published. Safe from any thread."""
        return {name: getattr(self._message, name) for name in ("state", "reason", "prompt", "robot")}

    def publish_unconfigured(self, reason: str) -> None:
        """There is nothing to describe yet, or no more."""
        with self._lock:
            self._told_key = None
            self._send(PolicyStatus(state=PolicyStatus.UNCONFIGURED, reason=reason))

    def publish(
        self,
        settings: PolicyParameters,
        policy: Policy,
        assembler: ObservationAssembler,
        loop: PolicyLoop,
        active: bool,
        faults: Mapping[str, str],
    ) -> None:
        """Everything about a configured node. faults: by stream, why no publisher reaches it."""
        with self._lock:
            state = loop.state()
            self._told_key = state.key
            message = PolicyStatus(
                state=state.state if active else PolicyStatus.INACTIVE,
                reason=state.reason if active else "Configured; not activated.",
                prompt=loop.prompt,
                checkpoint=settings.checkpoint,
                robot=settings.robot,
                adapt_to_pi=policy.binding.adapt_to_pi,
                queue_left=state.rows_left,
                chunks=state.chunks,
                refused_observations=state.refused_observations,
                refused_chunks=state.refused_chunks,
                corrupt_images=state.corrupt_images,
                clamps=state.clamps,
                underruns=state.underruns,
            )
            self._describe_streams(message, assembler)
            if message.state == PolicyStatus.WAITING and faults:
                message.reason = " ".join([message.reason, *self._faults_waited_for(assembler, faults)])
            if message.state == PolicyStatus.RUNNING and settings.dry_run:
                message.reason = " ".join(filter(None, (message.reason, DRY_RUN)))
            if state.latencies_ms:
                message.latency_p50_ms, message.latency_p95_ms = map(float, np.percentile(state.latencies_ms, [50, 95]))
            if policy.engine.device.type == "cuda":
                message.device_memory = torch.cuda.memory_allocated(policy.engine.device)
            self._send(message)

    def has_told(self, loop: PolicyLoop) -> bool:
        """True if state and kind of reason are still those that were published last."""
        return loop.state().key == self._told_key

    def measure_rates(self, assembler: ObservationAssembler) -> None:
        """Samples per second since the last call; call it about once a second."""
        now, counts = time.monotonic(), {name: count for name, (count, _) in assembler.arrivals().items()}
        before, earlier = self._arrivals
        if earlier.keys() == counts.keys():
            self._rates = {name: max(count - earlier[name], 0) / (now - before) for name, count in counts.items()}
        self._arrivals = (now, counts)

    def _faults_waited_for(self, assembler: ObservationAssembler, faults: Mapping[str, str]) -> list[str]:
        refusal = assembler.check(self._node.get_clock().now().nanoseconds)
        waited_for = {problem.stream for problem in refusal.problems} if refusal else set()
        return [fault for stream, fault in faults.items() if stream in waited_for]

    def _describe_streams(self, message: PolicyStatus, assembler: ObservationAssembler) -> None:
        now_ns, arrivals = self._node.get_clock().now().nanoseconds, assembler.arrivals()
        message.streams = list(arrivals)
        message.stream_ages = [-1.0 if stamp is None else (now_ns - stamp) / SECOND for _, stamp in arrivals.values()]
        message.stream_rates = [self._rates.get(name, 0.0) for name in arrivals]

    def _send(self, message: PolicyStatus) -> None:
        message.header.stamp = self._node.get_clock().now().to_msg()
        self._publisher.publish(message)
        self._message = message
