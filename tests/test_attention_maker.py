"""What attention reads of a checkpoint on each rank, and ALiBi's slopes."""

from __future__ import annotations

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from aioinfer.layers.attention_maker import _qkv_sources, alibi_slopes, head_shards
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard


@pytest.mark.parametrize("num_heads", [1, 4, 6, 8, 12, 71])
def test_slopes_are_transformers(num_heads: int) -> None:
    """Which rounds them to bfloat16; a rank has the slopes of its heads."""
    ours = alibi_slopes(Shard.whole(num_heads))
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(ours.bfloat16().float(), theirs, rtol=2**-7, atol=0)
    assert torch.equal(
        alibi_slopes(Shard(num_heads // 2, 1, num_heads)), ours[num_heads // 2 :][:1]
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (8, 8), (8, 1), (4, 4)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_that_are_merged_by_kv_head(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Each rank's rows are the same as of modules of their own, where these are put together as
    Falcon does."""
    head_size = 2
    per_group = num_heads // num_kv_heads
    numbers = torch.arange((num_heads + 2 * num_kv_heads) * head_size).split(
        [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    )
    queries, keys, values = (part.view(-1, head_size) for part in numbers)
    groups = [
        torch.cat(
            (queries[g * per_group : (g + 1) * per_group], keys[g : g + 1], values[g : g + 1])
        )
        for g in range(num_kv_heads)
    ]
    merged = torch.cat(groups).flatten()
    for rank in range(size):
        heads, kv_heads = head_shards(num_heads, num_kv_heads, ParallelGroup(rank, size))
        sources = _qkv_sources(
            "a", "qkv", (heads, kv_heads, kv_heads), head_size, "together", by_group=True
        )
        assert {source.rows.total for source in sources} == {len(merged)}
        rows = torch.cat([merged[s.rows.start : s.rows.start + s.rows.size] for s in sources])
        expected = [
            part[shard.start : shard.start + shard.size]
            for part, shard in zip(
                (queries, keys, values), (heads, kv_heads, kv_heads), strict=True
            )
        ]
        assert torch.equal(rows, torch.cat(expected).flatten())
