"""Drafts from a request's own tokens, on the GPU (prompt lookup decoding, Saxena 2023): where its
last few tokens stand earlier in its prompt or output, or in a text that was predicted for its
output, what followed them there is proposed. Where a drafter has drafted already, long matches
alone go before its drafts.

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


@triton.jit
def _longest(
    source, end, of_slot, base,
    MIN_SUFFIX: tl.constexpr, MAX_SUFFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the rank of the longest suffix of a slot's tokens up to `base` that ends below `end`
    in `source`, the latest of its length: its length times `_RANK`, and where it ends; -1 if none
    does."""
    best = -1
    while end > 0:  # the positions below are not searched yet
        begin = tl.maximum(end - BLOCK, 0)
        at = begin + tl.arange(0, BLOCK)
        matches = at < end
        size = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MAX_SUFFIX):
            inside = matches & (at >= back) & (back <= base)
            wanted = tl.load(of_slot + base - back, back <= base, 0)
            matches = inside & (tl.load(source + at - back, inside, -1) == wanted)
            size += matches.to(tl.int32)
        rank = tl.where(size >= MIN_SUFFIX, size * _RANK + at, -1)
        best = tl.maximum(best, tl.max(rank))
        # no earlier match is longer
        end = tl.where(best >= MAX_SUFFIX * _RANK, 0, begin)
    return best


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "bases", "offsets"]
)
def _ngram_kernel(
    slots, bases, offsets, tokens, predicted, counts, rows, stride, predicted_stride, length,
    MIN_SUFFIX: tl.constexpr, MAX_SUFFIX: tl.constexpr, KEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    # the last row of a slot writes the drafts of all of them
    count = tl.load(offsets + row)
    if row + 1 < rows:
        count = tl.where(tl.load(offsets + row + 1) > 0, 0, count)
    if count == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    of_slot = tokens + slot * stride
    text = predicted + slot * predicted_stride
    base = tl.load(bases + row)
    last = tl.load(counts + slot) - 1  # of the predicted text
    best = _longest(of_slot, base, of_slot, base, MIN_SUFFIX, MAX_SUFFIX, BLOCK)
    in_text = _longest(text, last, of_slot, base, MIN_SUFFIX, MAX_SUFFIX, BLOCK)
    is_text = (in_text >= 0) & (in_text // _RANK >= best // _RANK)
    best = tl.where(is_text, in_text, best)
    is_found = best >= 0
    if KEEPS:
        count = tl.where(is_found, count, 0)
    found = tl.where(is_found, best % _RANK, 0)
    period = tl.maximum(tl.where(is_text, last, base) - found, 1)
    source = tl.where(is_text, text, of_slot) + found + 1
    number = 1
    while number <= count:
        # what the end of the tokens cuts off goes on with the drafts
        draft = tl.load(source + (number - 1) % period, is_found, 0)
        tl.store(of_slot + base + number, draft, base + number < length)
        number += 1


def propose_ngrams(
    slots: torch.Tensor,
    bases: torch.Tensor,
    offsets: torch.Tensor,
    tokens: torch.Tensor,
    predicted: torch.Tensor,
    counts: torch.Tensor,
    *,
    min_suffix: int,
    max_suffix: int,
    keeps_drafts: bool = False,
) -> None:
    """Writes tokens[slots[i], bases[i] + offsets[i]] for each row with an offset above 0: the
    tokens behind the latest earlier occurrence of the longest suffix of the slot's tokens, of
    `min_suffix` to `max_suffix` tokens, that occurs earlier; without one, token 0, or what is there
    if it `keeps_drafts`. An occurrence in the slot's predicted text goes before one of the same
    length in its tokens.

    It may be captured in a CUDA graph.

    Args:
        slots, bases, offsets: int32 [R], see `worker.features.ProposalRows`.
        tokens: int32 [num_slots, max_len], fewer than 2**28 tokens each.
        predicted, counts: int32 [num_slots, max_predicted] and [num_slots], the predicted texts
            and their lengths.
        min_suffix, max_suffix: at least 1, at most 7.
    """
    rows = slots.shape[0]
    if rows:
        _ngram_kernel[(rows,)](
            slots, bases, offsets, tokens, predicted, counts, rows, tokens.stride(0),
            predicted.stride(0), tokens.shape[1],
            MIN_SUFFIX=min_suffix, MAX_SUFFIX=max_suffix, KEEPS=keeps_drafts, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip
