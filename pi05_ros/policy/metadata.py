"""What a client may know of a policy, as plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.engine import Engine
from pi05_ros.policy.binding import Binding
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.profile import RobotProfile


def describe(
    checkpoint: Checkpoint,
    binding: Binding,
    profile: RobotProfile | None,
    normalizers: Mapping[str, Normalizer],
    precision: str,
    engine: Engine,
) -> dict[str, Any]:
    """The object that ``/v1/actions/metadata`` serves. precision: as the policy was asked for it."""
    config, stats = checkpoint.config, checkpoint.norm_stats
    mode = {name: normalizer.mode for name, normalizer in normalizers.items()}
    return {
        "object": "action.metadata",
        "model": checkpoint.folder.name,
        "model_path": str(checkpoint.folder),
        "policy_family": "pi05",
        "input": {
            "image_keys": list(binding.fed_cameras),
            "image_size": [config.vision.image_size] * 2,
            "state_dim": binding.state_dim,
        },
        "output": {
            "action_type": "continuous",
            "action_horizon": config.horizon,
            "action_dim": binding.action_dim,
            "padded_action_dim": config.action_dim,
            "dtype": "float32",
        },
        "runtime": {
            "device": str(engine.device),
            "precision": precision,
            "materialize_dtype": "fp32" if precision == "float32" else "bf16",
            "float8": ["prefix.mlp"] if precision == "fp8" else [],
            "compile_mode": engine.path.name,
            "cuda_graph": {"enabled": engine.path.name == "graphs"},
            "prefix_cache": engine.path.cache.entries,
            "max_batch": engine.max_batch,
        },
        "defaults": {"num_inference_steps": checkpoint.num_steps},
        "robot": {
            "profile": "raw" if binding.raw else profile.name if profile else None,
            "joint_names": list(binding.state_names),
            "action_names": list(binding.action_names),
            "control_hz": profile.control_hz if profile else None,
            "units": _units(profile),
            "gripper": _gripper(profile),
            "adapt_to_pi": binding.adapt_to_pi,
            "reset_pose": list(profile.reset_pose) if profile and profile.reset_pose else None,
        },
        "normalization": {
            "mode": mode,
            "layout": checkpoint.layout,
            "source": stats.source if stats else None,
        },
    }


def _units(profile: RobotProfile | None) -> list[str] | None:
    """Of the state, by dimension; None where only the checkpoint's makers know."""
    if profile is None or profile.transform == "libero":
        return None
    units: list[str] = []
    for arm in profile.arms:
        units += ["rad"] * len(arm.joints)
        if arm.gripper:
            units.append("{:g}..{:g}".format(*arm.gripper.range))
    return units


def _gripper(profile: RobotProfile | None) -> str | None:
    grippers = [arm.gripper for arm in profile.arms if arm.gripper] if profile else []
    if not grippers:
        return None
    passed_through = any(gripper.passed_through for gripper in grippers)
    return "as it is measured, see the profile" if passed_through else "0 to 1, see the profile"
