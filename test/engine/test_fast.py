"""The fast path says what the plain one says. On a CPU the kernels' twins do its work."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.small import EXACT, SQUARE, TINY, alone, difference, guidance, plain_path, request, tiny_model
from pi05_ros.engine import EngineRequest, FastPath, PlainPath, make_path
from pi05_ros.engine.program import MAX_POSITIONS
from pi05_ros.model import Pi05Model

CAMERAS = (SQUARE, (90, 120, "uint8"), (40, 30, "float32"))
DIALECTS = ("lerobot", "openpi")


def fast_path(model: Pi05Model, dialect: str = "lerobot", **options: Any) -> FastPath:
    return FastPath(model, resize=dialect, time_grid=dialect, **options)


@pytest.fixture(scope="module")
def model() -> Pi05Model:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model: Pi05Model) -> PlainPath:
    return plain_path(model)


@pytest.fixture
def fast() -> FastPath:
    return fast_path(tiny_model())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cameras", [CAMERAS[:1], CAMERAS[1:], CAMERAS, CAMERAS[2:0:-1]], ids=len)
def test_prompts_and_cameras(cameras: tuple[tuple[int, int, str], ...], dialect: str) -> None:
    plain, fast = plain_path(tiny_model(), dialect), fast_path(tiny_model(), dialect)
    requests = [request(length, length, cameras) for length in (1, 31, 32, 33, 64, 200)]
    outcomes = [fast.run([one]) for one in requests]
    assert all((outcome.actions.shape, outcome.actions.dtype) == ((1, 12, 32), np.float32) for outcome in outcomes)
    assert difference(np.concatenate([outcome.actions for outcome in outcomes]), alone(plain, requests)) < EXACT


def test_any_number_of_steps(fast: FastPath, plain: PlainPath) -> None:
    requests = [request(num_steps=steps) for steps in range(1, 13)]
    assert difference(np.concatenate([fast.run([one]).actions for one in requests]), alone(plain, requests)) < EXACT


@st.composite
def batches(draw: st.DrawFn) -> list[EngineRequest]:
    """What may run together: prompts of one bucket, guided or not."""
    cameras = tuple(draw(st.lists(st.sampled_from(CAMERAS), min_size=1, max_size=3)))
    longest, steps = 32 * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    pulls = st.builds(
        guidance,
        st.integers(0, 9),
        inference_delay=st.integers(0, 5),
        execution_horizon=st.integers(0, 12),
        schedule=st.sampled_from(("ZEROS", "ONES", "LINEAR", "EXP")),
        max_guidance_weight=st.sampled_from((0.5, 10.0)),
    )
    return [
        request(seed, draw(st.integers(longest - 31, longest)), cameras, num_steps=steps, rtc=draw(st.none() | pulls))
        for seed in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=25)
@given(requests=batches(), data=st.data(), dialect=st.sampled_from(DIALECTS))
def test_batches_of_anything(
    model: Pi05Model, requests: list[EngineRequest], data: st.DataObject, dialect: str
) -> None:
    fast, plain = fast_path(model, dialect), plain_path(model, dialect)
    known = [data.draw(st.booleans(), label="known") for _ in requests]
    for one, is_known in zip(requests, known, strict=True):
        if is_known:
            fast.run([one])
    assert all(fast.fits(requests[0], one) for one in requests)
    outcome = fast.run(requests)
    assert outcome.hits == tuple(known)
    assert difference(outcome.actions, alone(plain, requests)) < EXACT


def test_a_guided_request_leaves_its_neighbour_as_it_is(fast: FastPath) -> None:
    neighbour, guided = request(1, length=20), request(2, rtc=guidance())
    unguided = fast.run([neighbour, dataclasses.replace(guided, rtc=None)]).actions
    mixed = fast.run([neighbour, guided]).actions
    assert np.array_equal(mixed[0], unguided[0])
    assert not np.array_equal(mixed[1], unguided[1])
    assert np.array_equal(fast.run([neighbour, dataclasses.replace(guided, rtc=None)]).actions, unguided), "nor a next"


def test_guidance_through_the_model(fast: FastPath, plain: PlainPath) -> None:
    through, identity = (request(rtc=guidance(jacobian=jacobian)) for jacobian in ("vjp", "identity"))
    fast.run([identity])  # its leavings in the same buffers are of no effect
    assert difference(fast.run([through]).actions, alone(plain, [through])) < EXACT
    assert difference(alone(plain, [through]), alone(plain, [identity])) > 100 * EXACT


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.04), ("openpi", 0.03)])
def test_rounding_costs_less_than_on_the_plain_path(plain: PlainPath, precision: str, tolerance: float) -> None:
    requests = [request(seed, 20 + seed, CAMERAS, num_steps=5) for seed in range(4)]
    exact = alone(plain, requests)
    plain_error = difference(alone(plain_path(tiny_model(precision)), requests), exact)
    for batch in (1, 4):
        fast = fast_path(tiny_model(precision))
        parts = [fast.run(requests[first : first + batch]).actions for first in range(0, 4, batch)]
        error = difference(np.concatenate(parts), exact)
        assert error < min(tolerance, plain_error)


def test_what_float8_costs(plain: PlainPath) -> None:
    requests = [request(seed, 20 + seed, CAMERAS, num_steps=5) for seed in range(4)]
    exact = alone(plain, requests)
    paths = [fast_path(tiny_model("bfloat16"), fp8=fp8) for fp8 in (False, True)]
    rounded, quantised = (difference(path.run(requests).actions, exact) for path in paths)
    assert rounded < quantised < 0.1


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("length", [1, 9, 30])
def test_nan_stays_with_its_request(length: int, cached: bool) -> None:
    """What it leaves in kv, which is used again, is nobody's: neither where a prefix will be nor behind."""
    fast = fast_path(tiny_model())
    poisoned, healthy, neighbour = request(1, length=30), request(2, length), request(3, length=12)
    poisoned.noise[:] = np.nan
    healthy, neighbour = (dataclasses.replace(one, use_cache=cached) for one in (healthy, neighbour))
    expected, both = fast.run([healthy]).actions, fast.run([healthy, neighbour]).actions
    assert np.isnan(fast.run([poisoned]).actions).all()
    assert np.array_equal(fast.run([healthy]).actions, expected)
    mixed = fast.run([poisoned, neighbour]).actions
    assert np.isnan(mixed[0]).all()
    assert np.array_equal(mixed[1], both[1])
    assert np.array_equal(fast.run([healthy, neighbour]).actions, both)


def test_a_failed_request_leaves_nothing_behind(fast: FastPath, plain: PlainPath) -> None:
    too_long = dataclasses.replace(guidance(), prev_chunk=np.zeros((TINY.horizon + 1, 2)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rtc.prev_chunk: expected at most \[1, 12, 32\], got \[1, 13, 2\]"):
            fast.run([request(1, rtc=guidance()), request(2, rtc=too_long)])
        requests = [request(3), request(4)]
        assert difference(fast.run(requests).actions, alone(plain, requests)) < EXACT


def test_timings_by_stage(fast: FastPath) -> None:
    stages = ("cache_lookup_ms", "preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms")
    miss, hit = fast.run([request()]).timings, fast.run([request()]).timings
    assert (tuple(miss), tuple(hit)) == (stages, stages)
    assert all(miss[stage] > 0 for stage in stages)
    assert (hit["preprocess_ms"], hit["vision_ms"]) == (0.0, 0.0)


def test_the_fast_path_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for mode in ("eager", "graphs"):
        path = make_path(tiny_model(), mode, resize="lerobot", time_grid="lerobot")
        assert (type(path), path.name) == (FastPath, "eager"), "a CPU captures nothing"
        path.run([request(graphs=True)])
    assert "compile_mode graphs needs a CUDA device" in caplog.text
    with pytest.raises(ValueError, match="precision: fp8 needs compile_mode graphs or eager"):
        make_path(tiny_model(), "plain", resize="lerobot", time_grid="lerobot", fp8=True)


def test_a_closed_path_keeps_nothing(fast: FastPath) -> None:
    fast.run([request()])
    fast.close()
    assert (len(fast.cache), fast.cache.bytes) == (0, 0)
    assert not hasattr(fast, "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "nearest"}, "resize: expected one of lerobot, openpi, got 'nearest'"),
        ({"time_grid": "euler"}, "time_grid: expected one of lerobot, openpi, sglang, got 'euler'"),
        ({"prefix_cache": -1}, "prefix_cache: expected an integer of 0 or more, got -1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastPath(tiny_model(), **{"resize": "lerobot", "time_grid": "lerobot", **options})


@pytest.mark.parametrize(
    ("part", "sizes", "message"),
    [
        ("prefix", {"kv_heads": 2}, "prefix.kv_heads: the fast path expects 1, got 2"),
        ("prefix", {"head_dim": 24}, "prefix.head_dim: the fast path expects a power of two, got 24"),
        ("expert", {"width": 48}, "expert.width: the fast path expects a power of two, got 48"),
        ("expert", {"mlp": 96}, "expert.mlp: the fast path expects a power of two, got 96"),
        ("expert", {"width": 256, "mlp": 128}, "expert.mlp: the fast path expects a multiple of 256, got 128"),
        ("expert", {"width": 256, "mlp": 512}, "prefix.head_dim: the fast path expects a multiple of 512, got 256"),
    ],
)
def test_sizes_that_have_no_kernel(part: str, sizes: dict[str, int], message: str) -> None:
    config = dataclasses.replace(TINY, **{part: dataclasses.replace(getattr(TINY, part), **sizes)})
    with pytest.raises(ValueError, match=message):
        fast_path(Pi05Model(config))


@pytest.mark.parametrize("shape", [(TINY.action_dim,), (TINY.horizon + 1, TINY.action_dim), (1, TINY.action_dim)])
def test_noise_of_another_shape_is_not_stretched(fast: FastPath, plain: PlainPath, shape: tuple[int, ...]) -> None:
    wrong = dataclasses.replace(request(1), noise=np.zeros(shape, dtype=np.float32))
    with pytest.raises(ValueError, match=r"noise: expected \[12, 32\], got \["):
        fast.run([wrong])
    assert difference(fast.run([request(2)]).actions, alone(plain, [request(2)])) < EXACT


def test_more_positions_than_there_are_rotary_embeddings_for(fast: FastPath) -> None:
    with pytest.raises(ValueError, match="tokens: expected 8192 positions at most"):
        fast.run([request(1, length=MAX_POSITIONS)])
