"""``/diagnostics``: through diagnostic_updater where it is installed, in the same form without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.node import Node

from pi05_ros.msg import PolicyStatus
from pi05_ros.ros import findings
from pi05_ros.ros.deployment import Deployment
from pi05_ros.ros.findings import TASKS, Finding

try:
    import diagnostic_updater
except ImportError:
    diagnostic_updater = None

PERIOD = 1.0
"""Seconds; the parameter diagnostic_updater.period may say another."""


def find(status: PolicyStatus, deployment: Deployment | None, failed: bool) -> dict[str, Finding]:
    """By task. status: as it was just published. deployment: None before configure. failed: the last transition did."""
    if deployment is None or status.state == PolicyStatus.UNCONFIGURED:
        return findings.of_unconfigured(status, failed)
    assembler, policy, sidecar = deployment.assembler, deployment.policy, deployment.sidecar
    counts = {name: count for name, (count, _) in assembler.arrivals().items()}
    state = deployment.measured_state()
    return {
        findings.STREAMS: findings.of_streams(
            status, deployment.profile, counts, assembler.corrupt_frames(), deployment.streams.faults
        ),
        findings.POLICY: findings.of_policy(status, policy.engine.stats()),
        findings.CONTROL: findings.of_control(status, deployment.in_control, deployment.regularity()),
        findings.STATE: findings.of_state(
            status, policy.binding.state_names, state, None if state is None else policy.unusual_state(state)
        ),
        findings.SERVER: findings.of_server(None, False, {})
        if sidecar is None
        else findings.of_server(sidecar.url, sidecar.serving, sidecar.clients),
    }


class Diagnostics:
    """Publishes when it is told to, but no more often than once a period. Not thread-safe."""

    def __init__(self, node: Node) -> None:
        self._publisher = _Plain(node) if diagnostic_updater is None else _Updater(node)
        self._due = 0.0

    def publish(self, found: Callable[[], Mapping[str, Finding]], hardware_id: str) -> None:
        """found: by task. hardware_id: of the robot, "" if there is none."""
        now = time.monotonic()
        if now >= self._due:
            # Whoever calls once a period is a little early as often as late.
            self._due = now + 0.9 * self._publisher.period
            self._publisher.publish(found(), hardware_id or "none")


class _Updater:
    """The package that ROS has for this. Without its timer, which stands still while weights load or /clock does."""

    def __init__(self, node: Node) -> None:
        self._updater = diagnostic_updater.Updater(node, period=PERIOD)
        self._updater.timer.cancel()
        self._found: Mapping[str, Finding] = {}
        self._updater.setHardwareID("none")
        for task in TASKS:
            self._updater.add(task, lambda status, task=task: self._fill(status, self._found[task]))

    @property
    def period(self) -> float:
        return float(self._updater.period)

    def publish(self, found: Mapping[str, Finding], hardware_id: str) -> None:
        self._found = found
        self._updater.setHardwareID(hardware_id)
        self._updater.force_update()

    @staticmethod
    def _fill(status: Any, finding: Finding) -> Any:
        status.summary(finding.level, finding.message)
        for key, value in finding.values.items():
            status.add(key, value)
        return status


class _Plain:
    """The same message without that package."""

    period = PERIOD

    def __init__(self, node: Node) -> None:
        self._node = node
        self._diagnostics = node.create_publisher(DiagnosticArray, "/diagnostics", 1)

    def publish(self, found: Mapping[str, Finding], hardware_id: str) -> None:
        message = DiagnosticArray()
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.status = [
            DiagnosticStatus(
                name=f"{self._node.get_name()}: {task}",
                level=found[task].level,
                message=found[task].message,
                hardware_id=hardware_id,
                values=[KeyValue(key=key, value=value) for key, value in found[task].values.items()],
            )
            for task in TASKS
        ]
        self._diagnostics.publish(message)
