"""What is wrong with a request is said by name: the field, what was expected, what came."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import urllib3
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from server.serving import (
    CAMERAS,
    GENERATIONS,
    STATE,
    flat,
    images,
    noise,
    post,
)

GOOD = {"observation": flat()}
WRONG: dict[str, tuple[Any, int, str, str]] = {
    "no observation": ({"input": {}}, 400, "state", "is required"),
    "no state": ({"input": {"observation": {"images": images(), "prompt": "x"}}}, 400, "state", "14 numbers"),
    "short state": (
        {"input": {"observation": flat(state=STATE[:3])}},
        400,
        "state",
        "expected 14 numbers, got shape [3]",
    ),
    "NaN in state": ({"input": {"observation": flat(state=STATE * np.nan)}}, 400, "state", "finite"),
    "text for state": ({"input": {"observation": flat(state="left")}}, 400, "state", "expected numbers, got text"),
    "ragged state": ({"input": {"observation": flat(state=[[1, 2], [3]])}}, 400, "state", "array of numbers"),
    "no prompt": ({"input": {"observation": flat(prompt="")}}, 400, "prompt", "is required"),
    "long prompt": ({"input": {"observation": flat(prompt="x" * 5000)}}, 413, "prompt", "4096"),
    "number for prompt": ({"input": {"observation": flat(prompt=3)}}, 400, "prompt", "expected text, got int"),
    "unknown camera": (
        {"input": {"observation": flat(images={"front": images()["cam_high"]})}},
        400,
        "images.front",
        "cam_high",
    ),
    "images without names": (
        {"input": {"observation": flat(images=list(images().values()))}},
        400,
        "images",
        "expected a map by camera name, got a list of 3",
    ),
    "no image": ({"input": {"observation": flat(images={})}}, 400, "images", "got none"),
    "grey image": (
        {"input": {"observation": flat(images={"cam_high": np.zeros((4, 4), np.uint8)})}},
        400,
        "images.cam_high",
        "[height, width, 3]",
    ),
    "no image file": (
        {"input": {"observation": flat(images={"cam_high": b"GIF89a"})}},
        400,
        "images.cam_high",
        "JPEG or PNG",
    ),
    "no base64": (
        {"input": {"observation": flat(images={"cam_high": {"b64_json": "%%%"}})}},
        400,
        "images.cam_high",
        "base64",
    ),
    "integers beyond a byte": (
        {"input": {"observation": flat(images={"cam_high": np.full((4, 4, 3), 256)})}},
        400,
        "images.cam_high",
        "0..255",
    ),
    "wide image": (
        {"input": {"observation": flat(images={"cam_high": np.zeros((1, 5000, 3), np.uint8)})}},
        413,
        "images.cam_high",
        "4096",
    ),
    "noise of another shape": ({"input": {**GOOD, "noise": noise(0)[:9]}}, 400, "noise", "[50, 32]"),
    "noise and seed": ({"input": {**GOOD, "noise": noise(0)}, "parameters": {"seed": 1}}, 400, "seed", "beside noise"),
    "no steps": (
        {"input": GOOD, "parameters": {"num_inference_steps": 0}},
        400,
        "parameters.num_inference_steps",
        "got 0",
    ),
    "many steps": (
        {"input": GOOD, "parameters": {"num_inference_steps": 10**6}},
        400,
        "parameters.num_inference_steps",
        "1000",
    ),
    "text for steps": (
        {"input": GOOD, "parameters": {"num_inference_steps": "x"}},
        400,
        "parameters.num_inference_steps",
        "'x'",
    ),
    "true for steps": (
        {"input": GOOD, "parameters": {"num_inference_steps": True}},
        400,
        "parameters.num_inference_steps",
        "truth",
    ),
    "another horizon": (
        {"input": GOOD, "parameters": {"action_horizon": 10}},
        400,
        "parameters.action_horizon",
        "expected 50",
    ),
    "another width": (
        {"input": GOOD, "parameters": {"action_dim": 7}},
        400,
        "parameters.action_dim",
        "expected 14 or 32",
    ),
    "huge seed": ({"input": GOOD, "parameters": {"seed": 2**64 - 1}}, 400, "parameters.seed", "less than"),
    "output format": (
        {"input": GOOD, "runtime": {"output_format": "torch"}},
        400,
        "runtime.output_format",
        "'list' or 'numpy'",
    ),
    "response format": (
        {"input": GOOD, "runtime": {"response_format": "x"}},
        400,
        "runtime.response_format",
        "'envelope' or 'raw'",
    ),
    "switch": (
        {"input": GOOD, "runtime": {"prefix_cache": "maybe"}},
        400,
        "runtime.prefix_cache",
        'true, false or "auto"',
    ),
    "camera order": (
        {"input": {"observation": flat(camera_order=list(CAMERAS[::-1]))}},
        400,
        "camera_order",
        "cam_high",
    ),
    "mask of no camera": (
        {"input": {"observation": flat(image_masks={"front": True})}},
        400,
        "image_masks.front",
        "unknown camera",
    ),
    "list of nothing": ({"input": []}, 400, "input", "1 to 16"),
    "list of too many": ({"input": [{}] * 17}, 400, "input", "1 to 16"),
    "one of several": ({"input": [GOOD, {"observation": flat(state=STATE[:2])}]}, 400, "state", "14 numbers"),
    "text for input": ({"input": "x"}, 400, "input", "expected"),
    "list for runtime": ({"input": GOOD, "runtime": []}, 400, "runtime", "expected"),
    "no map": ([1, 2], 400, "request", "expected a map, got list"),
    "no msgpack": (b"\xc1", 400, "message", "msgpack"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_by_name(url: str, case: str) -> None:
    body, status, field, part = WRONG[case]
    response = post(url + GENERATIONS, body)
    error = response.json()
    assert (response.status, error["error"]["field"]) == (status, field), error
    assert part in error["error"]["message"]
    assert error["detail"] == error["error"]["message"]
    assert error["error"]["code"] == {400: "invalid_value", 413: "too_large"}[status]
    assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", GENERATIONS, 405, "method_not_allowed"),
        ("POST", "/v1/actions/metadata", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
    ],
)
def test_wrong_routes_are_json_too(url: str, method: str, path: str, status: int, code: str) -> None:
    response = urllib3.request(method, url + path, retries=False)
    assert (response.status, response.json()["error"]["code"]) == (status, code)
    assert path in response.json()["detail"]


def test_a_websocket_where_there_is_none(url: str) -> None:
    for path in ("/v1/actions/generations", "/policy"):
        with pytest.raises(InvalidStatus) as caught:
            connect(url.replace("http", "ws") + path)
        assert caught.value.response.status_code == 404
        error = json.loads(caught.value.response.body)["error"]
        assert error["code"] == "not_found"
        assert error["message"].startswith(f"{path} is no websocket")


def test_a_body_of_another_kind(url: str) -> None:
    response = post(url + GENERATIONS, b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (response.status, response.json()["error"]["field"]) == (415, "Content-Type")
