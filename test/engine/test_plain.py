"""The plain path: the model's own numbers, whatever is cached, batched or guided."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pi05_ros.engine import Engine, EngineRequest, PlainPath, make_path
from pi05_ros.engine.images import image_to_model
from pi05_ros.model import Pi05Config, Pi05Model, Prefix, RtcGuidance

STAGES = ["cache_lookup_ms", "preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms"]
BATCHED = 1e-5  # sums of another batch size are taken in another order


class WatchedModel(Pi05Model):
    """A real model, tiny, that notes how many prefixes it computes at once, and fails on a token that it is told."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Pi05Config.tiny())
        self.eval()  # its parameters want gradients, as a module's do: inference must not
        self.batches: list[int] = []
        self.poison: int | None = None

    def encode_embedded(self, images: Tensor, image_masks: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        self.batches.append(len(tokens))
        if self.poison is not None and (tokens == self.poison).any():
            raise RuntimeError("poisoned")
        return super().encode_embedded(images, image_masks, tokens, token_mask)


@pytest.fixture
def model() -> WatchedModel:
    return WatchedModel()


@pytest.fixture
def path(model: WatchedModel) -> PlainPath:
    return PlainPath(model, resize="lerobot", time_grid="lerobot", prefix_cache=4)


def request(token: int = 5, length: int = 4, cameras: int = 1, **options: Any) -> EngineRequest:
    rng = np.random.default_rng(token)
    return EngineRequest(
        images=tuple(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8) for _ in range(cameras)),
        tokens=np.full(length, token, dtype=np.int64),
        noise=rng.standard_normal((50, 32), dtype=np.float32),
        **{"num_steps": 2, **options},
    )


def oracle(model: Pi05Model, one: EngineRequest, dialect: str = "lerobot") -> np.ndarray:
    """What the model itself says of a request."""
    size = model.config.vision.image_size
    images = torch.stack([image_to_model(image, size, dialect) for image in one.images])[None]
    tokens = torch.from_numpy(one.tokens)[None]
    actions = model.sample_actions(
        images,
        torch.ones(images.shape[:2], dtype=torch.bool),
        tokens,
        torch.ones(tokens.shape, dtype=torch.bool),
        torch.from_numpy(one.noise)[None],
        one.num_steps,
        dialect,
        one.rtc,
    )
    return actions[0].numpy()


@pytest.mark.parametrize("dialect", ["lerobot", "openpi"])
def test_one_request_is_bit_equal_to_the_model(model: WatchedModel, dialect: str) -> None:
    path = PlainPath(model, resize=dialect, time_grid=dialect)
    outcome = path.run([request(cameras=2)])
    assert (outcome.actions.shape, outcome.actions.dtype) == ((1, 50, 32), np.float32)
    assert np.array_equal(outcome.actions[0], oracle(model, request(cameras=2), dialect))
    assert list(outcome.timings) == STAGES


def test_a_batch_agrees_with_its_requests_alone(path: PlainPath, model: WatchedModel) -> None:
    requests = [request(token) for token in (5, 6, 7)]
    outcome = path.run(requests)
    assert model.batches == [3]
    for one, actions in zip(requests, outcome.actions, strict=True):
        assert np.abs(actions - oracle(model, one)).max() < BATCHED


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (request(6), True),
        (request(6, priority=3, deadline=1.0, use_cache=False, graphs=False), True),
        (request(6, length=5), False),
        (request(6, cameras=2), False),
        (request(6, num_steps=3), False),
        (request(6, rtc=RtcGuidance(np.zeros((5, 32)), 1)), False),
    ],
)
def test_what_may_run_together(path: PlainPath, other: EngineRequest, fits: bool) -> None:
    assert path.fits(request(5), other) is fits
    assert path.fits(other, request(5)) is fits


def test_a_hit_is_bit_equal_and_skips_the_prefix(path: PlainPath, model: WatchedModel) -> None:
    miss, hit, unused = path.run([request()]), path.run([request()]), path.run([request(use_cache=False)])
    assert [outcome.hits for outcome in (miss, hit, unused)] == [(False,), (True,), (False,)]
    assert np.array_equal(miss.actions, hit.actions)
    assert np.array_equal(miss.actions, unused.actions)
    assert model.batches == [1, 1], "the second was not computed"
    assert (path.cache.hits, path.cache.misses, len(path.cache)) == (1, 1, 1)
    config, positions = model.config, 16 + 4
    embeddings, keys = config.prefix.width, config.prefix.layers * config.prefix.kv_heads * config.prefix.head_dim
    assert path.cache.bytes == positions * (4 * embeddings + 1 + 2 * 4 * keys)
    path.clear_cache()
    assert path.run([request()]).hits == (False,)


def test_hits_and_misses_share_a_batch(path: PlainPath, model: WatchedModel) -> None:
    known = path.run([request(5)])
    outcome = path.run([request(6), request(5)])
    assert outcome.hits == (False, True)
    assert model.batches == [1, 1], "the known prefix is not computed again"
    assert np.abs(outcome.actions[1] - known.actions[0]).max() < BATCHED
    assert np.abs(outcome.actions[0] - oracle(model, request(6))).max() < BATCHED


def test_no_cache_no_keys(model: WatchedModel) -> None:
    path = PlainPath(model, resize="lerobot", time_grid="lerobot", prefix_cache=0)
    assert [path.run([request()]).hits for _ in range(2)] == [(False,), (False,)]
    assert (path.cache.hits, path.cache.misses) == (0, 0)


@pytest.mark.parametrize("jacobian", ["identity", "vjp"])
def test_guidance_is_the_models_own(path: PlainPath, model: WatchedModel, jacobian: str) -> None:
    rtc = RtcGuidance(np.ones((20, 32)), inference_delay=3, execution_horizon=15, jacobian=jacobian)
    guided = path.run([request(rtc=rtc)])
    assert np.array_equal(guided.actions[0], oracle(model, request(rtc=rtc)))
    assert not np.array_equal(guided.actions[0], oracle(model, request()))


def test_a_failing_request_fails_alone(path: PlainPath, model: WatchedModel) -> None:
    model.poison = 6
    with pytest.raises(RuntimeError, match="poisoned"):
        path.run([request(5), request(6)])
    assert path.run([request(5)]).hits == (False,), "nothing of the failed batch was kept"
    engine = Engine(path, batch_delay=0.0)
    futures = [engine.submit(request(token)) for token in (5, 6, 7)]
    with pytest.raises(RuntimeError, match="poisoned"):
        futures[1].result(30)
    for token, future in ((5, futures[0]), (7, futures[2])):
        assert np.abs(future.result(30).model_actions - oracle(model, request(token))).max() < BATCHED
    engine.close()


def test_a_closed_path_lets_go_of_the_model() -> None:
    model = WatchedModel()
    path = PlainPath(model, resize="lerobot", time_grid="lerobot")
    path.run([request()])
    gone = weakref.ref(model)
    del model
    path.close()
    assert gone() is None
    assert (len(path.cache), path.cache.bytes, path.device.type) == (0, 0, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "nearest"}, "resize: expected one of lerobot, openpi, got 'nearest'"),
        ({"time_grid": "euler"}, "time_grid: expected one of lerobot, openpi, sglang, got 'euler'"),
        ({"prefix_cache": -1}, "prefix_cache: expected an integer of 0 or more, got -1"),
        ({"compile_mode": "fast"}, "compile_mode: expected one of plain, eager, graphs, got 'fast'"),
    ],
)
def test_wrong_options(model: WatchedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_path(model, **{"compile_mode": "plain", "resize": "lerobot", "time_grid": "lerobot", **options})


def test_the_plain_path_by_name(model: WatchedModel) -> None:
    path = make_path(model, "plain", resize="lerobot", time_grid="lerobot")
    assert (type(path), path.name) == (PlainPath, "plain")
