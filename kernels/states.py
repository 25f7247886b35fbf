"""States of a layer in block tables, and the chunks in which a step's rows are computed: lists on
the GPU, made once a step for all layers.

The kernels of states read their work from these lists, and depend on nothing that the host knows at
launch but upper bounds, so a CUDA graph may hold them. Their programs are few and take several
chunks each: a step of many decodes has many rows, and hardly any chunks.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import multiprocessors, pad_rows

_PROGRAMS_PER_SM = 8


class StateTables(NamedTuple):
    """The states of one kind of a layer, and the block tables of its rows.

    Entry i of a row's table is the block with the state after the last token of the row's block i,
    or after the last computed token in the block that it lies in. A step of tokens [s, e) reads
    entry (s - 1) // block_size, or starts from zero if s is 0, and writes each entry of its range
    that is not negative.

    Attributes:
        states: [num_blocks, ...], each block contiguous: windows [num_blocks, C, W - 1] hold the
            last inputs of a convolution, the last one last; matrices of the gated delta rule are
            [num_blocks, HV, K, V].
        tables: int32 [R, max_blocks].
    """

    states: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of a step's rows, each of up to `length` consecutive tokens of one row.

    Attributes:
        chunks: int32 [1 + N, 4]; the number of chunks first, then for each chunk its row, its first
            token in the step, that token's position, and its tokens.
        rows: int32 [1 + R]; the number of rows that have chunks first, then these rows, those with
            most chunks first.
        length: tokens of a whole chunk.
        min_tokens: rows of fewer tokens in the step have no chunks.
        is_aligned: whether chunks begin at positions that are multiples of `length`; else every
            `length` tokens from the row's first in the step.
    """

    chunks: torch.Tensor
    rows: torch.Tensor
    length: int
    min_tokens: int
    is_aligned: bool

    @classmethod
    def empty(
        cls, rows: int, tokens: int, length: int, device: torch.device, *, min_tokens: int,
        is_aligned: bool,
    ) -> ChunkPlan:  # fmt: skip
        """Returns a plan without chunks, with capacity for `rows` rows of `tokens` tokens in
        total."""
        listed = torch.zeros(1 + rows, dtype=torch.int32, device=device)
        plan = cls(listed, listed, length, min_tokens, is_aligned)
        size = 1 + plan.max_chunks(rows, tokens), 4
        return replace(plan, chunks=torch.zeros(size, dtype=torch.int32, device=device))

    def max_chunks(self, rows: int, tokens: int) -> int:
        """Returns the maximum of chunks that `rows` rows of `tokens` tokens in total have: a row
        has at most one that is not whole, or two if they are aligned."""
        parts = (1 + self.is_aligned) * min(rows, tokens // self.min_tokens)
        return min(tokens, tokens // self.length + parts)


@triton.jit
def decode_row(seq_lens, query_starts, row, HAS_STARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Returns of a row of one token the token (int64), whether the row has a state before it, and
    the entries of the row's tables that have the states before the token and after. The token is -1
    of rows of several tokens and of padding.

    Args:
        seq_lens, query_starts: of all rows; query_starts is read with HAS_STARTS alone, else row r
            is token r.
    """
    seq_len = tl.load(seq_lens + row)
    token = row.to(tl.int64)
    length = 1
    if HAS_STARTS:
        token = tl.load(query_starts + row).to(tl.int64)
        length = tl.load(query_starts + row + 1) - token.to(tl.int32)
    token = tl.where((seq_len == 0) | (length != 1), -1, token)
    return token, seq_len > 1, tl.maximum(seq_len - 2, 0) // BLOCK_SIZE, (seq_len - 1) // BLOCK_SIZE


def programs_for(
    items: int, device: torch.device, per_multiprocessor: int = _PROGRAMS_PER_SM
) -> int:
    """Returns the number of programs of a launch over up to `items` items. Where it is known how
    many programs a multiprocessor has room for, `per_multiprocessor` is a multiple of it."""
    return min(items, per_multiprocessor * multiprocessors(device))


@triton.jit(
    do_not_specialize=["num_rows", "max_pending"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths", "offsets"],
)
def _replay_kernel(
    slots, starts, lengths, offsets, state_lens, row_slots, pending, counts, max_pending, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots + row, mask, 0)
    length = tl.load(lengths + row, mask, 0)
    is_first = mask & (length > 0)
    count = tl.where(is_first, 1, 0)
    if offsets is not None:
        is_first = is_first & (tl.load(offsets + row, mask, 1) == 0)
        count = tl.where(is_first, 1, 0)
        after = is_first
        while tl.max(after.to(tl.int32)) > 0:
            at = row + count
            after = after & (at < num_rows)
            after = after & (tl.load(offsets + at, after, 0) == count)
            count += after.to(tl.int32)
    start = tl.load(starts + row, mask, 0)
    known = tl.load(state_lens + slot, is_first, -1)
    ahead = tl.where(known >= 0, tl.minimum(tl.maximum(start - known, 0), max_pending), 0)
    tl.store(row_slots + row, slot, mask)
    tl.store(pending + row, ahead, mask)
    tl.store(counts + row, count, mask)
    # a slot that keeps no inputs has the state that it will need, whatever copies change
    tl.store(state_lens + slot, tl.where(count > 1, start + length, -1), is_first)


def plan_replays(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets: torch.Tensor | None,
    state_lens: torch.Tensor,
    replays: Sequence[torch.Tensor],
    max_pending: int,
) -> None:
    """Finds what the rows of a step replay (see `layers.step.Replays`), and brings `state_lens` up
    to the step's end. Once a step, with the rows at their positions.

    Args:
        rows: slots, starts and lengths, each int32 [R]; length 0 is padding.
        offsets: int32 [R], the number of each row among the adjacent rows of its slot; None if all
            are 0.
        state_lens: int32 [num_slots], the tokens behind which the states in memory are: the state
            of a slot is behind its first row once the step has run. Negative for a slot that keeps
            no inputs of further rows, which never replays any.
        replays: is filled for these rows: slots, pending and counts, int32 [R] each.
        max_pending: the maximum of replayed tokens.
    """
    count = len(rows[0])
    if count:
        _replay_kernel[(triton.cdiv(count, 128),)](
            *rows, offsets, state_lens, *replays, max_pending, count, BLOCK=128, num_warps=1
        )


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_starts", "seq_lens"]
)
def _plan_kernel(
    query_starts, seq_lens, chunks, rows, num_rows, LENGTH: tl.constexpr, MIN_TOKENS: tl.constexpr,
    IS_ALIGNED: tl.constexpr, ROWS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    r = tl.arange(0, ROWS_PAD)
    starts = tl.load(query_starts + r, r < num_rows, 0)
    tokens = tl.load(query_starts + r + 1, r < num_rows, 0) - starts
    ends = tl.load(seq_lens + r, r < num_rows, 0)
    # padding rows may have tokens, but no length
    tokens = tl.where((tokens >= MIN_TOKENS) & (ends > 0), tokens, 0)
    begins = ends - tokens
    bases = begins // LENGTH * LENGTH if IS_ALIGNED else begins  # where first chunks would begin
    counts = tl.where(tokens > 0, (ends - bases + LENGTH - 1) // LENGTH, 0)
    if row == 0:
        tl.store(chunks, tl.sum(counts))
        tl.store(rows, tl.sum((counts > 0).to(tl.int32)))
    own = r == row
    first = tl.sum(tl.where(r < row, counts, 0))
    count = tl.sum(tl.where(own, counts, 0))
    start = tl.sum(tl.where(own, starts, 0))
    if count > 0:
        is_before = (counts > count) | ((counts == count) & (r < row))
        tl.store(rows + 1 + tl.sum(is_before.to(tl.int32)), row)
    begin = tl.sum(tl.where(own, begins, 0))
    end = tl.sum(tl.where(own, ends, 0))
    for tile in range(0, count, TILE):
        index = tile + tl.arange(0, TILE)
        base = tl.sum(tl.where(own, bases, 0)) + index * LENGTH
        position = tl.maximum(base, begin)
        stop = tl.minimum(base + LENGTH, end)
        record = chunks + (1 + first + index) * 4
        mask = index < count
        tl.store(record, row, mask)
        tl.store(record + 1, start + position - begin, mask)
        tl.store(record + 2, position, mask)
        tl.store(record + 3, stop - position, mask)


def plan_chunks(
    plan: ChunkPlan, query_starts: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> None:
    """Lists the chunks of a step's rows.

    Args:
        plan: is filled.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], the tokens of each row, this step's included; 0 for padding rows.
        num_tokens: an upper bound of the step's tokens.

    Raises:
        ValueError: the plan has no capacity for so many.
    """
    rows, capacity = len(seq_lens), len(plan.chunks) - 1
    if plan.max_chunks(rows, num_tokens) > capacity or rows >= len(plan.rows):
        raise ValueError(
            f"the plan has room for {capacity} chunks, not for those of {rows} rows of "
            f"{num_tokens} tokens"
        )
    # one variant of the kernel for all steps: by the plan's rows, not by the step's
    rows_pad = pad_rows(len(plan.rows) - 1)
    _plan_kernel[(max(1, rows),)](
        query_starts, seq_lens, plan.chunks, plan.rows, rows, LENGTH=plan.length,
        MIN_TOKENS=plan.min_tokens, IS_ALIGNED=plan.is_aligned,
        ROWS_PAD=rows_pad, TILE=64, num_warps=4,
    )  # fmt: skip
