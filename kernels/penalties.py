"""Logit biases and penalties on the GPU, from counts that stay there. Called before `sampling` in
steps that have them.

The rules are the same as in `aioinfer.worker.adjustments`. Of several ranks each adjusts the
logits of its own tokens. For each request with penalties the worker keeps a row of occurrences over
the vocabulary: how often a token was generated, and whether it occurs in the prompt.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
#: The bit of an occurrence that is set if the token is in the prompt; the bits below count the
#: output.
IN_PROMPT = 1 << 30
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit(
    do_not_specialize=["length", "prompt_len"],
    do_not_specialize_on_alignment=["tokens", "occurrences"],
)
def _count_kernel(tokens, occurrences, length, prompt_len, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + index, index < length, 0)
    tl.atomic_or(occurrences + token, _IN_PROMPT, index < prompt_len)
    tl.atomic_add(occurrences + token, 1, (index >= prompt_len) & (index < length))


def count_occurrences(tokens: torch.Tensor, prompt_len: int, occurrences: torch.Tensor) -> None:
    """Begins a request's row: counts its tokens so far. Nothing waits for the GPU.

    Args:
        tokens: int32 [n], prompt and output. prompt_len: how many of them are the prompt.
        occurrences: int32 [V], overwritten.
    """
    occurrences.zero_()
    if len(tokens):
        _count_kernel[(triton.cdiv(len(tokens), 1024),)](
            tokens, occurrences, len(tokens), prompt_len, BLOCK=1024, num_warps=4
        )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sampled", "slot_ids"])
def _add_kernel(sampled, slot_ids, row_of_slot, occurrences, rows, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows
    row = tl.load(row_of_slot + tl.load(slot_ids + index, mask, 0), mask, -1).to(tl.int64)
    token = tl.load(sampled + index, mask, -1)
    tl.atomic_add(occurrences + row * stride + token, 1, (row >= 0) & (token >= 0))


def add_occurrences(
    sampled: torch.Tensor,
    slot_ids: torch.Tensor,
    row_of_slot: torch.Tensor,
    occurrences: torch.Tensor,
) -> None:
    """Counts the sampled tokens of slots that have a row.

    Args:
        sampled, slot_ids: int32 [S]; negative tokens are not counted.
        row_of_slot: int32 or int64 [num_slots], -1 for slots without penalties.
        occurrences: int32 [rows, V].
    """
    if len(sampled):
        grid = (triton.cdiv(len(sampled), 128),)
        _add_kernel[grid](
            sampled, slot_ids, row_of_slot, occurrences, len(sampled), occurrences.stride(0),
            BLOCK=128, num_warps=1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=["slot_ids", "offsets", "inputs"],
)
def _penalty_kernel(
    logits, slot_ids, row_of_slot, occurrences, repetition, presence, frequency, offsets, inputs,
    first, vocab, stride, occurrences_stride,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slot_ids + row)
    counts = tl.load(row_of_slot + slot).to(tl.int64)
    if counts < 0:
        return
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seen = tl.load(occurrences + counts * occurrences_stride + tokens, tokens < vocab, 0)
    if offsets is not None:
        for back in range(tl.load(offsets + row)):
            draft = tl.load(inputs + row - back)
            seen += ((tokens < vocab) & (first + tokens == draft)).to(tl.int32)
    count = (seen & (_IN_PROMPT - 1)).to(tl.float32)
    place = logits + row.to(tl.int64) * stride + tokens
    x = tl.load(place, seen != 0, 0.0).to(tl.float32)
    factor = tl.load(repetition + slot)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + slot) * count + tl.where(count > 0, tl.load(presence + slot), 0.0)
    tl.store(place, x.to(logits.dtype.element_ty), seen != 0)


def apply_penalties(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    row_of_slot: torch.Tensor,
    occurrences: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Applies repetition, presence and frequency penalties in place to the rows whose slots have
    occurrences.

    Repetition divides positive and multiplies negative logits of tokens of prompt and output (CTRL,
    Keskar et al. 2019); frequency is subtracted for each and presence once for any occurrence in
    the output (OpenAI).

    Args:
        logits: [S, V], fp32 (or bf16, fp16). slot_ids: int32 [S].
        row_of_slot: int32 or int64 [num_slots], -1 for slots without penalties.
        occurrences: int32 [rows, V], of the tokens of these logits; rows may be strided.
        repetition, presence, frequency: float32 [num_slots].
        offsets, inputs: int32 [S], of a step with lookahead, else both None: the number of the row
            among the adjacent rows of its slot, and the token that it has computed. The drafts
            among them count as output of the rows behind them.
        first: the token id of the first column.
    """
    rows, vocab = logits.shape
    if rows and vocab:
        _penalty_kernel[(rows, triton.cdiv(vocab, CHUNK))](
            logits, slot_ids, row_of_slot, occurrences, repetition, presence, frequency, offsets,
            inputs, first, vocab, logits.stride(0), occurrences.stride(0),
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["ids_stride", "first"],
    do_not_specialize_on_alignment=["slot_ids", "counts", "until", "positions", "ids", "values"],
)
def _bias_kernel(
    logits, slot_ids, counts, until, positions, ids, values, vocab, stride, ids_stride, first,
    BLOCK: tl.constexpr, BANS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slot_ids + row).to(tl.int64)
    if BANS and tl.load(positions + row) >= tl.load(until + slot):
        return
    count = tl.load(counts + slot)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        column = tl.load(ids + slot * ids_stride + index, index < count, 0) - first
        if BANS:
            value = tl.full((BLOCK,), NEGATIVE_INFINITY, tl.float32)
        else:
            value = tl.load(values + slot * ids_stride + index, index < count, 0.0)
        here = (index < count) & (column >= 0) & (column < vocab)
        tl.atomic_add(logits + row.to(tl.int64) * stride + column, value, here)


def add_biases(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    *,
    first: int = 0,
) -> None:
    """Adds each slot's biases to the logits of its row, in place.

    Args:
        logits: float32 [S, V], of the token ids from `first` on; other ids are skipped.
        slot_ids: int32 [S].
        ids, values: int32 and float32 [num_slots, width], of which the first `counts[slot]` count.
        counts: int32 [num_slots].
        first: the token id of the first column.
    """
    if len(slot_ids):
        _bias_kernel[(len(slot_ids),)](
            logits, slot_ids, counts, counts, slot_ids, ids, values, logits.shape[1],
            logits.stride(0), ids.stride(0), first, BLOCK=64, BANS=False, num_warps=1,
        )  # fmt: skip


def ban_tokens(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    *,
    positions: torch.Tensor,
    until: torch.Tensor,
    first: int = 0,
) -> None:
    """Adds minus infinity to the logits of each slot's banned tokens, in place, in the rows with
    positions[i] < until[slot].

    Args:
        logits, slot_ids, first: as for `add_biases`.
        ids: int32 [num_slots, width], of which the first `counts[slot]` count.
        counts: int32 [num_slots].
        positions: int32 [S], of the tokens that are sampled.
        until: int32 [num_slots].
    """
    if len(slot_ids):
        _bias_kernel[(len(slot_ids),)](
            logits, slot_ids, counts, until, positions, ids, ids, logits.shape[1],
            logits.stride(0), ids.stride(0), first, BLOCK=64, BANS=True, num_warps=1,
        )  # fmt: skip
