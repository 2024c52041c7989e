"""The engine's queue: who runs when and with whom, who is refused, and that every future is settled exactly once."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.held_path import PATIENCE, HeldPath, named, outcome
from pi05_ros.engine import Engine, Outcome
from pi05_ros.errors import DeadlineError, EngineBusyError, EngineClosedError, InferenceError

FIRST = 999  # the name of the request that the others wait behind


@pytest.fixture
def path() -> HeldPath:
    return HeldPath()


@pytest.fixture
def engine(path: HeldPath) -> Iterator[Engine]:
    """An engine with a request on its thread, which is held."""
    engine = Engine(path, max_batch=4, batch_delay=0.0, max_queue=4)
    engine.submit(named(FIRST))
    path.wait_for(lambda path: path.batches == [[FIRST]])
    yield engine
    path.let_go()
    assert engine.close(PATIENCE)


def answers(futures: list[Future[Any]]) -> list[float]:
    return [float(future.result(PATIENCE).model_actions[0, 0]) for future in futures]


def running(path: HeldPath, **options: Any) -> Engine:
    """An engine that runs a request, as of the fixture, but with other options."""
    engine = Engine(path, **{"batch_delay": 0.0, **options})
    engine.submit(named(FIRST))
    path.wait_for(lambda path: path.batches == [[FIRST]])
    return engine


# ---- order and batches ----


def test_priority_then_arrival_and_each_gets_his_own(engine: Engine, path: HeldPath) -> None:
    engine.max_batch = 1
    futures = [engine.submit(named(name, priority=priority)) for name, priority in enumerate((0, 5, 0, 5))]
    path.let_go()
    assert answers(futures) == [0, 1, 2, 3]
    assert path.batches[1:] == [[1], [3], [0], [2]]


def test_what_fits_the_first_runs_with_it(engine: Engine, path: HeldPath) -> None:
    futures = [engine.submit(named(name, kind)) for name, kind in enumerate((1, 2, 1, 2))]
    path.let_go()
    results = [future.result(PATIENCE) for future in futures]
    assert path.batches[1:] == [[0, 2], [1, 3]]
    assert [result.batch_size for result in results] == [2, 2, 2, 2]
    assert list(results[0].timings) == [
        *("queue_ms", "cache_lookup_ms", "preprocess_ms", "vision_ms", "prefix_ms", "denoise_ms"),
        *("postprocess_ms", "total_ms"),
    ]
    assert results[0].timings is not results[1].timings


def test_a_batch_is_never_larger_than_asked(path: HeldPath) -> None:
    engine = running(path, max_batch=3)
    futures = [engine.submit(named(name)) for name in range(5)]
    path.let_go()
    assert answers(futures) == [0, 1, 2, 3, 4]
    assert path.batches[1:] == [[0, 1, 2], [3, 4]]
    engine.close()


FOREVER = 3600.0  # a delay that no test would survive


def test_one_that_finds_the_engine_idle_never_waits() -> None:
    path = HeldPath(held=False)
    engine = Engine(path, batch_delay=FOREVER)
    assert answers([engine.submit(named(1))]) == [1]
    engine.close()


def test_what_is_submitted_together_shares_a_batch_on_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    path = HeldPath(held=False)
    engine = Engine(path, max_batch=4, batch_delay=0.0)
    looked = threading.Event()
    sweep = engine._sweep
    monkeypatch.setattr(engine, "_sweep", lambda: (looked.set(), sweep()))
    with engine.together():
        futures = [engine.submit(named(1))]
        assert not looked.wait(0.05), "nothing begins before all are there"
        futures += [engine.submit(named(name)) for name in (2, 3, 4)]
    assert answers(futures) == [1, 2, 3, 4]
    assert path.batches == [[1, 2, 3, 4]]
    engine.close()


def test_those_that_wait_together_wait_for_company(path: HeldPath) -> None:
    engine = running(path, max_batch=3, batch_delay=FOREVER)
    futures = [engine.submit(named(name)) for name in (1, 2)]
    path.let_go()
    path.wait_for_delay()
    futures.append(engine.submit(named(3)))
    assert answers(futures) == [1, 2, 3]
    assert path.batches[1:] == [[1, 2, 3]]
    engine.close()


@pytest.mark.parametrize(
    "others",
    [
        {"priority": 0},
        {"kind": 2, "priority": 1},
        {"deadline": time.monotonic() + FOREVER / 2, "priority": 1},
    ],
    ids=["of lower priority", "that do not fit", "with a deadline within the delay"],
)
def test_no_delay_for_company(path: HeldPath, others: dict[str, Any]) -> None:
    engine = running(path, max_batch=3, batch_delay=FOREVER)
    first, _ = engine.submit(named(1, priority=1)), engine.submit(named(2, **others))
    path.let_go()
    assert answers([first]) == [1]
    engine.close()


def test_one_that_comes_with_higher_priority_ends_the_delay(path: HeldPath) -> None:
    engine = running(path, max_batch=4, batch_delay=FOREVER)
    futures = [engine.submit(named(name)) for name in (1, 2)]
    path.let_go()
    path.wait_for_delay()
    urgent = engine.submit(named(3, priority=1))
    assert answers([urgent, *futures]) == [3, 1, 2]
    assert path.batches[1:] == [[3, 1, 2]]
    engine.close()


def test_one_that_comes_too_late_within_the_delay_is_not_run(path: HeldPath) -> None:
    engine = running(path, batch_delay=FOREVER)
    futures = [engine.submit(named(name)) for name in (1, 2)]
    path.let_go()
    path.wait_for_delay()
    with pytest.raises(DeadlineError):
        engine.submit(named(3, deadline=0.0)).result(PATIENCE)
    assert answers(futures) == [1, 2]
    engine.close()


def test_nobody_waits_for_company_that_has_left(path: HeldPath) -> None:
    engine = running(path, batch_delay=FOREVER)
    future, gone = (engine.submit(named(name)) for name in (1, 2))
    gone.cancel()
    path.let_go()
    assert answers([future]) == [1]
    engine.close()


def test_closing_ends_the_delay(path: HeldPath) -> None:
    engine = running(path, batch_delay=FOREVER)
    refused = [engine.submit(named(name)) for name in (1, 2)]
    path.let_go()
    path.wait_for_delay()
    assert engine.close(PATIENCE)
    for future in refused:
        with pytest.raises(EngineClosedError):
            future.result(0)


# ---- who is refused ----


def test_a_full_queue_says_busy(engine: Engine, path: HeldPath) -> None:
    waiting = [engine.submit(named(name)) for name in range(4)]
    with pytest.raises(EngineBusyError, match="busy: 4 requests are waiting already"):
        engine.submit(named(5))
    path.let_go()
    assert answers(waiting) == [0, 1, 2, 3]
    assert engine.stats()["refused"] == {"busy": 1, "deadline": 0, "closed": 0}


def test_the_urgent_one_takes_the_place_of_the_newest_of_the_lowest_priority(engine: Engine, path: HeldPath) -> None:
    futures = [engine.submit(named(name, priority=priority)) for name, priority in enumerate((1, 0, 0, 2))]
    urgent = engine.submit(named(9, priority=2))
    path.let_go()
    with pytest.raises(EngineBusyError, match="busy: 4 requests"):
        futures.pop(2).result(PATIENCE)
    assert answers([*futures, urgent]) == [0, 1, 3, 9]
    assert path.batches[1:] == [[3, 9, 0, 1]]


def test_a_cancelled_request_frees_its_place_and_costs_nothing(engine: Engine, path: HeldPath) -> None:
    gone = [engine.submit(named(name)) for name in range(4)]
    assert all(future.cancel() for future in gone)
    assert engine.stats()["waiting"] == 0
    assert wait(gone, 0).not_done == set(), "who waits for a cancelled future is told"
    waiting = [engine.submit(named(name)) for name in range(10, 14)]
    path.let_go()
    assert answers(waiting) == [10, 11, 12, 13]
    assert path.batches[1:] == [[10, 11, 12, 13]]
    assert engine.stats()["cancelled"] == 4


def test_a_request_cancelled_at_the_last_moment_is_not_run(
    engine: Engine, path: HeldPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    future, gone = (engine.submit(named(name)) for name in (1, 2))
    monkeypatch.setattr(path, "fits", lambda first, other: gone.cancel())
    path.let_go()
    assert answers([future]) == [1]
    assert path.batches[1:] == [[1]]
    assert engine.stats()["cancelled"] == 1


def test_an_overdue_request_is_answered_and_not_run(engine: Engine, path: HeldPath) -> None:
    passed = time.monotonic()
    late = [engine.submit(named(name, priority=-1, deadline=passed)) for name in range(4)]
    waiting = [engine.submit(named(10, deadline=passed + 3600.0)) for _ in range(4)]
    path.let_one_run()  # the first ends; at the next turn all that are late hear of it, whoever's turn it is
    for future in late:
        with pytest.raises(DeadlineError, match=r"The deadline passed \d+ ms before this request's turn"):
            future.result(PATIENCE)
    path.let_go()
    assert answers(waiting) == [10] * 4
    assert engine.stats()["refused"] == {"busy": 0, "deadline": 4, "closed": 0}


def test_a_request_that_cannot_be_ranked_is_not_made() -> None:
    with pytest.raises(ValueError, match=r"deadline: expected a time of time\.monotonic\(\), got 'soon'"):
        named(1, deadline="soon")
    with pytest.raises(ValueError, match="priority: expected an integer, got None"):
        named(1, priority=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected an integer of 1 or more, got 0"),
        ({"max_queue": 1.5}, "max_queue: expected an integer of 1 or more, got 1.5"),
        ({"batch_delay": -1}, "batch_delay: expected seconds, 0 or more, got -1"),
    ],
)
def test_wrong_options(path: HeldPath, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(path, **options)


# ---- failures ----


@pytest.mark.parametrize("error", [RuntimeError("poisoned"), SystemExit("poisoned")])
def test_a_failing_request_fails_alone(engine: Engine, path: HeldPath, error: BaseException) -> None:
    path.fails[2] = error
    good, bad, other = (engine.submit(named(name)) for name in (1, 2, 3))
    path.let_go()
    with pytest.raises(type(error), match="poisoned"):
        bad.result(PATIENCE)
    assert answers([good, other]) == [1, 3]
    assert path.batches[1:] == [[1, 2, 3], [1], [2], [3]]
    stats = engine.stats()
    assert (stats["answered"], stats["failed"], stats["batches"]) == (3, 1, {1: 4, 3: 1})


def test_an_outcome_of_the_wrong_length_leaves_nobody_waiting(engine: Engine, path: HeldPath) -> None:
    path.answer = lambda requests: outcome(requests[:1])
    first, second = (engine.submit(named(name)) for name in (1, 2))
    path.let_go()
    assert answers([first, second]) == [1, 2], "one by one the length is right"


def test_non_finite_actions_never_come_out(engine: Engine, path: HeldPath) -> None:
    def spoilt(requests: Any) -> Outcome:
        good = outcome(requests)
        good.actions[0, 1, 2] = np.nan
        return good

    path.answer = spoilt
    bad, good = engine.submit(named(1)), engine.submit(named(2))
    path.let_go()
    with pytest.raises(InferenceError, match="non-finite actions"):
        bad.result(PATIENCE)
    assert answers([good]) == [2]


def test_an_error_in_finish_is_the_requests_own(engine: Engine, path: HeldPath) -> None:
    bad, good = engine.submit(named(1), lambda result: 1 / 0), engine.submit(named(2))
    path.let_go()
    with pytest.raises(ZeroDivisionError):
        bad.result(PATIENCE)
    assert answers([good]) == [2]


def test_who_keeps_an_error_does_not_keep_the_tensors(engine: Engine, path: HeldPath) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def failing(requests: Any) -> Outcome:
        activations = torch.zeros(3)
        seen.append(weakref.ref(activations))
        raise RuntimeError(f"out of memory at {activations.shape}")

    path.answer = failing
    future = engine.submit(named(1))
    path.let_go()
    error = future.exception(PATIENCE)
    assert isinstance(error, RuntimeError)
    assert [tensor() for tensor in seen] == [None, None]


@pytest.mark.parametrize("broken", ["fits", "clear_cache"])
def test_an_engine_that_fails_lets_nobody_wait(
    engine: Engine, path: HeldPath, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A path that breaks the loop itself ends in errors, not in silence."""
    futures = [engine.submit(named(name)) for name in (1, 2)]
    monkeypatch.setattr(path, broken, None)
    engine.clear_cache()
    path.let_go()
    for future in futures:
        with pytest.raises(EngineClosedError, match="closed before this request's turn"):
            future.result(PATIENCE)
    with pytest.raises(EngineClosedError, match="The engine is closed"):
        engine.submit(named(3))
    assert engine.close(PATIENCE)
    assert path.calls[-1][0] == "close"
    assert "The engine's thread failed" in caplog.text


# ---- closing ----


def test_close_ends_what_runs_refuses_what_waits_and_frees_the_path(engine: Engine, path: HeldPath) -> None:
    waiting, gone = engine.submit(named(1)), engine.submit(named(2))
    gone.cancel()
    assert not engine.close(timeout=0)
    with pytest.raises(EngineClosedError, match="The engine is closed"):
        engine.submit(named(3))
    path.let_go()
    assert engine.close()
    assert engine.close(), "again is harmless"
    with pytest.raises(EngineClosedError, match="closed before this request's turn"):
        waiting.result(0)
    assert wait([gone], 0).done == {gone}
    assert path.batches == [[FIRST]]
    ((call, thread),) = path.calls
    assert (call, thread.name, thread.is_alive()) == ("close", "pi05-engine", False)
    assert engine.stats()["refused"] == {"busy": 0, "deadline": 0, "closed": 2}


def test_close_may_run_what_waits(engine: Engine, path: HeldPath) -> None:
    futures = [engine.submit(named(name, kind)) for name, kind in ((1, 1), (2, 2))]
    assert not engine.close(timeout=0, drain=True)
    with pytest.raises(EngineClosedError):
        engine.submit(named(3))
    path.let_go()
    assert engine.close(drain=True)
    assert answers(futures) == [1, 2]


def test_a_drain_may_be_stopped_and_not_begun_too_late(engine: Engine, path: HeldPath) -> None:
    waiting = engine.submit(named(1))
    for drain in (True, False, True):
        assert not engine.close(timeout=0, drain=drain)
    path.let_go()
    with pytest.raises(EngineClosedError):
        waiting.result(PATIENCE)


def test_a_path_that_does_not_close_is_said(
    engine: Engine, path: HeldPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(path, "close", None)
    path.let_go()
    assert engine.close(PATIENCE)
    assert "The held path did not close" in caplog.text


def test_the_cache_is_cleared_on_the_engines_thread_idle_or_not(engine: Engine, path: HeldPath) -> None:
    engine.clear_cache()
    after = engine.submit(named(1))
    path.let_go()
    assert answers([after]) == [1]
    assert [(call, thread.name) for call, thread in path.calls] == [("clear_cache", "pi05-engine")]
    engine.clear_cache()
    path.wait_for(lambda path: len(path.calls) == 2)


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
        batch = [job for job in sorted(self.waiting) if job[2] == min(self.waiting)[2]][: self.max_batch]
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
