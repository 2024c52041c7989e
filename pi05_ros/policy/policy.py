"""``Policy``: an observation in robot units becomes an action chunk in robot units."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi05_ros.checkpoint import Checkpoint, NormStats, load_model, read_checkpoint, read_norm_stats
from pi05_ros.engine import Engine, EngineRequest, EngineResult
from pi05_ros.engine.images import DIALECTS
from pi05_ros.errors import CheckpointError, InferenceError, ObservationError, Pi05Error
from pi05_ros.model import PRECISIONS, RtcGuidance, census
from pi05_ros.model.pi05 import TIME_GRIDS
from pi05_ros.policy.binding import Binding, bind
from pi05_ros.policy.inputs import as_image, as_numbers, as_tokens, as_vector
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.observation import ActionChunk, Observation
from pi05_ros.policy.profile import RobotProfile, load_profile
from pi05_ros.policy.prompt import clean, prompt_text
from pi05_ros.policy.tokenizer import PromptTokenizer
from pi05_ros.policy.transforms import absolute_actions

logger = logging.getLogger(__name__)

COMPILE_MODES = ("plain", "eager", "graphs")
MAX_STEPS = 1000


class Policy:
    """Pi0.5 for one robot. Thread-safe; the model itself runs on a thread of its engine."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        binding: Binding,
        profile: RobotProfile | None,
        engine: Engine,
        tokenizer: PromptTokenizer | None,
        normalizers: Mapping[str, Normalizer],
        tokenizer_error: str = "",
    ) -> None:
        """Use ``from_checkpoint``; this takes the parts that it makes."""
        self.checkpoint, self.binding, self.profile = checkpoint, binding, profile
        self.engine = engine
        self._tokenizer, self._tokenizer_error = tokenizer, tokenizer_error
        self._normalizers = normalizers
        self._entropy = np.random.default_rng()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        device: str = "auto",
        precision: str = "openpi",
        robot: str | Path | RobotProfile | None = "aloha_ros2",
        *,
        compile_mode: str = "graphs",
        prefix_cache: int = 8,
        max_batch: int = 4,
        batch_delay_ms: float = 3.0,
        time_grid: str | None = None,
        resize: str | None = None,
        norm_stats: str | Path | None = None,
        normalization: str | None = None,
        delta_actions: bool | None = None,
        adapt_to_pi: bool | None = None,
        truncate_prompt: bool = False,
        tokenizer: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Policy:
        """Load a checkpoint for a robot.

        path: a folder or .safetensors file, LeRobot or openpi layout.
        device: "auto" (CUDA if there is a GPU), "cuda", "cuda:1", "cpu".
        precision: "openpi" (bfloat16 with float32 islands), "float32" or "bfloat16".
        robot: name of a profile in ``config/robots/``, a path of one, or a RobotProfile; None: the checkpoint's own
            features without a robot transform; "raw": normalised model space in and out.
        compile_mode: "graphs", "eager" or "plain". This version has the plain path only and says so once.
        prefix_cache: prefixes kept, 0 for none. max_batch, batch_delay_ms: how requests that wait together are batched.
        time_grid: "lerobot", "openpi" or "sglang"; resize: "lerobot" or "openpi"; None: as the checkpoint's layout is.
        norm_stats: a file of statistics to use instead of the checkpoint's.
        normalization: "none" to leave states and actions as they are, for checkpoints without statistics.
        delta_actions, adapt_to_pi: None: what checkpoint and profile say.
        truncate_prompt: cut a prompt that is too long, as the references do, instead of refusing it.
        tokenizer: a tokenizer file to use instead of the checkpoint's.
        progress: called with tensors read and tensors in all while weights load.

        Raises CheckpointError, ProfileError: one message with everything that is wrong and what was tried.
        """
        for name, value, known in (
            ("precision", precision, PRECISIONS),
            ("compile_mode", compile_mode, COMPILE_MODES),
            ("time_grid", time_grid, (None, *TIME_GRIDS)),
            ("resize", resize, (None, *DIALECTS)),
            ("normalization", normalization, (None, "none")),
        ):
            if value not in known:
                raise Pi05Error(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}.")
        target = resolve_device(device)
        raw = isinstance(robot, str) and robot == "raw"
        profile = robot if isinstance(robot, RobotProfile) or robot is None or raw else load_profile(robot)
        profile = profile if isinstance(profile, RobotProfile) else None
        own_stats = norm_stats is None and normalization is None and not raw
        checkpoint = read_checkpoint(path, profile.openpi.asset_id if profile else None, with_stats=own_stats)
        binding = bind(checkpoint, profile, raw, adapt_to_pi, delta_actions)
        stats = read_norm_stats(Path(norm_stats)) if norm_stats is not None else checkpoint.norm_stats
        normalizers = _normalizers(checkpoint, binding, stats, off=raw or normalization == "none")
        prompts, tokenizer_error = _tokenizer(checkpoint, tokenizer, truncate_prompt, required=not raw)
        if compile_mode != "plain":
            logger.warning("compile_mode %r is not available in this version: the plain path runs.", compile_mode)
        model = load_model(path, target, precision, checkpoint.config, progress)
        logger.info(
            "Parameters by dtype: %s", ", ".join(f"{dtype} {n:,}" for dtype, n in sorted(census(model).items()))
        )
        dialect = "openpi" if checkpoint.layout == "openpi" else "lerobot"
        engine = Engine(
            model,
            resize=resize or dialect,
            time_grid=time_grid or dialect,
            prefix_cache=prefix_cache,
            max_batch=max_batch,
            batch_delay=batch_delay_ms / 1e3,
        )
        return cls(checkpoint, binding, profile, engine, prompts, normalizers, tokenizer_error)

    def infer(
        self,
        observation: Observation,
        *,
        noise: Any = None,
        seed: int | None = None,
        num_steps: int | None = None,
        rtc: RtcGuidance | None = None,
        prefix_cache: bool | None = None,
        graphs: bool | None = None,
        deadline: float | None = None,
        priority: int = 0,
    ) -> ActionChunk:
        """One action chunk.

        noise: [horizon, 32] or [1, horizon, 32] in model space, where the flow starts; or seed: draws it the same way
            on every device; neither: fresh noise.
        num_steps: denoise steps, None: the checkpoint's (10). rtc: guidance by the previous chunk, in model space.
        prefix_cache: False neither looks up nor stores. graphs: no effect on the plain path.
        deadline: time.monotonic() after which it is not started.
        priority: higher goes before others that wait.

        Raises ObservationError that names the field; InferenceError: non-finite result, deadline passed, engine closed.
        """
        return self.submit(
            observation,
            noise=noise,
            seed=seed,
            num_steps=num_steps,
            rtc=rtc,
            prefix_cache=prefix_cache,
            graphs=graphs,
            deadline=deadline,
            priority=priority,
        ).result()

    def infer_batch(self, observations: Sequence[Observation], **options: Any) -> list[ActionChunk]:
        """``infer`` for several; those of equal shape run together. Options count for all. All valid, or none runs."""
        requests = [self._prepare(observation, **options) for observation in observations]
        return [future.result() for future in [self._submit(*prepared) for prepared in requests]]

    def submit(self, observation: Observation, **options: Any) -> Future[ActionChunk]:
        """``infer`` without waiting. Raises ObservationError at once; all else comes through the future."""
        return self._submit(*self._prepare(observation, **options))

    def reset(self) -> None:
        """Forget cached prefixes."""
        self.engine.clear_cache()

    def close(self, timeout: float | None = None) -> bool:
        """End the engine; requests that wait are refused. Idempotent.

        timeout: seconds to wait for a running inference, None: as long as it takes. Returns False if it still runs.
        """
        return self.engine.close(timeout)

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def horizon(self) -> int:
        """Rows of an action chunk."""
        return self.checkpoint.config.horizon

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client needs to know, as ``/v1/actions/metadata`` serves it. Plain JSON types."""
        config, binding, profile = self.checkpoint.config, self.binding, self.profile
        mode = {name: normalizer.mode for name, normalizer in self._normalizers.items()}
        return {
            "object": "action.metadata",
            "model": self.checkpoint.folder.name,
            "model_path": str(self.checkpoint.folder),
            "policy_family": "pi05",
            "input": {
                "image_keys": [name for name in binding.cameras if name is not None],
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
            "defaults": {"num_inference_steps": self.checkpoint.num_steps},
            "robot": {
                "profile": "raw" if binding.raw else profile.name if profile else None,
                "joint_names": list(binding.state_names),
                "action_names": list(binding.action_names),
                "control_hz": profile.control_hz if profile else None,
                "adapt_to_pi": binding.adapt_to_pi,
                "reset_pose": list(profile.reset_pose) if profile and profile.reset_pose else None,
            },
            "normalization": {"mode": mode, "layout": self.checkpoint.layout},
        }

    # ---- from robot units to the engine ----

    def _submit(self, request: EngineRequest, finish: Callable[[EngineResult], ActionChunk]) -> Future[ActionChunk]:
        return self.engine.submit(request, finish)

    def _prepare(
        self,
        observation: Observation,
        *,
        noise: Any = None,
        seed: int | None = None,
        num_steps: int | None = None,
        rtc: RtcGuidance | None = None,
        prefix_cache: bool | None = None,
        graphs: bool | None = None,
        deadline: float | None = None,
        priority: int = 0,
    ) -> tuple[EngineRequest, Callable[[EngineResult], ActionChunk]]:
        """Validate everything that can be wrong with a request, before it reaches the engine."""
        binding = self.binding
        state = as_vector("state", observation.state, binding.state_dim, exact=not binding.raw)
        state = binding.transform.state_to_model(state)
        request = EngineRequest(
            images=self._images(observation),
            tokens=self._tokens(observation, self._normalizers["state"].normalize(state)),
            noise=self._noise(noise, seed),
            num_steps=self._steps(num_steps),
            rtc=self._guidance(rtc),
            deadline=deadline,
            priority=priority,
            use_cache=prefix_cache is not False,
        )
        return request, lambda result: self._finish(observation, state, result)

    def _images(self, observation: Observation) -> tuple[np.ndarray, ...]:
        """Images of the cameras that are there, in model order."""
        images, masks, binding = observation.images, observation.image_masks or {}, self.binding
        known = [name for name in binding.cameras if name is not None]
        for field, given in (("images", images), ("image_masks", masks)):
            if not isinstance(given, Mapping):
                raise ObservationError(field, f"expected a mapping by camera name, got {type(given).__name__}")
            unknown = [name for name in given if name not in known and name not in binding.ignored_cameras]
            if unknown:
                raise ObservationError(f"{field}.{unknown[0]}", f"unknown camera; this policy reads {', '.join(known)}")
        present = [name for name in known if name in images and masks.get(name, True)]
        if not present:
            raise ObservationError("images", f"at least one of {', '.join(known)} is needed, got none that counts")
        return tuple(as_image(f"images.{name}", images[name]) for name in present)

    def _tokens(self, observation: Observation, state: np.ndarray) -> np.ndarray:
        if observation.tokens is not None:
            return as_tokens(
                observation.tokens,
                observation.token_mask,
                self.checkpoint.config.prefix.vocab,
                self.checkpoint.prompt_length,
            )
        if self._tokenizer is None:
            raise ObservationError("prompt", f"cannot be read, give tokens instead: {self._tokenizer_error}")
        if not isinstance(observation.prompt, str):
            raise ObservationError("prompt", f"expected text, got {type(observation.prompt).__name__}")
        if not self.binding.state_in_prompt:
            return self._tokenizer.encode_without_state(clean(observation.prompt))
        return self._tokenizer.encode(prompt_text(observation.prompt, state))

    def _noise(self, noise: Any, seed: int | None) -> np.ndarray:
        """float32 [horizon, action_dim], as given, or drawn on the CPU so that a seed means the same everywhere."""
        config = self.checkpoint.config
        shape = (config.horizon, config.action_dim)
        if noise is None:
            if seed is None:
                seed = int(self._entropy.integers(2**63))
            if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
                raise ObservationError("seed", f"expected an integer of 64 bits, got {seed!r}")
            return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy()
        array = as_numbers("noise", noise)
        if array.shape not in (shape, (1, *shape)):
            raise ObservationError("noise", f"expected {list(shape)} or {[1, *shape]}, got {list(array.shape)}")
        return np.ascontiguousarray(array.reshape(shape), dtype=np.float32)

    def _steps(self, num_steps: int | None) -> int:
        if num_steps is None:
            return self.checkpoint.num_steps
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= MAX_STEPS:
            raise ObservationError("num_steps", f"expected an integer from 1 to {MAX_STEPS}, got {num_steps!r}")
        return num_steps

    def _guidance(self, rtc: RtcGuidance | None) -> RtcGuidance | None:
        if rtc is None:
            return None
        config = self.checkpoint.config
        rows, dims = rtc.prev_chunk.shape[-2:]
        batch = rtc.prev_chunk.shape[0] if rtc.prev_chunk.dim() == 3 else 1
        if batch != 1 or rows > config.horizon or dims > config.action_dim:
            raise ObservationError(
                "rtc.prev_chunk",
                f"expected at most [{config.horizon}, {config.action_dim}], got {list(rtc.prev_chunk.shape)}",
            )
        return rtc

    # ---- and back ----

    def _finish(self, observation: Observation, state: np.ndarray, result: EngineResult) -> ActionChunk:
        """model space -> robot units. state: un-normalised, in model conventions (what relative actions add to)."""
        binding = self.binding
        actions = self._normalizers["action"].unnormalize(result.model_actions[:, : binding.action_dim])
        if binding.delta_mask is not None:
            actions = absolute_actions(actions, state, binding.delta_mask)
        with np.errstate(over="ignore"):  # said by the next lines
            actions = np.ascontiguousarray(binding.transform.actions_to_robot(actions), dtype=np.float32)
        if not np.isfinite(actions).all():
            raise InferenceError("The actions are not finite in robot units: look at the statistics and the state.")
        return ActionChunk(
            actions=actions,
            model_actions=result.model_actions,
            timings=result.timings,
            prefix_cache_hit=result.prefix_cache_hit,
            stamp=observation.stamp,
            id=observation.id,
        )


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


def _normalizers(checkpoint: Checkpoint, binding: Binding, stats: NormStats | None, off: bool) -> dict[str, Normalizer]:
    """The maps of state and action, checked against the robot's dimensions."""
    normalizers = {}
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
        if covered < dims or (checkpoint.layout == "lerobot" and covered != dims):
            raise CheckpointError(
                f"{stats.source}: {feature}: the statistics cover {covered} dimensions, the robot has {dims}."
            )
        normalizers[feature] = normalizer
    return normalizers


def _tokenizer(
    checkpoint: Checkpoint, given: str | Path | None, truncate: bool, required: bool
) -> tuple[PromptTokenizer | None, str]:
    """The tokenizer, or why there is none, where a caller may send tokens instead."""
    path = Path(given) if given is not None else checkpoint.tokenizer
    try:
        return PromptTokenizer(path, checkpoint.config.prefix.vocab, checkpoint.prompt_length, truncate), ""
    except CheckpointError as error:
        if required or path is not None:
            raise
        return None, str(error)
