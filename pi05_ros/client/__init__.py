"""A client of the action server: requests over the realtime websocket or HTTP.

    from pi05_ros.client import ActionClient

    with ActionClient("http://127.0.0.1:8000") as client:
        client.wait_until_ready(120)
        chunk = client.infer({"cam_high": rgb}, state, "uncap the pen")
        chunk.actions    # float32 [horizon, action_dim], robot units

It needs neither torch nor a GPU.
"""

from pi05_ros.client.client import ActionClient
from pi05_ros.client.errors import ClientError, ServerRefusal, ServerUnavailable, Timeout
from pi05_ros.client.messages import Actions, Observation

__all__ = [
    "ActionClient",
    "Actions",
    "ClientError",
    "Observation",
    "ServerRefusal",
    "ServerUnavailable",
    "Timeout",
]
