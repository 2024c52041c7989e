"""The HTTP action API: every form of a request and of a reply, against what the policy itself gives."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import urllib3
from PIL import Image

from pi05_ros.policy import Policy
from pi05_ros.server.codec import unpack
from server.serving import (
    CAMERAS,
    GENERATIONS,
    PROMPT,
    STATE,
    answer,
    flat,
    images,
    load,
    noise,
    observation,
    post,
    serving,
)


@pytest.fixture(scope="module")
def expected(policy: Policy) -> np.ndarray:
    return policy.infer(observation(), seed=7).actions


def generate(url: str, body: Any) -> Any:
    """As msgpack."""
    response = post(url + GENERATIONS, body)
    assert response.status == 200, response.data
    return unpack(response.data)


def generate_json(url: str, body: Any, **headers: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request("POST", url + GENERATIONS, json=body, headers=headers, timeout=30.0, retries=False)


def values(reply: Any, index: int = 0) -> np.ndarray:
    return np.asarray(reply["data"][index]["action"]["values"], np.float32)


def encode(image: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


# ---- forms of a request ----


def chw(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image.transpose(2, 0, 1))


PNG = {camera: encode(image, "PNG") for camera, image in images().items()}
BASE64 = {camera: base64.b64encode(file).decode() for camera, file in PNG.items()}
NESTED = {camera: image.tolist() for camera, image in images().items()}

FORMS = {
    "in the observation": {"prompt": PROMPT, "observation": {"images": images(), "state": STATE}},
    "beside it": {"task": PROMPT, "images": images(), "state": STATE},
    "over the observation's": {
        "prompt": PROMPT,
        "state": STATE,
        "observation": {"images": images(), "state": STATE + 1},
    },
    "task over prompt": {"task": PROMPT, "prompt": "no", "observation": {"images": images(), "state": STATE}},
    "prompt in the observation": {"observation": flat()},
    "flat with dots": {
        "prompt": PROMPT,
        "observation": {
            **{f"observation.images.{name}": one for name, one in images().items()},
            "observation.state": STATE,
        },
    },
    "flat with slashes": {
        "prompt": PROMPT,
        "observation": {**{f"observation/{name}": one for name, one in images().items()}, "observation/state": STATE},
    },
    "channels first": {"observation": flat(images={name: chw(one) for name, one in images().items()})},
    "nested lists": {"observation": flat(images=NESTED, state=STATE.tolist())},
    "integers": {"observation": flat(images={name: one.astype(np.int64) for name, one in images().items()})},
    "floats 0..1": {"observation": flat(images={name: np.float32(one / 255) for name, one in images().items()})},
    "float64 state": {"observation": flat(state=STATE.astype(np.float64))},
    "PNG bytes": {"observation": flat(images=PNG)},
    "b64_json": {"observation": flat(images={name: {"b64_json": text} for name, text in BASE64.items()})},
    "base64": {"observation": flat(images={name: {"base64": text} for name, text in BASE64.items()})},
    "data URL": {"observation": flat(images={name: f"data:image/png;base64,{text}" for name, text in BASE64.items()})},
    "described by bytes": {
        "observation": flat(
            images={
                name: {"data": one.tobytes(), "dtype": "uint8", "shape": list(one.shape)}
                for name, one in images().items()
            },
            state={"data": STATE.tobytes(), "dtype": "<f4", "shape": [14]},
        )
    },
    "described by values": {
        "observation": flat(
            images={
                name: {"values": one.ravel().tolist(), "dtype": "uint8", "shape": list(one.shape)}
                for name, one in images().items()
            },
            state={"values": STATE.tolist(), "dtype": "float32", "shape": [14]},
        )
    },
    "everything said": {
        "observation": flat(camera_order=list(CAMERAS), image_masks=dict.fromkeys(CAMERAS, True), cam_low=None),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_observation_gives_the_same_chunk(url: str, expected: np.ndarray, form: str) -> None:
    reply = generate(url, {"input": FORMS[form], "parameters": {"seed": 7}})
    if form == "floats 0..1":  # not quite the same pixels
        assert np.abs(values(reply) - expected).max() < 0.01
    else:
        assert np.array_equal(values(reply), expected)


def test_json_is_read_and_written(url: str, expected: np.ndarray) -> None:
    body = {
        "id": "a",
        "input": {"prompt": PROMPT, "observation": {"images": NESTED, "state": STATE.tolist()}},
        "parameters": {"seed": 7, "num_inference_steps": 10, "action_horizon": 50, "action_dim": 32},
    }
    response = generate_json(url, body)
    assert response.status == 200, response.data
    assert response.headers["Content-Type"] == "application/json"
    reply = response.json()
    assert reply["data"][0]["action"]["shape"] == [50, 14]
    assert np.array_equal(values(reply), expected)


def test_json_with_files_as_a_browser_sends_them(url: str, expected: np.ndarray) -> None:
    reply = generate_json(url, {**flat(images=BASE64, state=STATE.tolist()), "seed": 7}).json()
    assert np.array_equal(values(reply), expected)


def test_a_body_without_input_is_one_observation(url: str, expected: np.ndarray) -> None:
    reply = generate(url, {**flat(), "seed": 7, "num_inference_steps": 10, "return_timing": False})
    assert np.array_equal(values(reply), expected)
    assert "timings" not in reply


def test_noise_is_where_the_flow_starts(url: str, policy: Policy) -> None:
    expected = policy.infer(observation(), noise=noise(3)).actions
    for given in (noise(3), noise(3)[None], noise(3).tolist()):
        assert np.array_equal(values(generate(url, {"input": {"observation": flat(), "noise": given}})), expected)
        assert np.array_equal(values(generate(url, {"input": {"observation": flat(noise=given)}})), expected)


def test_tokens_replace_the_prompt(url: str, policy: Policy) -> None:
    tokens = np.array([2, 10, 11, 12], np.int64)
    expected = policy.infer(observation(prompt="", tokens=tokens), seed=1).actions
    for names in (("tokens", "token_masks"), ("tokenized_prompt", "tokenized_prompt_mask")):
        padded = {names[0]: np.array([[2, 10, 11, 12, 0]]), names[1]: np.array([[True] * 4 + [False]])}
        body = {"input": {"observation": {"images": images(), "state": STATE, **padded}}, "parameters": {"seed": 1}}
        assert np.array_equal(values(generate(url, body)), expected)


def test_a_masked_camera_counts_as_absent(url: str, policy: Policy) -> None:
    masks = {"cam_left_wrist": False}
    expected = policy.infer(observation(image_masks=masks), seed=1).actions
    for given in (flat(image_masks=masks), flat(images={n: one for n, one in images().items() if n not in masks})):
        assert np.array_equal(
            values(generate(url, {"input": {"observation": given}, "parameters": {"seed": 1}})), expected
        )


def test_several_observations_in_one_request(url: str, policy: Policy) -> None:
    inputs = [
        {"observation": flat(images=images(seed=index), id=f"robot {index}", stamp=1.5 * index)} for index in range(3)
    ]
    reply = generate(url, {"input": inputs, "parameters": {"seed": 2}})
    assert reply["usage"]["batch_size"] == 3
    assert [item["index"] for item in reply["data"]] == [item["input_index"] for item in reply["data"]] == [0, 1, 2]
    assert [(item["id"], item["stamp"]) for item in reply["data"]] == [
        ("robot 0", 0.0),
        ("robot 1", 1.5),
        ("robot 2", 3.0),
    ]
    for index in range(3):
        expected = policy.infer(observation(images=images(seed=index)), seed=2).actions
        assert np.abs(values(reply, index) - expected).max() < 1e-4  # a batch rounds otherwise than one alone


def test_of_a_camera_that_writes_several_pictures_to_a_file_the_first_counts(url: str) -> None:
    first, other = (Image.fromarray(images(seed=seed)["cam_high"]) for seed in (0, 1))
    single, several = io.BytesIO(), io.BytesIO()
    first.save(single, "JPEG")
    first.save(several, "MPO", save_all=True, append_images=[other])
    replies = [generate(url, {**flat(images={"cam_high": file.getvalue()}), "seed": 7}) for file in (single, several)]
    assert np.array_equal(*map(values, replies))


def test_raw_is_the_models_own_space() -> None:
    with load(robot="raw") as policy, serving(policy) as sidecar:
        keys = policy.metadata["input"]["image_keys"]
        state = np.linspace(-1, 1, 32, dtype=np.float32)
        given = {f"observation.images.{key.removeprefix('observation.images.')}": images()["cam_high"] for key in keys}
        tokens = [2, 10, 11]
        reply = generate(
            sidecar.url,
            {"input": {"observation": {**given, "observation.state": state, "tokens": tokens, "noise": noise(1)}}},
        )
        assert values(reply).shape == (50, 32)
        names = dict.fromkeys(keys, images()["cam_high"])
        chunk = policy.infer(observation(images=names, state=state, prompt="", tokens=tokens), noise=noise(1))
        assert np.array_equal(values(reply), chunk.model_actions)


# ---- forms of a reply ----


def test_the_envelope_is_complete(url: str) -> None:
    body = {"request_id": "my id", "input": {"observation": flat()}, "parameters": {"num_inference_steps": 3}}
    first, again = (generate(url, body) for _ in range(2))
    assert first["id"] == "my id"
    assert first["object"] == "action.generation"
    assert isinstance(first["created"], int)
    assert first["model"] == "tiny"
    (item,) = first["data"]
    assert (item["index"], item["input_index"], item["candidate_index"]) == (0, 0, 0)
    action = item["action"]
    assert (action["type"], action["dtype"], action["shape"]) == ("continuous", "float32", [50, 14])
    assert action["values"].dtype == np.float32
    assert again["usage"] == {
        "batch_size": 1,
        "action_horizon": 50,
        "action_dim": 14,
        "denoise_steps": 3,
        "prefix_cache_hit": True,
    }
    stages = {"preprocess_ms", "cache_lookup_ms", "action_denoise_ms", "postprocess_ms", "queue_ms", "total_ms"}
    assert set(again["timings"]) == stages, "a prefix from the cache took no time"
    assert again["cache"] == {"hit": True, "scope": "global", "mode": "exact", "grouped": False, "batch_size": 1}


def test_the_raw_form(url: str) -> None:
    body = {"id": "r", "input": {"observation": flat(stamp=4.0)}, "runtime": {"response_format": "raw"}}
    reply = generate(url, body)
    assert (reply["request_id"], reply["stamp"]) == ("r", 4.0)
    assert (reply["actions"].shape, reply["actions"].dtype) == ((50, 14), np.float32)
    assert reply["parameters"] == {"num_inference_steps": 10}
    assert {"timings", "cache"} <= set(reply)


@pytest.mark.parametrize("accept", ["", "application/msgpack"])
@pytest.mark.parametrize("form", ["list", "numpy"])
def test_who_asks_decides_the_form(url: str, accept: str, form: str) -> None:
    body = {**flat(images=BASE64, state=STATE.tolist()), "output_format": form}
    response = generate_json(url, body, **({"Accept": accept} if accept else {}))
    action = answer(response)["data"][0]["action"]["values"]
    assert isinstance(action, np.ndarray if accept and form == "numpy" else list)
    reply = generate(url, {"input": {"observation": flat()}, "parameters": {"output_format": form}})
    assert isinstance(reply["data"][0]["action"]["values"], np.ndarray if form == "numpy" else list)


@pytest.mark.parametrize("word", [False, "false", "0", "no", np.False_])
def test_the_cache_can_be_left_out(url: str, word: Any) -> None:
    runtime = {"prefix_cache": word, "cuda_graph": "auto"}
    replies = [generate(url, {"input": {"observation": flat()}, "runtime": runtime}) for _ in range(2)]
    assert not any(reply["cache"]["hit"] for reply in replies)
    assert replies[0]["cache"]["mode"] == "disabled"


def test_an_id_is_made_up_where_none_is_given(url: str) -> None:
    ids = {generate(url, {"input": {"observation": flat()}})["id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(one.startswith("act_") for one in ids)


def test_metadata_says_what_the_policy_reads_and_gives(url: str, policy: Policy) -> None:
    metadata = urllib3.request("GET", url + "/v1/actions/metadata").json()
    assert metadata["object"] == "action.metadata"
    assert metadata["input"]["image_keys"] == list(CAMERAS)
    assert (metadata["output"]["action_horizon"], metadata["output"]["action_dim"]) == (50, 14)
    assert metadata["status"] == "ready"
    assert metadata["defaults"] == {"num_inference_steps": 10, "prefix_cache": "auto", "cuda_graph": False}
    assert metadata["capabilities"]["batch_inputs"]
    assert metadata["robot"]["joint_names"] == policy.metadata["robot"]["joint_names"]


def test_metrics_count_requests_and_stages(policy: Policy) -> None:
    with serving(policy) as sidecar:
        generate(sidecar.url, {"input": {"observation": flat()}})
        post(sidecar.url + GENERATIONS, {"input": {}})
        text = urllib3.request("GET", sidecar.url + "/metrics").data.decode()
    assert f'pi05_requests_total{{route="{GENERATIONS}",status="200"}} 1.0' in text
    assert f'pi05_requests_total{{route="{GENERATIONS}",status="400"}} 1.0' in text
    for name in ("denoise", "prefix", "queue", "total"):
        assert f'pi05_stage_seconds_count{{stage="{name}"}} 1.0' in text
    for name in ('pi05_stage{stage="ready"} 1.0', "pi05_queue_depth 0.0", 'pi05_batches_total{size="1"}'):
        assert name in text
