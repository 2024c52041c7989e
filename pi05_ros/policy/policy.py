"""``Policy``: an observation in robot units becomes an action chunk in robot units."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi05_ros.checkpoint import Checkpoint, load_model, read_checkpoint, read_norm_stats
from pi05_ros.engine import COMPILE_MODES, Engine, EngineRequest, EngineResult, check_fast_path, make_path
from pi05_ros.engine.images import DIALECTS
from pi05_ros.errors import InferenceError, Pi05Error
from pi05_ros.model import PRECISIONS, RtcGuidance, census
from pi05_ros.model.pi05 import TIME_GRIDS
from pi05_ros.policy.binding import Binding, bind
from pi05_ros.policy.inputs import as_integer
from pi05_ros.policy.loading import (
    check_least,
    check_milliseconds,
    check_options,
    check_paths,
    check_precision,
    find_tokenizer,
    make_normalizers,
    resolve_device,
)
from pi05_ros.policy.metadata import describe
from pi05_ros.policy.normalization import Normalizer, outside_quantiles
from pi05_ros.policy.observation import ActionChunk, Observation
from pi05_ros.policy.profile import RobotProfile, load_profile
from pi05_ros.policy.tokenizer import PromptTokenizer
from pi05_ros.policy.translator import MAX_PRIORITY, Translator
from pi05_ros.policy.warm_up import rehearsals, run_in_turn

logger = logging.getLogger(__name__)

POLICY_PRECISIONS = (*PRECISIONS, "fp8")
"""Those of the weights, and fp8: as "openpi", with those of the prefix's MLPs in float8 (engine/packed.py)."""


@dataclass(frozen=True)
class _Prepared:
    """An observation, and what goes to the engine for it."""

    observation: Observation
    request: EngineRequest
    finish: Callable[[EngineResult], ActionChunk]


Listener = Callable[[Observation, "Future[ActionChunk]"], None]
"""Is told of a request that has ended: the observation as it was given, and its future, which is done."""


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
        precision: str,
        tokenizer_error: str = "",
    ) -> None:
        """Use ``from_checkpoint``; this takes the parts that it makes."""
        self.checkpoint, self.binding, self.profile = checkpoint, binding, profile
        self.engine, self.precision = engine, precision
        self._normalizers = normalizers
        self._listeners: tuple[Listener, ...] = ()
        self._translator = Translator(checkpoint, binding, normalizers, tokenizer, tokenizer_error)
        # A policy that is dropped, or still there when Python ends, closes its engine: a thread in the middle of an
        # inference would bring the interpreter's end down with it.
        self._closer = weakref.finalize(self, engine.close)

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
        precision: "openpi" (bfloat16 with float32 islands), "float32", "bfloat16", or "fp8" (as "openpi", with the
            MLPs of the prefix in float8; a GPU of compute capability 8.9 or more).
        robot: name of a profile in ``config/robots/``, a path of one, or a RobotProfile; None: the checkpoint's own
            features without a robot transform; "raw": normalised model space in and out.
        compile_mode: "graphs" (captured CUDA graphs; on a CPU as "eager", which the log says), "eager" (the same
            kernels, not captured) or "plain" (the network as ``model/`` has it).
        prefix_cache: prefixes kept, 0 for none. max_batch, batch_delay_ms: how requests that wait together are batched.
        time_grid: "lerobot", "openpi" or "sglang"; resize: "lerobot" or "openpi"; None: as the checkpoint's layout is.
        norm_stats: a file of statistics to use instead of the checkpoint's.
        normalization: "none" to leave states and actions as they are, for checkpoints without statistics.
        delta_actions, adapt_to_pi: None: what checkpoint and profile say.
        truncate_prompt: cut a prompt that is too long, as the references do, instead of refusing it.
        tokenizer: a tokenizer file to use instead of the checkpoint's.
        progress: called with tensors read and tensors in all while weights load.

        Raises CheckpointError, ProfileError, or their base Pi05Error for an option: one message that names what is
        wrong and what was tried.
        """
        check_options(
            precision=(precision, POLICY_PRECISIONS),
            compile_mode=(compile_mode, COMPILE_MODES),
            time_grid=(time_grid, (None, *TIME_GRIDS)),
            resize=(resize, (None, *DIALECTS)),
            normalization=(normalization, (None, "none")),
            delta_actions=(delta_actions, (None, True, False)),
            adapt_to_pi=(adapt_to_pi, (None, True, False)),
            truncate_prompt=(truncate_prompt, (True, False)),
        )
        check_paths(path=(path, False), norm_stats=(norm_stats, True), tokenizer=(tokenizer, True))
        check_least(prefix_cache=(prefix_cache, 0), max_batch=(max_batch, 1))
        check_milliseconds("batch_delay_ms", batch_delay_ms)
        if norm_stats is not None and normalization is not None:
            raise Pi05Error("norm_stats: is of no use beside normalization='none'; give one of them.")
        target = resolve_device(device)
        check_precision(precision, compile_mode, target)
        if not (robot is None or isinstance(robot, (str, Path, RobotProfile))):
            raise Pi05Error(f"robot: expected a profile's name or path, a RobotProfile or None, got {robot!r}.")
        raw = robot == "raw"
        profile = load_profile(robot) if isinstance(robot, (str, Path)) and not raw else robot
        profile = profile if isinstance(profile, RobotProfile) else None
        own_stats = norm_stats is None and normalization is None and not raw
        path = Path(path).expanduser()
        checkpoint = read_checkpoint(path, profile.openpi.asset_id if profile else None, with_stats=own_stats)
        if norm_stats is not None:
            checkpoint = replace(checkpoint, norm_stats=read_norm_stats(Path(norm_stats).expanduser()))
        binding = bind(checkpoint, profile, raw, adapt_to_pi, delta_actions)
        normalizers = make_normalizers(checkpoint, binding, off=raw or normalization == "none")
        prompts, tokenizer_error = find_tokenizer(checkpoint, tokenizer, truncate_prompt, required=not raw)
        if compile_mode != "plain":
            try:
                check_fast_path(checkpoint.config, target)
            except ValueError as error:
                raise Pi05Error(f'{error}. compile_mode="plain" runs without kernels.') from error
        fp8 = precision == "fp8"
        with torch.inference_mode(False):  # whatever the caller is in: guidance through the model needs gradients
            model = load_model(path, target, "openpi" if fp8 else precision, checkpoint.config, progress)
            counts = ", ".join(f"{dtype} {number:,}" for dtype, number in sorted(census(model).items()))
            logger.info("Parameters by dtype: %s", counts)
            dialect = "openpi" if checkpoint.layout == "openpi" else "lerobot"
            engine_path = make_path(
                model,
                compile_mode,
                resize=resize or dialect,
                time_grid=time_grid or dialect,
                prefix_cache=prefix_cache,
                fp8=fp8,
            )
        engine = Engine(engine_path, max_batch=max_batch, batch_delay=batch_delay_ms / 1e3)
        return cls(checkpoint, binding, profile, engine, prompts, normalizers, precision, tokenizer_error)

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
        prefix_cache: False neither looks up nor stores. graphs: False runs this request uncaptured; None and True as
            compile_mode has it.
        deadline: time.monotonic() after which it is not started.
        priority: higher goes before others that wait.

        Raises ObservationError that names the field; InferenceError: non-finite result, deadline passed, engine closed.
        """
        self._refuse_own_thread()
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
        """``infer`` for several; those of equal shape run together. Options count for all. All valid, or none runs.

        When one fails, or finds the queue full, those that have not begun are not run.
        """
        self._refuse_own_thread()
        requests = [self._prepare(observation, **options) for observation in observations]
        window = max(self.engine.max_queue // 2, 1)  # leaves room for others
        chunks: list[ActionChunk] = []
        for begin in range(0, len(requests), window):
            futures: list[Future[ActionChunk]] = []
            try:
                futures += self._submit_together(requests[begin : begin + window])
                chunks += [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
        return chunks

    def submit(self, observation: Observation, **options: Any) -> Future[ActionChunk]:
        """``infer`` without waiting. Raises at once: ObservationError; InferenceError if the engine is closed or busy.

        Everything else comes through the future, whose callbacks run on the engine's thread and must be quick.
        """
        return self._submit(self._prepare(observation, **options))

    def submit_batch(
        self, observations: Sequence[Observation], options: Sequence[Mapping[str, Any]]
    ) -> list[Future[ActionChunk]]:
        """``submit`` for several, each with its options, at once, so that they can share a batch. All or none.

        Raises as ``submit`` does.
        """
        return self._submit_together(
            [self._prepare(observation, **own) for observation, own in zip(observations, options, strict=True)]
        )

    def actions_to_model(self, actions: Any, state: Any) -> np.ndarray:
        """What the model would have had to say for these actions: the way back of a chunk, for guidance (``rtc``).

        actions: [rows, action_dim] in robot units, as ``ActionChunk.actions`` has them. state: the robot's state
            [state_dim] in the observation that the result goes with; relative actions are relative to it.

        Returns float32 [rows, 32], normalised model space; what the robot has no use for is 0, and so are dimensions
        that were constant in the training data. Raises ObservationError that names the field.
        """
        return self._translator.actions_to_model(actions, state)

    def watch(self, listener: Listener) -> None:
        """Tell it of every request that ends from now on, whoever submitted it: answered, failed, late or cancelled.

        It runs on the engine's thread (a cancelled one's: where it was cancelled) and must be quick; what it raises is
        logged. The arrays of the observation are the caller's, who may write to them later.
        """
        self._listeners = (*self._listeners, listener)

    def _refuse_own_thread(self) -> None:
        """A callback of a future that waited for another inference would wait for itself."""
        if self.engine.is_own_thread():
            raise InferenceError("A callback runs on the engine's own thread and cannot wait for it: use submit there.")

    @property
    def compiles(self) -> bool:
        """True if the first request of a kind takes much longer: kernels are compiled for it and graphs captured."""
        return self.engine.device.type == "cuda"

    def warm_up(
        self,
        image_shapes: Mapping[str, tuple[int, int]] | None = None,
        prompt_lengths: Iterable[int] | None = None,
        *,
        batches: Iterable[int] = (1,),
        num_steps: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Run what a deployment will ask for, so that its first chunks wait for no compiler and no capture.

        Each batch size once for each bucket of prompt lengths, past the prefix cache, and after whatever else waits.
        The first one compiles kernels, each one takes a few inferences' time and, for good, its bucket's buffers and
        graphs. Other batches, cameras, float images and numbers of steps are compiled and captured when they first
        come. On a CPU nothing is (``compiles`` is False), and this only costs as many inferences.

        image_shapes: height and width of uint8 images, by camera, of all cameras that there will be; None: every
            camera at 480 x 640. prompt_lengths: in tokens, with the state; None: all that the checkpoint allows,
            since the length changes with the state. batches: numbers of requests that will run together, each
            from 1 to max_batch; a robot's own request runs alone. num_steps: None: the checkpoint's.
        progress: called with batches done and batches in all, also while one runs; what it raises ends the warm-up.

        Returns the seconds that it took. Raises ObservationError that names the field, and what ``infer`` raises.
        """
        began = time.monotonic()
        observations = rehearsals(self.checkpoint, self.binding, image_shapes, prompt_lengths)
        sizes = {as_integer("batches", size, 1, self.engine.max_batch) for size in batches}
        # The lowest priority, so that it is no company for a request that somebody waits for.
        options = {"seed": 0, "num_steps": num_steps, "prefix_cache": False, "priority": -MAX_PRIORITY}
        # The robot's own come last: should there be no room for all, they are those that stay.
        rehearsed = [
            partial(self.submit_batch, [observation] * size, [options] * size)
            for size in sorted(sizes, reverse=True)
            for observation in observations
        ]
        run_in_turn(rehearsed, progress)
        return time.monotonic() - began

    def reset(self) -> None:
        """Forget cached prefixes."""
        self.engine.clear_cache()

    def close(self, timeout: float | None = None) -> bool:
        """End the engine; requests that wait are refused. Idempotent.

        timeout: seconds to wait for a running inference, None: as long as it takes. Returns False if it still runs.
        """
        closed = self.engine.close(timeout)
        if closed:  # otherwise it still has to end before Python does
            self._closer.detach()
        return closed

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def horizon(self) -> int:
        """Rows of an action chunk."""
        return self.checkpoint.config.horizon

    def unusual_state(self, state: np.ndarray) -> np.ndarray | None:
        """bool [state_dim]: where a state, [state_dim] in robot units, lies outside of q01..q99 of what the checkpoint
        was trained on. None: its statistics do not say.
        """
        stats = self.checkpoint.norm_stats
        return None if stats is None else outside_quantiles(self.binding.transform.state_to_model(state), stats.state)

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client needs to know, as ``/v1/actions/metadata`` serves it. Plain JSON types."""
        return describe(self.checkpoint, self.binding, self.profile, self._normalizers, self.precision, self.engine)

    def _prepare(self, observation: Observation, **options: Any) -> _Prepared:
        request, finish = self._translator.request(observation, **options)
        return _Prepared(observation, request, partial(self._finish, finish))

    def _submit_together(self, requests: Sequence[_Prepared]) -> list[Future[ActionChunk]]:
        futures: list[Future[ActionChunk]] = []
        try:
            with self.engine.together():
                futures.extend(self._submit(prepared) for prepared in requests)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return futures

    def _submit(self, prepared: _Prepared) -> Future[ActionChunk]:
        future = self.engine.submit(prepared.request, prepared.finish)
        for listener in self._listeners:
            future.add_done_callback(partial(listener, prepared.observation))
        return future

    def _finish(self, finish: Callable[[EngineResult], ActionChunk], result: EngineResult) -> ActionChunk:
        """A method, so that a policy of which only futures are kept lives until they are answered."""
        return finish(result)
