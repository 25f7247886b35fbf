"""Drafts from a request's own tokens, on the GPU (prompt lookup decoding, Saxena 2023): where its
last few tokens stand earlier in its prompt or output, what followed them there is proposed.

The rule is that of `aioinfer.features.speculation.ngram`, to the token.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
#: A match is ranked by its length first, then by its position, in the bits below.
_RANK = tl.constexpr(1 << 28)


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "bases", "offsets"]
)
def _ngram_kernel(
    slots, bases, offsets, tokens, rows, stride, length,
    MIN_SUFFIX: tl.constexpr, MAX_SUFFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    # the last row of a slot writes the drafts of all of them
    count = tl.load(offsets + row)
    if row + 1 < rows:
        count = tl.where(tl.load(offsets + row + 1) > 0, 0, count)
    if count == 0:
        return
    of_slot = tokens + tl.load(slots + row).to(tl.int64) * stride
    base = tl.load(bases + row)
    best = -1
    end = base  # the positions below are not searched yet
    while end > 0:
        begin = tl.maximum(end - BLOCK, 0)
        at = begin + tl.arange(0, BLOCK)
        matches = at < end
        size = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MAX_SUFFIX):
            inside = matches & (at >= back) & (back <= base)
            wanted = tl.load(of_slot + base - back, back <= base, 0)
            matches = inside & (tl.load(of_slot + at - back, inside, -1) == wanted)
            size += matches.to(tl.int32)
        rank = tl.where(size >= MIN_SUFFIX, size * _RANK + at, -1)
        best = tl.maximum(best, tl.max(rank))
        # no earlier match is longer
        end = tl.where(best >= MAX_SUFFIX * _RANK, 0, begin)
    is_found = best >= 0
    found = tl.where(is_found, best % _RANK, 0)
    period = tl.maximum(base - found, 1)
    number = 1
    while number <= count:
        # what the end of the tokens cuts off goes on with the drafts
        draft = tl.load(of_slot + found + 1 + (number - 1) % period, is_found, 0)
        tl.store(of_slot + base + number, draft, base + number < length)
        number += 1


def propose_ngrams(
    slots: torch.Tensor,
    bases: torch.Tensor,
    offsets: torch.Tensor,
    tokens: torch.Tensor,
    *,
    min_suffix: int,
    max_suffix: int,
) -> None:
    """Writes tokens[slots[i], bases[i] + offsets[i]] for each row with an offset above 0: the
    tokens behind the latest earlier occurrence of the longest suffix of the slot's tokens, of
    `min_suffix` to `max_suffix` tokens, that occurs earlier; without one, token 0.

    It may be captured in a CUDA graph.

    Args:
        slots, bases, offsets: int32 [R], see `worker.features.ProposalRows`.
        tokens: int32 [num_slots, max_len], fewer than 2**28 tokens each.
        min_suffix, max_suffix: at least 1, at most 7.
    """
    rows = slots.shape[0]
    if rows:
        _ngram_kernel[(rows,)](
            slots, bases, offsets, tokens, rows, tokens.stride(0), tokens.shape[1],
            MIN_SUFFIX=min_suffix, MAX_SUFFIX=max_suffix, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
