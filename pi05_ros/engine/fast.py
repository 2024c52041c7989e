"""The fast path: packed weights, kernels, an exact prefix cache, and CUDA graphs if wanted."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pi05_ros.engine.buckets import Bucket
from pi05_ros.engine.images import DIALECTS
from pi05_ros.engine.kernels.denoise_buffers import Tiling
from pi05_ros.engine.kernels.language import AVAILABLE, check_compiler
from pi05_ros.engine.packed import pack
from pi05_ros.engine.prefix_cache import PrefixCache, PrefixKey
from pi05_ros.engine.program import MAX_POSITIONS, MAX_RECORDED_STEPS, Program, Setting
from pi05_ros.engine.recording import Recorder, RecordingError
from pi05_ros.engine.requests import EngineRequest, Outcome
from pi05_ros.engine.roofline import has_fp8
from pi05_ros.engine.schedule import Schedule, make_schedule
from pi05_ros.model import Pi05Config, Pi05Model, Prefix
from pi05_ros.model.gemma import rotary
from pi05_ros.model.pi05 import TIME_GRIDS

logger = logging.getLogger(__name__)

MAX_SCHEDULES = 4
"""Schedules that are kept, and with them the graphs of their flows, each of another number of steps."""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all engines on a device, and of nothing else: what else a process does there is not waited for.

    One for all: libraries keep a workspace for every stream that they have seen, tens of megabytes, until the end.
    """
    return torch.cuda.Stream(device)


class FastPath:
    """Runs batches in programs, one a bucket, made on first use and bounded in number and memory."""

    def __init__(
        self,
        model: Pi05Model,
        *,
        resize: str,
        time_grid: str,
        prefix_cache: int = 8,
        graphs: bool = True,
        fp8: bool = False,
        max_programs: int = 32,
        max_program_bytes: int = 2 << 30,
    ) -> None:
        """Takes the model over: its parameters become views of packed weights.

        resize: dialect of ``images.py``; time_grid: of ``model/pi05.py``; prefix_cache: entries kept, 0 for none.
        graphs: capture each bucket's stages; False, a CPU, or no Triton: run the same kernels (or their twins) one by
        one.
        fp8: the MLPs of the prefix in float8; the model's own are given up. max_programs, max_program_bytes:
        what buckets may take in buffers before the least recently used goes; what graphs need beside them is shared.
        Raises ValueError that names the field, the size of the model that this path cannot run, or what the machine
        lacks to compile kernels.
        """
        for field, value, known in (("resize", resize, DIALECTS), ("time_grid", time_grid, TIME_GRIDS)):
            if value not in known:
                raise ValueError(f"{field}: expected one of {', '.join(known)}, got {value!r}")
        self.model = model
        self.device = model.action_in_proj.weight.device
        check_fast_path(model.config, self.device, fp8)
        on_gpu = self.device.type == "cuda"
        self.name = "graphs" if graphs and on_gpu and AVAILABLE else "eager"
        self.resize, self.time_grid = resize, time_grid
        self.max_programs, self.max_program_bytes = max_programs, max_program_bytes
        self.cache: PrefixCache[Tensor] = PrefixCache(prefix_cache, size=lambda kv: kv.nbytes)
        weights = pack(model, fp8)
        table = rotary(
            torch.arange(MAX_POSITIONS, device=self.device)[None],
            model.config.prefix.head_dim,
            torch.float32,
            model.config.rope_frequencies,
        )
        rope = table.cos[0, 0].contiguous(), table.sin[0, 0].contiguous()
        recorder = Recorder(self.device) if self.name == "graphs" else None
        self._setting = Setting(model.config, weights, rope, resize, self.device, recorder)
        self._stream = _stream(self.device) if on_gpu else None
        # Made once, for it takes a while to make; entered, it makes its device the current one as well.
        self._on_stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        if on_gpu:  # the weights are packed on the caller's stream
            torch.cuda.current_stream(self.device).synchronize()
        self._programs: OrderedDict[Bucket, Program] = OrderedDict()
        self._schedules: OrderedDict[int, Schedule] = OrderedDict()

    def fits(self, first: EngineRequest, other: EngineRequest) -> bool:
        """One bucket, one number of steps. Guidance through the model runs alone, in the plain flow."""
        return (
            Bucket.of(first) == Bucket.of(other)
            and first.num_steps == other.num_steps
            and (first.graphs is False) == (other.graphs is False)
            and not (_needs_gradients(first) or _needs_gradients(other))
        )

    @torch.no_grad()
    def run(self, requests: Sequence[EngineRequest]) -> Outcome:
        """One batch. Raises ValueError for guidance that does not fit the noise, and whatever the device raises."""
        with self._on_device():
            try:
                return self._run(requests, captured=self.name == "graphs" and requests[0].graphs is not False)
            except RecordingError as error:
                logger.error("This engine runs uncaptured, which is slower, until it is made anew. %s", error)
                self.name = "eager"
            return self._run(requests, captured=False)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        with self._on_stream:
            try:
                yield
            except BaseException:
                if self._stream is not None:
                    with contextlib.suppress(RuntimeError):  # it may be reading the host's side of the inputs still
                        self._stream.synchronize()
                raise

    def _run(self, requests: Sequence[EngineRequest], captured: bool) -> Outcome:
        program = self._program(Bucket.of(requests[0], len(requests)))
        began = time.perf_counter()
        keys = [self._key(request) for request in requests]
        found = [None if key is None else self.cache.get(key) for key in keys]
        lookup = {"cache_lookup_ms": (time.perf_counter() - began) * 1e3}
        clock = _Clock(self._stream)
        missing = [index for index, kv in enumerate(found) if kv is None]
        if missing:
            self._encode(program, requests, missing, captured, clock)
            self._remember(program, keys, missing)
        else:
            program.put_noise(requests)
        for index, kv in enumerate(found):
            if kv is not None:
                program.kv[:, :, index, : program.positions] = kv
        clock.mark("prefix_ms")
        if _needs_gradients(requests[0]):
            actions = self._guided_through_model(program, requests[0])
        else:
            program.run_flow(self._schedule(requests[0].num_steps), captured)
            clock.wait()
            actions = program.actions()
        clock.mark("denoise_ms")
        return Outcome(actions, tuple(kv is not None for kv in found), lookup | clock.timings())

    def clear_cache(self) -> None:
        """Forget all cached prefixes."""
        self.cache.clear()

    def close(self) -> None:
        """Let go of programs, graphs, weights and the cache."""
        self.cache.clear()
        self._programs.clear()
        self._schedules.clear()
        del self._setting, self.model
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.empty_cache()

    def _encode(
        self, program: Program, requests: Sequence[EngineRequest], missing: list[int], captured: bool, clock: _Clock
    ) -> None:
        """Keys and values of the missing prefixes, into their places in the program's kv, and the noise of all.

        The host prepares the noise and the guidance while the device looks at the images.
        """
        some = [requests[index] for index in missing]
        encoder = program if len(some) == len(requests) else self._program(Bucket.of(some[0], len(some)))
        encoder.put_prompts(some)
        clock.mark("preprocess_ms")
        encoder.run_vision(captured)
        clock.mark("vision_ms")
        program.put_noise(requests)
        encoder.run_prefix(captured)
        if encoder is not program:
            for row, index in enumerate(missing):
                program.kv[:, :, index] = encoder.kv[:, :, row]

    def _remember(self, program: Program, keys: list[PrefixKey | None], missing: list[int]) -> None:
        for index in missing:
            key = keys[index]
            if key is not None:
                self.cache.put(key, program.kv[:, :, index, : program.positions].clone())

    def _key(self, request: EngineRequest) -> PrefixKey | None:
        """None: the cache is not to be used. It is this path's own, so model and precision need not be in the key."""
        if self.cache.entries == 0 or not request.use_cache:
            return None
        return PrefixKey(request.images, request.tokens, identity=self._setting.resize)

    def _program(self, bucket: Bucket) -> Program:
        """The bucket's program. Others go if it is new and there are too many, or no memory for it."""
        program = self._programs.get(bucket)
        if program is None:
            try:
                program = Program(self._setting, bucket)
            except torch.OutOfMemoryError:
                logger.warning("No memory for a new size of request: all others' buffers and graphs are given up.")
                self._programs.clear()
                program = Program(self._setting, bucket)
            self._programs[bucket] = program
            while len(self._programs) > 2 and (  # one batch may need two
                len(self._programs) > self.max_programs
                or sum(one.nbytes for one in self._programs.values()) > self.max_program_bytes
            ):
                self._programs.popitem(last=False)
        self._programs.move_to_end(bucket)
        return program

    def _schedule(self, steps: int) -> Schedule:
        schedule = self._schedules.pop(steps, None)
        if schedule is None:
            schedule = make_schedule(self.model, steps, self.time_grid)
        if steps > MAX_RECORDED_STEPS:
            return schedule
        self._schedules[steps] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            _, old = self._schedules.popitem(last=False)
            for program in self._programs.values():
                program.forget(old)
        return schedule

    def _guided_through_model(self, program: Program, request: EngineRequest) -> np.ndarray:
        """Guidance that back-propagates through the expert has no kernel: the model's own loop on the same prefix."""
        length = program.image_tokens + len(request.tokens)
        kv = program.kv[:, :, :, None, :length]
        seen = torch.ones(1, length, dtype=torch.bool, device=self.device)
        embeddings = kv.new_empty(1, length, 0)  # nothing looks at them behind the prefix
        prefix = Prefix(embeddings, seen, list(kv[0]), list(kv[1]))
        noise = torch.from_numpy(request.noise).to(self.device)[None]
        return self.model.denoise(prefix, noise, request.num_steps, self.time_grid, request.rtc).cpu().numpy()


def _needs_gradients(request: EngineRequest) -> bool:
    return request.rtc is not None and request.rtc.jacobian == "vjp"


def check_fast_path(config: Pi05Config, device: torch.device, fp8: bool = False) -> None:
    """Whether kernels have been written for these sizes and can be compiled here; known before weights are read.

    Raises ValueError that names the size, or what the machine lacks.
    """
    prefix, expert = config.prefix, config.expert
    if prefix.kv_heads != 1:
        raise ValueError(f"prefix.kv_heads: the fast path expects 1, got {prefix.kv_heads}")
    for name, value in (
        ("expert.width", expert.width),
        ("expert.mlp", expert.mlp),
        ("prefix.head_dim", prefix.head_dim),
    ):
        if value & (value - 1):
            raise ValueError(f"{name}: the fast path expects a power of two, got {value}")
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 2):
            tiling = Tiling.of(batch * config.horizon, dtype, expert.width, device)
            tiling.check(expert.width, prefix.heads * prefix.head_dim, prefix.head_dim, expert.mlp)
    if device.type == "cuda":
        check_compiler()
        if fp8 and not has_fp8(device):
            found = "{}.{}".format(*torch.cuda.get_device_capability(device))
            raise ValueError(f"precision: fp8 needs a GPU of compute capability 8.9 or more, got {found}")


class _Clock:
    """Times the stages of a run without waiting for any: on a GPU by events in the stream's order."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """stream: None on a CPU."""
        self._stream = stream
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """What has been asked for since the last mark was the stage ``name``."""
        if self._stream is None:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((name, event))

    def wait(self) -> None:
        """Until the device has done all that it was asked for, once an inference."""
        if self._stream is not None:
            self._stream.synchronize()

    def timings(self) -> dict[str, float]:
        """Milliseconds by stage; stages that did not come are 0."""
        self.wait()
        timings = dict.fromkeys(("preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms"), 0.0)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float):
                assert isinstance(after, float)
                timings[name] += (after - before) * 1e3
            else:
                assert not isinstance(after, float)
                timings[name] += before.elapsed_time(after)
        return timings
