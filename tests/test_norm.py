"""Norms against transformers' and torch's, bit for bit where the arithmetic allows."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from aioinfer.layers.backend import Backend
from aioinfer.layers.norm import HeadLayerNorms, LayerNorm, RMSNorm, SplitRMSNorm, norm_in_place
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard

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


class SummedRanks(ParallelGroup):
    """One of several ranks, in place of whose all-reduce stands a sum that is known."""

    def __init__(self, rank: int, size: int, total: torch.Tensor):
        super().__init__(rank, size)
        self._total = total

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        assert values.shape == self._total.shape
        self.own = values.clone()
        return values.copy_(self._total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
def test_norms_of_dimensions_that_ranks_share(dtype: torch.dtype, copies: int):
    """Two norms over 96 channels, of which each rank has 32; a part of the second may be had by
    several ranks."""
    torch.manual_seed(0)
    weights, whole = torch.rand(2, 96) + 0.5, torch.randn(2, 7, 96).to(dtype)
    expected = []
    for weight, x in zip(weights.to(dtype), whole, strict=True):
        theirs = LlamaRMSNorm(96, 1e-5).to(dtype)
        theirs.weight.data.copy_(weight)
        expected.append(theirs(x).detach())
    total = whole.float().square().sum(-1)
    sums = torch.zeros(2, 7)
    for rank in range(3 * copies):
        part = Shard(rank // copies * 32, 32, 96)
        group = SummedRanks(rank, 3 * copies, total)
        backend = Backend(torch.device("cpu"), dtype, group)
        norms = [SplitRMSNorm(f"n{i}", part, copies, 1e-5, backend) for i in range(2)]
        for norm, weight in zip(norms, weights, strict=True):
            ((_, shard),) = norm.weight_shards()
            assert (shard.start, shard.total, len(shard.destination)) == (part.start, 96, 32)
            shard.destination.copy_(weight[part.start : part.start + 32])
        local = slice(part.start, part.start + 32)
        parts = [x[:, local].clone() for x in whole]
        norm_in_place(parts, norms, backend)
        for ours, theirs in zip(parts, expected, strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(ours, theirs[:, local], rtol=tolerance, atol=1e-6)
        sums += group.own
    torch.testing.assert_close(sums, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_in_place_of_a_rank_alone(dtype: torch.dtype):
    ours, theirs = norms(dtype)
    split = SplitRMSNorm("n", Shard.whole(96), 1, 1e-5, backend(dtype))
    split.weight.copy_(ours.weight)
    x = torch.randn(7, 200).to(dtype)
    expected = theirs(x[:, 50:146]).detach()
    norm_in_place([x[:, 50:146]], [split], backend(dtype))
    assert torch.equal(x[:, 50:146], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_equal_torchs(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    ours = LayerNorm("n", 96, 1e-5, backend(dtype), bias=bias)
    theirs = torch.nn.LayerNorm(96, 1e-5, bias=bias, dtype=dtype)
    for (name, shard), parameter in zip(ours.weight_shards(), theirs.parameters(), strict=True):
        assert name in ("n.weight", "n.bias")
        parameter.data.uniform_(0.5, 1.5)
        shard.destination.copy_(parameter)
    ours.finalize()
    x = torch.randn(7, 3, 96).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)
    out = torch.empty_like(x)
    assert ours(x, out=out) is out
    assert torch.equal(out, ours(x))


def test_norms_by_head_have_the_weights_of_this_ranks_heads() -> None:
    norm = HeadLayerNorms("n", Shard(2, 3, 6), 16, 1e-5, backend(torch.float32))
    shards = dict(norm.weight_shards())
    assert list(shards) == [f"n.norms.{head}.weight" for head in (2, 3, 4)]
    for shard in shards.values():
        shard.destination.uniform_(0.5, 1.5)
    x = torch.randn(5, 3, 16)
    expected = [
        torch.nn.functional.layer_norm(x[:, head], (16,), shard.destination, None, 1e-5)
        for head, shard in enumerate(shards.values())
    ]
    torch.testing.assert_close(norm(x), torch.stack(expected, 1))
