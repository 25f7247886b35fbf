"""Attention on CPUs: against plain attention, the table of distances, and what each rank reads of a
checkpoint."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from aioinfer.layers.attention_maker import _qkv_sources, alibi_slopes, head_shards
from aioinfer.layers.backend import Backend
from aioinfer.layers.distance_bias import DistanceBias, buckets_of
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard
from aioinfer.layers.step import HostRows
from aioinfer.layers.torch_attention import Gather, TorchAttention, plan_gathers
from tests.paged_model import make_step

HEADS, KV_HEADS, SIZE, BLOCKS = 6, 2, 8, 96


class Batch:
    """Rows (tokens before the step, tokens in the step) over scattered blocks, with everything that
    was ever written."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        block_size: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        noise = torch.Generator().manual_seed(seed)

        def normal(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, SIZE, generator=noise).to(dtype)

        self.rows = rows
        free = random.Random(seed).sample(range(BLOCKS), BLOCKS)
        tables = [
            [free.pop() for _ in range(-(-(before + count) // block_size))]
            for before, count in rows
        ]
        before, counts = zip(*rows, strict=True)
        ids = torch.zeros(sum(counts), dtype=torch.int32)
        self.step = make_step(tables, before, counts, block_size, ids, num_groups=2)
        self.inputs = self.step.inputs.groups[0]
        self.queries = normal(sum(counts), HEADS)
        self.keys, self.values = ([normal(sum(row), KV_HEADS) for row in rows] for _ in range(2))
        shape = (BLOCKS, block_size, KV_HEADS, SIZE)
        self.cache = KVCache(
            torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
        )
        for table, past, keys, values in zip(tables, before, self.keys, self.values, strict=True):
            for position in range(past):
                self.cache.keys[table[position // block_size], position % block_size] = keys[
                    position
                ]
                self.cache.values[table[position // block_size], position % block_size] = values[
                    position
                ]

    def attend(
        self,
        window: int | None = None,
        group: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        new = [
            torch.cat([part[past:] for part, (past, _) in zip(parts, self.rows, strict=True)])
            for parts in (self.keys, self.values)
        ]
        shape = AttentionShape(HEADS, KV_HEADS, SIZE, SIZE**-0.5, window, soft_cap)
        attention = TorchAttention(shape, group, sinks, slopes)
        return attention(self.queries, *new, self.cache, self.step)

    def plan(self, window: int | None) -> list[Gather]:
        assert self.step.host is not None
        return plan_gathers(self.step.host, self.inputs.block_tables, self.cache.keys, window)

    def reference(
        self,
        window: int | None = None,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each token and head by itself, float64 [T, HEADS, SIZE]."""
        outputs, token = [], 0
        for (before, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            for position in range(before, before + count):
                first = 0 if window is None else max(0, position + 1 - window)
                for head in range(HEADS):
                    shared = head // (HEADS // KV_HEADS)
                    scores = (
                        keys[first : position + 1, shared].double()
                        @ self.queries[token, head].double()
                        * SIZE**-0.5
                    )
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    if slopes is not None:
                        places = torch.arange(first, position + 1)
                        scores = scores + slopes[head].double() * (places - position)
                    weights = scores.exp()
                    total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                    outputs.append(weights / total @ values[first : position + 1, shared].double())
                token += 1
        return torch.stack(outputs).view(-1, HEADS, SIZE)


BATCHES = {
    "one decode": [(9, 1)],
    "first token": [(0, 1)],
    "decodes of like length": [(17, 1), (14, 1), (19, 1)],
    "decodes of unlike length": [(60, 1), (0, 1), (3, 1), (90, 1), (2, 1), (2, 1), (1, 1), (70, 1)],
    "whole prompts": [(0, 20), (0, 1), (0, 7)],
    "chunks": [(16, 16), (5, 9), (1, 2)],
    "all together": [(33, 1), (0, 1), (12, 1), (0, 11), (7, 5), (20, 1), (0, 1), (15, 17)],
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 18, 1000])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_equals_the_reference(rows: list[tuple[int, int]], window: int | None, block_size: int):
    if block_size == 1 and sum(map(sum, rows)) > BLOCKS:
        rows = [(min(before, 12), min(count, 4)) for before, count in rows]
    batch = Batch(rows, block_size)
    torch.testing.assert_close(
        batch.attend(window).double(), batch.reference(window), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int):
    rng = random.Random(seed)
    decodes = [(rng.randint(0, 60), 1) for _ in range(rng.randint(0, 6))]
    others = [
        (rng.choice([0, rng.randint(1, 30)]), rng.choice([1, rng.randint(2, 20)]))
        for _ in range(rng.randint(1, 4))
    ]
    rows = decodes + sorted(others, key=lambda row: row[1] == 1)
    batch = Batch(rows, rng.choice([4, 8, 16]), seed=seed)
    window = rng.choice([None, 6, 25])
    torch.testing.assert_close(
        batch.attend(window).double(), batch.reference(window), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype, window: int | None):
    batch = Batch(BATCHES["all together"], 4, dtype)
    attended = batch.attend(window)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), batch.reference(window), rtol=0.02, atol=0.02)


def test_only_the_steps_own_slots_are_written():
    batch = Batch([(5, 1), (2, 6)], 4)
    before = batch.cache.keys.clone()
    batch.attend()
    written = (batch.cache.keys != before).flatten(0, 1).any(-1).any(
        -1
    ) & ~batch.cache.keys.isnan().flatten(0, 1).any(-1).any(-1)
    assert written.nonzero()[:, 0].tolist() == sorted(batch.inputs.slot_mapping.tolist())
    mine = batch.cache.keys.flatten(0, 1)[batch.inputs.slot_mapping]
    torch.testing.assert_close(
        mine, torch.cat([batch.keys[0][5:], batch.keys[1][2:]]), rtol=0, atol=0
    )


def test_a_row_of_nan_does_not_change_the_others():
    rows = [(10, 1), (12, 1), (11, 1), (0, 5), (3, 4)]
    well, sick = Batch(rows, 4), Batch(rows, 4)
    for row in (1, 3):
        sick.keys[row].fill_(torch.nan)
        sick.values[row].fill_(torch.nan)
    expected, attended = well.attend(), sick.attend()
    others = [0, 2, 8, 9, 10, 11]
    torch.testing.assert_close(attended[others], expected[others], rtol=0, atol=1e-6)
    assert attended[[1, 3, 4, 5, 6, 7]].isnan().all()


def test_the_calls_are_planned_once_a_step_for_each_group():
    batch = Batch(BATCHES["all together"], 4)
    batch.attend(None, group=0)
    first = batch.step.memo[TorchAttention, 0]
    batch.attend(5, group=1)
    batch.attend(None, group=0)
    assert batch.step.memo[TorchAttention, 0] is first
    assert set(batch.step.memo) == {(TorchAttention, 0), (TorchAttention, 1)}


@pytest.mark.parametrize("window", [None, 5])
def test_soft_caps(window: int | None):
    batch = Batch(BATCHES["all together"], 4)
    attended = batch.attend(window, soft_cap=0.7)
    expected = batch.reference(window, soft_cap=0.7)
    assert not torch.allclose(expected, batch.reference(window), rtol=1e-3)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", ["all together", "decodes of unlike length", "whole prompts"])
def test_sinks(name: str, window: int | None, soft_cap: float):
    batch = Batch(BATCHES[name], 4)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, -0.5])
    attended = batch.attend(window, soft_cap=soft_cap, sinks=sinks)
    expected = batch.reference(window, soft_cap, sinks)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, batch.reference(window, soft_cap), rtol=1e-2)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7, "sinks": torch.ones(HEADS)}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", BATCHES)
def test_alibi(name: str, window: int | None, options: dict[str, Any]):
    batch = Batch(BATCHES[name], 4)
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    attended = batch.attend(window, slopes=slopes, **options)
    expected = batch.reference(window, slopes=slopes, **options)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)
    if window != 1 and name != "first token":
        assert not torch.allclose(expected, batch.reference(window, **options), rtol=1e-2)


def test_blocks_before_the_window_are_not_gathered():
    batch = Batch([(99, 1), (12, 1), (101, 1), (80, 10), (3, 2)], 4)
    seen = {gather.first: gather.shape[1] for gather in batch.plan(6)}
    assert max(length for first, length in seen.items() if first < 3) < 6 + 4, "decodes"
    assert seen[3] < 10 + 6 + 4
    assert seen[13] == 5
    torch.testing.assert_close(batch.attend(6).double(), batch.reference(6), rtol=1e-4, atol=1e-5)
    whole = batch.plan(None)
    assert max(gather.shape[1] for gather in whole) == 102


@pytest.mark.parametrize("seed", range(5))
def test_decodes_that_go_together_waste_at_most_half(seed: int):
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(1, 20), rng.randint(100, 300)]) for _ in range(40)]
    tables = torch.zeros(len(lengths), 75, dtype=torch.int32)
    host = HostRows([1] * len(lengths), lengths)
    gathers = plan_gathers(host, tables, torch.empty(1, 4, 1, 16), None)
    assert [
        row for gather in gathers for row in range(gather.first, gather.first + gather.count)
    ] == list(range(len(lengths)))
    for gather in gathers:
        filled = sum(
            -(-length // 4) for length in lengths[gather.first : gather.first + gather.count]
        )
        assert gather.blocks is not None
        assert len(gather.blocks) <= 2 * filled


BACKEND = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())


def test_buckets() -> None:
    distances = torch.arange(-600, 601)
    for count in (32, 16):
        expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=count)
        assert torch.equal(buckets_of(distances, count), expected)
        expected = T5Attention._relative_position_bucket(distances, False, count, 100)
        assert torch.equal(buckets_of(distances, count, 100, both_ways=False), expected)


def test_a_rank_has_the_biases_of_its_heads() -> None:
    bias = DistanceBias("bias", 32, Shard(2, 2, 8), 20, BACKEND)
    ((name, shard),) = bias.weight_shards()
    assert (name, shard.start, shard.total) == ("bias.weight", 2, 8)
    shard.destination.normal_()
    weight = shard.destination.clone()
    bias.finalize()
    assert bias.table.shape == (2, 39)
    found = bias.of_length(7)
    for query in range(7):
        for key in range(7):
            bucket = buckets_of(torch.tensor(key - query), 32)
            assert torch.equal(found[:, query, key], weight[bucket])


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
