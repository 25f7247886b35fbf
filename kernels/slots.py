"""Bringing the slots up to date with a step's plan: block tables grow, admitted requests take their
slots.

Called once a step before `prepare`; the growth is captured in the decode steps' graphs. A plan
reaches the GPU as one array of int32, so floats and 64-bit seeds travel as their bits, and are
stored as they came.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Fields of a record: slot, where its tokens begin in the packed ones, how many; the seed's low and
#: high half; two
#: integers (top_k, banned_until); six numbers (temperature, top_p, min_p and the three penalties,
#: as bits).
RECORD_FIELDS = 13
_FIELDS = tl.constexpr(RECORD_FIELDS)
TOKENS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """What an admission writes. S slots.

    Attributes:
        tokens: int32 [S, max_len].
        seeds: int64 [S].
        integers: int32 [2, S]. numbers: float32 [6, S].
    """

    tokens: torch.Tensor
    seeds: torch.Tensor
    integers: torch.Tensor
    numbers: torch.Tensor


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "indices", "blocks"]
)
def _grow_kernel(slots, indices, blocks, tables, stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + entry, entry < count, -1).to(tl.int64)
    index = tl.load(indices + entry, entry < count, 0)
    tl.store(tables + slot * stride + index, tl.load(blocks + entry, entry < count, 0), slot >= 0)


def grow_tables(
    slots: torch.Tensor, indices: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor
) -> None:
    """Writes tables[slots[i], indices[i]] = blocks[i] where slots[i] is not negative.

    Args:
        slots, indices, blocks: int32 [N]. No entry twice.
        tables: int32 [num_slots, max_blocks].
    """
    if len(slots):
        _grow_kernel[(triton.cdiv(len(slots), 256),)](
            slots, indices, blocks, tables, tables.stride(0), len(slots), BLOCK=256, num_warps=4
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["records", "packed"])
def _admit_kernel(
    records, packed, tokens, seeds, integers, numbers, tokens_stride, num_slots, BLOCK: tl.constexpr
):
    record = records + tl.program_id(0) * _FIELDS
    slot = tl.load(record).to(tl.int64)
    offset = tl.load(record + 1)
    length = tl.load(record + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        tokens + slot * tokens_stride + at,
        tl.load(packed + offset + at, at < length, 0),
        at < length,
    )
    if tl.program_id(1) == 0:
        field = tl.arange(0, 16)
        bits = tl.load(record + 3 + field, field < _FIELDS - 3, 0)
        tl.store(seeds + slot * 2 + field, bits, field < 2)
        tl.store(integers + (field - 2) * num_slots + slot, bits, (field >= 2) & (field < 4))
        tl.store(
            numbers + (field - 4) * num_slots + slot, bits, (field >= 4) & (field < _FIELDS - 3)
        )


def admit_requests(
    records: torch.Tensor, packed: torch.Tensor, slots: SlotTensors, longest: int
) -> None:
    """Writes what each admitted request brings into its slot.

    Args:
        records: int32 [A, RECORD_FIELDS].
        packed: int32 [N], the tokens of all of them.
        slots: what to write to.
        longest: the most tokens that one of them brings.
    """
    if len(records):
        grid = (len(records), triton.cdiv(longest, TOKENS_PER_PROGRAM))
        bits = slots.seeds.view(torch.int32), slots.integers, slots.numbers.view(torch.int32)
        _admit_kernel[grid](
            records, packed, slots.tokens, *bits, slots.tokens.stride(0), len(slots.tokens),
            BLOCK=TOKENS_PER_PROGRAM, num_warps=4
        )  # fmt: skip


def grow_tables_reference(
    slots: torch.Tensor, indices: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor
) -> None:
    """`grow_tables` in plain torch."""
    held = slots >= 0
    tables[slots[held].long(), indices[held].long()] = blocks[held]


def admit_requests_reference(
    records: torch.Tensor, packed: torch.Tensor, slots: SlotTensors
) -> None:
    """`admit_requests` in plain torch, request by request."""
    for record in records:
        slot, offset, length = record[:3].tolist()
        slots.tokens[slot, :length] = packed[offset : offset + length]
        slots.seeds[slot] = record[3:5].clone().view(torch.int64)[0]
        slots.integers[:, slot] = record[5:7]
        slots.numbers[:, slot] = record[7:13].clone().view(torch.float32)
