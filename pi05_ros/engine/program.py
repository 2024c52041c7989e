"""One bucket's buffers and stages: run as they are, or captured once as CUDA graphs and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pi05_ros.engine.buckets import Bucket
from pi05_ros.engine.kernels.denoise import DenoiseInputs, Flow, denoise
from pi05_ros.engine.kernels.denoise_buffers import DenoiseBuffers
from pi05_ros.engine.kernels.images import ResizePlan, images_to_patches, resize_plan
from pi05_ros.engine.packed import PackedWeights
from pi05_ros.engine.recording import Recorder
from pi05_ros.engine.requests import EngineRequest
from pi05_ros.engine.schedule import Schedule
from pi05_ros.engine.stages import embed_prompt, encode_images, encode_prefix
from pi05_ros.engine.staging import Staging
from pi05_ros.model import Pi05Config
from pi05_ros.model.rtc import Guide

MAX_POSITIONS = 8192
"""Positions of prefix and action tokens together: 30 cameras, and 8 MB of rotary tables."""

MAX_RECORDED_STEPS = 64
"""A flow of more steps is launched as it is. It is one kernel, so its graph saves a few launches, and its
schedule, half a megabyte a step, would stay in memory with it."""


@dataclass(frozen=True)
class Setting:
    """What all programs of an engine share.

    rope: cos and sin, float32 [positions, D / 2]. recorder: of graphs; None where nothing is captured.
    """

    config: Pi05Config
    weights: PackedWeights
    rope: tuple[Tensor, Tensor]
    resize: str
    device: torch.device
    recorder: Recorder | None


class Program:
    """Everything between a batch's host arrays and its action chunks, in memory that stays where it is.

    kv: [2, layers, B, C, D], keys and values of a batch's prefixes, with room for the action tokens behind them.
    """

    def __init__(self, setting: Setting, bucket: Bucket) -> None:
        """Raises ValueError: more positions, or a larger batch, than kernels can do."""
        config, device, batch = setting.config, setting.device, bucket.batch
        self._setting, self.bucket = setting, bucket
        dtype = setting.weights.prefix.embed_tokens.dtype
        lengths = ((batch,), torch.int32)
        prompt: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "lengths": lengths,
            "tokens": ((batch, bucket.tokens), torch.int64),
        }
        for camera, (height, width, kind) in enumerate(bucket.images):
            prompt[f"image{camera}"] = ((batch, height, width, 3), getattr(torch, kind))
        rows = (batch, config.horizon)
        self._prompt = Staging(prompt, device)
        self._flow = Staging(
            {
                "noise": ((*rows, config.action_dim), torch.float32),
                "previous": ((*rows, config.action_dim), torch.float32),
                "pull": (rows, torch.float32),
                "max_weight": ((batch,), torch.float32),
                "lengths": lengths,
            },
            device,
        )
        guidance = {name: self._flow.device[name] for name in ("lengths", "previous", "pull", "max_weight")}
        self._inputs = DenoiseInputs(torch.empty_like(self._flow.device["noise"]), **guidance)
        self._actions = torch.empty(
            (*rows, config.action_dim), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._actions_array = self._actions.numpy()
        vision, layers, head_dim = config.vision, config.prefix.layers, config.prefix.head_dim
        self.image_tokens = len(bucket.images) * vision.tokens
        self.positions = self.image_tokens + bucket.tokens
        if self.positions + config.horizon > MAX_POSITIONS:
            raise ValueError(
                f"images, tokens: expected {MAX_POSITIONS} positions at most with the horizon's {config.horizon}, "
                f"got {self.positions}"
            )
        self._plans: list[ResizePlan] = [
            resize_plan(height, width, vision.image_size, setting.resize, device) for height, width, _ in bucket.images
        ]
        patch = setting.weights.vision.patch.weight
        self._patches = torch.empty(
            (len(bucket.images), batch, vision.tokens, patch.shape[1]), dtype=patch.dtype, device=device
        )
        self._seen = torch.empty((batch, self.image_tokens, config.prefix.width), dtype=dtype, device=device)
        if config.prefix.layers * batch * (self.positions + config.horizon) * head_dim >= 2**31:
            raise ValueError(f"batch: {batch} requests of {self.positions} positions are more than kernels can address")
        self.kv = torch.zeros((2, layers, batch, self.positions + config.horizon, head_dim), dtype=dtype, device=device)
        self._buffers = DenoiseBuffers.allocate(setting.weights.expert, self.kv[0], config.horizon)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._flow_graphs: dict[int, tuple[Schedule, torch.cuda.CUDAGraph]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that its buffers have on the device."""
        own = (self._patches, self._seen, self.kv, *self._buffers.tensors)
        return sum(tensor.nbytes for tensor in own) + self._prompt.nbytes + self._flow.nbytes

    # ---- filling in, on the host's side: the stages begin with bringing it over. It may be written once the last run
    # has ended ----

    def put_prompts(self, requests: Sequence[EngineRequest]) -> None:
        """Images and tokens."""
        host = self._prompt.host
        for row, request in enumerate(requests):
            length = len(request.tokens)
            host["lengths"][row] = self.image_tokens + length
            host["tokens"][row, :length] = request.tokens
            host["tokens"][row, length:] = 0
            for camera, image in enumerate(request.images):
                host[f"image{camera}"][row] = image

    def put_noise(self, requests: Sequence[EngineRequest]) -> None:
        """Noise, guidance and lengths. Raises ValueError: noise or guidance do not fit."""
        host = self._flow.host
        for row, request in enumerate(requests):
            if request.noise.shape != host["noise"].shape[1:]:
                raise ValueError(f"noise: expected {list(host['noise'].shape[1:])}, got {list(request.noise.shape)}")
            host["noise"][row] = request.noise
            host["lengths"][row] = self.image_tokens + len(request.tokens)
            for name in ("previous", "pull", "max_weight"):
                host[name][row] = 0.0
            if request.rtc is not None:
                guide = Guide(request.rtc, torch.from_numpy(request.noise)[None])
                host["previous"][row] = guide.previous[0].numpy()
                host["pull"][row] = guide.weights[0, :, 0].numpy()
                host["max_weight"][row] = guide.max_weight

    # ---- running ----

    def run_vision(self, captured: bool) -> None:
        """Images -> embeddings of the image positions."""
        self._run("vision", self._vision, captured)

    def run_prefix(self, captured: bool) -> None:
        """Embeddings and tokens -> kv."""
        self._run("prefix", self._prefix, captured)

    def run_flow(self, schedule: Schedule, captured: bool) -> None:
        """kv and noise -> the action chunks, on their way to the host."""

        setting, (keys, values) = self._setting, self.kv
        steps = Flow(self._inputs, keys, values, setting.weights.expert, schedule, setting.rope)

        def flow() -> None:
            self._flow.upload()
            self._inputs.x_t.copy_(self._flow.device["noise"])
            denoise(steps, self._buffers)
            self._actions.copy_(self._inputs.x_t, non_blocking=True)

        recorder = self._setting.recorder if captured and schedule.steps <= MAX_RECORDED_STEPS else None
        if recorder is None:
            flow()
            return
        known, graph = self._flow_graphs.pop(schedule.steps, (None, None))
        if known is not schedule or graph is None:  # a graph reads its own schedule's memory
            graph = recorder.record(flow)
        self._flow_graphs[schedule.steps] = schedule, graph
        graph.replay()

    def forget(self, schedule: Schedule) -> None:
        """Let go of the graph that reads this schedule."""
        self._flow_graphs.pop(schedule.steps, None)

    def actions(self) -> np.ndarray:
        """The action chunks, float32 [B, H, A]: a copy, to be taken when the device has come to the end of the flow."""
        return self._actions_array.copy()

    def _run(self, name: str, stage: Callable[[], None], captured: bool) -> None:
        recorder = self._setting.recorder if captured else None
        if recorder is None:
            stage()
            return
        if name not in self._graphs:
            self._graphs[name] = recorder.record(stage)
        self._graphs[name].replay()

    def _vision(self) -> None:
        setting, vision = self._setting, self._setting.config.vision
        self._prompt.upload()
        for camera, plan in enumerate(self._plans):
            images_to_patches(self._prompt.device[f"image{camera}"], self._patches[camera], plan, vision.patch_size)
        cameras, batch = self._patches.shape[:2]
        tokens = encode_images(setting.weights.vision, self._patches.flatten(0, 1), vision.heads, self._seen.dtype)
        by_sample = tokens.view(cameras, batch, vision.tokens, -1).transpose(0, 1)
        self._seen.view(batch, cameras, vision.tokens, -1).copy_(by_sample)

    def _prefix(self) -> None:
        weights = self._setting.weights.prefix
        x = torch.cat((self._seen, embed_prompt(weights, self._prompt.device["tokens"])), dim=1)
        keys, values = self.kv
        encode_prefix(weights, x, self._prompt.device["lengths"], self._setting.rope, keys, values)
