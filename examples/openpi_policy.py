"""Programs of openpi run unchanged: its websocket policy and its chunk broker, on the server's bare host and port.

    pip install --no-deps openpi-client && pip install dm-tree      # by itself it wants numpy 1
    python examples/openpi_policy.py [127.0.0.1] [8000]        a token: PI05_ROS_TOKEN

The images are random and the state is zero: a stand-in for a robot, whose actions mean nothing.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")


def main() -> None:
    host = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    policy = WebsocketClientPolicy(host, port, api_key=os.environ.get("PI05_ROS_TOKEN"))
    print("model:", policy.get_server_metadata()["model"])

    random = np.random.default_rng(0)
    observation = {
        "images": {name: random.integers(0, 256, (3, 224, 224), np.uint8) for name in CAMERAS},
        "state": np.zeros(14),
        "prompt": "uncap the pen",
    }
    broker = ActionChunkBroker(policy, action_horizon=10)
    for step in range(12):  # the second chunk is inferred at step 10
        print(f"step {step:2}:", np.round(broker.infer(observation)["actions"], 3))


if __name__ == "__main__":
    main()
