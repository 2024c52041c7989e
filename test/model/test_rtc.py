"""Real-time chunking beyond the golden cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.model.rtc import SCHEDULES, Guide, RtcGuidance, guidance_weight, prefix_weights


def test_schedule_values() -> None:
    linear = [1, 1, 1, 1, 0.888889, 0.777778, 0.666667, 0.555556, 0.444444, 0.333333, 0.222222, 0.111111]
    exponential = [1, 1, 1, 1, 0.741012, 0.5326, 0.367706, 0.240198, 0.14475, 0.076746, 0.032183, 0.007599]
    for name, expected in (("LINEAR", linear), ("EXP", exponential)):
        weights = prefix_weights(name, 4, 12, 50)
        assert torch.allclose(weights[:12], torch.tensor(expected), atol=1e-6)
        assert not weights[12:].any()


@given(st.sampled_from(SCHEDULES), st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_weights_fall_from_one_to_zero(schedule: str, delay: int, horizon: int, rows: int) -> None:
    weights = prefix_weights(schedule, delay, horizon, rows)
    assert weights.shape == (rows,)
    assert (weights[:-1] >= weights[1:]).all()
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights[: min(delay, horizon)] == 1).all()
    assert (weights[horizon:] == 0).all()


def test_guidance_weights_of_ten_steps() -> None:
    expected = [10, 9.111111, 4.25, 2.761905, 2.166667, 2, 2.166667, 2.761905, 4.25, 9.111109]
    actual = [guidance_weight(1.0 - step / 10, 10.0) for step in range(10)]
    assert actual == pytest.approx(expected, rel=1e-6)


def test_the_pull_ends_near_the_previous_chunk() -> None:
    """With a model that does not move, guidance alone must bring the held rows to the previous chunk."""
    noise = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(0))
    previous = torch.full((10, 4), 0.5)
    guide = Guide(RtcGuidance(previous, inference_delay=5, execution_horizon=10, schedule="ZEROS"), noise)
    x = noise
    for step in range(10):
        x = x - 0.1 * guide.velocity(torch.zeros_like, x, 1.0 - step / 10)
    assert (x[0, :5] - 0.5).abs().max() < 0.1
    assert torch.equal(x[0, 5:], noise[0, 5:])


def test_vjp_equals_identity_for_a_model_that_ignores_x() -> None:
    noise = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(0))
    constant = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(1))

    def velocity_of(x: torch.Tensor) -> torch.Tensor:
        return constant + 0 * x

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x

    def guided(jacobian: str, model: object) -> torch.Tensor:
        guidance = RtcGuidance(torch.ones(10, 4), 3, 8, "LINEAR", jacobian=jacobian)
        return Guide(guidance, noise).velocity(model, noise, 0.6)  # type: ignore[arg-type]

    assert torch.allclose(guided("identity", velocity_of), guided("vjp", velocity_of))
    # d(x - t v)/dx = 1 - 0.6 * 0.5: the paper's correction is that much smaller.
    plain = 0.5 * noise
    assert torch.allclose(guided("vjp", scaled) - plain, 0.7 * (guided("identity", scaled) - plain), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "COSINE"}, "rtc.schedule: expected one of ZEROS, ONES, LINEAR, EXP, got 'COSINE'"),
        ({"jacobian": "none"}, "rtc.jacobian: expected one of identity, vjp"),
        ({"prev_chunk": torch.zeros(3)}, r"rtc.prev_chunk: expected \[rows, dims\]"),
        ({"prev_chunk": torch.full((3, 2), float("nan"))}, "rtc.prev_chunk: expected finite numbers"),
        ({"prev_chunk": None}, "rtc.prev_chunk: expected"),
        ({"inference_delay": 2.5}, "rtc.inference_delay: expected 0 or more rows, got 2.5"),
        ({"execution_horizon": "7"}, "rtc.execution_horizon: expected 0 or more rows, got '7'"),
        ({"max_guidance_weight": "x"}, "rtc.max_guidance_weight: expected a positive number, got 'x'"),
        ({"inference_delay": -1}, "rtc.inference_delay: expected 0 or more rows, got -1"),
        ({"execution_horizon": -2}, "rtc.execution_horizon: expected 0 or more rows, got -2"),
        ({"max_guidance_weight": 0.0}, "rtc.max_guidance_weight: expected a positive number"),
    ],
)
def test_bad_guidance_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RtcGuidance(**{"prev_chunk": torch.zeros(3, 2), "inference_delay": 1, **change})  # type: ignore[arg-type]
