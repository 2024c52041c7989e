"""The parts of a policy, found and checked before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.engine.engine import MAX_BATCH_DELAY
from pi05_ros.engine.roofline import has_fp8
from pi05_ros.errors import CheckpointError, Pi05Error
from pi05_ros.policy.binding import Binding
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.tokenizer import PromptTokenizer


def resolve_device(device: str) -> torch.device:
    """ "auto" -> CUDA if there is a GPU, else the CPU. Raises Pi05Error: unknown, or not there."""
    if not isinstance(device, (str, torch.device)):
        raise Pi05Error(f"device: expected auto, cuda, cuda:<index> or cpu, got {device!r}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise Pi05Error(f"device: expected auto, cuda, cuda:<index> or cpu, got {device!r}.") from error
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            raise Pi05Error(f"device: {device!r} was asked for; this machine has {count} CUDA devices PyTorch can use.")
    elif target.type != "cpu":
        raise Pi05Error(f"device: expected auto, cuda, cuda:<index> or cpu, got {device!r}.")
    return target


def check_options(**options: tuple[Any, tuple[Any, ...]]) -> None:
    """name=(value, legal values). Raises Pi05Error for the first that is not legal."""
    for name, (value, known) in options.items():
        if not any(value is one or (isinstance(value, str) and value == one) for one in known):
            raise Pi05Error(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}.")


def check_paths(**options: tuple[Any, bool]) -> None:
    """name=(value, may be None). Raises Pi05Error for the first that is no path."""
    for name, (value, optional) in options.items():
        if not isinstance(value, (str, Path)) and not (optional and value is None):
            raise Pi05Error(f"{name}: expected a path, got {value!r}.")


def check_least(**options: tuple[Any, int]) -> None:
    """name=(value, least). Raises Pi05Error for the first that is no integer of at least that."""
    for name, (value, least) in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Pi05Error(f"{name}: expected an integer of {least} or more, got {value!r}.")


def check_milliseconds(name: str, value: Any) -> None:
    """Raises Pi05Error: no number from 0 to what the engine takes."""
    most = MAX_BATCH_DELAY * 1e3
    if not isinstance(value, (int, float)) or not 0.0 <= value <= most:
        raise Pi05Error(f"{name}: expected milliseconds, 0 to {most:g}, got {value!r}.")


def check_precision(precision: str, compile_mode: str, device: torch.device) -> None:
    """Raises Pi05Error: float8 where nothing multiplies it."""
    if precision != "fp8":
        return
    if compile_mode == "plain":
        raise Pi05Error("precision: fp8 needs compile_mode graphs or eager, got plain, which has no float8.")
    if not has_fp8(device):
        found = "the CPU"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            found = f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
        raise Pi05Error(
            f"precision: fp8 needs a GPU of compute capability 8.9 or more, and the device is {found}; "
            "openpi runs on any."
        )


def make_normalizers(checkpoint: Checkpoint, binding: Binding, off: bool) -> dict[str, Normalizer]:
    """The maps of state and action, checked against the robot's dimensions."""
    normalizers, stats = {}, checkpoint.norm_stats
    for feature, dims in (("state", binding.state_dim), ("action", binding.action_dim)):
        mode = "IDENTITY" if off else checkpoint.normalization[feature]
        if mode == "IDENTITY":
            normalizers[feature] = Normalizer(mode, {}, checkpoint.layout)
            continue
        if stats is None:
            raise CheckpointError(
                f"{checkpoint.folder}: no normalisation statistics found (looked for "
                + (
                    "the state files that policy_preprocessor.json and policy_postprocessor.json name"
                    if checkpoint.layout == "lerobot"
                    else "assets/*/norm_stats.json"
                )
                + f"), and {feature} is to be normalised by {mode}. The arm would move by made-up numbers. Give a file "
                "with norm_stats=, or normalization='none' to go without."
            )
        normalizer = Normalizer(mode, stats.require(feature, mode), checkpoint.layout)
        covered = normalizer.dims or 0
        # openpi pads some of its statistics to the model's width.
        padded = checkpoint.layout == "openpi" and covered == checkpoint.config.action_dim
        if covered != dims and not padded:
            raise CheckpointError(
                f"{stats.source}: {feature}: the statistics cover {covered} dimensions, the robot has {dims}."
            )
        normalizers[feature] = normalizer
    return normalizers


def find_tokenizer(
    checkpoint: Checkpoint, given: str | Path | None, truncate: bool, required: bool
) -> tuple[PromptTokenizer | None, str]:
    """The tokenizer, or why there is none, where a caller may send tokens instead."""
    path = Path(given).expanduser() if given is not None else checkpoint.tokenizer
    try:
        return PromptTokenizer(path, checkpoint.config.prefix.vocab, checkpoint.prompt_length, truncate), ""
    except CheckpointError as error:
        if required or path is not None:
            raise
        return None, str(error)
