"""Where kernels are tested: on a GPU if there is one, else on the CPU in Triton's interpreter: see test/conftest.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pi05_ros.engine.kernels.language import AVAILABLE

HAVE_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Place:
    """A device, the dtype of activations on it, and how far a kernel may be from its twin."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """NaN everywhere, so that what a kernel does not write is seen."""
        return torch.full(shape, torch.nan, device=self.device).to(dtype or self.dtype)

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Both compute in float32, in another order, and round once: they differ by one rounding at most."""
        tolerance = 2**-7 if self.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * 1e-1, equal_nan=False)


PLACES = (
    {"gpu-float32": Place("cuda", torch.float32), "gpu-bfloat16": Place("cuda", torch.bfloat16)}
    if HAVE_GPU
    else {"interpreter-float32": Place("cpu", torch.float32)}
)


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    if not AVAILABLE:
        pytest.skip("Triton cannot be imported")
    torch.manual_seed(0)
    return request.param
