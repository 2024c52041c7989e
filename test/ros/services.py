"""Calling a service so that its answer comes.

A server sees a client's request before it has seen the client's reader of answers; the middleware waits 0.1 s for that
and then drops the answer (`failed to send response (timeout)` in the server's log), which a busy machine needs longer
for. A participant makes its readers known in the order in which they were made, so once a server has answered to a
client made later, it knows the earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rcl_interfaces.srv import ListParameters
from rclpy.node import Node

AGAIN = 1.0
"""Seconds after which the question without effect is put again."""


class Services:
    """Clients of one node, kept by the name of the service."""

    def __init__(self, node: Node, wait_for: Callable[[Callable[[], Any], str], Any]) -> None:
        """wait_for: spins until the condition holds; raises when it takes too long, saying what did not come."""
        self._node, self._wait_for = node, wait_for
        self._clients: dict[str, Any] = {}
        self._probes: dict[str, Any] = {}

    def call(self, kind: Any, name: str, request: Any) -> Any:
        """The answer of the service ``name``, /node/service."""
        server = name.rpartition("/")[0]
        if name not in self._clients:
            self._clients[name] = self._node.create_client(kind, name)
            self._probes[server] = self._node.create_client(ListParameters, f"{server}/list_parameters")
        client = self._clients[name]
        self._wait_for(client.service_is_ready, f"service {name}")
        self._wait_until_known(self._probes[server])
        future = client.call_async(request)
        self._wait_for(future.done, f"answer of {name}")
        return future.result()

    def _wait_until_known(self, probe: Any) -> None:
        self._wait_for(probe.service_is_ready, f"service {probe.srv_name}")
        asked: list[Any] = []
        again = 0.0

        def answered() -> bool:
            nonlocal again
            if time.monotonic() > again:
                asked.append(probe.call_async(ListParameters.Request()))
                again = time.monotonic() + AGAIN
            return any(future.done() for future in asked)

        self._wait_for(answered, f"answer of {probe.srv_name}")
