"""The rows of a drafter's passes, on the GPU: one for each request whose last kept token a step has
sampled.

`select_rows` finds them for the passes behind the first one, which has the rows of the step itself;
behind each pass `append_drafts` enters the drafts, and moves the rows to the next position. Both
may be captured in a CUDA graph.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Of the rows that `select_rows` writes.
_COLUMNS = 7


@triton.jit(
    do_not_specialize=["count", "size"],
    do_not_specialize_on_alignment=["slots", "positions", "is_real", "numbers", "last", "limits"],
)
def _select_kernel(
    slots, positions, is_real, numbers, last, limits, next_start, rows, count, size, stride,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK)
    mask = row < count
    slot = tl.load(slots + row, mask, 0)
    position = tl.load(positions + row, mask, 0)
    kept = mask & (tl.load(is_real + row, mask, 0) != 0)
    kept = kept & (tl.load(next_start + slot, mask, -1) == position)
    place = tl.cumsum(kept.to(tl.int32)) - 1
    padding = (row >= tl.sum(kept.to(tl.int32))) & (row < size)
    for column in tl.static_range(COLUMNS):
        tl.store(rows + column * stride + row, 0, padding)
    number = row
    token = row
    if numbers is not None:
        number = tl.load(numbers + row, mask, 0)
        token = tl.load(last + row, mask, 0)
    out = rows + place
    tl.store(out, slot, kept)
    tl.store(out + stride, position - 1, kept)
    tl.store(out + 2 * stride, 1, kept)
    tl.store(out + 3 * stride, tl.load(limits + number, kept, 0), kept)
    tl.store(out + 4 * stride, position + 1, kept)
    tl.store(out + 5 * stride, number, kept)
    tl.store(out + 6 * stride, token, kept)


def select_rows(
    slots: torch.Tensor,
    positions: torch.Tensor,
    is_real: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor] | None,
    limits: torch.Tensor,
    next_start: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """Returns the rows of a drafter's further passes, int32 [7, D], a part of `memory`: of each
    slot the sampled row whose token is the slot's last one, in order, and padding behind these. D
    is S, or the number of slots if that is less.

    Of each row the result has the slot; the position of the row's token; 1, or 0 for padding; the
    limit; the position behind that of the sampled token; the number of the row in the step; and its
    last token in the step.

    Args:
        slots, positions, is_real: int32 [S], the slot of each sampled row, the position of its
            token, and 0 for rows that do not count.
        places: the number of each sampled row in the step, and its last token, int32 [S] each; None
            if both are the number of the sampled row.
        limits: int32 [R], of the rows of the step.
        next_start: int32 [num_slots], the position of each slot's last token.
        memory: int32 [7, >= D].
    """
    count = slots.shape[0]
    size = min(count, next_start.shape[0])
    numbers, last = (None, None) if places is None else places
    if count:
        _select_kernel[(1,)](
            slots, positions, is_real, numbers, last, limits, next_start, memory, count, size,
            memory.stride(0), BLOCK=triton.next_power_of_2(max(count, 128)), COLUMNS=_COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return memory[:, :size]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["drafts", "slots"])
def _append_drafts_kernel(
    drafts, slots, starts, lengths, positions, tokens, count, tokens_stride, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    draft = tl.maximum(tl.load(drafts + row, mask, 0), 0)
    position = tl.load(positions + row, mask, 0)
    slot = tl.load(slots + row, mask, 0).to(tl.int64)
    is_real = mask & (tl.load(lengths + row, mask, 0) > 0)
    tl.store(tokens + slot * tokens_stride + position, draft, is_real & (position < length))
    start = tl.load(starts + row, mask, 0)
    tl.store(starts + row, tl.minimum(start + 1, length - 2), mask)
    tl.store(positions + row, position + 1, mask)


def append_drafts(
    drafts: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Writes tokens[slots[i], positions[i]] = drafts[i] for the rows that are not padding, 0 for
    -1, and moves all rows on by one position: `starts`, up to the last position that a request can
    compute, and `positions`, in place.

    Args:
        drafts: int32 [D], token ids or -1.
        slots, starts, lengths, positions: int32 [D], see `select_rows`.
        tokens: int32 [num_slots, max_model_len + 1]; drafts behind its end are dropped.
    """
    count = drafts.shape[0]
    if count:
        _append_drafts_kernel[(triton.cdiv(count, 128),)](
            drafts, slots, starts, lengths, positions, tokens, count, tokens.stride(0),
            tokens.shape[1], BLOCK=128, num_warps=1,
        )  # fmt: skip
