"""The engine's queue: who runs when and with whom, who is refused, what a failure touches, how it ends."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch

from engine.held_path import FIRST, PATIENCE, HeldPath, answers, named, outcome, running
from pi05_ros.engine import Engine, Outcome
from pi05_ros.engine.engine import MAX_BATCH_DELAY
from pi05_ros.errors import DeadlineError, EngineBusyError, EngineClosedError, InferenceError

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


FOREVER = MAX_BATCH_DELAY  # which no test would survive


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
    assert answers([engine.submit(named(3, priority=1))]) == [3]
    futures += [engine.submit(named(name)) for name in (4, 5)]  # company that fills the batch
    assert answers(futures) == [1, 2, 4, 5]
    assert path.batches[1:] == [[3], [1, 2, 4, 5]], "the urgent one does not pay for company"
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
    assert path.batches[1:] == [[3, 9], [0], [1]]


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
        ({"batch_delay": -1}, "batch_delay: expected seconds, 0 to 60, got -1"),
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
