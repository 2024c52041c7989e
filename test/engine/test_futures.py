"""The engine's futures: each is settled exactly once, whatever happens, and its callbacks may do what they like."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.held_path import FIRST, PATIENCE, HeldPath, answers, named, running
from pi05_ros.engine import Engine
from pi05_ros.errors import EngineBusyError, EngineClosedError, InferenceError

# ---- callbacks ----

ENDINGS: dict[str, Callable[[Engine, HeldPath], Future[Any]]] = {
    "answered": lambda engine, path: engine.submit(named(1)),
    "failed": lambda engine, path: engine.submit(named(2)),
    "displaced": lambda engine, path: displaced(engine),
    "overdue": lambda engine, path: engine.submit(named(1, deadline=0.0)),
    "closed": lambda engine, path: closed(engine),
}


def displaced(engine: Engine) -> Future[Any]:
    *_, last = [engine.submit(named(1)) for _ in range(4)]
    engine.submit(named(1, priority=1))
    return last


def closed(engine: Engine) -> Future[Any]:
    future = engine.submit(named(1))
    engine.close(timeout=0)
    return future


@pytest.mark.parametrize("ending", ENDINGS)
def test_callbacks_run_without_the_engines_lock(engine: Engine, path: HeldPath, ending: str) -> None:
    """A callback may wait for somebody who needs the lock, which is re-entrant, so another thread has to try it."""
    path.fails[2] = RuntimeError("poisoned")
    free, called = [], threading.Event()

    def callback(_: object) -> None:
        other = threading.Thread(target=engine.stats, daemon=True)
        other.start()
        other.join(2.0)
        free.append(not other.is_alive())
        called.set()

    ENDINGS[ending](engine, path).add_done_callback(callback)
    path.let_go()
    assert called.wait(PATIENCE)
    assert free == [True]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine")])
def test_a_callback_that_raises_is_logged_and_harmless(
    engine: Engine, path: HeldPath, ending: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    path.fails[2] = RuntimeError("poisoned")

    def callback(_: object) -> None:
        raise error

    future = ENDINGS[ending](engine, path)
    future.add_done_callback(callback)
    path.let_go()
    wait([future], PATIENCE)
    if ending != "closed":
        assert answers([engine.submit(named(7))]) == [7]
    assert engine.close(PATIENCE)
    assert "mine" in caplog.text


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_callback_may_submit_again(engine: Engine, path: HeldPath, ending: str) -> None:
    path.fails[2] = RuntimeError("poisoned")
    again: list[Future[Any] | Exception] = []
    called = threading.Event()

    def callback(_: object) -> None:
        try:
            again.append(engine.submit(named(7)))
        except InferenceError as error:
            again.append(error)
        called.set()

    ENDINGS[ending](engine, path).add_done_callback(callback)
    path.let_go()
    assert called.wait(PATIENCE)
    (answer,) = again
    if ending == "closed":
        assert isinstance(answer, EngineClosedError)
    else:
        assert isinstance(answer, Future)
        assert answers([answer]) == [7]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_callback_may_close_the_engine(engine: Engine, path: HeldPath, ending: str) -> None:
    path.fails[2] = RuntimeError("poisoned")
    ended: list[bool] = []
    future = ENDINGS[ending](engine, path)
    future.add_done_callback(lambda _: ended.append(engine.close()))
    path.let_go()
    engine._thread.join(PATIENCE)
    assert ended == [False], "the thread cannot have ended in its own callback"
    assert engine.close()


# ---- nothing is lost ----


class Expected:
    """What the engine's documentation promises, as plainly as can be: lists, and one thing after the other."""

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self.max_batch, self.max_queue = max_batch, max_queue
        self.waiting: list[tuple[int, int, int, bool]] = []  # (-priority, name, kind, overdue)
        self.running: list[int] = []
        self.ends: dict[int, str] = {}

    def submit(self, name: int, priority: int, kind: int, overdue: bool) -> bool:
        """False if the engine is to say busy at once."""
        if len(self.waiting) >= self.max_queue:
            self.sweep()
        if len(self.waiting) >= self.max_queue:
            last = max(self.waiting)
            if -last[0] >= priority:
                return False
            self.waiting.remove(last)
            self.ends[last[1]] = "EngineBusyError"
        self.waiting.append((-priority, name, kind, overdue))
        return True

    def cancel(self, name: int) -> bool:
        found = [job for job in self.waiting if job[1] == name]
        for job in found:
            self.waiting.remove(job)
            self.ends[name] = "cancelled"
        return self.ends.get(name) == "cancelled"

    def sweep(self) -> None:
        self.ends |= {name: "DeadlineError" for _, name, _, overdue in self.waiting if overdue}
        self.waiting = [job for job in self.waiting if not job[3]]

    def turn(self) -> list[int]:
        """The running batch ends and the next begins."""
        self.ends |= dict.fromkeys(self.running, "answered")
        self.sweep()
        first = min(self.waiting, default=None)
        equal = [job for job in sorted(self.waiting) if (job[0], job[2]) == (first[0], first[2])]
        batch = equal[: self.max_batch]
        self.waiting = [job for job in self.waiting if job not in batch]
        self.running = [job[1] for job in batch]
        return self.running

    def close(self) -> None:
        self.ends |= {job[1]: "EngineClosedError" for job in self.waiting}


def end_of(future: Future[Any]) -> str:
    if future.cancelled():
        return "cancelled"
    error = future.exception(0)
    return "answered" if error is None else type(error).__name__


SUBMIT = st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 2), st.sampled_from([False, False, True]))
OPERATION = st.one_of(SUBMIT, SUBMIT, SUBMIT, st.tuples(st.just("cancel"), st.integers(0, 20)), st.just(("turn",)))


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATION, max_size=25), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_whatever_happens_order_holds_and_each_future_is_settled_once(
    operations: list[tuple[Any, ...]], max_batch: int, max_queue: int, drain: bool
) -> None:
    path, expected = HeldPath(), Expected(max_batch, max_queue)
    engine = running(path, max_batch=max_batch, max_queue=max_queue)
    futures: dict[int, Future[Any]] = {}
    settled: Counter[int] = Counter()
    batches = [[FIRST]]

    def turn() -> None:
        path.let_one_run()
        batch = expected.turn()
        if batch:
            batches.append(batch)
            path.wait_for(lambda path: len(path.batches) == len(batches))
        else:  # it idles; begin anew behind another first one
            engine.submit(named(FIRST, priority=9))
            batches.append([FIRST])
            path.wait_for(lambda path: len(path.batches) == len(batches))

    for name, (kind, *arguments) in enumerate(operations):
        if kind == "submit":
            priority, size, overdue = arguments
            request = named(name, size, priority=priority, deadline=0.0 if overdue else None)
            if expected.submit(name, *arguments):
                futures[name] = engine.submit(request)
                futures[name].add_done_callback(lambda _, name=name: settled.update([name]))
            else:
                with pytest.raises(EngineBusyError):
                    engine.submit(request)
        elif kind == "cancel":
            name = arguments[0]
            assert (name in futures and futures[name].cancel()) == expected.cancel(name)
        else:
            turn()
    engine.close(0, drain)
    if drain:
        while expected.running or expected.waiting:
            batches += [batch] if (batch := expected.turn()) else []
    else:
        expected.ends |= dict.fromkeys(expected.running, "answered")
        expected.close()
    path.let_go()
    assert engine.close(PATIENCE, drain)
    assert path.batches == batches
    assert {name: end_of(future) for name, future in futures.items()} == expected.ends
    assert settled == Counter(list(futures))
    stats = engine.stats()
    ends = Counter(expected.ends.values())
    assert (stats["cancelled"], stats["failed"], stats["waiting"], stats["running"]) == (ends["cancelled"], 0, 0, 0)
    assert stats["refused"]["deadline"] == ends["DeadlineError"]
    assert_sums_up(stats)


def assert_sums_up(stats: dict[str, Any]) -> None:
    ends = ("answered", "failed", "cancelled", "waiting", "running")
    assert stats["requests"] == sum(stats[end] for end in ends) + sum(stats["refused"].values())


def test_many_threads_at_once() -> None:
    """Clients that submit, cancel, come late, submit again from callbacks, while counters are read and it closes."""
    path = HeldPath(held=False)
    path.fails = {name: RuntimeError("poisoned") for name in range(0, 1000, 97)}
    engine = Engine(path, max_batch=4, batch_delay=0.0001, max_queue=8)
    futures: list[Future[Any]] = []
    settled: Counter[int] = Counter()
    wrong: list[object] = []

    def submit(name: int, **options: Any) -> Future[Any] | None:
        try:
            future = engine.submit(named(name, kind=1 + name % 2, **options))
        except (EngineBusyError, EngineClosedError):
            return None
        futures.append(future)
        future.add_done_callback(lambda future: settled.update([id(future)]))
        return future

    def client(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(500):
            name = chance.randrange(1000)
            deadline = time.monotonic() + chance.choice([-1.0, 0.001, 60.0])
            future = submit(name, priority=chance.randrange(3), deadline=deadline)
            if future is None:
                continue
            if chance.random() < 0.2:
                future.cancel()
            elif chance.random() < 0.2:
                future.add_done_callback(lambda _, name=name: submit(name, priority=1))
            elif chance.random() < 0.5:
                try:
                    if answers([future]) != [name]:
                        wrong.append(name)
                except (InferenceError, RuntimeError):
                    pass
            assert_sums_up(engine.stats())

    threads = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert engine.close(PATIENCE, drain=True)
    assert not wrong
    assert wait(futures, 0).not_done == set()
    assert settled == Counter(map(id, futures))
    stats = engine.stats()
    assert (stats["waiting"], stats["running"]) == (0, 0)
    assert_sums_up(stats)
