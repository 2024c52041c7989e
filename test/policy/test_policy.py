"""The policy as a user meets it: what it accepts, what it refuses and how; requests that do not touch each other."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.errors import CheckpointError, EngineBusyError, InferenceError, ObservationError, Pi05Error, ProfileError
from pi05_ros.model import RtcGuidance
from pi05_ros.policy import load_profile

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
STATE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("policy") / "lerobot", "lerobot")


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("policy") / "openpi", "openpi")


def load(folder: Path, **options: Any) -> Policy:
    return Policy.from_checkpoint(folder, **{"device": "cpu", "precision": "float32", **options})


@pytest.fixture(scope="module")
def policy(lerobot: Path) -> Iterator[Policy]:
    with load(lerobot) as policy:
        yield policy


def observation(**changes: Any) -> Observation:
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in CAMERAS}
    return Observation(**{"images": images, "state": STATE, "prompt": "pick up the cube", **changes})


def test_a_chunk_is_complete(policy: Policy) -> None:
    chunk = policy.infer(observation(stamp=12.5, id="a"), seed=0)
    assert (chunk.actions.shape, chunk.actions.dtype) == ((50, 14), np.float32)
    assert (chunk.model_actions.shape, chunk.model_actions.dtype) == ((50, 32), np.float32)
    assert (chunk.stamp, chunk.id) == (12.5, "a")
    stages = ("queue", "preprocess", "cache_lookup", "prefix", "denoise", "postprocess", "total")
    assert set(chunk.timings) == {f"{stage}_ms" for stage in stages}
    assert sum(chunk.timings.values()) <= 2 * chunk.timings["total_ms"] + 1


def test_noise_and_seed_decide_the_chunk(policy: Policy) -> None:
    first, again = (policy.infer(observation(), seed=3).actions for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, policy.infer(observation(), seed=4).actions)
    fresh = [policy.infer(observation()).actions for _ in range(2)]
    assert not np.array_equal(*fresh)
    noise = torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
    for form in (noise, noise[None], noise.numpy(), noise.numpy().astype(np.float64)):
        assert np.array_equal(policy.infer(observation(), noise=form).actions, first)


def test_cache_hit_is_bit_equal_and_said(lerobot: Path) -> None:
    with load(lerobot) as policy:
        miss = policy.infer(observation(), seed=1)
        hit = policy.infer(observation(), seed=1)
        unused = policy.infer(observation(), seed=1, prefix_cache=False)
        assert [chunk.prefix_cache_hit for chunk in (miss, hit, unused)] == [False, True, False]
        assert np.array_equal(miss.actions, hit.actions)
        assert np.array_equal(miss.actions, unused.actions)
        policy.reset()
        assert not policy.infer(observation(), seed=1).prefix_cache_hit


def changed_image(name: str) -> Observation:
    images = {key: image.copy() for key, image in observation().images.items()}
    images[name][20, 30, 1] ^= 1
    return observation(images=images)


@pytest.mark.parametrize(
    "other",
    [
        *[changed_image(name) for name in CAMERAS],
        observation(prompt="pick up the cup"),
        observation(state=STATE + 0.1),
        observation(image_masks={"cam_left_wrist": False}),
        observation(images={name: observation().images[name] for name in CAMERAS[:2]}),
        observation(images=dict(zip(CAMERAS, reversed(observation().images.values()), strict=True))),
        observation(images={name: image[:, ::-1] for name, image in observation().images.items()}),
        observation(images={name: (image / 255).astype(np.float32) for name, image in observation().images.items()}),
    ],
)
def test_whatever_the_prefix_depends_on_misses_the_cache(policy: Policy, other: Observation) -> None:
    policy.reset()
    policy.infer(observation(), seed=1)
    assert not policy.infer(other, seed=1).prefix_cache_hit


def test_masks_and_absent_cameras_are_the_same(policy: Policy) -> None:
    full = observation()
    masked = observation(image_masks={"cam_left_wrist": False})
    absent = observation(images={name: full.images[name] for name in ("cam_right_wrist", "cam_high")})
    assert np.array_equal(policy.infer(masked, seed=1).actions, policy.infer(absent, seed=1).actions)
    assert not np.array_equal(policy.infer(full, seed=1).actions, policy.infer(absent, seed=1).actions)


def test_dtype_alone_decides_the_range(policy: Policy) -> None:
    """A dark image of whatever dtype stays dark: nothing looks at the values to guess."""
    dark = {name: np.ones((48, 64, 3), np.uint8) for name in CAMERAS}
    as_float = {name: (image / 255).astype(np.float32) for name, image in dark.items()}
    same = policy.infer(observation(images=dark), seed=1).actions
    assert np.allclose(policy.infer(observation(images=as_float), seed=1).actions, same, atol=1e-6)
    white = {name: np.ones((48, 64, 3), np.float32) for name in CAMERAS}
    full = {name: np.full((48, 64, 3), 255, np.uint8) for name in CAMERAS}
    assert np.allclose(
        policy.infer(observation(images=white), seed=1).actions,
        policy.infer(observation(images=full), seed=1).actions,
        atol=1e-6,
    )
    channels_first = {name: image.transpose(2, 0, 1) for name, image in observation().images.items()}
    assert np.array_equal(
        policy.infer(observation(images=channels_first), seed=1).actions, policy.infer(observation(), seed=1).actions
    )


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"images": {}}, {}, "images: at least one of cam_high, cam_left_wrist, cam_right_wrist is needed"),
    (
        {"images": {"cam_hihg": np.zeros((4, 4, 3), np.uint8)}},
        {},
        r"images\.cam_hihg: unknown camera; this policy reads",
    ),
    ({"images": [1]}, {}, "images: expected a mapping by camera name, got list"),
    (
        {"images": {"cam_high": np.zeros((4, 4), np.uint8)}},
        {},
        r"images\.cam_high: expected \[height, width, 3\].*\[4, 4\]",
    ),
    ({"images": {"cam_high": np.zeros((0, 4, 3), np.uint8)}}, {}, r"images\.cam_high: expected .*\[0, 4, 3\]"),
    ({"images": {"cam_high": np.zeros((4, 4, 3), np.int64)}}, {}, "expected uint8 .* or a float dtype .*, got int64"),
    ({"images": {"cam_high": np.full((4, 4, 3), 255.0)}}, {}, "a float image is 0..1, got 255..255; send uint8"),
    ({"images": {"cam_high": np.full((4, 4, 3), np.nan)}}, {}, r"images\.cam_high: expected finite numbers"),
    ({"image_masks": {"cam_top": True}}, {}, r"image_masks\.cam_top: unknown camera"),
    ({"image_masks": dict.fromkeys(CAMERAS, False)}, {}, "images: at least one of"),
    ({"state": np.zeros(13)}, {}, r"state: expected 14 numbers, got shape \[13\]"),
    ({"state": np.zeros((14, 1))}, {}, r"state: expected 14 numbers, got shape \[14, 1\]"),
    ({"state": np.where(np.arange(14) == 5, np.nan, 0.0)}, {}, r"state: expected finite numbers, got nan at \[5\]"),
    ({"state": np.full(14, 1e300)}, {}, "state: expected numbers that float32 can hold, got 1e\\+300"),
    ({"state": ["a"] * 14}, {}, "state: expected numbers, got dtype <U1"),
    ({"state": [[1], [1, 2]]}, {}, "state: expected"),
    ({"state": None}, {}, "state: expected numbers"),
    ({"prompt": None}, {}, "prompt: expected text, got NoneType"),
    ({"prompt": "cube " * 300}, {}, "prompt: with the state it has .* tokens, the model takes at most 200"),
    ({"tokens": [1.5]}, {}, "tokens: expected integers"),
    ({"tokens": [5000]}, {}, "tokens: expected ids from 0 to 1023, got 5000"),
    ({"tokens": [-1, 2]}, {}, "tokens: expected ids from 0 to 1023, got -1"),
    ({"tokens": [1, 2], "token_mask": [True]}, {}, "token_mask: expected 2 truth values"),
    ({"tokens": [1, 2], "token_mask": [False, False]}, {}, "tokens: expected 1 to 200 real tokens, got 0"),
    ({}, {"noise": np.zeros((49, 32))}, r"noise: expected \[50, 32\] or \[1, 50, 32\], got \[49, 32\]"),
    ({}, {"noise": np.full((50, 32), np.inf)}, r"noise: expected finite numbers, got inf at \[0, 0\]"),
    ({}, {"noise": np.zeros((50, 32), complex)}, "noise: expected numbers, got dtype complex128"),
    ({}, {"seed": "1"}, "seed: expected an integer from -9223372036854775808 .*, got '1'"),
    ({}, {"seed": 2**70}, "seed: expected an integer from"),
    ({}, {"seed": 1, "noise": np.zeros((50, 32))}, "seed: is of no use beside noise"),
    ({}, {"noise": np.full((50, 32), 1e300)}, "noise: expected numbers that float32 can hold"),
    ({}, {"deadline": "soon"}, "deadline: expected a time of time.monotonic.., got 'soon'"),
    ({}, {"deadline": float("nan")}, "deadline: expected a time"),
    ({}, {"deadline": 10**400}, "deadline: expected a time"),
    ({}, {"priority": 1j}, "priority: expected an integer from .*, got 1j"),
    ({}, {"prefix_cache": 0}, "prefix_cache: expected True, False or None, got 0"),
    (
        {"images": {"cam_high": np.zeros((1, 16385, 3), np.uint8)}},
        {},
        r"images\.cam_high: expected sides of 16384 pixels",
    ),
    ({}, {"graphs": "off"}, "graphs: expected True, False or None, got 'off'"),
    ({}, {"rtc": {"prev_chunk": []}}, "rtc: expected RtcGuidance, got dict"),
    ({"prompt": "\ud800"}, {}, "prompt: expected text that is valid Unicode"),
    ({"images": {"cam_high": [[[1, 2, 3]], [[1]]]}}, {}, r"images\.cam_high: expected an array of numbers"),
    ({"tokens": [[1], [1, 2]]}, {}, "tokens: expected an array of numbers"),
    ({"image_masks": {"cam_high": "false"}}, {}, r"image_masks\.cam_high: expected true or false, got 'false'"),
    ({"image_masks": {"cam_high": np.array([True])}}, {}, r"image_masks\.cam_high: expected true or false"),
    ({}, {"num_steps": 0}, "num_steps: expected an integer from 1 to 1000, got 0"),
    ({}, {"num_steps": 2.0}, "num_steps: expected an integer from 1 to 1000, got 2.0"),
    ({}, {"rtc": RtcGuidance(np.zeros((51, 32)), 0)}, r"rtc\.prev_chunk: expected at most \[50, 32\], got \[51, 32\]"),
    ({}, {"rtc": RtcGuidance(np.zeros((2, 5, 32)), 0)}, r"rtc\.prev_chunk: expected at most"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD)
def test_bad_requests_name_the_field(
    policy: Policy, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ObservationError, match=message) as caught:
        policy.submit(observation(**changes), **options)
    assert str(caught.value).startswith(caught.value.field + ": ")
    assert policy.infer(observation(), seed=1).actions.shape == (50, 14), "and the next request is served"


def test_an_observation_is_an_observation(policy: Policy) -> None:
    with pytest.raises(ObservationError, match="observation: expected an Observation, got dict"):
        policy.infer({"images": {}})  # type: ignore[arg-type]


def test_numbers_of_every_kind_are_taken(policy: Policy) -> None:
    expected = policy.infer(observation(), seed=3, num_steps=4)
    images = {name: torch.from_numpy(image) for name, image in observation().images.items()}
    tensors = observation(images=images, state=torch.from_numpy(STATE))
    assert np.array_equal(policy.infer(tensors, seed=np.int64(3), num_steps=np.int8(4)).actions, expected.actions)  # type: ignore[arg-type]
    half = {name: (image.float() / 255).bfloat16() for name, image in images.items()}
    assert policy.infer(observation(images=half), seed=3).actions.shape == (50, 14)
    barely = {name: np.full((8, 8, 3), 1.0000001) for name in CAMERAS}
    assert policy.infer(observation(images=barely), seed=3).actions.shape == (50, 14)


def test_buffers_may_be_used_again_at_once(openpi: Path) -> None:
    """A camera driver or a client writes its next frame over the last one while the request still waits."""
    with load(openpi, adapt_to_pi=False, max_batch=1) as policy:
        fresh = observation()
        state, noise = STATE.astype(np.float32), np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
        previous = np.random.default_rng(1).standard_normal((20, 32)).astype(np.float32)
        images = {name: image.copy() for name, image in fresh.images.items()}

        def request() -> Any:
            rtc = RtcGuidance(previous, inference_delay=4, execution_horizon=8)
            return policy.submit(observation(images=images, state=state), noise=noise, rtc=rtc)

        expected = request().result(30)
        policy.reset()
        policy.submit(fresh, num_steps=60)  # keeps the engine busy
        waiting = request()
        for buffer in (state, noise, previous, *images.values()):
            buffer[...] = 1
        assert np.array_equal(waiting.result(30).actions, expected.actions)
        hit = policy.infer(observation(images=images, state=state), noise=noise)
        assert not hit.prefix_cache_hit, "what was cached is what was seen"


def test_a_batch_larger_than_the_queue(policy: Policy) -> None:
    chunks = policy.infer_batch([observation(id=str(index)) for index in range(100)], seed=1, num_steps=1)
    assert [chunk.id for chunk in chunks] == [str(index) for index in range(100)]


def test_a_batch_that_finds_the_queue_full_leaves_nobody_behind(lerobot: Path) -> None:
    with load(lerobot, max_batch=1) as policy:
        busy = policy.submit(observation(), num_steps=1000)
        while not busy.running():
            time.sleep(0.001)
        others = [policy.submit(observation(), num_steps=1) for _ in range(policy.engine.max_queue - 2)]
        with pytest.raises(EngineBusyError):
            policy.infer_batch([observation()] * 5)
        assert policy.engine.stats()["waiting"] == len(others)
        for future in others:
            future.cancel()


def test_a_callback_that_waits_for_the_engine_is_told_so(lerobot: Path) -> None:
    with load(lerobot) as policy:
        found: Future[Any] = Future()

        def call_back(_: Future[Any]) -> None:
            for ask in (policy.infer, lambda one: policy.infer_batch([one])):
                with pytest.raises(InferenceError, match="use submit there"):
                    ask(observation())
            policy.submit(observation()).add_done_callback(lambda answer: found.set_result(answer.result(0)))

        policy.submit(observation()).add_done_callback(call_back)
        assert found.result(60).actions.shape == (50, 14)


def test_a_seed_is_a_seed_whatever_torch_s_defaults_are(lerobot: Path) -> None:
    with load(lerobot) as policy:
        expected = policy.infer(observation(), seed=5).model_actions
    torch.set_default_dtype(torch.float64)
    try:
        with load(lerobot) as policy, torch.device("meta"):
            actual = policy.infer(observation(), seed=5).model_actions
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_policy_loaded_for_inference_only_can_still_be_guided_through_the_model(lerobot: Path) -> None:
    with torch.inference_mode():
        policy = load(lerobot)
    rtc = RtcGuidance(np.zeros((20, 32)), 3, jacobian="vjp")
    assert np.isfinite(policy.infer(observation(), rtc=rtc).actions).all()
    policy.close()


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "del policy, future; gc.collect()",
        "sys.exit(3)",
        "while not future.running(): pass\nassert not policy.close(0.01)",
    ],
)
def test_a_program_may_end_without_closing(lerobot: Path, ending: str) -> None:
    program = f"""
import gc, logging, sys, time
logging.disable()
import numpy as np
from pi05_ros import Observation, Policy
policy = Policy.from_checkpoint({str(lerobot)!r}, "cpu", "float32")
image = np.zeros((8, 8, 3), np.uint8)
future = policy.submit(Observation({{"cam_high": image}}, np.zeros(14), "x"), num_steps=300)
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (3 if "exit" in ending else 0, "")


def test_a_policy_of_which_only_a_future_is_kept_answers(lerobot: Path) -> None:
    futures = [load(lerobot).submit(observation(), num_steps=20) for _ in range(2)]
    gc.collect()
    assert [future.result(60).actions.shape for future in futures] == [(50, 14)] * 2


def test_a_policy_that_is_dropped_gives_its_memory_back(lerobot: Path) -> None:
    policy = load(lerobot)
    policy.infer(observation())
    model = weakref.ref(policy.engine.path.model)
    del policy
    for _ in range(200):
        gc.collect()
        if model() is None:
            return
        time.sleep(0.01)
    raise AssertionError("the model is still there")


@settings(deadline=None, max_examples=80)
@given(
    st.one_of(
        st.none(),
        st.text(max_size=5),
        st.lists(st.floats(), max_size=16),
        hnp.arrays(
            st.sampled_from([np.float32, np.int8, np.bool_, np.complex64, np.dtype("U3")]), hnp.array_shapes(max_dims=4)
        ),
    )
)
def test_anything_as_state_or_image_is_an_error_or_a_chunk(policy: Policy, value: Any) -> None:
    for changes in ({"state": value}, {"images": {"cam_high": value}}, {"tokens": value}):
        try:
            chunk = policy.infer(observation(**changes), seed=1, num_steps=1)
        except ObservationError:
            continue
        assert np.isfinite(chunk.actions).all()


@pytest.mark.parametrize(("given", "asked"), [(None, None), (True, True), (np.False_, False)])
def test_graphs_are_the_requests_own_choice(policy: Policy, given: Any, asked: bool | None) -> None:
    request = policy._prepare(observation(), graphs=given).request
    assert request.graphs is asked


@pytest.mark.parametrize(("mode", "path"), [("plain", "plain"), ("eager", "eager"), ("graphs", "eager")])
def test_modes_are_ways_to_the_same_chunk(policy: Policy, lerobot: Path, mode: str, path: str) -> None:
    with load(lerobot, compile_mode=mode) as other:
        assert other.engine.path.name == path, "a CPU captures no graphs"
        chunk, expected = (one.infer(observation(), seed=1) for one in (other, policy))
    assert set(chunk.timings) == set(expected.timings)
    assert np.abs(chunk.model_actions - expected.model_actions).max() < 1e-4


def test_only_what_is_asked_is_cut(lerobot: Path) -> None:
    with load(lerobot, truncate_prompt=True) as policy:
        assert policy.infer(observation(prompt="cube " * 300), seed=1).actions.shape == (50, 14)


def test_batched_and_single_requests_agree(policy: Policy) -> None:
    observations = [observation(state=STATE + shift) for shift in (0.0, 0.05, 0.1)]
    policy.reset()
    together = policy.infer_batch(observations, seed=5)
    policy.reset()
    for alone, chunk in zip([policy.infer(one, seed=5) for one in observations], together, strict=True):
        assert np.abs(alone.model_actions - chunk.model_actions).max() < 5e-6


def test_many_threads_get_their_own_answers(policy: Policy) -> None:
    expected = {seed: policy.infer(observation(), seed=seed).model_actions for seed in range(6)}
    wrong: list[int] = []

    def client(seed: int) -> None:
        for _ in range(5):
            chunk = policy.infer(observation(id=str(seed)), seed=seed)
            if chunk.id != str(seed) or np.abs(chunk.model_actions - expected[seed]).max() > 1e-5:
                wrong.append(seed)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_priority_deadline_and_cancellation(lerobot: Path) -> None:
    with load(lerobot, max_batch=1) as policy:
        order: list[str] = []
        busy = policy.submit(observation(), num_steps=200)
        low = policy.submit(observation(), seed=1)
        late = policy.submit(observation(), seed=1, deadline=time.monotonic())
        cancelled = policy.submit(observation(), seed=1)
        high = policy.submit(observation(), seed=1, priority=10)
        assert cancelled.cancel()
        low.add_done_callback(lambda _: order.append("low"))
        high.add_done_callback(lambda _: order.append("high"))
        wait([busy, low, high, late], timeout=60)
        assert order == ["high", "low"]
        with pytest.raises(InferenceError, match="deadline passed"):
            late.result(0)


def test_close_refuses_what_waits(lerobot: Path) -> None:
    policy = load(lerobot, max_batch=1)
    running = policy.submit(observation(), num_steps=50)
    while not running.running():
        time.sleep(0.001)
    waiting = policy.submit(observation())
    policy.close()
    policy.close()
    assert running.result(0).actions.shape == (50, 14)
    with pytest.raises(InferenceError, match="closed before this request's turn"):
        waiting.result(0)
    with pytest.raises(InferenceError, match="closed"):
        policy.infer(observation())


def test_nan_never_comes_out(lerobot: Path) -> None:
    with load(lerobot) as policy:
        policy.engine.path.model.action_out_proj.bias[3] = float("nan")
        with pytest.raises(InferenceError, match="non-finite actions"):
            policy.infer(observation())
        policy.engine.path.model.action_out_proj.bias[3] = 0.0
        assert np.isfinite(policy.infer(observation()).actions).all()


def test_statistics_that_blow_up_are_refused(openpi: Path) -> None:
    with load(openpi, adapt_to_pi=False) as policy:
        policy._normalizers["action"]._factor[2] = 1e39
        with pytest.raises(InferenceError, match="not finite in robot units"):
            policy.infer(observation())


def test_rtc_holds_the_first_rows(policy: Policy) -> None:
    previous = policy.infer(observation(), seed=1).model_actions + 1.0  # somewhere else than where it would go
    rtc = RtcGuidance(previous[10:], inference_delay=8, execution_horizon=20, schedule="EXP")
    plain, guided = policy.infer(observation(), seed=2), policy.infer(observation(), seed=2, rtc=rtc)
    held = previous[10:18]
    assert np.abs(guided.model_actions[:8] - held).mean() < 0.3 * np.abs(plain.model_actions[:8] - held).mean()
    free = np.abs(guided.model_actions[30:] - plain.model_actions[30:]).mean()
    assert free < 0.3, "rows beyond the window follow of themselves, and are not pulled by one whole unit"


def edited(folder: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_libero_as_lerobot_has_it(lerobot: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        images = {
            f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 256, 256]} for name in ("image", "image2")
        }
        config["input_features"] = {**images, "observation.state": {"type": "STATE", "shape": [8]}}
        config["output_features"]["action"]["shape"] = [7]
        config["empty_cameras"] = 1

    folder = edited(lerobot, tmp_path, change)
    image = np.zeros((8, 8, 3), np.uint8)
    with load(folder, robot="libero", normalization="none", delta_actions=True) as policy:
        seen = Observation({"image": image, "wrist_image": image}, np.arange(8.0), "x")
        chunk = policy.infer(seen, seed=1)
        absolute = chunk.actions - chunk.model_actions[:, :7]
        assert np.allclose(absolute, np.arange(7), atol=1e-5), "state and action differ in length"
        assert policy.metadata["input"]["image_keys"] == ["image", "wrist_image"]


def test_openpi_without_a_robot_takes_the_dimensions_of_its_statistics(openpi: Path) -> None:
    with load(openpi, robot=None) as policy:
        images = {"base_0_rgb": np.zeros((8, 8, 3), np.uint8)}
        assert policy.infer(Observation(images, STATE, "x"), seed=1).actions.shape == (50, 14)
        assert "trossen" in policy.metadata["normalization"]["source"]


def test_statistics_of_another_robot_are_refused(openpi: Path) -> None:
    with pytest.raises(CheckpointError, match="state: the statistics cover 14 dimensions, the robot has 8"):
        load(openpi, robot="franka_droid")


def test_openpi_insists_on_the_base_camera(openpi: Path, policy: Policy) -> None:
    wrists = {name: image for name, image in observation().images.items() if name != "cam_high"}
    with load(openpi, adapt_to_pi=False) as pi:
        for seen in (observation(images=wrists), observation(image_masks={"cam_high": False})):
            with pytest.raises(ObservationError, match=r"images\.cam_high: is required"):
                pi.infer(seen)
    assert policy.infer(observation(images=wrists), seed=1).actions.shape == (50, 14), "LeRobot takes what is there"


def test_openpi_deltas_are_added_to_the_state(openpi: Path) -> None:
    with (
        load(openpi, adapt_to_pi=False) as absolute_policy,
        load(openpi, adapt_to_pi=False, delta_actions=False) as plain,
    ):
        relative, direct = (
            absolute_policy.infer(observation(), seed=1).actions,
            plain.infer(observation(), seed=1).actions,
        )
    difference = relative - direct
    grippers = [6, 13]
    joints = [index for index in range(14) if index not in grippers]
    assert np.allclose(difference[:, joints], STATE[joints], atol=1e-5)
    assert np.allclose(difference[:, grippers], 0)


def test_a_state_is_unusual_where_the_checkpoint_has_seen_no_such(lerobot: Path, openpi: Path) -> None:
    """By the statistics of the model's own convention: those of a checkpoint that is adapted have its signs."""
    with load(openpi, adapt_to_pi=False) as policy:
        stats = policy.checkpoint.norm_stats
        assert stats is not None
        middle = ((stats.state["q01"] + stats.state["q99"]) / 2)[:14]
        assert (policy.unusual_state(middle) == np.zeros(14, bool)).all()
        middle[1], middle[7] = stats.state["q99"][1] + 0.1, np.nan
        assert np.flatnonzero(policy.unusual_state(middle)).tolist() == [1, 7]
    with load(openpi, adapt_to_pi=True) as policy:
        shoulder = np.zeros(14)
        shoulder[1] = -stats.state["q99"][1] - 0.1  # flipped by the transform
        flipped = policy.binding.transform.state_to_model(shoulder)
        assert flipped[1] > stats.state["q99"][1]
        unusual = policy.unusual_state(shoulder)
        assert unusual is not None
        assert unusual[1]
    with load(lerobot, normalization="none") as policy:
        assert policy.unusual_state(STATE) is None


def test_adapt_to_pi_is_never_guessed(lerobot: Path, openpi: Path) -> None:
    with pytest.raises(ProfileError, match="adapt_to_pi: an openpi checkpoint on robot 'aloha_ros2' needs it said"):
        load(openpi)
    with pytest.raises(ProfileError, match="a LeRobot checkpoint is never adapted"):
        load(lerobot, adapt_to_pi=True)
    with load(lerobot) as policy:
        assert policy.metadata["robot"]["adapt_to_pi"] is False
    with load(openpi, adapt_to_pi=True) as policy:
        assert policy.metadata["robot"]["adapt_to_pi"] is True


def test_checkpoint_without_statistics_is_refused_unless_asked(lerobot: Path, openpi: Path, tmp_path: Path) -> None:
    for file in lerobot.iterdir():
        if not file.name.startswith("policy_"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"no normalisation statistics found.*norm_stats="):
        load(tmp_path)
    with load(tmp_path, normalization="none") as policy:
        chunk = policy.infer(observation(state=np.zeros(14)), seed=1)
        assert np.array_equal(chunk.actions, chunk.model_actions[:, :14])
    with load(tmp_path, norm_stats=openpi / "assets/trossen/norm_stats.json") as policy:
        assert not np.array_equal(policy.infer(observation(), seed=1).actions, chunk.actions)


def test_robot_none_and_raw(lerobot: Path) -> None:
    with load(lerobot, robot=None) as own, load(lerobot) as aloha, load(lerobot, robot="raw") as raw:
        expected = aloha.infer(observation(), seed=1)
        assert np.array_equal(own.infer(observation(), seed=1).actions, expected.actions)
        normalized = aloha._normalizers["state"].normalize(STATE)
        chunk = raw.infer(observation(state=normalized), seed=1)
        assert chunk.actions.shape == (50, 32)
        assert np.array_equal(chunk.actions, expected.model_actions)
        assert raw.infer(observation(state=normalized[:5]), seed=1).actions.shape == (50, 32)


def test_cam_low_is_accepted_and_ignored(policy: Policy) -> None:
    images = {**observation().images, "cam_low": np.zeros((4, 4, 3), np.uint8)}
    assert np.array_equal(
        policy.infer(observation(images=images), seed=1).actions, policy.infer(observation(), seed=1).actions
    )


def test_base_checkpoint_by_slots(lerobot: Path, tmp_path: Path) -> None:
    """A checkpoint with pi05_base's own input names takes an ALOHA through its slots, and a one-camera-short robot."""
    for file in lerobot.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    slots = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    config["input_features"] = {
        f"observation.images.{slot}": {"type": "VISUAL", "shape": [3, 224, 224]} for slot in slots
    }
    config["input_features"]["observation.state"] = {"type": "STATE", "shape": [32]}
    config["output_features"]["action"]["shape"] = [32]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with load(tmp_path) as base, load(lerobot) as tuned:
        assert np.array_equal(base.infer(observation(), seed=1).actions, tuned.infer(observation(), seed=1).actions)
    with load(tmp_path, robot="franka_droid", normalization="none") as droid:
        images = dict(zip(("exterior_image_1_left", "wrist_image_left"), observation().images.values(), strict=False))
        assert droid.infer(Observation(images, np.zeros(8), "wipe"), seed=1).actions.shape == (50, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"robot": "libero"}, ProfileError, "state: robot profile 'libero' has 8 dimensions .*the checkpoint 14"),
        ({"robot": "alohaa"}, ProfileError, "no robot profile 'alohaa'; the package has .*aloha_ros2"),
        ({"max_batch": 0}, Pi05Error, "max_batch: expected an integer of 1 or more, got 0"),
        ({"prefix_cache": -1}, Pi05Error, "prefix_cache: expected an integer of 0 or more, got -1"),
        ({"prefix_cache": None}, Pi05Error, "prefix_cache: expected an integer of 0 or more, got None"),
        ({"max_batch": True}, Pi05Error, "max_batch: expected an integer of 1 or more, got True"),
        ({"batch_delay_ms": "x"}, Pi05Error, "batch_delay_ms: expected milliseconds, 0 to 60000, got 'x'"),
        ({"batch_delay_ms": float("nan")}, Pi05Error, "batch_delay_ms: expected milliseconds, 0 to 60000, got nan"),
        ({"batch_delay_ms": 1e15}, Pi05Error, "batch_delay_ms: expected milliseconds, 0 to 60000, got"),
        ({"tokenizer": 5}, Pi05Error, "tokenizer: expected a path, got 5"),
        ({"norm_stats": 5}, Pi05Error, "norm_stats: expected a path, got 5"),
        ({"device": 0}, Pi05Error, "device: expected auto, cuda, cuda:<index> or cpu, got 0"),
        ({"robot": 5}, Pi05Error, "robot: expected a profile's name or path, a RobotProfile or None, got 5"),
        ({"delta_actions": "false"}, Pi05Error, "delta_actions: expected one of None, True, False, got 'false'"),
        ({"norm_stats": "x.json", "normalization": "none"}, Pi05Error, "norm_stats: is of no use beside"),
        ({"device": "cuda:99"}, Pi05Error, "device: 'cuda:99' was asked for; this machine has"),
        ({"device": "tpu"}, Pi05Error, "device: expected auto, cuda"),
        ({"precision": "int4"}, Pi05Error, "precision: expected one of float32, openpi, bfloat16, fp8, got 'int4'"),
        ({"compile_mode": "fast"}, Pi05Error, "compile_mode: expected one of"),
        ({"time_grid": "euler"}, Pi05Error, "time_grid: expected one of"),
        ({"resize": "nearest"}, Pi05Error, "resize: expected one of"),
        ({"normalization": "off"}, Pi05Error, "normalization: expected one of None, none"),
        ({"norm_stats": "/nowhere.json"}, CheckpointError, "/nowhere.json: the file of normalisation statistics"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, CheckpointError, "the tokenizer file does not exist"),
    ],
)
def test_wrong_options_stop_loading(lerobot: Path, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        load(lerobot, **options)


def test_wrong_cameras_list_both_sides(lerobot: Path) -> None:
    profile = load_profile("aloha_ros2")
    cameras = (replace(profile.cameras[0], name="cam_top", slot="base_0_rgb"), *profile.cameras[1:])
    expected = (
        r"the checkpoint reads cam_high, .*cam_top \(slot base_0_rgb\).*"
        "Without a camera: cam_high; without an input: cam_top"
    )
    with pytest.raises(ProfileError, match=expected):
        load(lerobot, robot=replace(profile, cameras=cameras))


def test_joints_in_another_order_list_both_sides(lerobot: Path, tmp_path: Path) -> None:
    names = load_profile("aloha_ros2").joint_names

    def named(*action_names: str) -> Path:
        folder = shutil.copytree(lerobot, tmp_path / action_names[0])
        processor = json.loads((folder / "policy_preprocessor.json").read_text())
        (step,) = [one for one in processor["steps"] if one["registry_name"] == "relative_actions_processor"]
        step["config"]["action_names"] = list(action_names)
        (folder / "policy_preprocessor.json").write_text(json.dumps(processor))
        return folder

    for fits in (names, [f"{name}.pos" for name in names], [f"motor_{index}" for index in range(14)]):
        load(named(*fits), robot="aloha_ros2").close()
    swapped = [*names[7:], *names[:7]]
    expected = (
        r"'aloha_ros2' has the dimensions left_waist, .* in this order; the checkpoint has right_waist.pos, .*"
        r"At another place: left_waist, .*, right_gripper\."
    )
    with pytest.raises(ProfileError, match=expected):
        load(named(*(f"{name}.pos" for name in swapped)), robot="aloha_ros2")


def test_missing_tokenizer_says_where_from(lerobot: Path, tmp_path: Path) -> None:
    for file in lerobot.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*paligemma"):
        load(tmp_path)
    with load(tmp_path, tokenizer=lerobot / "tokenizer.json") as policy:
        assert policy.infer(observation(), seed=1).actions.shape == (50, 14)
    with load(tmp_path, robot="raw") as raw:
        chunk = raw.infer(observation(tokens=[2, 5, 6], prompt=""), seed=1)
        assert chunk.actions.shape == (50, 32)
        with pytest.raises(ObservationError, match=r"prompt: cannot be read, give tokens instead.*tokenizer\.json"):
            raw.infer(observation())


def test_metadata_is_json_and_true(policy: Policy) -> None:
    metadata = json.loads(json.dumps(policy.metadata))
    assert metadata["input"] == {"image_keys": list(CAMERAS), "image_size": [56, 56], "state_dim": 14}
    assert metadata["output"]["action_horizon"] == 50
    assert metadata["output"]["action_dim"] == 14
    assert metadata["robot"]["joint_names"][6] == "left_gripper"
    assert metadata["normalization"]["mode"] == {"state": "QUANTILES", "action": "QUANTILES"}
    assert metadata["runtime"]["device"] == "cpu"
