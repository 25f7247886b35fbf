"""Paged attention at tiny sizes: splits, mixed batches, windows, soft caps, odd groups, padding."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from aioinfer.kernels.decode_plan import (
    MIN_JOINED_ROWS,
    DecodeConfig,
    DecodeWorkspace,
    joined_rows,
    merged_splits,
    plan_decode,
)
from aioinfer.kernels.paged_attention import paged_attention
from cases import (
    ROTATIONS,
    AttentionCase,
    RotationCase,
    attention,
    error,
    projected_attention,
    random_rows,
)
from channel_cases import expand_all_words
from references import paged_attention_reference

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1, part_tiles=1)


def attention_error(rows: list[tuple[int, int]], *shape: int, **options: object) -> float:
    options = {"dtype": torch.float32, "device": "cpu", "config": SMALL, "programs": 5} | options
    return error(attention(AttentionCase(rows, *shape, **options)))


def test_decodes_of_several_lengths_on_fewer_programs_than_tiles() -> None:
    assert attention_error([(1, 5), (1, 40), (1, 130), (1, 17), (1, 1)], 6, 2, 64, 16) < 1e-5


def test_one_long_row_is_split_over_all_programs() -> None:
    assert attention_error([(1, 300)], 4, 1, 64, 16, programs=16) < 1e-5


def test_parts_of_a_long_row_are_merged_in_levels() -> None:
    """17 and 5 parts, 4 merged at a time: three levels, of which the last merges the first 16
    parts with one, and two levels."""
    case = AttentionCase(
        [(1, 260), (1, 70)], 8, 1, 512, 16, torch.float32, "cpu", config=SMALL, programs=22
    )
    assert merged_splits(SMALL, 8, 512) == 4
    assert error(attention(case)) < 1e-5


@pytest.mark.parametrize(
    ("heads", "window", "soft_cap", "sinks", "programs"),
    [(4, 0, 0.0, False, 7), (6, 20, 5.0, True, 40), (16, 0, 0.0, False, 22), (32, 7, 0.0, True, 3)],
)
def test_adjacent_rows_of_one_sequence_are_computed_together(
    heads: int, window: int, soft_cap: float, sinks: bool, programs: int
) -> None:
    """Groups of 2, 3, 8 and 16 query heads: up to 8, 4, 2 and 1 rows in a tile. Sequences with one
    row, with as many as a tile has, with more, with none, and two whose lengths are adjacent."""
    size, kv_heads, block = 64, 2, 16
    first, counts = [5, 60, 33, 0, 130, 131, 15], [1, 4, 9, 1, 1, 2, 3]
    offsets = torch.tensor([n for count in counts for n in range(count)], dtype=torch.int32)
    sequences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    lens = torch.tensor(first, dtype=torch.int32)[sequences] + offsets
    tables = torch.randperm(9 * len(counts) + 1)[:-1].view(len(counts), 9).int()[sequences]
    # entries past a row's length may be any block
    tables[torch.arange(9) * block >= lens[:, None]] = 9 * len(counts)
    caches = [torch.randn(9 * len(counts) + 1, block, kv_heads, size) for _ in range(2)]
    q, starts = torch.randn(len(lens), heads, size), torch.arange(len(lens) + 1).int()
    workspace = DecodeWorkspace.create(
        heads, caches[0], window=window, config=SMALL, programs=programs, max_rows=len(lens)
    )
    assert workspace.for_lookahead(heads, size, MIN_JOINED_ROWS - 1).max_joined == 1
    assert workspace.for_lookahead(heads, 256, 2 * MIN_JOINED_ROWS - 1).max_joined == 1
    workspace = workspace.for_lookahead(heads, size, MIN_JOINED_ROWS)
    assert workspace.max_joined == joined_rows(heads // kv_heads)
    plan_decode(workspace, lens, offsets=offsets)
    options = {"soft_cap": soft_cap, "sinks": torch.randn(heads) if sinks else None}
    out = paged_attention(
        q, *caches, tables, starts, lens, num_decodes=len(lens), workspace=workspace, **options,
        out=torch.full_like(q, float("nan")),
    )  # fmt: skip
    wide = [cache.double() for cache in caches]
    expected = paged_attention_reference(
        q.double(), *wide, tables, starts, lens, window=window, **options
    )
    assert error((out, expected)) < 1e-5
    assert not workspace.parts.counters.any()
    if workspace.joined is not None:
        most = 16 // triton.next_power_of_2(heads // kv_heads)
        expected_joined = [min(most, count) for count in counts]
        first_rows = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        assert workspace.joined[first_rows].tolist() == expected_joined


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_any_number_of_programs_matches_the_reference(programs: int) -> None:
    assert attention_error([(1, 60), (1, 3), (1, 90)], 4, 2, 64, 16, programs=programs) < 1e-5


def test_padding_rows_become_zeros() -> None:
    case = AttentionCase(
        [(1, 0), (1, 33), (1, 0)], 4, 2, 64, 16, torch.float32, "cpu", config=SMALL, programs=5
    )
    out, reference = attention(case)
    assert not out[[0, 2]].any()
    assert error((out, reference)) < 1e-5


@pytest.mark.parametrize("head_size", [64, 96, 128, 256, 512])
def test_mixed_batch(head_size: int) -> None:
    assert attention_error([(1, 33), (7, 33), (40, 40), (1, 2)], 3, 1, head_size, 16) < 1e-5


def test_window_and_soft_cap() -> None:
    assert (
        attention_error([(1, 130), (1, 9), (30, 70), (9, 9)], 4, 2, 64, 32, window=20, soft_cap=5.0)
        < 1e-5
    )


FEW_ROWS = [(1, 5), (1, 130), (1, 0), (1, 1)]


def projected_error(
    rotation: RotationCase,
    rows: list[tuple[int, int]] = FEW_ROWS,
    block_size: int = 16,
    **options: Any,
) -> float:
    """Returns the largest error of decodes that read and rotate a projection: with few programs,
    and with so many that they load keys before a row begins."""
    given = {"dtype": torch.float32, "device": "cpu", "config": SMALL} | options
    cases = [
        AttentionCase(rows, 6, 2, 64, block_size, programs=programs, **given)
        for programs in (5, 4 * len(rows))
    ]
    return max(error(pair) for case in cases for pair in projected_attention(case, rotation))


@pytest.mark.parametrize(("normed", "rotary"), [(True, 64), (False, 32)])
def test_decodes_from_a_projection_apply_norm_and_rope_and_write_the_cache(
    normed: bool, rotary: int
) -> None:
    rows = [*FEW_ROWS, (1, 33), (1, 16), (1, 17)]
    rotation = RotationCase(rotary, normed)
    assert projected_error(rotation, rows) < 1e-5
    assert projected_error(rotation, rows, block_size=32, window=20, soft_cap=5.0) < 1e-5


def test_tiles_smaller_and_larger_than_blocks() -> None:
    for block_size, tile in ((64, 16), (16, 64), (32, 32)):
        config = DecodeConfig(tile, 4, 2, 1, 1)
        assert (
            attention_error([(1, 100), (1, 64), (20, 65)], 2, 2, 64, block_size, config=config)
            < 1e-5
        )


def test_float16() -> None:
    assert attention_error([(1, 50), (20, 40)], 4, 2, 64, 16, dtype=torch.float16) < 1e-2


def test_random_batches() -> None:
    rng = random.Random(5)
    for _ in range(3):
        rows = random_rows(4, 60, 20, rng)
        assert (
            attention_error(
                rows, 6, 2, 64, 16, programs=rng.randint(1, 9), window=rng.choice([0, 0, 13])
            )
            < 1e-5
        )


def test_plan_divides_the_work_evenly_whatever_the_lengths() -> None:
    cache = torch.zeros(1, 16, 8, 64)
    workspace = DecodeWorkspace.create(8, cache, config=SMALL, programs=64)
    lens = torch.tensor([32 * 1024] + [100] * 200, dtype=torch.int32)
    plan_decode(workspace, lens)
    total = 8 * (2048 + 200 * 7)
    spans = workspace.plan[:, 3]
    assert spans.sum() == total
    assert spans.max() == -(-total // 64)
    assert (spans[:-1] == spans.max()).all()


@pytest.mark.parametrize(
    ("lens", "programs", "whole", "span"),
    [
        ([256] * 8, 132, 0, 2),  # 16 tiles a row, 16 (row, head) pairs, 8 programs each
        ([250] * 8, 64, 16, 16),  # a row is not split
        ([300] * 8, 128, 16, 3),  # 19 tiles in parts of 3, where the even span is 3 as well
        ([100, 900, 30], 25, 0, 7),  # 7, 57 and 2 tiles: 1 + 9 + 1 parts of each head
    ],
)
def test_programs_of_few_rows_have_parts_of_one_row_and_head(
    lens: list[int], programs: int, whole: int, span: int
) -> None:
    config = replace(SMALL, whole_tiles=whole)
    workspace = DecodeWorkspace.create(
        2, torch.zeros(1, 16, 2, 64), config=config, programs=programs
    )
    plan_decode(workspace, torch.tensor(lens, dtype=torch.int32))
    rows, heads, tiles, todo, spans, _ = workspace.plan.T[:6]
    assert (spans == span).all()
    expected = [
        (row, head, first, min(span, -(-keys // 16) - first))
        for row, keys in enumerate(lens)
        for head in range(2)
        for first in range(0, -(-keys // 16), span)
    ]
    busy = todo > 0
    given = torch.stack([rows, heads, tiles, todo], dim=1)[busy]
    assert [tuple(line) for line in given.tolist()] == expected
    assert not busy[len(expected) :].any()


def test_unsupported_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="head size"):
        attention_error([(1, 5)], 2, 1, 80, 16)
    with pytest.raises(ValueError, match="no multiple"):
        attention_error([(1, 5)], 3, 2, 64, 16)


SINK_ROWS = [(1, 5), (1, 40), (1, 0), (1, 130), (1, 1), (7, 33), (40, 40), (20, 65)]


def test_sinks() -> None:
    """Rows that one program computes, rows that several share, and prompts."""
    rows = [(1, 5), (1, 70), (1, 0), (7, 33)]
    assert attention_error(rows, 6, 2, 64, 16, has_sinks=True) < 1e-5
    assert attention_error(rows, 6, 2, 64, 16, window=20, has_sinks=True) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (1, 0.0), (20, 5.0)])
def test_sinks_with_windows_and_soft_caps(window: int, soft_cap: float) -> None:
    options = {"window": window, "soft_cap": soft_cap, "has_sinks": True}
    assert attention_error(SINK_ROWS, 6, 2, 64, 16, **options) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize("programs", [1, 3, 40])
def test_a_sink_counts_once_however_a_row_is_split(programs: int) -> None:
    rows = [(1, 300), (1, 20)]
    assert attention_error(rows, 8, 1, 64, 16, programs=programs, has_sinks=True) < 1e-5


def test_sinks_of_decodes_from_a_projection() -> None:
    assert projected_error(RotationCase(64), window=20, has_sinks=True) < 1e-5


@pytest.mark.extended
def test_sinks_over_a_float8_cache() -> None:
    options = {"cache_dtype": torch.float8_e4m3fn, "has_sinks": True}
    assert attention_error(SINK_ROWS, 6, 2, 64, 16, **options) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_sinks_that_weigh_nothing_and_all(logit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below and far above every score: as without sinks, and zeros."""
    monkeypatch.setattr(AttentionCase, "sinks", lambda case: torch.full((case.q_heads,), logit))
    rows = [(1, 40), (1, 130), (7, 33)]
    case = AttentionCase(
        rows, 6, 2, 64, 16, torch.float32, "cpu", config=SMALL, programs=5, has_sinks=True
    )
    out, reference = attention(case)
    if logit < 0:
        assert error((out, reference)) < 1e-5
        assert out.abs().max() > 0.1
    else:
        assert out.abs().max() < 1e-30


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotations_of_decodes_from_a_projection(rotation: RotationCase) -> None:
    """None at all, norms that follow it, and positions apart from places: one a token or three."""
    assert projected_error(rotation) < 1e-5


ALIBI_ROWS = [*FEW_ROWS, (7, 33), (20, 65)]


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 5.0)])
def test_alibi(window: int, soft_cap: float) -> None:
    options = {"window": window, "soft_cap": soft_cap, "has_slopes": True}
    assert attention_error(ALIBI_ROWS, 6, 2, 64, 16, **options) < 1e-5


def test_alibi_with_sinks_over_a_float8_cache() -> None:
    options = {"has_slopes": True, "has_sinks": True, "cache_dtype": torch.float8_e4m3fn}
    assert attention_error(ALIBI_ROWS, 6, 2, 64, 16, **options) < 1e-5
    assert attention_error(PAIRED_ROWS, 6, 2, 64, 16, **PAIRED, has_slopes=True) < 2e-3


def test_alibi_of_decodes_from_a_projection() -> None:
    assert projected_error(RotationCase(0), has_slopes=True) < 1e-5


FLOAT8_ROWS = [(1, 5), (1, 40), (1, 130), (1, 0), (1, 1), (7, 33), (40, 40), (20, 65)]


@pytest.mark.parametrize("head_size", [64, 96])
def test_a_float8_cache(head_size: int) -> None:
    """Against the attention over what such a cache holds: the scales of each head cost nothing."""
    options = {"cache_dtype": torch.float8_e4m3fn}
    assert attention_error(FLOAT8_ROWS, 6, 2, head_size, 16, **options) < 1e-5
    if head_size == 64:
        capped = {"window": 20, "soft_cap": 5.0, "config": replace(SMALL, fp16_operands=True)}
        assert attention_error(FLOAT8_ROWS, 6, 2, head_size, 32, **options, **capped) < 1e-2


def test_numbers_of_words_of_two_channels() -> None:
    """Subnormal numbers, negative zero and NaN among them."""
    expand_all_words("cpu", by_assembly=False)


PAIRED = {
    "dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn,
    "config": replace(SMALL, paired_channels=True),
}  # fmt: skip
PAIRED_ROWS = [(1, 5), (1, 40), (1, 130), (1, 0), (1, 1)]


@pytest.mark.parametrize("head_size", [64, 96])
def test_pairs_of_channels(head_size: int) -> None:
    assert attention_error(PAIRED_ROWS, 6, 2, head_size, 16, **PAIRED) < 2e-3


@pytest.mark.extended
def test_pairs_of_channels_with_options() -> None:
    more = {"window": 20, "soft_cap": 5.0, "has_sinks": True}
    assert attention_error(PAIRED_ROWS, 6, 2, 64, 32, **PAIRED, **more) < 2e-3
    for programs in (5, 4 * len(PAIRED_ROWS)):
        case = AttentionCase(PAIRED_ROWS, 6, 2, 64, 16, device="cpu", programs=programs, **PAIRED)
        assert error(projected_attention(case, RotationCase(64, normed=True))[0]) < 5e-3


@pytest.mark.parametrize(("normed", "rotary"), [(True, 64), (False, 32)])
def test_decodes_from_a_projection_write_a_float8_cache(normed: bool, rotary: int) -> None:
    rotation, rows = RotationCase(rotary, normed), [*FEW_ROWS, (1, 33)]
    # a product that lies between two numbers of float8 may round to the other one
    assert projected_error(rotation, rows, cache_dtype=torch.float8_e4m3fn) < 2e-3
