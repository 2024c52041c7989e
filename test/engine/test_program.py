"""Programs and schedules of the fast path: used again, bounded, and right after others have taken their place."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from engine.small import EXACT, SQUARE, alone, difference, plain_path, request, tiny_model
from pi05_ros.engine import EngineRequest, FastPath, fast
from pi05_ros.engine.buckets import Bucket
from pi05_ros.engine.fast import MAX_SCHEDULES
from pi05_ros.engine.program import Program
from pi05_ros.engine.recording import RecordingError

BUCKETS = [request(seed, length=32 * seed) for seed in (1, 2, 3, 4)]
"""Requests each of another bucket, and each larger than the one before."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The buckets that programs have been made for, in order."""
    buckets: list[Bucket] = []

    class Noted(Program):
        def __init__(self, setting: Any, bucket: Bucket) -> None:
            super().__init__(setting, bucket)
            buckets.append(bucket)

    monkeypatch.setattr(fast, "Program", Noted)
    return buckets


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that schedules have been made for, in order."""
    steps: list[int] = []
    make_schedule = fast.make_schedule

    def noted(model: Any, count: int, grid: str) -> Any:
        steps.append(count)
        return make_schedule(model, count, grid)

    monkeypatch.setattr(fast, "make_schedule", noted)
    return steps


def fast_path(**options: Any) -> FastPath:
    return FastPath(tiny_model(), **{"resize": "lerobot", "time_grid": "lerobot", "prefix_cache": 0, **options})


def expected(requests: list[EngineRequest]) -> np.ndarray:
    return alone(plain_path(tiny_model()), requests)


def test_a_bucket_has_one_program(made: list[Bucket]) -> None:
    path = fast_path()
    for seed, length, steps in ((1, 1, 1), (2, 32, 4), (3, 17, 2)):
        path.run([request(seed, length, num_steps=steps)])
    assert made == [Bucket((SQUARE,), 32, 1)]
    path.run([request(4), request(5)])
    path.run([request(4, cameras=(SQUARE, SQUARE))])
    assert made[1:] == [Bucket((SQUARE,), 32, 2), Bucket((SQUARE, SQUARE), 32, 1)]


def test_the_least_recently_used_program_goes(made: list[Bucket]) -> None:
    path = fast_path(max_programs=3)
    a, b, c, d = BUCKETS
    order = [a, b, c, a, d, a, c, d, b, c, a]  # b goes for d, then a for b, then d for a
    assert difference(alone(path, order), expected(order)) < EXACT
    assert made == [Bucket.of(one) for one in (a, b, c, d, b, a)]


def test_programs_are_bounded_in_bytes(made: list[Bucket]) -> None:
    setting = fast_path()._setting
    sizes = [Program(setting, Bucket.of(one)).nbytes for one in BUCKETS]
    made.clear()
    a, b, c, d = BUCKETS
    path = fast_path(max_program_bytes=sum(sizes) - 1)
    order = [a, b, c, d, b, c, d, a, c, d]  # a goes for d, then b for a
    assert difference(alone(path, order), expected(order)) < EXACT
    assert made == [Bucket.of(one) for one in (a, b, c, d, a)]


def test_a_programs_size_is_that_of_all_its_buffers() -> None:
    path = fast_path()
    program = Program(path._setting, Bucket.of(BUCKETS[3], 3))
    buffers: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            buffers[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            list(map(count, value.values()))
        elif hasattr(value, "__dict__"):
            count(vars(value))

    count({name: value for name, value in vars(program).items() if name not in ("_setting", "_plans", "_actions")})
    assert program.nbytes == pytest.approx(sum(buffers.values()), rel=0.01)


@pytest.mark.parametrize("bound", [{"max_programs": 1}, {"max_program_bytes": 1}])
def test_a_batch_that_needs_two_programs_has_both(made: list[Bucket], bound: dict[str, int]) -> None:
    path = fast_path(prefix_cache=8, **bound)
    requests = [request(seed) for seed in (1, 2, 3)]
    path.run([BUCKETS[3]])
    path.run([requests[0]])
    outcome = path.run(requests)
    assert outcome.hits == (True, False, False)
    assert difference(outcome.actions, expected(requests)) < EXACT
    made.clear()
    path.run(requests[1:])
    path.run(requests)
    assert made == [], "the two are those that stay"


def test_schedules_are_made_once_and_bounded(schedules: list[int]) -> None:
    path = fast_path()
    counts = [*range(1, MAX_SCHEDULES + 1), 1, MAX_SCHEDULES + 1, 1, MAX_SCHEDULES, 2]  # 2 goes for the last, and comes
    requests = [request(seed, num_steps=steps) for seed, steps in enumerate(counts)]
    assert difference(alone(path, requests), expected(requests)) < EXACT
    assert schedules == [*range(1, MAX_SCHEDULES + 2), 2]


def test_a_long_schedule_is_not_kept(schedules: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi05_ros.engine.fast.MAX_RECORDED_STEPS", 2)
    path = fast_path()
    requests = [request(seed, num_steps=steps) for seed, steps in enumerate((2, 3, 3, 2))]
    assert difference(alone(path, requests), expected(requests)) < EXACT
    assert schedules == [2, 3, 3]


def test_what_cannot_be_recorded_runs_uncaptured_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    class Unable:
        """A recorder (there is no CUDA here) whose recordings fail."""

        tries = 0

        def record(self, stage: Any) -> Any:
            self.tries += 1
            raise RecordingError("out of luck")

    path, recorder = fast_path(), Unable()
    path.name, path._setting = "graphs", dataclasses.replace(path._setting, recorder=recorder)
    requests = [request(seed) for seed in (1, 2)]
    assert difference(alone(path, requests), expected(requests)) < EXACT
    assert (path.name, recorder.tries) == ("eager", 1)
    assert "runs uncaptured, which is slower, until it is made anew. out of luck" in caplog.text


def test_without_memory_for_a_new_program_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    path = fast_path()
    path.run([BUCKETS[0]])

    class Short(Program):
        """The device's memory is short as long as another program is there."""

        def __init__(self, setting: Any, bucket: Bucket) -> None:
            if path._programs:
                raise torch.OutOfMemoryError
            super().__init__(setting, bucket)

    monkeypatch.setattr("pi05_ros.engine.fast.Program", Short)
    assert difference(path.run([BUCKETS[1]]).actions, expected([BUCKETS[1]])) < EXACT


def test_a_shorter_prompt_is_padded_anew() -> None:
    path = fast_path()
    program = Program(path._setting, Bucket.of(request(), 2))
    program.put_prompts([request(1, 32), request(2, 20)])
    program.put_prompts([request(3, 7), request(4, 32)])
    tokens = program._prompt.device["tokens"]
    assert tokens[0].tolist() == [*request(3, 7).tokens, *[0] * 25]
    assert tokens[1].tolist() == [*request(4, 32).tokens]
