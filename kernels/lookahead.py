"""Lookahead rows on the GPU: where the rows of a step begin, and which sampled tokens are kept.

`aioinfer.ipc.lookahead` describes lookahead rows. `resolve_starts` is the first kernel of a step
that has some, and `accept_tokens` the last; both may be captured in a CUDA graph, and may be
launched again for the same step.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.ipc.lookahead import SKIPPED

_SKIPPED = tl.constexpr(SKIPPED)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["slots", "starts", "offsets", "settled", "bases"],
)
def _resolve_kernel(
    slots, starts, offsets, settled, next_start, bases, rows, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    offset = tl.load(offsets + row, mask, 0)
    known = tl.load(next_start + tl.load(slots + row, mask, 0), mask, 0)
    is_settled = tl.load(settled + row, mask, 1) != 0
    base = tl.where(is_settled, tl.load(starts + row, mask, 0) - offset, known)
    tl.store(bases + row, base, mask)
    tl.store(starts + row, base + offset, mask)


def resolve_starts(
    slots: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    settled: torch.Tensor,
    next_start: torch.Tensor,
    bases: torch.Tensor,
) -> None:
    """Replaces `starts` by the positions of the rows: starts[i] where settled[i] is not 0, else
    next_start[slots[i]] + offsets[i].

    Args:
        slots, starts, offsets, settled: int32 [R], of the rows of a step.
        next_start: int32 [num_slots].
        bases: int32 [R], overwritten by starts[i] - offsets[i], the position of the last known
            token of the row's slot.
    """
    rows = slots.shape[0]
    if rows:
        _resolve_kernel[(triton.cdiv(rows, 128),)](
            slots, starts, offsets, settled, next_start, bases, rows, BLOCK=128, num_warps=1
        )


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "sampled", "slots", "positions", "is_appended", "offsets", "inputs", "buffer_index",
        "places",
    ],
)  # fmt: skip
def _accept_kernel(
    sampled, slots, positions, is_appended, offsets, inputs, tokens, next_start, results,
    buffer_index, places, tokens_stride, results_stride, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # One thread has all rows of a slot: it reads a sampled token before it replaces it.
    here = (first < rows) & (tl.load(offsets + first, first < rows, 1) == 0)
    appends = here & (tl.load(is_appended + first, here, 0) != 0)
    slot = tl.load(slots + first, here, 0).to(tl.int64)
    result = results + tl.load(buffer_index) * results_stride
    kept = here
    row = first
    token = tl.zeros_like(first)
    count = tl.zeros_like(first)
    while tl.max(here.to(tl.int32)) > 0:
        draft = tl.load(inputs + row, here, 0)
        kept = kept & here & ((row == first) | (draft == token))
        token = tl.load(sampled + row, here, 0)
        outcome = tl.where(kept, token, _SKIPPED)
        place = row if places is None else tl.load(places + row, here, 0)
        tl.store(result + place, outcome, here)
        tl.store(sampled + row, outcome, here & (row > first))
        position = tl.load(positions + row, here, 0)
        # the next step embeds this id, so a row that failed writes a valid one
        target = tokens + slot * tokens_stride + position
        tl.store(target, tl.maximum(token, 0), kept & appends)
        count = tl.where(kept, position, count)
        row += 1
        here = here & (row < rows) & (tl.load(offsets + row, row < rows, 0) == row - first)
    tl.store(next_start + slot, count, appends)


def accept_tokens(
    sampled: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    is_appended: torch.Tensor,
    offsets: torch.Tensor,
    inputs: torch.Tensor,
    tokens: torch.Tensor,
    next_start: torch.Tensor,
    *,
    results: torch.Tensor,
    buffer_index: torch.Tensor,
    places: torch.Tensor | None = None,
) -> None:
    """Keeps the sampled tokens of each slot up to the first draft that differs from the token
    sampled before it: writes tokens[slots[i], positions[i]] = sampled[i] for the kept rows, 0 for
    -1, a row that failed, and `SKIPPED` over the sampled tokens of the others, in place.

    Args:
        sampled: int32 [S], token ids or -1.
        slots: int32 [S], the slot of each row; the rows of a slot are adjacent.
        positions: int32 [S], where the tokens are written: the seq_lens of the rows.
        is_appended: int32 [S], 0 for rows whose token is not kept; the same for all rows of a slot.
        offsets: int32 [S], the number of the row among those of its slot.
        inputs: int32 [S], the token that each row has computed: its draft, if its offset is not 0.
        tokens: int32 [num_slots, max_len].
        next_start: int32 [num_slots]; the slots get the position of their last kept token.
        results, buffer_index: int32 [N, >= S] and [1], the result buffers and the index of this
            step's buffer: it gets the sampled tokens, or `SKIPPED`.
        places: int32 [S], the entry of the result buffer for each row, if it is not its number.
    """
    rows = sampled.shape[0]
    if rows:
        _accept_kernel[(triton.cdiv(rows, 128),)](
            sampled, slots, positions, is_appended, offsets, inputs, tokens, next_start, results,
            buffer_index, places, tokens.stride(0), results.stride(0), rows,
            BLOCK=128, num_warps=1,
        )  # fmt: skip
