"""``PolicyHost``: what a server serves. None yet, a policy, or the reason why there is none.

The server listens before there is a policy, so that a client learns what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pi05_ros.policy import Listener, Policy
from pi05_ros.server.errors import NotReadyError

STAGES = ("loading", "warming_up", "ready", "error", "closed")

# One GPU does all; the fields are those that clients of the action API may read.
PARALLELISM = {"num_gpus": 1, "tp_size": 1, "sp_degree": 1, "ulysses_degree": 1, "ring_degree": 1}


class PolicyHost:
    """Thread-safe. Stages: loading -> warming_up -> ready, or error; closed at the end."""

    def __init__(self, robot_status: Callable[[], dict[str, Any]] | None = None) -> None:
        """robot_status: of the node that runs the same policy: {"state", "reason", ...}; None without a robot."""
        self._lock = threading.Lock()
        self._stage, self._reason = "loading", ""
        self._policy: Policy | None = None
        self._listeners: list[Listener] = []
        self.robot_status = robot_status

    @property
    def stage(self) -> str:
        """One of STAGES."""
        return self._stage

    @property
    def reason(self) -> str:
        """A sentence: what is being done, or what went wrong; "" when ready."""
        return self._reason

    def tell(self, stage: str, reason: str = "") -> None:
        """What the policy is at, as long as there is none; or "error", "closed": there will be none."""
        with self._lock:
            self._stage, self._reason = stage, reason
            self._policy = None

    def serve(self, policy: Policy) -> None:
        """From now on requests go to this policy."""
        with self._lock:
            for listener in self._listeners:
                policy.watch(listener)
            self._policy, self._stage, self._reason = policy, "ready", ""

    def policy(self) -> Policy:
        """Raises NotReadyError, which says what the server waits for."""
        with self._lock:
            if self._policy is None:
                raise NotReadyError(self._stage, self._reason)
            return self._policy

    def metadata(self) -> dict[str, Any]:
        """Of the policy, and what this server can do. Raises NotReadyError."""
        policy = self.policy()
        own = policy.metadata
        cached, graphs = own["runtime"]["prefix_cache"] > 0, own["runtime"]["cuda_graph"]["enabled"]
        return {
            **own,
            "status": "ready",
            "runtime": {**own["runtime"], "enable_autocast": False, "parallelism": PARALLELISM},
            "defaults": {
                **own["defaults"],
                "prefix_cache": "auto" if cached else False,
                "cuda_graph": "auto" if graphs else False,
            },
            "capabilities": {
                "exact_prefix_cache": cached,
                "cuda_graph": graphs,
                "realtime_websocket": True,
                "openpi_websocket": True,
                "batch_inputs": True,
                "multiple_candidates": False,
            },
        }

    def watch(self, listener: Listener) -> None:
        """Tell it of every request that ends, a robot's own too; see ``Policy.watch``."""
        with self._lock:
            self._listeners.append(listener)
            if self._policy is not None:
                self._policy.watch(listener)
