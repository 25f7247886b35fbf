"""RMSNorm against transformers', bit for bit where the arithmetic allows."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from aioinfer.layers.backend import Backend
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def backend(dtype: torch.dtype) -> Backend:
    return Backend(torch.device("cpu"), dtype, ParallelGroup.single())


def norms(dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    torch.manual_seed(0)
    ours = RMSNorm("n", 96, 1e-5, backend(dtype))
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
def test_weights_less_one_equal_gemmas(dtype: torch.dtype):
    torch.manual_seed(0)
    ours = RMSNorm("n", 96, 1e-5, backend(dtype), unit_offset=True)
    theirs = GemmaRMSNorm(96, 1e-5).to(dtype)
    theirs.weight.data.uniform_(-0.5, 0.5)
    (name, shard), *rest = ours.weight_shards()
    assert (name, rest) == ("n.weight", [])
    shard.destination.copy_(theirs.weight)
    ours.finalize()
    x = torch.randn(7, 3, 96).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_the_residual_stream(dtype: torch.dtype):
    ours, theirs = norms(dtype)
    hidden = torch.randn(7, 96).to(dtype)
    stream = ResidualStream(hidden, backend(dtype))
    torch.testing.assert_close(stream.normed(ours), theirs(hidden).detach(), rtol=0, atol=0)
    assert stream.normed(None) is hidden
