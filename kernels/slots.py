"""Updates of the slots from a step's plan: block tables grow, admitted requests take their slots.

Called once a step before `prepare`; the growth is captured in the decode steps' graphs. A plan
reaches the GPU as one array of int32, so records, floats and 64-bit seeds travel as their bits, and
are stored as they came.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aioinfer.ipc.request_record import RECORD_WORDS, WORD

TOKENS_PER_PROGRAM = 1024
_WORDS = tl.constexpr(RECORD_WORDS)
_WORDS_PAD = tl.constexpr(triton.next_power_of_2(RECORD_WORDS))
# the words of a record: see `ipc.request_record.RECORD`
_SLOT = tl.constexpr(WORD["slot"])
_FIRST_TOKEN, _NUM_TOKENS = tl.constexpr(WORD["first_token"]), tl.constexpr(WORD["num_tokens"])
_FIRST_BIAS, _NUM_BIAS = tl.constexpr(WORD["first_bias"]), tl.constexpr(WORD["num_bias"])
_FIRST_BANNED, _NUM_BANNED = tl.constexpr(WORD["first_banned"]), tl.constexpr(WORD["num_banned"])
_SEED = tl.constexpr(WORD["seed_low"])  # the high half follows


@dataclass(frozen=True, slots=True)
class PackedAdmissions:
    """The records of A admitted requests, on the device as on the wire (`ipc.request_record`).

    Attributes:
        records: int32 [A, RECORD_WORDS].
        rows: int32 [A], the row of occurrences of each request, or -1.
        tokens, bias_ids, bias_values, banned_ids: int32 [N], the lists that the records point into;
            the values are float32 as their bits.
    """

    records: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    banned_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """The tensors of the slots that an admission writes. S slots.

    Attributes:
        tokens: int32 [S, max_len].
        seeds: int64 [S].
        records: int32 [RECORD_WORDS, S].
        row_of_slot: int32 [S].
        bias_ids, bias_values: int32 and float32 [S, max biases].
        banned_ids: int32 [S, max banned tokens].
    """

    tokens: torch.Tensor
    seeds: torch.Tensor
    records: torch.Tensor
    row_of_slot: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    banned_ids: torch.Tensor


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "indices", "blocks"]
)
def _grow_kernel(rows, indices, blocks, tables, stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry, entry < count, -1).to(tl.int64)
    index = tl.load(indices + entry, entry < count, 0)
    tl.store(tables + row * stride + index, tl.load(blocks + entry, entry < count, 0), row >= 0)


def grow_tables(
    rows: torch.Tensor, indices: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor
) -> None:
    """Writes tables[rows[i], indices[i]] = blocks[i] where rows[i] is not negative.

    Args:
        rows, indices, blocks: int32 [N]. No entry twice.
        tables: int32 [num_rows, max_blocks].
    """
    if len(rows):
        _grow_kernel[(triton.cdiv(len(rows), 256),)](
            rows, indices, blocks, tables, tables.stride(0), len(rows), BLOCK=256, num_warps=4
        )  # fmt: skip


@triton.jit
def _copy_list(target, source, count, at):
    """Copies the entries `at` of a list of `count` int32."""
    tl.store(target + at, tl.load(source + at, at < count, 0), at < count)


@triton.jit(
    do_not_specialize_on_alignment=[
        "records", "rows", "packed_tokens", "packed_ids", "packed_values", "packed_banned"
    ]
)  # fmt: skip
def _admit_kernel(
    records, rows, packed_tokens, packed_ids, packed_values, packed_banned,
    tokens, seeds, fields, row_of_slot, bias_ids, bias_values, banned_ids,
    tokens_stride, bias_stride, banned_stride, num_slots, BLOCK: tl.constexpr
):  # fmt: skip
    record = records + tl.program_id(0) * _WORDS
    slot = tl.load(record + _SLOT).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = packed_tokens + tl.load(record + _FIRST_TOKEN)
    _copy_list(tokens + slot * tokens_stride, source, tl.load(record + _NUM_TOKENS), at)
    first, count = tl.load(record + _FIRST_BIAS), tl.load(record + _NUM_BIAS)
    _copy_list(bias_ids + slot * bias_stride, packed_ids + first, count, at)
    _copy_list(bias_values + slot * bias_stride, packed_values + first, count, at)
    source = packed_banned + tl.load(record + _FIRST_BANNED)
    _copy_list(banned_ids + slot * banned_stride, source, tl.load(record + _NUM_BANNED), at)
    if tl.program_id(1) == 0:
        field = tl.arange(0, _WORDS_PAD)
        bits = tl.load(record + field, field < _WORDS, 0)
        tl.store(fields + field * num_slots + slot, bits, field < _WORDS)
        half = field - _SEED
        tl.store(seeds + slot * 2 + half, bits, (half >= 0) & (half < 2))
        tl.store(row_of_slot + slot, tl.load(rows + tl.program_id(0)))


def admit_requests(packed: PackedAdmissions, slots: SlotTensors, longest: int) -> None:
    """Writes the record of each admitted request into its slot.

    Args:
        packed: the requests.
        slots: the tensors to write to.
        longest: how many tokens one of them brings at most.
    """
    if len(packed.records):
        longest = max(longest, slots.bias_ids.shape[1], slots.banned_ids.shape[1])
        grid = (len(packed.records), triton.cdiv(longest, TOKENS_PER_PROGRAM))
        _admit_kernel[grid](
            packed.records, packed.rows, packed.tokens, packed.bias_ids, packed.bias_values,
            packed.banned_ids, slots.tokens, slots.seeds.view(torch.int32), slots.records,
            slots.row_of_slot, slots.bias_ids, slots.bias_values.view(torch.int32),
            slots.banned_ids, slots.tokens.stride(0), slots.bias_ids.stride(0),
            slots.banned_ids.stride(0), len(slots.tokens), BLOCK=TOKENS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
