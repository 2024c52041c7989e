"""Random-weight checkpoints of any size, in the files and names of real ones: for tests, demos and benchmarks.

They are complete (weights, configuration, statistics, tokenizer) and useless for a task. Every tensor is written before
the next one is made, so that a full-size checkpoint needs the memory of its largest tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

from pi05_ros.checkpoint.layout import EMBED_TOKENS_KEY, EXPERT_LM_HEAD_KEY, LM_HEAD_KEY, checkpoint_key
from pi05_ros.checkpoint.random_weights import random_tensor
from pi05_ros.checkpoint.stand_in_tokenizer import stand_in_tokenizer
from pi05_ros.errors import CheckpointError
from pi05_ros.model import Pi05Config, Pi05Model

PRESETS: dict[str, Callable[[], Pi05Config]] = {"tiny": Pi05Config.tiny, "pi05_base": Pi05Config.pi05_base}
LAYOUTS = ("lerobot", "openpi")
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
ASSET_ID = "trossen"
CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")

# An ALOHA around its start pose: six arm joints (rad) and the gripper (0 closed .. 1 open) of one arm. Actions reach
# less far than states, so that a simulated arm survives a network that means nothing.
_START_POSE = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5)
_STATE_REACH = (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
_ACTION_REACH = (0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.5)


def make_checkpoint(
    preset: str,
    folder: str | Path,
    layout: str = "lerobot",
    seed: int = 0,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint for an ALOHA (three cameras, 14 joints) and return its folder.

    preset: "tiny" or "pi05_base". layout: "lerobot" or "openpi". dtype: of the file; None: float32 for LeRobot,
    bfloat16 for openpi, as published. progress: called with bytes written and bytes in all.
    Raises CheckpointError: unknown choice, or the folder holds weights already and overwrite is False.
    """
    dtype = dtype or ("float32" if layout == "lerobot" else "bfloat16")
    for name, value, known in (("preset", preset, PRESETS), ("layout", layout, LAYOUTS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise CheckpointError(f"{name}: expected one of {', '.join(known)}, got {value!r}.")
    folder = Path(folder)
    weights = folder / "model.safetensors"
    present = [path.name for path in (*folder.glob("*.safetensors*"), folder / "config.json") if path.exists()]
    if present and not overwrite:
        raise CheckpointError(
            f"{folder} holds {present[0]} already; choose another folder, or overwrite it (overwrite=True, --force)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)  # else the shards of before would be read
    config = PRESETS[preset]()
    architecture = {} if preset == "pi05_base" else {"pi05_ros_architecture": config.architecture()}
    if layout == "lerobot":
        _write_lerobot(folder, config, architecture, dtype)
    else:
        _write_openpi(folder, config, architecture, dtype)
    (folder / "tokenizer.json").write_text(stand_in_tokenizer(config.prefix.vocab), encoding="utf-8")
    partial = folder / "model.safetensors.partial"
    try:
        with partial.open("wb") as file:
            _write_weights(file, config, seed, dtype, progress)
        partial.replace(weights)
    finally:
        partial.unlink(missing_ok=True)
    return folder


def _write_weights(
    file: BinaryIO, config: Pi05Config, seed: int, dtype: str, progress: Callable[[int, int], None] | None
) -> None:
    """The safetensors format: length of a JSON header, the header, the tensors one behind the other."""
    torch_dtype, dtype_name = DTYPES[dtype]
    shapes = dict(_shapes(config))
    header: dict[str, Any] = {}
    end = 0
    for key, (_, shape) in shapes.items():
        begin, end = end, end + shape.numel() * torch_dtype.itemsize
        header[key] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [begin, end]}
    header["__metadata__"] = {"format": "pt", EMBED_TOKENS_KEY: LM_HEAD_KEY}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for key, (name, shape) in shapes.items():
        tensor = random_tensor(name, shape, seed).to(torch_dtype).contiguous()
        file.write(tensor.view(torch.uint8).numpy().data)
        if progress is not None:
            progress(header[key]["data_offsets"][1], end)


def _shapes(config: Pi05Config) -> Iterator[tuple[str, tuple[str, torch.Size]]]:
    """Key in the file -> parameter name and shape, in the file's order."""
    with torch.device("meta"):
        model = Pi05Model(config)
    named = {checkpoint_key(name): (name, parameter.shape) for name, parameter in model.named_parameters()}
    named[EXPERT_LM_HEAD_KEY] = ("expert.lm_head.weight", torch.Size((config.prefix.vocab, config.expert.width)))
    for key in sorted(named):
        yield key, named[key]


def _features() -> tuple[dict[str, Any], dict[str, Any]]:
    inputs: dict[str, Any] = {
        f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, 480, 640]} for camera in CAMERAS
    }
    inputs["observation.state"] = {"type": "STATE", "shape": [14]}
    return inputs, {"action": {"type": "ACTION", "shape": [14]}}


def _statistics(relative_actions: bool) -> dict[str, dict[str, list[float]]]:
    """Statistics of "state" and "action", both arms. Relative actions are around zero, grippers stay absolute."""
    action_center = (*[0.0] * 6, _START_POSE[6]) if relative_actions else _START_POSE
    return {"state": _quantiles(_START_POSE, _STATE_REACH), "action": _quantiles(action_center, _ACTION_REACH)}


def _quantiles(center: tuple[float, ...], reach: tuple[float, ...]) -> dict[str, list[float]]:
    return {
        "q01": [c - r for c, r in zip(center, reach, strict=True)] * 2,
        "q99": [c + r for c, r in zip(center, reach, strict=True)] * 2,
        "mean": list(center) * 2,
        "std": [r / 2 for r in reach] * 2,
    }


def _write_lerobot(folder: Path, config: Pi05Config, architecture: dict[str, Any], dtype: str) -> None:
    inputs, outputs = _features()
    norm_map = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    size = config.vision.image_size
    _write_json(
        folder / "config.json",
        {
            "type": "pi05",
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "dtype": dtype,
            "n_obs_steps": 1,
            "chunk_size": config.horizon,
            "n_action_steps": config.horizon,
            "max_state_dim": config.action_dim,
            "max_action_dim": config.action_dim,
            "num_inference_steps": 10,
            "min_period": config.min_period,
            "max_period": config.max_period,
            "image_resolution": [size, size],
            "empty_cameras": 0,
            "tokenizer_max_length": 200,
            "normalization_mapping": norm_map,
            "use_relative_actions": False,
            "relative_exclude_joints": ["gripper"],
            "action_feature_names": None,
            "input_features": inputs,
            "output_features": outputs,
            **architecture,
        },
    )
    features = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": norm_map}
    tokenizer = {"max_length": 200, "task_key": "task", "padding_side": "right", "padding": "max_length"}
    _write_processor(
        folder,
        "policy_preprocessor",
        [
            ("rename_observations_processor", {"rename_map": {}}),
            ("to_batch_processor", {}),
            ("relative_actions_processor", {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}),
            ("normalizer_processor", features),
            ("pi05_prepare_state_tokenizer_processor_step", {}),
            ("tokenizer_processor", {**tokenizer, "truncation": True, "tokenizer_name": "stand-in"}),
            ("device_processor", {"device": "cpu", "float_dtype": None}),
        ],
    )
    _write_processor(
        folder,
        "policy_postprocessor",
        [
            ("unnormalizer_processor", features),
            ("absolute_actions_processor", {"enabled": False}),
            ("device_processor", {"device": "cpu", "float_dtype": None}),
        ],
    )


def _write_processor(folder: Path, name: str, steps: list[tuple[str, dict[str, Any]]]) -> None:
    """A LeRobot processor, with the statistics of its (un)normaliser beside it."""
    entries = []
    for index, (registry_name, config) in enumerate(steps):
        entry: dict[str, Any] = {"registry_name": registry_name, "config": config}
        if "normalizer" in registry_name:
            entry["state_file"] = f"{name}_step_{index}_{registry_name}.safetensors"
            stats = {
                f"{key}.{statistic}": torch.tensor(values)
                for feature, key in (("state", "observation.state"), ("action", "action"))
                for statistic, values in _statistics(relative_actions=False)[feature].items()
            }
            (folder / entry["state_file"]).write_bytes(save(stats))
        entries.append(entry)
    _write_json(folder / f"{name}.json", {"name": name, "steps": entries})


def _write_openpi(folder: Path, config: Pi05Config, architecture: dict[str, Any], dtype: str) -> None:
    _write_json(
        folder / "config.json",
        {
            "action_dim": config.action_dim,
            "action_horizon": config.horizon,
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "precision": dtype,
            **architecture,
        },
    )
    assets = folder / "assets" / ASSET_ID
    assets.mkdir(parents=True, exist_ok=True)
    stats = _statistics(relative_actions=True)  # what openpi trains an ALOHA on
    _write_json(assets / "norm_stats.json", {"norm_stats": {"state": stats["state"], "actions": stats["action"]}})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
