"""An observation in robot units becomes a request to the engine, and what the engine gives a chunk in robot units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.engine import EngineRequest, EngineResult
from pi05_ros.errors import InferenceError, ObservationError
from pi05_ros.model import RtcGuidance
from pi05_ros.policy.binding import Binding
from pi05_ros.policy.inputs import (
    as_image,
    as_integer,
    as_masks,
    as_numbers,
    as_switch,
    as_text,
    as_tokens,
    as_vector,
)
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.observation import ActionChunk, Observation
from pi05_ros.policy.prompt import clean, prompt_text
from pi05_ros.policy.tokenizer import PromptTokenizer
from pi05_ros.policy.transforms import absolute_actions, relative_actions

MAX_STEPS = 1000
MAX_PRIORITY = 1_000_000
MAX_DEADLINE = 1e12
"""Seconds of any monotonic clock; what is beyond is no time."""


class Translator:
    """Between one robot and one checkpoint. Thread-safe."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        binding: Binding,
        normalizers: Mapping[str, Normalizer],
        tokenizer: PromptTokenizer | None,
        tokenizer_error: str,
    ) -> None:
        """tokenizer_error: why there is no tokenizer, for whoever sends a prompt all the same."""
        self._checkpoint, self._binding, self._normalizers = checkpoint, binding, normalizers
        self._tokenizer, self._tokenizer_error = tokenizer, tokenizer_error
        self._entropy = np.random.default_rng()

    def request(
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
        """A request, and what turns its result into a chunk; options as of ``Policy.infer``.

        Everything that can be wrong with a request is found here, before it reaches the engine. Raises
        ObservationError that names the field.
        """
        if not isinstance(observation, Observation):
            raise ObservationError("observation", f"expected an Observation, got {type(observation).__name__}")
        if deadline is not None and not (isinstance(deadline, (int, float)) and abs(deadline) < MAX_DEADLINE):
            raise ObservationError("deadline", f"expected a time of time.monotonic(), got {deadline!r}")
        binding = self._binding
        state = as_vector("state", observation.state, binding.state_dim, exact=not binding.raw)
        state = binding.transform.state_to_model(state)
        request = EngineRequest(
            images=self._images(observation),
            tokens=self._tokens(observation, self._normalizers["state"].normalize(state)),
            noise=self._noise(noise, seed),
            num_steps=self._checkpoint.num_steps
            if num_steps is None
            else as_integer("num_steps", num_steps, 1, MAX_STEPS),
            rtc=self._guidance(rtc),
            deadline=deadline,
            priority=as_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY),
            use_cache=as_switch("prefix_cache", prefix_cache) is not False,
            graphs=as_switch("graphs", graphs),
        )
        return request, partial(self._finish, observation, request.num_steps, state)

    def actions_to_model(self, actions: Any, state: Any) -> np.ndarray:
        """See ``Policy.actions_to_model``."""
        binding = self._binding
        rows = as_numbers("actions", actions)
        if rows.ndim != 2 or rows.shape[1] != binding.action_dim:
            raise ObservationError("actions", f"expected [rows, {binding.action_dim}], got {list(rows.shape)}")
        state = as_vector("state", state, binding.state_dim, exact=not binding.raw)
        rows = binding.transform.actions_to_model(rows.astype(np.float64))
        if binding.delta_mask is not None:
            rows = relative_actions(rows, binding.transform.state_to_model(state), binding.delta_mask)
        normalizer = self._normalizers["action"]
        result = np.zeros((len(rows), self._checkpoint.config.action_dim), np.float32)
        # Divided by next to nothing, what is left of rounding would become an enormous number that means nothing.
        constant = normalizer.constant(binding.action_dim)
        result[:, : binding.action_dim] = np.where(constant, 0.0, normalizer.normalize(rows))
        return result

    def _images(self, observation: Observation) -> tuple[np.ndarray, ...]:
        """Images of the cameras that are there, in model order."""
        images, masks, binding = observation.images, as_masks("image_masks", observation.image_masks), self._binding
        if not isinstance(images, Mapping):
            raise ObservationError("images", f"expected a mapping by camera name, got {type(images).__name__}")
        known = [name for name in binding.cameras if name is not None]
        for field, given in (("images", images), ("image_masks", masks)):
            unknown = [name for name in given if name not in known and name not in binding.ignored_cameras]
            if unknown:
                raise ObservationError(f"{field}.{unknown[0]}", f"unknown camera; this policy reads {', '.join(known)}")
        present = [name for name in known if name in images and masks.get(name, True)]
        missing = [name for name in binding.required_cameras if name not in present]
        if missing:
            raise ObservationError(f"images.{missing[0]}", "is required, and neither may it be masked")
        if not present:
            raise ObservationError("images", f"at least one of {', '.join(known)} is needed, got none that counts")
        return tuple(as_image(f"images.{name}", images[name]) for name in present)

    def _tokens(self, observation: Observation, state: np.ndarray) -> np.ndarray:
        if observation.tokens is not None:
            vocab, limit = self._checkpoint.config.prefix.vocab, self._checkpoint.prompt_length
            return as_tokens(observation.tokens, observation.token_mask, vocab, limit)
        if self._tokenizer is None:
            raise ObservationError("prompt", f"cannot be read, give tokens instead: {self._tokenizer_error}")
        prompt = as_text("prompt", observation.prompt)
        if not self._binding.state_in_prompt:
            return self._tokenizer.encode_without_state(clean(prompt))
        return self._tokenizer.encode(prompt_text(prompt, state))

    def _noise(self, noise: Any, seed: int | None) -> np.ndarray:
        """float32 [horizon, action_dim], as given, or drawn on the CPU so that a seed means the same everywhere."""
        config = self._checkpoint.config
        shape = (config.horizon, config.action_dim)
        if noise is not None:
            if seed is not None:
                raise ObservationError("seed", "is of no use beside noise; give one of them")
            array = as_numbers("noise", noise)
            if array.shape not in (shape, (1, *shape)):
                raise ObservationError("noise", f"expected {list(shape)} or {[1, *shape]}, got {list(array.shape)}")
            return array.reshape(shape).astype(np.float32)
        if seed is None:
            seed = int(self._entropy.integers(2**63))
        generator = torch.Generator("cpu").manual_seed(as_integer("seed", seed, -(2**63), 2**63 - 1))
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").numpy()

    def _guidance(self, rtc: RtcGuidance | None) -> RtcGuidance | None:
        if rtc is None:
            return None
        if not isinstance(rtc, RtcGuidance):
            raise ObservationError("rtc", f"expected RtcGuidance, got {type(rtc).__name__}")
        config = self._checkpoint.config
        rows, dims = rtc.prev_chunk.shape[-2:]
        batch = rtc.prev_chunk.shape[0] if rtc.prev_chunk.dim() == 3 else 1
        if batch != 1 or rows > config.horizon or dims > config.action_dim:
            raise ObservationError(
                "rtc.prev_chunk",
                f"expected at most [{config.horizon}, {config.action_dim}], got {list(rtc.prev_chunk.shape)}",
            )
        return rtc

    def _finish(self, observation: Observation, num_steps: int, state: np.ndarray, result: EngineResult) -> ActionChunk:
        """model space -> robot units. state: un-normalised, in model conventions (what relative actions add to)."""
        binding = self._binding
        actions = self._normalizers["action"].unnormalize(result.model_actions[:, : binding.action_dim])
        if binding.delta_mask is not None:
            actions = absolute_actions(actions, state, binding.delta_mask)
        with np.errstate(over="ignore"):  # said by the next lines
            actions = np.array(binding.transform.actions_to_robot(actions), dtype=np.float32)
        if not np.isfinite(actions).all():
            raise InferenceError("The actions are not finite in robot units: look at the statistics and the state.")
        timings = result.timings  # not copied: the engine adds what this function took
        timings["prefix_ms"] += timings.pop("vision_ms")
        return ActionChunk(
            actions=actions,
            model_actions=result.model_actions,
            timings=timings,
            prefix_cache_hit=result.prefix_cache_hit,
            batch_size=result.batch_size,
            num_steps=num_steps,
            stamp=observation.stamp,
            id=observation.id,
        )
