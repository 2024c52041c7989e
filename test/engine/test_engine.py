"""The engine's queue: batching, failures that stay alone, memory that stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from pi05_ros.engine import Engine, EngineRequest, PlainPath
from pi05_ros.errors import InferenceError
from pi05_ros.model import Pi05Config, Pi05Model, Prefix

# One test breaks an engine's thread on purpose; pytest may notice that during a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class WatchedModel(Pi05Model):
    """A real model that notes the batches it is given, can be held, and fails on a token that it is told."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Pi05Config.tiny())
        self.eval().requires_grad_(False)
        self.batches: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.poison: int | None = None

    def encode_embedded(self, images: Any, image_masks: Any, tokens: Any, token_mask: Any) -> Prefix:
        self.may_go.wait(30)
        self.batches.append(len(tokens))
        if self.poison is not None and (tokens == self.poison).any():
            raise RuntimeError("poisoned")
        return super().encode_embedded(images, image_masks, tokens, token_mask)


@pytest.fixture
def model() -> WatchedModel:
    return WatchedModel()


@pytest.fixture
def engine(model: WatchedModel) -> Iterator[Engine]:
    path = PlainPath(model, resize="lerobot", time_grid="lerobot", prefix_cache=4)
    engine = Engine(path, max_batch=4, batch_delay=0.0, max_queue=8)
    yield engine
    model.may_go.set()
    engine.close()


def request(token: int = 5, length: int = 4, cameras: int = 1, **options: Any) -> EngineRequest:
    rng = np.random.default_rng(token)
    return EngineRequest(
        images=tuple(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8) for _ in range(cameras)),
        tokens=np.full(length, token, dtype=np.int64),
        noise=rng.standard_normal((50, 32), dtype=np.float32),
        **{"num_steps": 2, **options},
    )


def submit_while_held(engine: Engine, model: WatchedModel, requests: list[EngineRequest]) -> list[Future[Any]]:
    """Queue requests behind a running one, so that they wait together."""
    model.may_go.clear()
    first = engine.submit(request(token=999))
    while not first.running():
        threading.Event().wait(0.001)
    futures = [engine.submit(one) for one in requests]
    model.may_go.set()
    first.result(30)
    return futures


def test_equal_shapes_run_together_others_do_not(engine: Engine, model: WatchedModel) -> None:
    requests = [
        request(5),
        request(6),
        request(7, length=6),
        request(8),
        request(9, cameras=2),
        request(10, num_steps=3),
    ]
    futures = submit_while_held(engine, model, requests)
    results = [future.result(30) for future in futures]
    assert model.batches == [1, 3, 1, 1, 1]
    for one, result in zip(requests, results, strict=True):
        alone = engine.submit(EngineRequest(**{**vars(one), "use_cache": False})).result(30)
        assert np.abs(alone.model_actions - result.model_actions).max() < 1e-5


def test_a_batch_is_never_larger_than_asked(engine: Engine, model: WatchedModel) -> None:
    for future in submit_while_held(engine, model, [request(token) for token in range(10, 16)]):
        future.result(30)
    assert model.batches == [1, 4, 2]


def test_a_failing_request_fails_alone(engine: Engine, model: WatchedModel) -> None:
    model.poison = 6
    good, bad, other = submit_while_held(engine, model, [request(5), request(6), request(7)])
    with pytest.raises(RuntimeError, match="poisoned"):
        bad.result(30)
    assert np.isfinite(good.result(30).model_actions).all()
    assert np.isfinite(other.result(30).model_actions).all()


def test_an_error_in_finish_is_the_requests_own(engine: Engine) -> None:
    def finish(_: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        engine.submit(request(), finish).result(30)
    assert engine.submit(request()).result(30).model_actions.shape == (50, 32)


def test_a_full_queue_says_busy(engine: Engine, model: WatchedModel) -> None:
    model.may_go.clear()
    first = engine.submit(request())
    while not first.running():
        threading.Event().wait(0.001)
    waiting = [engine.submit(request(token)) for token in range(8)]
    with pytest.raises(InferenceError, match="busy: 8 requests are waiting"):
        engine.submit(request())
    model.may_go.set()
    for future in waiting:
        future.result(30)


def test_cancelled_requests_give_their_place_back(engine: Engine, model: WatchedModel) -> None:
    model.may_go.clear()
    first = engine.submit(request())
    while not first.running():
        threading.Event().wait(0.001)
    for future in [engine.submit(request(token)) for token in range(8)]:
        assert future.cancel()
    waiting = [engine.submit(request(token)) for token in range(8)]
    model.may_go.set()
    for future in waiting:
        future.result(30)


def test_an_engine_that_fails_lets_nobody_wait(model: WatchedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that breaks the loop itself ends in errors, not in silence."""
    engine = Engine(PlainPath(model, resize="lerobot", time_grid="lerobot"), batch_delay=0.0)
    monkeypatch.setattr(engine.path, "fits", None)
    futures = submit_while_held(engine, model, [request(5), request(6)])
    for future in futures:
        with pytest.raises(InferenceError, match="closed"):
            future.result(30)
    with pytest.raises(InferenceError, match="closed"):
        engine.submit(request())


def test_closing_from_a_callback(model: WatchedModel) -> None:
    engine = Engine(PlainPath(model, resize="lerobot", time_grid="lerobot"))
    closed = threading.Event()
    model.may_go.clear()
    future = engine.submit(request())
    future.add_done_callback(lambda _: (engine.close(), closed.set()))
    model.may_go.set()
    assert closed.wait(30)


def test_hits_and_misses_share_a_batch(engine: Engine, model: WatchedModel) -> None:
    known = engine.submit(request(5)).result(30)
    model.batches.clear()
    again, fresh = submit_while_held(engine, model, [request(5), request(6)])
    assert again.result(30).prefix_cache_hit
    assert not fresh.result(30).prefix_cache_hit
    assert model.batches == [1, 1], "the known prefix is not computed again"
    assert np.abs(again.result(30).model_actions - known.model_actions).max() < 1e-5


def test_close_joins_the_thread(model: WatchedModel) -> None:
    engine = Engine(PlainPath(model, resize="openpi", time_grid="openpi"))
    engine.submit(request()).result(30)
    engine.close()
    assert not any(thread.name == "pi05-engine" and thread.is_alive() for thread in threading.enumerate())
