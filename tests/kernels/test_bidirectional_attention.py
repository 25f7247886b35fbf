"""Attention within whole texts against torch's own, text by text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.bidirectional_attention import LOG2_E, bidirectional_attention


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
