"""Attention within whole texts against torch's own, text by text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.bidirectional_attention import LOG2_E, bidirectional_attention

from aioinfer.layers.backend import Backend
from aioinfer.layers.bidirectional_attention import BidirectionalAttention, BidirectionalShape
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard


def attention_of_texts(
    qkv: torch.Tensor,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    size: int,
    reach: int,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `bidirectional_attention` does, with a scale of 0.3."""
    found = []
    for text in qkv.split(lengths):
        queries, keys, values = (
            text.unflatten(1, (-1, size)).transpose(0, 1).split((heads, kv_heads, kv_heads))
        )
        places = torch.arange(len(text))
        distances = places - places[:, None]
        mask = distances.abs() <= reach if reach else None
        if biases is not None:
            mask = biases[:, biases.shape[1] // 2 + distances].to(qkv.dtype)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, scale=0.3, enable_gqa=True
        )
        found.append(attended.transpose(0, 1).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "reach"),
    [
        ([1, 40, 32, 3, 65], 2, 2, 16, 0),
        ([33, 1, 1, 64], 4, 2, 24, 0),
        ([70, 5, 33], 2, 2, 16, 7),
        ([64], 1, 1, 16, 31),
        ([96, 31], 3, 3, 20, 0),  # keys in whole tiles, with channels that are padded
    ],
)
def test_attention(lengths: list[int], heads: int, kv_heads: int, size: int, reach: int) -> None:
    torch.manual_seed(0)
    width = (heads + 2 * kv_heads) * size
    padded = torch.randn(sum(lengths), width + 8)
    padded[:, width:] = torch.nan
    qkv = padded[:, :width]  # a row is longer than what is read of it
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = bidirectional_attention(
        qkv, starts, num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=0.3, reach=reach
    )
    expected = attention_of_texts(qkv.contiguous(), lengths, heads, kv_heads, size, reach)
    assert torch.allclose(found, expected, atol=1e-5)


def test_biases_by_distance() -> None:
    torch.manual_seed(0)
    lengths, heads, size = [40, 1, 65], 3, 16
    qkv, biases = torch.randn(sum(lengths), 3 * heads * size), torch.randn(heads, 2 * 70 - 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = bidirectional_attention(
        qkv, starts, num_heads=heads, num_kv_heads=heads, head_size=size, scale=0.3,
        biases=biases * LOG2_E,
    )  # fmt: skip
    expected = attention_of_texts(qkv, lengths, heads, heads, size, 0, biases)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_layer_attends_with_the_biases_of_updated_weights() -> None:
    torch.manual_seed(0)
    heads, size, unused = 2, 16, Any
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
    bias = DistanceBias("bias", 8, Shard(0, heads, heads), 20, backend)
    ((_, shard),) = bias.weight_shards()
    layer = BidirectionalAttention(
        BidirectionalShape(heads, size, None), unused, unused, None, None, bias, backend
    )
    qkv, starts = torch.randn(9, 3 * heads * size), torch.tensor([0, 9]).int()
    for _ in range(2):
        shard.destination.normal_()
        bias.finalize()
        step: Any = SimpleNamespace(memo={}, inputs=SimpleNamespace(query_starts=starts))
        found = layer._attend_with_kernel(qkv, step)
        parts = qkv.unflatten(1, (3, heads, size)).permute(1, 2, 0, 3)
        expected = F.scaled_dot_product_attention(*parts, bias.of_length(9))
        assert torch.allclose(found, expected.transpose(0, 1).flatten(1), atol=1e-5)
