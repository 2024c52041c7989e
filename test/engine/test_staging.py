"""Inputs of a batch in one block of memory on either side."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pi05_ros.engine.staging import ALIGNMENT, Staging

FIELDS = {
    "tokens": ((2, 33), torch.int64),
    "image": ((2, 5, 7, 3), torch.uint8),
    "noise": ((2, 3), torch.float32),
    "lengths": ((2,), torch.int32),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def staging(request: pytest.FixtureRequest) -> Staging:
    return Staging(FIELDS, torch.device(request.param))


def sides(staging: Staging) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The host's and the device's, as tensors."""
    return {name: torch.from_numpy(array) for name, array in staging.host.items()}, staging.device


def test_fields_are_as_asked_for_and_zero(staging: Staging) -> None:
    for side in sides(staging):
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in side.items()} == FIELDS
        assert not any(tensor.any() for tensor in side.values())


def test_fields_lie_aligned_in_one_block(staging: Staging) -> None:
    for side in sides(staging):
        spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in side.values()]
        start = spans[0][0]
        assert all((begin - start) % ALIGNMENT == 0 for begin, _ in spans)
        assert all(end <= begin < end + ALIGNMENT for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= start + staging.nbytes


def test_what_is_written_on_the_host_arrives(staging: Staging) -> None:
    for value, array in enumerate(staging.host.values(), 1):
        array[:] = value
    staging.upload()
    for value, tensor in enumerate(staging.device.values(), 1):
        assert (tensor == value).all()
    host, device = (side["noise"] for side in sides(staging))
    assert host.is_pinned() is device.is_cuda
    assert (host.data_ptr() != device.data_ptr()) is device.is_cuda
