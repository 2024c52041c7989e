"""A checkpoint folder, read except for its weights: sizes, features, normalisation, tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pi05_ros.checkpoint.norm_stats import NormStats, read_lerobot_stats, read_norm_stats
from pi05_ros.errors import CheckpointError
from pi05_ros.model import Pi05Config

logger = logging.getLogger(__name__)

IMAGE_PREFIX = "observation.images."


@dataclass(frozen=True)
class RelativeActions:
    """LeRobot's relative actions: predicted against the present state, except joints whose name says otherwise."""

    enabled: bool = False
    exclude_joints: tuple[str, ...] = ("gripper",)
    action_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says about itself.

    layout: "lerobot" (features, processors and statistics in the folder) or "openpi" (sizes and statistics only: what
        cameras and joints there are is the robot profile's business).
    cameras: image inputs in model order, without ``observation.images.``; empty for openpi.
    state_dim, action_dim: robot dimensions; None where the checkpoint does not say (openpi).
    normalization: mode by "state" and "action".
    norm_stats: None if the folder has none.
    rename_map: names of incoming images -> names of image inputs.
    tokenizer: the tokenizer file of the folder, None if there is none.
    """

    folder: Path
    layout: Literal["lerobot", "openpi"]
    config: Pi05Config
    num_steps: int = 10
    prompt_length: int = 200
    cameras: tuple[str, ...] = ()
    state_dim: int | None = None
    action_dim: int | None = None
    normalization: Mapping[str, str] = field(default_factory=lambda: {"state": "QUANTILES", "action": "QUANTILES"})
    norm_stats: NormStats | None = None
    relative_actions: RelativeActions = RelativeActions()
    rename_map: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None


def read_checkpoint(path: str | Path, asset_id: str | None = None, with_stats: bool = True) -> Checkpoint:
    """Describe the checkpoint at ``path`` (a folder, or a weight file in one).

    asset_id: which of several openpi norm stats is meant. with_stats: False leaves the statistics unread.
    Raises CheckpointError that names the file and the field.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint folder or .safetensors file.")
    config = _read_json(folder / "config.json")
    reader = _Reader(folder / "config.json", config)
    if config.get("type", "pi05") != "pi05":
        raise CheckpointError(f"{reader.file}: type: expected 'pi05', got {config['type']!r}.")
    if "input_features" in config or "chunk_size" in config:
        return _read_lerobot(folder, reader, with_stats)
    return _read_openpi(folder, reader, asset_id, with_stats)


class _Reader:
    """Fields of one JSON object, each checked as it is read. A null counts as absent."""

    def __init__(self, file: Path, data: Mapping[str, Any], where: str = "") -> None:
        self.file, self.data, self.where = file, data, where

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one.__name__ for one in kinds)
            raise CheckpointError(f"{self.file}: {self.where}{name}: expected {expected}, got {value!r}.")
        return value

    def names(self, name: str, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """A list of texts."""
        values = self.get(name, list, default)
        if values is not default and not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{self.file}: {self.where}{name}: expected a list of names, got {values!r}.")
        return values if values is None else tuple(values)

    def texts(self, name: str) -> dict[str, str]:
        """An object of texts."""
        values = self.get(name, dict, {})
        if not all(isinstance(value, str) for value in values.values()):
            raise CheckpointError(f"{self.file}: {self.where}{name}: expected an object of texts, got {values!r}.")
        return dict(values)

    def positive(self, name: str, default: int) -> int:
        value: int = self.get(name, int, default)
        if value <= 0:
            raise CheckpointError(f"{self.file}: {self.where}{name}: expected a positive number, got {value}.")
        return value

    def architecture(self, **others: Any) -> Pi05Config:
        for name, only in (("paligemma_variant", "gemma_2b"), ("action_expert_variant", "gemma_300m")):
            if self.data.get(name, only) != only:
                raise CheckpointError(f"{self.file}: {name}: expected {only!r}, got {self.data[name]!r}.")
        try:
            return Pi05Config.from_architecture(self.data.get("pi05_ros_architecture"), **others)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {error}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file}: the file does not exist; a checkpoint needs it beside its weights.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(data).__name__}.")
    return data


def _read_lerobot(folder: Path, reader: _Reader, with_stats: bool) -> Checkpoint:
    config = reader.architecture(
        horizon=reader.positive("chunk_size", 50),
        action_dim=reader.positive("max_action_dim", 32),
        min_period=float(reader.get("min_period", (int, float), 0.004)),
        max_period=float(reader.get("max_period", (int, float), 4.0)),
    )
    size = config.vision.image_size
    resolution = reader.get("image_resolution", list, [size, size])
    if resolution != [size, size]:
        raise CheckpointError(
            f"{reader.file}: image_resolution: expected [{size}, {size}] (the vision tower's), got {resolution}."
        )
    inputs = reader.get("input_features", dict, {})
    outputs = reader.get("output_features", dict, {})
    cameras = [
        name.removeprefix(IMAGE_PREFIX)
        for name, feature in inputs.items()
        if isinstance(feature, dict) and feature.get("type") == "VISUAL"
    ]
    cameras += [f"empty_camera_{index}" for index in range(reader.get("empty_cameras", int, 0))]
    if not cameras:
        raise CheckpointError(f"{reader.file}: input_features: expected at least one of type VISUAL, got {inputs!r}.")
    _refuse_other_models(reader)
    pre, post = _steps(folder, "policy_preprocessor.json"), _steps(folder, "policy_postprocessor.json")
    state, action = pre.get("normalizer_processor"), post.get("unnormalizer_processor")
    return Checkpoint(
        folder=folder,
        layout="lerobot",
        config=config,
        num_steps=reader.positive("num_inference_steps", 10),
        prompt_length=reader.positive("tokenizer_max_length", 200),
        cameras=tuple(dict.fromkeys(cameras)),
        state_dim=_feature_dim(reader.file, "input_features", inputs, "observation.state", None),
        action_dim=_feature_dim(reader.file, "output_features", outputs, "action", config.action_dim),
        normalization={"state": _mode("STATE", state, reader), "action": _mode("ACTION", action, reader)},
        norm_stats=_lerobot_stats(folder, action, state) if with_stats else None,
        relative_actions=_relative_actions(reader, pre),
        rename_map=_rename_map(pre.get("rename_observations_processor")),
        tokenizer=_find_tokenizer(folder),
    )


def _refuse_other_models(reader: _Reader) -> None:
    """Options that change what the network reads or does, and that we do not have."""
    for name in ("use_proprioceptive_memory", "memory_enabled"):
        if reader.data.get(name):
            raise CheckpointError(f"{reader.file}: {name}: checkpoints with proprioceptive memory are not supported.")
    if reader.get("rtc_training_max_delay", int, 0) > 0:
        logger.warning("%s: rtc_training_max_delay: real-time chunking is guided here, not as trained.", reader.file)


def _feature_dim(file: Path, group: str, features: Mapping[str, Any], name: str, default: int | None) -> int | None:
    if name not in features:
        return default
    shape = features[name].get("shape") if isinstance(features[name], dict) else None
    if not (isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 0):
        raise CheckpointError(f"{file}: {group}[{name!r}].shape: expected one positive number, got {shape!r}.")
    return shape[0]


KNOWN_STEPS = (
    "rename_observations_processor",
    "to_batch_processor",
    "relative_actions_processor",
    "delta_actions_processor",
    "normalizer_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "device_processor",
    "unnormalizer_processor",
    "absolute_actions_processor",
)


@dataclass(frozen=True)
class _Step:
    """A step of a LeRobot processor: its configuration, and the file of its tensors."""

    config: _Reader
    state_file: str | None


def _steps(folder: Path, name: str) -> dict[str, _Step]:
    """Steps of a LeRobot processor file by their registry name; empty if the folder has no such file.

    A step that is not known would change states or actions in a way that we would silently leave out, so it is refused.
    """
    file = folder / name
    if not file.is_file():
        return {}
    steps = {}
    for index, step in enumerate(_Reader(file, _read_json(file)).get("steps", list, [])):
        where = f"steps[{index}]"
        if not isinstance(step, dict) or step.get("registry_name") not in KNOWN_STEPS:
            raise CheckpointError(
                f"{file}: {where}: expected an object whose registry_name is one of {', '.join(KNOWN_STEPS)}, "
                f"got {step!r}."
            )
        reader = _Reader(file, step, f"{where}.")
        config = _Reader(file, reader.get("config", dict, {}), f"{where}.config.")
        steps[step["registry_name"]] = _Step(config, reader.get("state_file", str, None))
    return steps


def _mode(feature: str, step: _Step | None, config: _Reader) -> str:
    """How STATE or ACTION is normalised: as its step says, else config.json. A map without it leaves it as it is."""
    if step is not None and step.config.get("eps", (int, float), 1e-8) != 1e-8:
        raise CheckpointError(f"{step.config.file}: eps: expected 1e-08, got {step.config.data['eps']!r}.")
    modes = step.config.texts("norm_map") if step is not None else {}
    modes = modes or config.texts("normalization_mapping")
    return modes.get(feature, "IDENTITY") if modes else "QUANTILES"


def _lerobot_stats(folder: Path, action: _Step | None, state: _Step | None) -> NormStats | None:
    """Action statistics come from the unnormaliser, state statistics from the normaliser; both files may hold both."""
    files = {
        feature: folder / step.state_file
        for feature, step in (("action", action), ("state", state))
        if step is not None and step.state_file
    }
    for file in files.values():
        if not file.is_file():
            raise CheckpointError(f"{file}: the file does not exist, but the processor's JSON names it.")
    if not files:
        return None
    read = {feature: read_lerobot_stats(file) for feature, file in files.items()}
    either = next(iter(read.values()))
    return NormStats(
        read.get("state", either).state,
        read.get("action", either).action,
        ", ".join(dict.fromkeys(stats.source for stats in read.values())),
    )


def _rename_map(step: _Step | None) -> dict[str, str]:
    renames = {} if step is None else step.config.texts("rename_map")
    return {old.removeprefix(IMAGE_PREFIX): new.removeprefix(IMAGE_PREFIX) for old, new in renames.items()}


def _relative_actions(reader: _Reader, steps: Mapping[str, _Step]) -> RelativeActions:
    step = steps.get("relative_actions_processor") or steps.get("delta_actions_processor")
    if step is not None:
        source, enabled, excluded, names = step.config, "enabled", "exclude_joints", "action_names"
    else:
        source = reader
        enabled, excluded, names = "use_relative_actions", "relative_exclude_joints", "action_feature_names"
    return RelativeActions(
        enabled=source.get(enabled, bool, False),
        exclude_joints=source.names(excluded, ("gripper",)) or (),
        action_names=source.names(names, None),
    )


def _read_openpi(folder: Path, reader: _Reader, asset_id: str | None, with_stats: bool) -> Checkpoint:
    config = reader.architecture(
        horizon=reader.positive("action_horizon", 50), action_dim=reader.positive("action_dim", 32)
    )
    return Checkpoint(
        folder=folder,
        layout="openpi",
        config=config,
        norm_stats=_openpi_stats(folder, asset_id) if with_stats else None,
        tokenizer=_find_tokenizer(folder),
    )


def _openpi_stats(folder: Path, asset_id: str | None) -> NormStats | None:
    assets = folder / "assets"
    found = {file.parent.relative_to(assets).as_posix(): file for file in sorted(assets.rglob("norm_stats.json"))}
    if not found:
        return None
    if asset_id in found:
        return read_norm_stats(found[asset_id])
    if len(found) == 1:
        (name, file), *_ = found.items()
        if asset_id is not None:
            logger.warning("%s: these are the statistics of %r, the robot profile expects %r.", file, name, asset_id)
        return read_norm_stats(file)
    raise CheckpointError(
        f"{assets}: several norm stats ({', '.join(found)}), none named {asset_id!r} as the robot profile says. "
        "Give the file with norm_stats=."
    )


def _find_tokenizer(folder: Path) -> Path | None:
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    return next(iter(sorted(folder.glob("*tokenizer.model"))), None)
