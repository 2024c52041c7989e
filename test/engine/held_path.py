"""A path without a model, for what the engine does with requests: it notes them and runs each batch when it is let."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from pi05_ros.engine import Engine, EngineRequest, Outcome
from pi05_ros.engine.prefix_cache import PrefixCache

FIRST = 999
"""The name of the request that others wait behind."""

PATIENCE = 30.0
"""Seconds after which a test that waits for what should have happened goes on, and fails."""


class HeldPath:
    """A request's token is its name, and the number of its tokens is its kind: equal kinds fit."""

    name = "held"
    device = torch.device("cpu")

    def __init__(self, held: bool = True) -> None:
        self.cache: PrefixCache[Any] = PrefixCache(0)
        self.batches: list[list[int]] = []
        self.calls: list[tuple[str, threading.Thread]] = []
        self.fails: dict[int, BaseException] = {}
        self.answer: Callable[[Sequence[EngineRequest]], Outcome] = outcome
        self.asked = 0
        self._permits, self._held = 0, held
        self._changed = threading.Condition()

    def fits(self, first: EngineRequest, other: EngineRequest) -> bool:
        with self._changed:
            self.asked += 1
            self._changed.notify_all()
        return len(first.tokens) == len(other.tokens)

    def run(self, requests: Sequence[EngineRequest]) -> Outcome:
        names = [int(request.tokens[0]) for request in requests]
        with self._changed:
            self.batches.append(names)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits or not self._held, PATIENCE)
            self._permits -= 1
        for name in names:
            if name in self.fails:
                raise self.fails[name]
        return self.answer(requests)

    def clear_cache(self) -> None:
        self._note("clear_cache")

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        with self._changed:
            self.calls.append((call, threading.current_thread()))
            self._changed.notify_all()

    def let_go(self) -> None:
        """Hold no batch any more."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def let_one_run(self) -> None:
        """The batch that runs, or the next one, may end."""
        with self._changed:
            self._permits += 1
            self._changed.notify_all()

    def wait_for_delay(self) -> None:
        """Return when the engine waits for more company: who then takes its lock finds it there."""
        self.wait_for(lambda path: path.asked > 0)

    def wait_for(self, condition: Callable[[HeldPath], bool]) -> None:
        """Return when the condition holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE)


def outcome(requests: Sequence[EngineRequest]) -> Outcome:
    """Actions that say whose they are."""
    actions = np.stack([np.full((2, 3), request.tokens[0], dtype=np.float32) for request in requests])
    stages = ("cache_lookup_ms", "preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms")
    return Outcome(actions, (False,) * len(requests), dict.fromkeys(stages, 1.0))


def named(name: int, kind: int = 1, **options: Any) -> EngineRequest:
    """A request for a ``HeldPath``."""
    image, noise = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 3), np.float32)
    return EngineRequest((image,), np.full(kind, name, dtype=np.int64), noise, **{"num_steps": 1, **options})


def running(path: HeldPath, **options: Any) -> Engine:
    """An engine with a request (FIRST) on its thread, which is held, so that what is submitted next has to wait."""
    engine = Engine(path, **{"batch_delay": 0.0, **options})
    engine.submit(named(FIRST))
    path.wait_for(lambda path: path.batches == [[FIRST]])
    return engine


def answers(futures: list[Future[Any]]) -> list[float]:
    """The names that the results carry."""
    return [float(future.result(PATIENCE).model_actions[0, 0]) for future in futures]
