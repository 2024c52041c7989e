"""The parts of a policy, found and checked before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.errors import CheckpointError, Pi05Error
from pi05_ros.policy.binding import Binding
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.tokenizer import PromptTokenizer


def resolve_device(device: str) -> torch.device:
    """ "auto" -> CUDA if there is a GPU, else the CPU. Raises Pi05Error: unknown, or not there."""
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
