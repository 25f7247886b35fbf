"""RMSNorm against transformers', bit for bit where the arithmetic allows."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from aioinfer.layers.norm import RMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norms(dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    torch.manual_seed(0)
    ours = RMSNorm(96, 1e-5, dtype=dtype, device=torch.device("cpu"))
    theirs = LlamaRMSNorm(96, 1e-5).to(dtype)
    ours.weight.uniform_(0.5, 1.5)
    theirs.weight.data.copy_(ours.weight)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_equals_transformers(dtype: torch.dtype, scale: float):
    ours, theirs = norms(dtype)
    x = (torch.randn(7, 3, 96) * scale).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_sum_is_rounded_as_transformers_does(dtype: torch.dtype):
    ours, theirs = norms(dtype)
    x, residual = torch.randn(2, 7, 96).to(dtype)
    total = x + residual
    normed, summed = ours.add(x, residual)
    torch.testing.assert_close(normed, theirs(total).detach(), rtol=0, atol=0)
    torch.testing.assert_close(summed, total, rtol=0, atol=0)
    assert summed is residual
