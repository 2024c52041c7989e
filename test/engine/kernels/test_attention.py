"""Attention of the prefix against its plain twin."""

from __future__ import annotations

import pytest
import torch

from pi05_ros.engine.kernels.attention import attend_plain, attend_triton

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 products need a GPU")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), pytest.param(torch.bfloat16, 1e-2, marks=CUDA)]
)
@pytest.mark.parametrize(("length", "heads", "counts"), [(20, 8, [20]), (45, 4, [33, 45]), (9, 2, [1])])
def test_equals_its_twin_and_reads_no_unused_key(dtype, tolerance, length, heads, counts):
    torch.manual_seed(length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(len(counts), length, heads, 32, device=device, dtype=dtype)
    keys, values = torch.randn(2, len(counts), length + 7, 32, device=device, dtype=dtype)
    for sample, count in enumerate(counts):
        keys[sample, count:] = values[sample, count:] = float("nan")
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    plain, fast = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    attend_plain(q, keys, values, lengths, plain)
    attend_triton(q, keys, values, lengths, fast)
    assert torch.linalg.vector_norm(fast - plain) <= tolerance * torch.linalg.vector_norm(plain)
