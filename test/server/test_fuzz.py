"""Whatever comes in becomes a request or an error that says what is wrong with it; the server is there for the next."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from pi05_ros.errors import ObservationError
from pi05_ros.policy import Policy
from pi05_ros.server.codec import pack
from pi05_ros.server.errors import RequestError, as_request_error
from pi05_ros.server.limits import Limits
from pi05_ros.server.request import read_action_request, read_body
from pi05_ros.server.values import ImageReader
from server.serving import CAMERAS, GENERATIONS, answer, flat, images, post

LIMITS = Limits()
REFUSALS = (ObservationError, RequestError)

ARRAYS = hnp.arrays(
    st.sampled_from(["|u1", "<f4", "<f8", "<i8", "|b1", "<U3", "|S2", "<f2", ">f4", "<m8[s]"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=16),
    ARRAYS,
    ARRAYS.filter(lambda array: array.size).map(lambda array: array.flat[0]),
    st.sampled_from(["float32", "uint8", "data:image/png;base64,AAAA", "auto", "numpy", "raw", CAMERAS[0]]),
)
WORDS = """
input observation images image state noise prompt task image_masks camera_order tokens token_mask
tokenized_prompt stamp id request_id parameters runtime num_inference_steps action_horizon action_dim
seed output_format response_format return_timing prefix_cache cuda_graph timeout_ms values data dtype
shape b64_json base64 joint_position gripper_position observation.images.cam_high observation/state
observation.images.other
"""
NAMES = st.sampled_from([*WORDS.split(), *CAMERAS])
KEYS = st.one_of(NAMES, NAMES, st.text(st.characters(), max_size=4), st.integers(), st.binary(max_size=3))
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def read_and_run(body: Any, policy: Policy) -> None:
    """One step of what a request of that body runs, if it is one."""
    request = read_action_request(body, policy, LIMITS, numpy=True)
    options = [{**request.options(index), "num_steps": 1} for index in range(len(request.observations))]
    for future in policy.submit_batch(request.observations, options):
        assert np.isfinite(future.result().actions).all()


@settings(max_examples=300)
@given(changes=st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
def test_any_values_in_an_observation(policy: Policy, changes: dict[Any, Any]) -> None:
    """Nested and flat."""
    observation = {**flat(), **changes}
    for body in ({"input": {"observation": observation}}, observation):
        with suppress(*REFUSALS):
            read_and_run(body, policy)


@settings(max_examples=300)
@given(changes=st.dictionaries(NAMES, TREES, min_size=1, max_size=4), where=st.sampled_from(["", "input", "runtime"]))
def test_any_values_in_a_request(policy: Policy, changes: dict[Any, Any], where: str) -> None:
    body: dict[str, Any] = {"input": {"observation": flat()}, "runtime": {}, "parameters": {}}
    (body[where] if where else body).update(changes)
    with suppress(*REFUSALS):
        read_and_run(body, policy)


@settings(max_examples=300)
@given(tree=TREES)
def test_any_value_as_an_image(tree: Any) -> None:
    with suppress(*REFUSALS):
        ImageReader(LIMITS).read("images.cam_high", tree)


@given(error=st.builds(RequestError, st.just(400), st.text(st.characters()), st.text(st.characters())))
def test_every_error_can_be_sent(error: RequestError) -> None:
    assert json.loads(json.dumps(error.body, ensure_ascii=False).encode()) == error.body
    assert pack(error.body)


@settings(max_examples=300)
@given(data=st.binary(max_size=200) | st.text().map(str.encode), msgpack=st.booleans())
def test_any_bytes_as_a_body(data: bytes, msgpack: bool) -> None:
    with suppress(*REFUSALS):
        assert isinstance(read_body(data, msgpack, LIMITS), dict)


def damaged(data: st.DataObject, original: bytes) -> bytes:
    """Cut short, with bytes changed, or with some of it twice."""
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(0, 8))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    begin, end = data.draw(st.integers(0, len(changed))), data.draw(st.integers(0, len(changed)))
    return bytes(changed[:end] if data.draw(st.booleans()) else changed + changed[begin:end])


def encoded(form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(images(8, 8)["cam_high"]).save(file, form)
    return file.getvalue()


@settings(max_examples=400)
@given(data=st.data(), form=st.sampled_from(["JPEG", "PNG"]))
def test_damaged_image_files(data: st.DataObject, form: str) -> None:
    with suppress(*REFUSALS):
        image = ImageReader(LIMITS).read("images.cam_high", damaged(data, encoded(form)))
        assert image.dtype == np.uint8
        assert image.shape[2] == 3


SMALL = {**flat(images=images(6, 8)), "num_inference_steps": 1}
AS_JSON = json.dumps(
    {
        "input": {"prompt": "lift it", "observation": {"images": {"cam_high": images(2, 2)["cam_high"].tolist()}}},
        "runtime": {"return_timing": True},
        "parameters": {"num_inference_steps": 1},
    }
).encode()


@settings(max_examples=200)
@given(data=st.data(), form=st.sampled_from(["application/msgpack", "application/json"]))
def test_damaged_requests_over_http(url: str, data: st.DataObject, form: str) -> None:
    original = pack(SMALL) if "msgpack" in form else AS_JSON
    response = post(url + GENERATIONS, damaged(data, original), headers={"Content-Type": form})
    assert response.status in (200, 400, 413)
    if response.status != 200:
        error = response.json()
        assert error["detail"] == error["error"]["message"] != ""
        assert error["error"]["code"] in ("invalid_value", "too_large")
        assert "Traceback" not in error["detail"]


def test_the_server_is_still_there(url: str) -> None:
    """After all that."""
    assert answer(post(url + GENERATIONS, flat()))["usage"]["action_horizon"] == 50


def test_an_error_that_nobody_foresaw_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log, for whoever runs the server."""
    error = as_request_error(ZeroDivisionError("secret"))
    assert (error.status, error.code) == (500, "internal")
    assert "secret" not in json.dumps(error.body)
    assert "secret" in caplog.text
