"""The short convolution and the plan of chunks at tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.short_convolution import short_convolution
from aioinfer.kernels.states import ChunkPlan, StateTables, plan_chunks
from cases import error

CHANNELS, BLOCK, WIDTH = 140, 16, 4


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty_plan(
    rows: int, tokens: int, *, min_tokens: int = 1, is_aligned: bool = False
) -> ChunkPlan:
    return ChunkPlan.empty(
        rows, tokens, BLOCK, torch.device("cpu"), min_tokens=min_tokens, is_aligned=is_aligned
    )


def make_plan(rows: list[tuple[int, int]], **options: Any) -> ChunkPlan:
    """Returns the plan of rows of (tokens, length)."""
    tokens = sum(count for count, _ in rows)
    plan = empty_plan(len(rows), tokens, **options)
    plan.chunks.fill_(-1)
    starts = ints([0, *torch.tensor([count for count, _ in rows]).cumsum(0).tolist()])
    plan_chunks(plan, starts, ints([total for _, total in rows]), tokens)
    return plan


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("min_tokens", [1, 2])
def test_chunks(min_tokens: int, is_aligned: bool) -> None:
    """Rows in a chunk, over several, of a token, without any, and padding rows with a token."""
    rows = [(1, 5), (5, 13), (40, 50), (1, 1), (0, 0), (1, 0), (32, 32), (2, 17)]
    expected, token = [], 0
    for row, (count, end) in enumerate(rows):
        start = position = end - count
        shift = 0 if is_aligned else start % 16
        while 0 <= position < end and count >= min_tokens:
            stop = min((position - shift) // 16 * 16 + 16 + shift, end)
            expected.append([row, token + position - start, position, stop - position])
            position = stop
        token += count
    plan = make_plan(rows, min_tokens=min_tokens, is_aligned=is_aligned)
    assert int(plan.chunks[0, 0]) == len(expected)
    assert plan.chunks[1 : 1 + len(expected)].tolist() == expected
    assert (plan.chunks[1 + len(expected) :] == -1).all()
    listed = [row for row, *_ in expected]
    wanted = sorted(set(listed), key=lambda row: (-listed.count(row), row))
    assert plan.rows[: 1 + len(wanted)].tolist() == [len(wanted), *wanted]


def test_many_rows_and_chunks() -> None:
    """More rows and more chunks of a row than one vector holds."""
    rows = [(2, 2)] * 100 + [(16 * 150, 16 * 150)]
    plan = make_plan(rows, min_tokens=2)
    assert int(plan.chunks[0, 0]) == 250
    assert plan.chunks[101:251, 2].tolist() == list(range(0, 16 * 150, 16))


def test_a_plan_that_is_too_small_is_rejected() -> None:
    plan = empty_plan(1, 32)
    with pytest.raises(ValueError, match="has room for 3 chunks"):
        plan_chunks(plan, ints([0, 64]), ints([64]), 64)


def check(
    rows: list[tuple[int, int]], *, max_tokens: int, has_bias: bool = False, has_silu: bool = True
) -> None:
    """Compares rows of (tokens, length) with torch's convolution of each row over its window.
    Tables have the blocks of the token before a row's first and of its last one; what no row may
    read is NaN."""
    torch.manual_seed(0)
    nan = float("nan")
    tokens = sum(count for count, _ in rows)
    x = torch.randn(tokens, CHANNELS + 4)[:, :-4]
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS) if has_bias else None
    blocks = torch.randperm(2 * len(rows) + 1).tolist()
    windows = torch.full((len(blocks), CHANNELS, WIDTH - 1), nan)
    tables = torch.full((len(rows), 8), -1, dtype=torch.int32)
    expected, kept, token = torch.full((tokens, CHANNELS), nan), windows.clone(), 0
    for row, (count, end) in enumerate(rows):
        start = end - count
        if end == 0:
            token += count
            continue
        tables[row, (end - 1) // BLOCK] = blocks.pop()
        window = torch.zeros(CHANNELS, WIDTH - 1)
        if start:
            if tables[row, (start - 1) // BLOCK] < 0:
                tables[row, (start - 1) // BLOCK] = blocks.pop()
            window = torch.randn(CHANNELS, WIDTH - 1)
            for pool in (windows, kept):
                pool[tables[row, (start - 1) // BLOCK]] = window
        taken = torch.cat([window, x[token : token + count].T], 1)
        y = F.conv1d(taken[None], weight[:, None], bias, groups=CHANNELS)[0].T
        expected[token : token + count] = F.silu(y) if has_silu else y
        for entry in range(start // BLOCK, (end - 1) // BLOCK + 1):
            stop = min((entry + 1) * BLOCK, end) - start
            if tables[row, entry] >= 0:
                kept[tables[row, entry]] = taken[:, stop : stop + WIDTH - 1]
        token += count
    plan = make_plan(rows)
    starts = ints([0, *torch.tensor([count for count, _ in rows]).cumsum(0).tolist()])
    out = torch.full((tokens, CHANNELS), nan)
    short_convolution(
        x, weight, StateTables(windows, tables), plan, starts, out, bias=bias, has_silu=has_silu,
        block_size=BLOCK, max_tokens=max_tokens,
    )  # fmt: skip
    torch.testing.assert_close(windows, kept, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.isnan(), expected.isnan())
    assert error((out.nan_to_num(), expected.nan_to_num())) < 1e-6


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_of_any_length(has_bias: bool, has_silu: bool) -> None:
    """Rows of fewer tokens than the window has, and chunks of one token before and after others."""
    rows = [(1, 1), (2, 2), (1, 9), (2, 17), (2, 18), (20, 35), (0, 0), (17, 17), (5, 16), (3, 30)]
    check(rows, max_tokens=20, has_bias=has_bias, has_silu=has_silu)


def test_decodes() -> None:
    """A program computes one token; padding rows have one, too."""
    check([(1, 1), (1, 2), (1, 16), (1, 17), (1, 0), (1, 33)], max_tokens=1)


def test_wrong_shapes_are_rejected() -> None:
    plan = make_plan([(2, 2)])
    states = StateTables(torch.zeros(1, 8, 3), ints([[0]]))
    x, starts = torch.zeros(2, 8), ints([0, 2])
    for weight, block_size in ((torch.zeros(8, 3), BLOCK), (torch.zeros(8, 4), 32)):
        with pytest.raises(ValueError, match="do not fit"):
            short_convolution(
                x, weight, states, plan, starts, x, block_size=block_size, max_tokens=2
            )
