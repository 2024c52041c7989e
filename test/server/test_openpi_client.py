"""openpi's own client, installed and unchanged, against the server: what robots that speak its protocol already run.

The preset's statistics are an ALOHA's. The other robots take its openpi layout without them, as no features are named
there; their numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from openpi_client import image_tools
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.policy import Observation, Policy, load_profile
from pi05_ros.server.sidecar import Sidecar
from server.serving import CAMERAS, PROMPT, STATE, flat, load, noise, serving

pytestmark = pytest.mark.filterwarnings("ignore:connect:Warning")  # the client is of before its websocket library's

HORIZON = 50


@pytest.fixture(scope="module")
def openpi_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("openpi") / "tiny", "openpi")


@pytest.fixture(scope="module")
def aloha() -> Iterator[tuple[Policy, Sidecar]]:
    with load() as policy, serving(policy) as sidecar:
        yield policy, sidecar


def connect(sidecar: Sidecar, path: str | None = None, **options: Any) -> WebsocketClientPolicy:
    """By host and port, as most robots do it, or by the address of a path."""
    address = urlsplit(sidecar.url)
    if path is not None:
        return WebsocketClientPolicy(f"ws://{address.netloc}{path}", **options)
    return WebsocketClientPolicy(str(address.hostname), address.port, **options)


def picture(seed: int, height: int = 60, width: int = 80) -> np.ndarray:
    """RGB float [height, width, 3], 0..1, as simulators render it."""
    return np.random.default_rng(seed).random((height, width, 3))


def sent(image: np.ndarray) -> np.ndarray:
    """What openpi's examples make of a picture: uint8, 224 x 224."""
    return image_tools.convert_to_uint8(image_tools.resize_with_pad(image_tools.convert_to_uint8(image), 224, 224))


def aloha_observation() -> tuple[dict[str, Any], Observation]:
    images = {name: sent(picture(seed)) for seed, name in enumerate(CAMERAS)}
    message = {
        "state": STATE,
        "images": {name: image.transpose(2, 0, 1) for name, image in images.items()},
        "prompt": PROMPT,
    }
    return message, Observation(images, STATE, PROMPT)


def real_aloha_observation() -> tuple[dict[str, Any], Observation]:
    """It has one more camera, which the model has no input for."""
    message, observation = aloha_observation()
    message["images"]["cam_low"] = sent(picture(9)).transpose(2, 0, 1)
    return message, observation


def droid_observation() -> tuple[dict[str, Any], Observation]:
    outside, wrist = sent(picture(1)), sent(picture(2))
    joints, gripper = np.linspace(-1, 1, 7), np.array([0.25])
    message = {
        "observation/exterior_image_1_left": outside,
        "observation/wrist_image_left": wrist,
        "observation/joint_position": joints,
        "observation/gripper_position": gripper,
        "prompt": PROMPT,
    }
    images = {"exterior_image_1_left": outside, "wrist_image_left": wrist}
    return message, Observation(images, np.concatenate([joints, gripper]), PROMPT)


def libero_observation() -> tuple[dict[str, Any], Observation]:
    front, wrist, state = sent(picture(3)), sent(picture(4)), np.linspace(-0.5, 0.5, 8)
    message = {
        "observation/image": front,
        "observation/wrist_image": wrist,
        "observation/state": state,
        "prompt": PROMPT,
    }
    return message, Observation({"image": front, "wrist_image": wrist}, state, PROMPT)


Example = Callable[[], tuple[dict[str, Any], Observation]]


@pytest.mark.parametrize(
    ("robot", "options", "example", "dims"),
    [
        ("aloha_sim", {}, aloha_observation, 14),
        ("aloha_ros2", {"adapt_to_pi": True}, real_aloha_observation, 14),
        ("franka_droid", {"normalization": "none"}, droid_observation, 8),
        ("libero", {"normalization": "none"}, libero_observation, 7),
    ],
)
def test_a_chunk_equals_the_policys(
    openpi_checkpoint: Path, robot: str, options: dict[str, Any], example: Example, dims: int
) -> None:
    message, observation = example()
    with (
        Policy.from_checkpoint(openpi_checkpoint, "cpu", "float32", robot, **options) as policy,
        serving(policy) as sidecar,
    ):
        expected = policy.infer(observation, noise=noise(3)).actions
        for path in (None, "/openpi/policy"):
            client = connect(sidecar, path)
            assert client.get_server_metadata()["robot"]["profile"] == robot
            reply = client.infer({**message, "noise": noise(3)})
            assert (reply["actions"].shape, reply["actions"].dtype) == ((HORIZON, dims), np.float32)
            assert np.array_equal(reply["actions"], expected)


def test_the_metadata_is_what_http_serves(aloha: tuple[Policy, Sidecar]) -> None:
    policy, sidecar = aloha
    metadata = connect(sidecar).get_server_metadata()
    assert metadata["status"] == "ready"
    assert metadata["output"] == policy.metadata["output"]
    assert "reset_pose" not in metadata


def test_the_reset_pose_is_where_openpis_robots_look_for_it() -> None:
    pose = (0.0, -1.5, 1.5, 0.0, 0.0, 0.0)
    with load(replace(load_profile("aloha_sim"), reset_pose=pose)) as policy, serving(policy) as sidecar:
        assert connect(sidecar).get_server_metadata()["reset_pose"] == list(pose)


def test_timings_of_a_second_reply_tell_of_the_first(aloha: tuple[Policy, Sidecar]) -> None:
    client = connect(aloha[1])
    first, second = client.infer(flat()), client.infer(flat())
    assert set(first["server_timing"]) == {"infer_ms"}
    assert set(second["server_timing"]) == {"infer_ms", "prev_total_ms"}
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]
    assert 0 < second["policy_timing"]["infer_ms"] <= second["server_timing"]["infer_ms"]


def test_the_brokers_fifty_steps_are_one_inference(aloha: tuple[Policy, Sidecar]) -> None:
    """It slices every array of a reply, whatever else is in it."""
    policy, sidecar = aloha
    broker = ActionChunkBroker(connect(sidecar), action_horizon=HORIZON)
    before = policy.engine.stats()["answered"]
    message = {**flat(), "noise": noise(1)}
    steps = [broker.infer(message) for _ in range(HORIZON)]
    assert policy.engine.stats()["answered"] == before + 1
    expected = policy.infer(Observation(flat()["images"], STATE, PROMPT), noise=noise(1)).actions
    assert np.array_equal(np.stack([step["actions"] for step in steps]), expected)
    following = broker.infer({**flat(), "noise": noise(2)})
    assert policy.engine.stats()["answered"] == before + 3, "ours, and one more of the broker's"
    assert not np.array_equal(following["actions"], expected[0])


@pytest.mark.parametrize(
    "prompt", [PROMPT, np.array(PROMPT), np.str_(PROMPT)], ids=["text", "array of no dimensions", "numpy text"]
)
def test_prompts_in_every_form(aloha: tuple[Policy, Sidecar], prompt: Any) -> None:
    policy, sidecar = aloha
    expected = policy.infer(Observation(flat()["images"], STATE, PROMPT), noise=noise(1)).actions
    reply = connect(sidecar).infer({**flat(), "prompt": prompt, "noise": noise(1)})
    assert np.array_equal(reply["actions"], expected)


@pytest.mark.parametrize(
    ("wrong", "field", "came"),
    [
        ({"state": np.zeros(7)}, "state", "[7]"),
        ({"state": np.full(14, np.nan)}, "state", "nan"),
        ({"images": {"cam_back": np.zeros((3, 8, 8), np.uint8)}}, "images.cam_back", "cam_high"),
        ({"images": {**flat()["images"], "cam_high": np.zeros((8, 8), np.uint8)}}, "images.cam_high", "[8, 8]"),
        ({"prompt": 3}, "prompt", "int"),
        ({"noise": np.zeros((4, 4), np.float32)}, "noise", "[4, 4]"),
        ({"num_inference_steps": 0}, "num_inference_steps", "0"),
    ],
)
def test_an_error_is_one_line_and_the_socket_goes_on(
    aloha: tuple[Policy, Sidecar], wrong: dict[str, Any], field: str, came: str
) -> None:
    client = connect(aloha[1])
    with pytest.raises(RuntimeError) as caught:
        client.infer({**flat(), **wrong})
    heading, line = str(caught.value).splitlines()
    assert heading == "Error in inference server:"
    assert field in line
    assert came in line
    assert "Traceback" not in line
    assert client.infer(flat())["actions"].shape == (HORIZON, 14)


def test_numpy_scalars_are_numbers(aloha: tuple[Policy, Sidecar]) -> None:
    policy, sidecar = aloha
    reply = connect(sidecar).infer({**flat(), "noise": noise(1), "num_inference_steps": np.int64(2)})
    expected = policy.infer(Observation(flat()["images"], STATE, PROMPT), noise=noise(1), num_steps=2).actions
    assert reply["parameters"] == {"num_inference_steps": 2}
    assert np.array_equal(reply["actions"], expected)


def test_the_api_key_is_the_token() -> None:
    with load() as policy, serving(policy, token="secret") as sidecar:
        assert connect(sidecar, api_key="secret").infer(flat())["actions"].shape == (HORIZON, 14)
        with pytest.raises(Exception, match="401"):
            connect(sidecar, api_key="guess")
