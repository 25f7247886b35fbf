"""Step inputs from the slots, embedding, and sampled tokens written back to the slots, all on the
GPU.

The worker keeps the tokens and the block table of every slot in GPU memory. A step plan names rows
(slot, start, length); `prepare_inputs` derives everything that the model reads from them, so the
CPU computes nothing per token. It is the first kernel of a step's graph; `embed` follows it, and
`append_tokens` ends the step.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import pad_rows
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TOKENS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The model's inputs in a step of R rows and T tokens. Rows and tokens beyond the step plan's
    are padding.

    Attributes:
        input_ids: int32 [T]; 0 in padding.
        positions: int32 [T]; 0 in padding.
        slot_mapping: int64 [T], block * block_size + offset of each token in the KV cache, with
            block 0 in the place of none; -1 in padding.
        query_starts: int32 [R + 1], the first token of each row; padding rows are empty.
        seq_lens: int32 [R], start + length; 0 for padding rows.
        block_tables: int32 [R, max_blocks]; entries past a row's length keep their old values.
        rotary: int32 [3, T], the positions for RoPE with sections; 0 in padding; None where
            RoPE places tokens at `positions`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    rotary: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, rows: int, tokens: int, max_blocks: int, device: torch.device | str
    ) -> PreparedInputs:
        """Returns buffers for R rows and T tokens, without `rotary`.

        Block tables start as zeros, the number of a block that exists: padding may be read.
        """

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            make(tokens),
            make(tokens),
            make(tokens, dtype=torch.int64),
            make(rows + 1),
            make(rows),
            make(rows, max_blocks),
        )


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["slots", "starts", "lengths", "limits"],
)
def _prepare_kernel(
    slots, starts, lengths, tokens, tables, input_ids, positions, slot_mapping, query_starts,
    seq_lens, block_tables, rotary, rotary_offsets, limits,
    num_rows, num_tokens, tokens_stride, tables_stride, out_tables_stride, axis_stride,
    ROWS_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    KEEPS_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    rows = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + rows, rows < num_rows, 0)
    first = tl.sum(tl.where(rows < row, all_lengths, 0))
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    if row == num_rows:  # the program after the last row writes the padding
        at = first + index
        mask = at < num_tokens
        tl.store(input_ids + at, 0, mask)
        tl.store(positions + at, 0, mask)
        tl.store(slot_mapping + at, -1, mask)
        if rotary is not None:
            for axis in tl.static_range(3):
                tl.store(rotary + axis * axis_stride + at, 0, mask)
        if chunk == 0:
            tl.store(query_starts + row, first)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        start = tl.load(starts + row)
        length = tl.load(lengths + row)
        end = tl.where(length > 0, start + length, 0)
        position = start + index
        mask = index < length
        table = tables + slot * tables_stride
        # a table of states may have no block there; no state is found by the slot mapping
        block = tl.maximum(tl.load(table + position // BLOCK_SIZE, mask, 0), 0).to(tl.int64)
        at = position
        if KEEPS_FIRST:
            at = tl.where(position == 0, -1, position)
        tl.store(
            input_ids + first + index, tl.load(tokens + slot * tokens_stride + at, mask, 0), mask
        )
        tl.store(positions + first + index, position, mask)
        place = block * BLOCK_SIZE + position % BLOCK_SIZE
        if limits is not None:
            place = tl.where(position < tl.load(limits + row), place, -1)
        tl.store(slot_mapping + first + index, place, mask)
        if rotary is not None:
            moved = position + tl.load(rotary_offsets + slot)
            for axis in tl.static_range(3):
                tl.store(rotary + axis * axis_stride + first + index, moved, mask)
        if chunk == 0:
            tl.store(query_starts + row, first)
            tl.store(seq_lens + row, end)
            blocks = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
            for begin in range(0, blocks, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                tl.store(
                    block_tables + row.to(tl.int64) * out_tables_stride + at,
                    tl.load(table + at, at < blocks, 0),
                    at < blocks,
                )


def prepare_inputs(
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    inputs: PreparedInputs,
    *,
    block_size: int,
    max_length: int,
    rotary_offsets: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    keeps_first: bool = False,
) -> None:
    """Fills `inputs` for the rows of a step.

    Args:
        slots, starts, lengths: int32 [R], each row's slot, first position and number of tokens;
            length 0 is padding.
        tokens: int32 [num_slots, max_len], the tokens of each slot.
        tables: int32 [num_slots, max_blocks], the KV blocks of each slot.
        inputs: the buffers to fill; its T may exceed the lengths' sum, the rest becomes padding.
        block_size: tokens a KV block.
        max_length: the maximum length of a row in any step that this launch, or the CUDA graph that
            it is captured in, is used for.
        rotary_offsets: int32 [num_slots], added to the positions of a slot's tokens where RoPE is
            applied; given if `inputs.rotary` is.
        limits: int32 [R], the position of each row from which on nothing is cached: its slot
            mapping is -1 there.
        keeps_first: the input of position 0 is the token before the first of `tokens`, a view.

    Raises:
        ValueError: the buffers are too small, or of a wrong dtype or layout.
    """
    rows, num_tokens = slots.shape[0], inputs.input_ids.shape[0]
    _check_tables(tokens, tables, inputs, rows)
    if (rotary_offsets is None) != (inputs.rotary is None):
        raise ValueError("rotary_offsets are given where inputs have rotary positions")
    block = min(TOKENS_PER_PROGRAM, max(128, triton.next_power_of_2(max_length)))
    grid = (rows + 1, triton.cdiv(max(max_length, num_tokens if rows else 1), block))
    _prepare_kernel[grid](
        slots, starts, lengths, tokens, tables, inputs.input_ids, inputs.positions,
        inputs.slot_mapping, inputs.query_starts,
        inputs.seq_lens, inputs.block_tables, inputs.rotary, rotary_offsets, limits, rows,
        num_tokens,
        tokens.stride(0), tables.stride(0), inputs.block_tables.stride(0),
        0 if inputs.rotary is None else inputs.rotary.stride(0),
        ROWS_PAD=pad_rows(rows), BLOCK_SIZE=block_size,
        BLOCK=block, KEEPS_FIRST=keeps_first, num_warps=4,
    )  # fmt: skip


def _check_tables(
    tokens: torch.Tensor, tables: torch.Tensor, inputs: PreparedInputs, rows: int
) -> None:
    """Raises ValueError where arguments of `prepare_inputs` do not fit."""
    if inputs.seq_lens.shape[0] != rows or inputs.block_tables.shape[1] < tables.shape[1]:
        raise ValueError(
            f"inputs hold {inputs.seq_lens.shape[0]} rows of {inputs.block_tables.shape[1]} "
            f"blocks, not {rows} of {tables.shape[1]}"
        )
    if any(each.stride(1) != 1 or each.dtype != torch.int32 for each in (tokens, tables)):
        raise ValueError("tokens and tables must be int32 with contiguous rows")


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "sampled", "slots", "positions", "is_appended", "buffer_index", "places",
    ],
)  # fmt: skip
def _append_kernel(
    sampled, slots, positions, is_appended, tokens, results, buffer_index, places, tokens_stride,
    results_stride, rows, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mask = row < rows
    token = tl.load(sampled + row, mask, 0)
    if results is not None:
        place = row if places is None else tl.load(places + row, mask, 0)
        tl.store(results + tl.load(buffer_index) * results_stride + place, token, mask)
    mask = mask & (tl.load(is_appended + row, mask, 0) != 0)
    target = (
        tokens
        + tl.load(slots + row, mask, 0).to(tl.int64) * tokens_stride
        + tl.load(positions + row, mask, 0)
    )
    # the next step embeds this id, so a row that failed writes a valid one
    tl.store(target, tl.maximum(token, 0), mask)


def append_tokens(
    sampled: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    is_appended: torch.Tensor,
    tokens: torch.Tensor,
    *,
    results: torch.Tensor | None = None,
    buffer_index: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Writes tokens[slots[i], positions[i]] = sampled[i] where is_appended[i] is not 0; -1, a row
    that failed, becomes 0.

    Args:
        sampled: int32 [S], token ids or -1.
        slots: int32 [S], the slot of each row.
        positions: int32 [S], where the tokens are written: the seq_lens of the rows.
        is_appended: int32 [S], 0 for rows whose token is not kept.
        tokens: int32 [num_slots, max_len].
        results, buffer_index: int32 [N, >= S] and [1], both or neither: the result buffers and the
            index of this step's buffer. Also writes results[buffer_index, i] = sampled[i]; with N
            buffers the next steps do not overwrite results that are still being copied to the host.
        places: int32 [S], the entry of the result buffer for each row, if it is not its number.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
    """
    rows = sampled.shape[0]
    if rows:
        grid = (triton.cdiv(rows, 128),)
        _append_kernel[grid](
            sampled, slots, positions, is_appended, tokens, results, buffer_index, places,
            tokens.stride(0), 0 if results is None else results.stride(0), rows,
            BLOCK=128, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed_kernel(
    ids, weight, out, hidden, weight_stride, out_stride, first, vocab,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.load(ids + row) - first
    in_shard = (index >= 0) & (index < vocab)
    mask = columns < hidden
    value = tl.load(weight + index.to(tl.int64) * weight_stride + columns, mask & in_shard, 0.0)
    tl.store(out + row * out_stride + columns, value, mask)


def embed(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    first: int = 0,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Gathers the rows of a (vocabulary-parallel) embedding; ids that are out of shard give zeros.

    Args:
        ids: int32 or int64 [T].
        weight: [V, H], the embeddings of the ids first .. first + V - 1.
        first: the first id of this shard.
        out: [T, H] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
    """
    rows, (vocab, hidden) = ids.shape[0], weight.shape
    if out is None:
        out = torch.empty((rows, hidden), dtype=weight.dtype, device=weight.device)
    if weight.stride(1) != 1:
        raise ValueError("the rows of the embedding must be contiguous")
    if rows:
        block = min(2048, triton.next_power_of_2(hidden))
        grid = (rows, triton.cdiv(hidden, block))
        _embed_kernel[grid](
            ids, weight, out, hidden, weight.stride(0), out.stride(0), first, vocab,
            BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
