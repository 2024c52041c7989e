"""The model against LeRobot's and openpi's own numbers, in float32.

PI05_ROS_TEST_DEVICE=cuda runs the same cases on a GPU.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from golden_cases import ACTIONS_LIMIT, GOLDEN, PREFIX_LIMIT, VELOCITY_LIMIT, case, close, names
from safetensors.torch import load_file

from pi05_ros.checkpoint import load_model
from pi05_ros.model import Pi05Model, RtcGuidance
from pi05_ros.model.rtc import prefix_weights

DEVICE = os.environ.get("PI05_ROS_TEST_DEVICE", "cpu")
CASES = [(folder, name) for folder in ("fp32", "fp32_224") for name in names(f"lerobot_{folder}/cases.json")]
RTC_CASES = names("lerobot_rtc/cases.json")


@cache
def model_of(folder: str) -> Pi05Model:
    return load_model(GOLDEN / folder, DEVICE, "float32")


@cache
def tensors_of(file: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / file, DEVICE)


def inputs_of(folder: str, name: str) -> tuple[torch.Tensor, ...]:
    tensors = tensors_of(f"{folder}/cases.safetensors")
    return tuple(tensors[f"{name}.{field}"] for field in ("images", "image_masks", "tokens", "token_mask"))


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_prefix_and_velocity_equal_lerobot(folder: str, name: str) -> None:
    model, expected = model_of(f"lerobot_{folder}"), tensors_of(f"lerobot_{folder}/cases.safetensors")
    pad_mask = expected[f"{name}.pad_mask"]
    with torch.no_grad():
        prefix = model.encode_prefix(*inputs_of(f"lerobot_{folder}", name))
    assert torch.equal(prefix.pad_mask, pad_mask)
    for field, actual in (
        ("prefix_embeddings", prefix.embeddings[pad_mask]),
        ("k_first", prefix.keys[0].transpose(1, 2)[pad_mask]),
        ("v_first", prefix.values[0].transpose(1, 2)[pad_mask]),
        ("k_last", prefix.keys[-1].transpose(1, 2)[pad_mask]),
        ("v_last", prefix.values[-1].transpose(1, 2)[pad_mask]),
    ):
        wanted = expected[f"{name}.{field}"]
        wanted = (wanted if field == "prefix_embeddings" else wanted.transpose(1, 2))[pad_mask]
        assert (actual - wanted).abs().max() <= PREFIX_LIMIT * max(1.0, float(wanted.abs().max())), field
    noise = expected[f"{name}.noise"]
    for time, field in ((1.0, "velocity_t1"), (0.5, "velocity_t05")):
        with torch.no_grad():
            velocity = model.denoise_step(prefix, noise, torch.full((noise.shape[0],), time, device=DEVICE))
        assert (velocity - expected[f"{name}.{field}"]).abs().max() <= VELOCITY_LIMIT, field


@pytest.mark.parametrize(("folder", "name"), CASES)
@pytest.mark.parametrize("reference", ["lerobot", "openpi"])
def test_actions_equal_the_references(reference: str, folder: str, name: str) -> None:
    noise = tensors_of(f"lerobot_{folder}/cases.safetensors")[f"{name}.noise"]
    file = "cases" if reference == "lerobot" else "actions"
    expected = tensors_of(f"{reference}_{folder}/{file}.safetensors")[f"{name}.actions"]
    steps = case(f"{reference}_{folder}/cases.json", name)["num_steps"]
    model = model_of(f"lerobot_{folder}")
    actions = model.sample_actions(*inputs_of(f"lerobot_{folder}", name), noise, steps, time_grid=reference)
    assert close(actions, expected, ACTIONS_LIMIT)


@pytest.mark.parametrize("name", RTC_CASES)
def test_guided_chunks_equal_lerobot(name: str) -> None:
    described, tensors = case("lerobot_rtc/cases.json", name), tensors_of("lerobot_rtc/cases.safetensors")
    inputs = described["inputs_of_case"]
    noise = tensors_of("lerobot_fp32/cases.safetensors")[f"{inputs}.noise"]
    guidance = None
    if described["has_previous_chunk"]:
        guidance = RtcGuidance(
            prev_chunk=tensors[f"{name}.prev_chunk_left_over"],
            inference_delay=described["inference_delay"],
            execution_horizon=described["execution_horizon"],
            schedule=described["schedule"],
            max_guidance_weight=described["max_guidance_weight"],
        )
        rows = guidance.prev_chunk.shape[-2]
        horizon = described["execution_horizon"] or described["config_execution_horizon"]
        weights = prefix_weights(described["schedule"], described["inference_delay"], min(horizon, rows), 50)
        assert (weights.to(DEVICE) - tensors[f"{name}.weights"]).abs().max() <= 1e-6
    actions = model_of("lerobot_fp32").sample_actions(
        *inputs_of("lerobot_fp32", inputs), noise, described["num_steps"], rtc=guidance
    )
    assert close(actions, tensors[f"{name}.actions"], ACTIONS_LIMIT)
