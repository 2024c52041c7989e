"""The policy node in this process, where a test can break a part of it, with a robot beside it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter

from pi05_ros.ros.deployment import Deployment
from pi05_ros.ros.node import PolicyNode
from ros.robot_stand_in import Robot

# A lifecycle node's services outlive destroy_node() within a process, and would answer for the nodes of later tests:
# so every station here has a ROS domain of its own.
DOMAINS = itertools.count(int(os.environ["ROS_DOMAIN_ID"]))


class Station:
    """The node, spun on a thread once that is started, and the robot beside it. It serves nothing over HTTP unless a
    port is given.
    """

    def __init__(self, checkpoint: Path, interrupted: Callable[[], bool] = lambda: False, **parameters: Any) -> None:
        domain = 1 + next(DOMAINS) % 101
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        values = {"checkpoint": str(checkpoint), "robot": "aloha_sim", "prompt": "x", "device": "cpu", "http_port": 0}
        overrides = [Parameter(name, value=value) for name, value in {**values, **parameters}.items()]
        self.node = PolicyNode(interrupted, context=self.context, parameter_overrides=overrides)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.thread = threading.Thread(target=self.executor.spin, daemon=True)
        self.robot = Robot(domain=domain)

    @property
    def deployment(self) -> Deployment:
        assert self.node._deployment is not None
        return self.node._deployment

    def configure(self) -> None:
        assert self.node.trigger_configure() == TransitionCallbackReturn.SUCCESS

    def activate(self) -> None:
        assert self.node.trigger_activate() == TransitionCallbackReturn.SUCCESS

    def close(self) -> None:
        self.executor.shutdown()
        if self.thread.ident is not None:
            self.thread.join(5)
        self.node.close("The test ends.")
        self.node.destroy_node()
        self.robot.close()
        rclpy.shutdown(context=self.context)
