"""Decode attention over shared prefixes at tiny sizes: which rows share what, parts of the prefix,
projections, float8, sinks, padding, nothing shared."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aioinfer.kernels import cascade_attention as kernels
from aioinfer.kernels.cascade_attention import CascadeConfig, CascadeWorkspace, find_shared_prefix
from aioinfer.kernels.decode_plan import DecodeConfig
from cascade_cases import CascadeCase, cascade_attention, tables_of
from cases import error

from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.layers.rotary import Sections
from tests.kernels.bound_model import BLOCK_SIZE, Bound, assert_close, last_tokens
from tests.paged_model import make_step
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1, part_tiles=1)
CASCADE = CascadeConfig(
    rows=16, tile=16, programs_per_sm=1, max_splits=4, min_split=16, min_rows=2, min_saved=16
)
#: Five rows share four blocks of 16 tokens, one of them no more; one shares a block, one nothing,
#: one is padding, and one is too short to have a full block before its newest token.
ROWS = [(70, 0, 4), (65, 0, 4), (0, 9, 0), (130, 0, 4), (40, 1, 0), (66, 0, 4), (33, 0, 1),
        (100, 0, 4), (16, 0, 1)]  # fmt: skip


#: Where rows write their newest keys, no row has its own in a shared block.
OWN_ROWS = [*ROWS[:-1], (16, 0, 0)]


def case(rows: list[tuple[int, int, int]], *shape: int, **options: object) -> CascadeCase:
    options = {
        "dtype": torch.float32, "device": "cpu", "config": SMALL, "cascade": CASCADE,
        "programs": 5,
    } | options  # fmt: skip
    return CascadeCase(rows, *shape, **options)  # type: ignore[arg-type]


def largest_error(problem: CascadeCase) -> float:
    return max(map(error, cascade_attention(problem)))


@pytest.mark.parametrize("programs", [1, 5, 40])
def test_rows_that_share_a_prefix_beside_rows_that_do_not(programs: int) -> None:
    assert largest_error(case(ROWS, 4, 2, 64, 16, programs=programs, expected=64)) < 1e-5


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (7, 1), (2, 2)])
def test_any_group_of_query_heads(q_heads: int, kv_heads: int) -> None:
    assert largest_error(case(ROWS, q_heads, kv_heads, 64, 16, programs=7, expected=64)) < 1e-5


@pytest.mark.parametrize("head_size", [96, 128])
def test_head_sizes_and_soft_cap(head_size: int) -> None:
    assert largest_error(case(ROWS[:6], 2, 1, head_size, 16, soft_cap=5.0, expected=64)) < 1e-5


@pytest.mark.sample
def test_more_sharing_rows_than_a_tile_has() -> None:
    rows = [(40 + number, 0, 2) for number in range(11)]
    assert largest_error(case(rows, 4, 2, 64, 16, expected=32, max_rows=20)) < 1e-5


@pytest.mark.parametrize(("normed", "rotary"), [(True, 64), (False, 32)])
def test_queries_from_a_projection(normed: bool, rotary: int) -> None:
    problem = case(
        OWN_ROWS, 6, 2, 64, 16, projected=True, normed=normed, rotary=rotary, expected=64,
        has_sinks=True,
    )  # fmt: skip
    assert largest_error(problem) < 1e-5


@pytest.mark.parametrize("sections", [Sections(16, 8, 8), Sections(12, 10, 10, True)])
def test_queries_with_three_rotary_positions(sections: Sections) -> None:
    problem = case(
        OWN_ROWS, 6, 2, 64, 16, projected=True, rotary=64, sections=sections, expected=64
    )
    assert largest_error(problem) < 1e-5


def test_a_float8_cache() -> None:
    problem = case(
        OWN_ROWS, 4, 2, 64, 16, dtype=torch.float16, cache_dtype=FLOAT8, projected=True, rotary=64,
        expected=64,
    )  # fmt: skip
    for config in (SMALL, replace(SMALL, paired_channels=True)):
        assert error(cascade_attention(replace(problem, config=config))[0]) < 5e-3


def test_nothing_is_shared_where_it_does_not_pay() -> None:
    few = CascadeConfig(rows=16, tile=16, max_splits=4, min_split=16, min_rows=6, min_saved=16)
    little = CascadeConfig(rows=16, tile=16, max_splits=4, min_split=16, min_rows=2, min_saved=300)
    for config in (few, little):
        assert largest_error(case(ROWS, 2, 1, 64, 16, cascade=config, expected=0)) < 1e-5
    apart = [(40 + row, row, 0) for row in range(5)]
    assert largest_error(case(apart, 2, 1, 64, 16, expected=0)) < 1e-5


def test_prefixes_are_whole_tiles_of_both_kernels() -> None:
    wide = CascadeConfig(rows=16, tile=32, max_splits=4, min_split=32, min_rows=2, min_saved=16)
    rows = [(60, 0, 3), (61, 0, 3), (70, 0, 3)]
    assert largest_error(case(rows, 2, 1, 64, 16, cascade=wide, expected=32)) < 1e-5


def test_a_prefix_that_saves_most_is_found() -> None:
    """Rows share the first blocks of one text, as far as each has it; others begin alike and soon
    go their own way. Half of what is saved at best is enough; if all share the whole text, it is
    all."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(25):
        longest = rng.randint(1, 70)
        choices = rng.choice([[longest], [0, longest], [0, rng.randint(1, longest), longest]])
        rows = []
        for _ in range(rng.randint(3, 40)):
            blocks = rng.choice(choices)
            rows.append((max(1, 16 * blocks) + rng.randint(1, 1000), 0, blocks))
        cache = torch.empty(1, 16, 1, 64)
        workspace = CascadeWorkspace.create(2, cache, 64, 16, config=CASCADE, programs=5)
        lens = torch.tensor([keys for keys, _, _ in rows], dtype=torch.int32)
        find_shared_prefix(workspace, tables_of(case(rows, 2, 1, 64, 16)), lens)
        shared, count, row_tiles, splits, tiles, _ = workspace.rows[:6].tolist()
        lengths = [16 * blocks for _, _, blocks in rows]
        saved = {length: (sum(o >= length for o in lengths) - 1) * length for length in lengths}
        saved[0] = 0
        assert shared in saved
        assert saved[shared] >= max(saved.values()) * (1.0 if len(choices) < 3 else 0.5)
        if not shared:
            continue
        members = workspace.rows[8 + 2 * 64 :][:count].tolist()
        assert members == [row for row, length in enumerate(lengths) if length >= shared]
        assert workspace.rows[8 : 8 + len(rows)].tolist() == [
            shared if length >= shared else 0 for length in lengths
        ]
        assert row_tiles == -(-count // 8)
        assert (splits - 1) * tiles < shared // 16 <= splits * tiles


@torch.inference_mode()
def test_a_model_finds_the_prefix_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes that share a prefix, the same beside a prompt, and decodes that share nothing; the
    last layer for sampled rows alone, whose plan has no prefix."""
    monkeypatch.setattr(kernels, "cascade_config", lambda *sizes: CASCADE)
    sizes = {"vocab_size": 100, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2}
    tiny_model("qwen3", tmp_path, **sizes, num_key_value_heads=1)
    cascade, plain = (Bound(tmp_path, kernels=use) for use in (True, False))
    cascade.backend.cascade = True
    caches = [torch.randn_like(tensor) for tensor in plain.kv]
    for bound in (cascade, plain):
        for tensor, values in zip(bound.kv, caches, strict=True):
            tensor.copy_(values)
    cascade.model.bind(cascade.groups, cascade.kv, BLOCK_SIZE, 8, 80, programs=3)
    shared = []
    for tables, starts, lengths in (
        ([[3, 1, 0], [3, 1, 2], [3, 1, 4]], [40, 33, 47], [1, 1, 1]),
        ([[3, 1, 0], [3, 1, 2], [5]], [41, 34, 0], [1, 1, 9]),
        ([[0], [2], [4]], [5, 6, 7], [1, 1, 1]),
    ):
        ids = torch.tensor(range(sum(lengths)), dtype=torch.int32)
        steps = [make_step(tables, starts, lengths, BLOCK_SIZE, ids) for _ in range(2)]
        if max(lengths) > 1:
            steps[0].sampled = last_tokens(steps[0], [0, 1, 2])
        expected, found = plain.run(steps[1]), cascade.run(steps[0])
        if max(lengths) > 1:
            expected = expected[steps[0].sampled.last]
        else:
            (workspace,) = cascade.model._plans._workspaces.values()
            shared.append(workspace.cascade.shared_len)
        assert_close(found, expected)
    assert shared == [2 * BLOCK_SIZE, 0]
