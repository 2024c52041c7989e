"""Which parameter has which dtype, and that every precision runs."""

from __future__ import annotations

import pytest
import torch

from pi05_ros.model import Pi05Config, Pi05Model, census
from pi05_ros.model.precision import parameter_dtype


def cast(model: Pi05Model, precision: str) -> Pi05Model:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameter_dtype(name, precision))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("openpi", {"bfloat16": 3_233_713_264, "float32": 119_720_608}),
        ("float32", {"float32": 3_353_433_872}),
        ("bfloat16", {"bfloat16": 3_353_433_872}),
    ],
)
def test_census_of_pi05_base(precision: str, expected: dict[str, int]) -> None:
    with torch.device("meta"):
        model = Pi05Model(Pi05Config.pi05_base())
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        new = torch.nn.Parameter(torch.empty_like(parameter, dtype=parameter_dtype(name, precision)))
        setattr(model.get_submodule(owner), attribute, new)
    assert len(list(model.parameters())) == 811
    assert census(model) == expected


@pytest.mark.parametrize("precision", ["openpi", "bfloat16"])
def test_low_precision_stays_close_to_float32(precision: str) -> None:
    def actions(precision: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = cast(Pi05Model(Pi05Config.tiny()), precision)
        generator = torch.Generator().manual_seed(1)
        return model.sample_actions(
            torch.rand(1, 2, 3, 56, 56, generator=generator) * 2 - 1,
            torch.ones(1, 2, dtype=torch.bool),
            torch.arange(4, 12)[None],
            torch.ones(1, 8, dtype=torch.bool),
            torch.randn(1, 50, 32, generator=generator),
        )

    exact, rounded = actions("float32"), actions(precision)
    assert rounded.dtype == torch.float32
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-6 < error < 1e-2, "close, and really computed in low precision"


def test_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match="precision: expected one of float32, openpi, bfloat16, got 'half'"):
        parameter_dtype("vision.post_layernorm.weight", "half")
