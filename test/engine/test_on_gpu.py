"""The fast path on a GPU: captured graphs, kernels and streams, against the same kernels uncaptured and the plain path.

Two networks: one of the real widths with few layers, in every precision, and a tiny one for all that does not depend on
them. A kernel is compiled for each combination of precision and tiling, which takes most of the time: batches, cameras
and numbers of steps below are chosen so that there are few.

PI05_ROS_GPU_TESTS_ON=cpu runs what can be run of this file without a GPU, which checks the file and no kernel.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from engine.small import TINY, alone, difference, guidance, request
from pi05_ros.checkpoint.random_weights import random_model
from pi05_ros.engine import Engine, EngineRequest, FastPath, PlainPath
from pi05_ros.engine.fast import MAX_SCHEDULES
from pi05_ros.model import ExpertConfig, Pi05Config, Pi05Model, PrefixConfig, VisionConfig

DEVICE = os.environ.get("PI05_ROS_GPU_TESTS_ON", "cuda")
# A mark: a module that skips itself while it is imported takes its whole folder with it under launch_testing.
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU")

PATIENCE = 120.0
WIDE = Pi05Config(
    vision=VisionConfig(width=144, layers=2, heads=2, mlp=304, image_size=112),
    prefix=PrefixConfig(layers=3, mlp=4096, vocab=512),
    expert=ExpertConfig(),
)
"""pi05_base's widths of the language model, its head and its expert, and SigLIP's head width of 72."""
ERRORS = {"float32": 1e-4, "openpi": 0.04, "bfloat16": 0.05, "fp8": 0.15}
"""Largest relative difference of actions to the plain path in float32, by precision."""
BATCHED = {"float32": 1e-4, "openpi": 0.03, "fp8": 0.08}
"""The same, of a request in a batch to the request alone."""
EXACT = ERRORS["float32"]
CAMERAS = ((56, 56, "uint8"), (40, 30, "uint8"))


def make_model(config: Pi05Config, precision: str) -> Pi05Model:
    return random_model(config, DEVICE, precision)


def fast_path(model: Pi05Model, **options: Any) -> FastPath:
    return FastPath(model, resize="openpi", time_grid="openpi", **options)


def plain_path(model: Pi05Model) -> PlainPath:
    return PlainPath(model, resize="openpi", time_grid="openpi", prefix_cache=0)


def uncaptured(requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    """The same, all of it computed anew."""
    return [dataclasses.replace(one, graphs=False, use_cache=False) for one in requests]


# ---- the real widths, in every precision ----


def wide_requests() -> list[EngineRequest]:
    """Prompts of one bucket; the second is guided. What is computed for one is computed again for the next run."""
    cameras = ((112, 112, "uint8"), (60, 80, "uint8"))
    return [
        request(seed, length, cameras, WIDE, num_steps=5, use_cache=False, rtc=guidance(3, WIDE) if seed == 1 else None)
        for seed, length in enumerate((5, 20, 32, 17))
    ]


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    """What the plain path says in float32 of each of wide_requests, [4, H, A]."""
    return alone(plain_path(make_model(WIDE, "float32")), wide_requests())


@pytest.fixture(scope="module", params=["openpi", "fp8", "bfloat16", "float32"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wide(precision: str) -> Iterator[FastPath]:
    fp8 = precision == "fp8"
    path = fast_path(make_model(WIDE, "openpi" if fp8 else precision), fp8=fp8)
    yield path
    path.close()


def batches(precision: str) -> list[list[EngineRequest]]:
    """Without and with guidance, and all together: but in bfloat16, whose kernels differ little from openpi's."""
    requests = wide_requests()
    return [requests[:1], requests[1:2], *([requests] if precision != "bfloat16" else [])]


def test_graphs_equal_eager_bit_for_bit(wide: FastPath, precision: str) -> None:
    for batch in batches(precision):
        captured, replayed = wide.run(batch).actions, wide.run(batch).actions
        eager = wide.run(uncaptured(batch)).actions
        assert np.isfinite(eager).all()
        assert np.array_equal(captured, eager)
        assert np.array_equal(replayed, eager)


def test_the_difference_to_the_plain_path(wide: FastPath, precision: str, exact: np.ndarray) -> None:
    error = difference(alone(wide, uncaptured(wide_requests())), exact)
    assert error < ERRORS[precision]
    if precision in ("openpi", "bfloat16"):
        plain_error = difference(alone(plain_path(wide.model), wide_requests()), exact)
        assert error < 1.5 * plain_error


def test_a_hit_equals_a_miss_bit_for_bit(wide: FastPath, precision: str) -> None:
    for batch in batches(precision):
        cached = [dataclasses.replace(one, use_cache=True) for one in batch]
        wide.clear_cache()
        miss, hit = wide.run(cached), wide.run(cached)
        eager = wide.run([dataclasses.replace(one, graphs=False) for one in cached])
        assert (miss.hits, hit.hits, eager.hits) == ((False,) * len(batch), (True,) * len(batch), (True,) * len(batch))
        assert np.array_equal(hit.actions, miss.actions)
        assert np.array_equal(eager.actions, miss.actions)


def test_a_batch_says_what_its_requests_say_alone(wide: FastPath, precision: str) -> None:
    if precision == "bfloat16":
        pytest.skip("see batches")
    requests = wide_requests()
    assert difference(wide.run(requests).actions, alone(wide, requests)) < BATCHED[precision]


# ---- a tiny network, in float32 ----


@pytest.fixture(scope="module")
def model() -> Pi05Model:
    return make_model(TINY, "float32")


@pytest.fixture(scope="module")
def plain(model: Pi05Model) -> PlainPath:
    return plain_path(model)


@pytest.fixture
def tiny(model: Pi05Model) -> Iterator[FastPath]:
    path = fast_path(model)
    yield path
    path.close()


def ask(seed: int, length: int = 9, cameras: Sequence[tuple[int, int, str]] = CAMERAS, **options: Any) -> EngineRequest:
    return request(seed, length, cameras, **options)


def assert_right(path: FastPath, plain: PlainPath, requests: Sequence[EngineRequest]) -> None:
    """One by one and captured: bit-equal to uncaptured, and what the plain path says."""
    captured = alone(path, requests)
    assert np.array_equal(captured, alone(path, uncaptured(requests)))
    assert difference(captured, alone(plain, requests)) < EXACT


def test_what_is_captured_and_when(tiny: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cuda":
        pytest.skip("a CPU captures nothing")
    assert tiny.name == "graphs"
    calls: list[str] = []
    for name in ("capture_begin", "replay"):
        own = getattr(torch.cuda.CUDAGraph, name)

        def noted(*args: Any, name: str = name, own: Any = own, **options: Any) -> Any:
            calls.append(name)
            return own(*args, **options)

        monkeypatch.setattr(torch.cuda.CUDAGraph, name, noted)

    def counts(one: EngineRequest) -> tuple[int, int]:
        calls.clear()
        tiny.run([one])
        return calls.count("capture_begin"), calls.count("replay")

    captured, replayed = counts(ask(1))
    assert captured == replayed > 1
    assert counts(ask(2)) == (0, replayed), "another request of the same bucket"
    hit = counts(ask(2))
    assert (hit[0], 0 < hit[1] < replayed) == (0, True), "the prefix is not computed again"
    assert counts(ask(3, graphs=False)) == (0, 0)
    assert counts(ask(3, num_steps=3))[0] > 0


def test_any_number_of_steps(tiny: FastPath, plain: PlainPath) -> None:
    assert_right(tiny, plain, [ask(seed, num_steps=steps) for seed, steps in enumerate((1, 3, 10, 10, 3, 1))])


def test_more_numbers_of_steps_than_are_kept(tiny: FastPath, plain: PlainPath) -> None:
    steps = [*range(2, MAX_SCHEDULES + 4), 2, 3]
    assert_right(tiny, plain, [ask(seed, num_steps=count) for seed, count in enumerate(steps)])


def test_guidance(tiny: FastPath, plain: PlainPath) -> None:
    weak = guidance(1, max_guidance_weight=0.5, schedule="EXP")
    pulls = (guidance(2), None, weak, guidance(3, jacobian="vjp"), guidance(4, inference_delay=0), None)
    assert_right(tiny, plain, [ask(seed, num_steps=3, rtc=rtc) for seed, rtc in enumerate(pulls)])


def test_an_unguided_request_in_a_guided_batch(tiny: FastPath) -> None:
    unguided = [ask(1), ask(2, length=30)]
    expected = tiny.run(unguided).actions
    mixed = tiny.run([unguided[0], dataclasses.replace(unguided[1], rtc=guidance())]).actions
    assert np.array_equal(mixed[0], expected[0])
    assert not np.array_equal(mixed[1], expected[1])
    assert np.array_equal(tiny.run(unguided).actions, expected)


def test_image_shapes_take_turns(tiny: FastPath, plain: PlainPath) -> None:
    shapes = (CAMERAS, ((70, 90, "float32"), (56, 56, "uint8")), CAMERAS[::-1])
    assert_right(tiny, plain, [ask(seed, cameras=shapes[seed % 3]) for seed in range(6)])


def test_graphs_after_others_took_their_place(model: Pi05Model, plain: PlainPath) -> None:
    path = fast_path(model, max_programs=2, prefix_cache=0)
    buckets = [{"length": 9}, {"length": 40}, {"cameras": CAMERAS[::-1]}]
    first = [ask(seed, **bucket) for seed, bucket in enumerate(buckets)]
    again = [ask(seed, **bucket) for seed, bucket in enumerate(buckets, start=3)]
    order = [*first, *again, first[0], first[0], first[2], *first]
    assert difference(alone(path, order), alone(plain, order)) < EXACT
    assert_right(path, plain, order)
    path.close()


def test_hits_and_misses_in_a_batch(tiny: FastPath, plain: PlainPath) -> None:
    requests = [ask(1), ask(2, length=32), ask(3, length=1)]
    known = tiny.run(requests[:1])
    outcome = tiny.run(requests)
    assert (known.hits, outcome.hits) == ((False,), (True, False, False))
    assert difference(outcome.actions, alone(plain, requests)) < EXACT
    assert np.array_equal(tiny.run(requests[:1]).actions, known.actions)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nan_stays_with_its_request(tiny: FastPath, use_cache: bool) -> None:
    poisoned = ask(1, length=30, use_cache=use_cache)  # long: its actions stand behind where prefixes are written
    healthy, neighbour = (ask(seed, length=seed, use_cache=use_cache) for seed in (2, 3))
    poisoned.noise[:] = np.nan
    expected, both = tiny.run([healthy]).actions, tiny.run([healthy, neighbour]).actions
    assert np.isnan(tiny.run([poisoned]).actions).all()
    assert np.array_equal(tiny.run([healthy]).actions, expected)
    mixed = tiny.run([poisoned, neighbour]).actions
    assert np.isnan(mixed[0]).all()
    assert np.array_equal(mixed[1], both[1])
    assert np.array_equal(tiny.run([healthy, neighbour]).actions, both)


def test_timings_by_stage(tiny: FastPath) -> None:
    for one in (ask(1), ask(2), ask(2, graphs=False)):
        timings = tiny.run([one]).timings
        assert list(timings) == ["cache_lookup_ms", "preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms"]
        assert all(0.0 <= value < float("inf") for value in timings.values())
        assert timings["denoise_ms"] > 0


def test_capturing_while_another_thread_uses_the_device(model: Pi05Model) -> None:
    requests = [ask(1), ask(2, length=40), ask(3, cameras=CAMERAS[::-1]), ask(4, num_steps=5), ask(5, length=50)]
    reference = fast_path(model)
    expected = alone(reference, uncaptured(requests))
    reference.close()
    started, stop = threading.Event(), threading.Event()

    def use_the_device() -> None:
        """Allocates, computes and waits, as a simulator or another model in this process does."""
        size = 0
        while not stop.is_set():
            size = (size + 4099) % 1_000_000
            numbers = torch.ones(size, device=DEVICE)
            assert int(numbers.sum()) == size
            started.set()

    engine = Engine(fast_path(model), batch_delay=0.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(use_the_device)
        try:
            assert started.wait(PATIENCE)
            results = [engine.submit(one).result(PATIENCE) for one in (*requests, *requests)]
        finally:
            stop.set()
        other.result(PATIENCE)
    assert engine.close(PATIENCE)
    actions = np.stack([result.model_actions for result in results])
    assert np.array_equal(actions, np.concatenate((expected, expected)))


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU does not say what it holds")
def test_a_closed_path_frees_the_device() -> None:
    left = []
    for _ in range(2):  # the first leaves behind what is the process's
        path = fast_path(make_model(WIDE, "openpi"))
        path.run(wide_requests()[:1])
        weights = sum(parameter.nbytes for parameter in path.model.parameters())
        held = torch.cuda.memory_allocated()
        path.close()
        del path
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # a library's, for each stream that was used
        left.append(torch.cuda.memory_allocated())
        assert held - left[-1] >= weights
    assert left[1] - left[0] < 1 << 20
