"""An action chunk with pi05_ros.client: python examples/python_client.py [http://127.0.0.1:8000]

The images are random and the state is zero: a stand-in for a robot, whose actions mean nothing.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from pi05_ros.client import ActionClient, ServerRefusal


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with ActionClient(url, os.environ.get("PI05_ROS_TOKEN", "")) as client:
        client.wait_until_ready(120)
        metadata = client.metadata()
        print("cameras:", *metadata["input"]["image_keys"])

        random = np.random.default_rng(0)
        images = {name: random.integers(0, 256, (480, 640, 3), np.uint8) for name in metadata["input"]["image_keys"]}
        state = np.zeros(metadata["input"]["state_dim"])
        chunk = client.infer(images, state, "uncap the pen", seed=0)
        print("actions:", chunk.actions.shape, chunk.actions.dtype, f"in {chunk.timings['total_ms']:.1f} ms")
        for name, target in zip(metadata["robot"]["action_names"], chunk.actions[0], strict=True):
            print(f"  {name:24} {target:8.4f}")

        try:
            client.infer(images, state[:3], "uncap the pen")
        except ServerRefusal as error:
            print("a state that is too short:", error)


if __name__ == "__main__":
    main()
