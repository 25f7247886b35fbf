"""Mamba-2's recurrence for rows of one token where rows may look ahead, after the convolution: one
launch a layer, which reads each state once and writes it once.

    mamba_lookahead(inputs, weights, matrices, seq_lens, replays, replayed, saved, out,
                    block_size=..., query_starts=...)

A program computes one head of the adjacent rows of one slot (`layers.step.Replays`): first the
tokens that it replays, without an output, then the rows. It writes the state behind the first of
them, and keeps the steps of the others; `convolution_lookahead` keeps their other inputs.
"""
# ruff: noqa: N803, N806  (compile-time constants and matrices are written in capitals)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.mamba import (
    MambaInputs,
    MambaShape,
    MambaWeights,
    advance_state,
    decode_warps,
)
from aioinfer.kernels.replays import check_saved, end_of_block, keep_inputs, rows_of_slot
from aioinfer.kernels.states import StateTables


@triton.jit(
    do_not_specialize_on_alignment=[
        "tables", "seq_lens", "query_starts", "slots", "pending", "counts",
    ]
)  # fmt: skip
def _mamba_lookahead_kernel(
    mixed, steps, a_log, dt_bias, skip, least, largest, out, matrices, tables, seq_lens,
    query_starts, slots, pending, counts, replayed, saved, mixed_stride, step_stride, out_stride,
    matrix_stride, table_stride,
    SHAPE: tl.constexpr, SAVED: tl.constexpr, HAS_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    GROUPS: tl.constexpr = SHAPE.heads // SHAPE.group
    CHANNELS: tl.constexpr = SHAPE.heads * SHAPE.head_size + 2 * GROUPS * SHAPE.state_size
    i, j = tl.arange(0, SHAPE.state_pad), tl.arange(0, SHAPE.head_pad)
    is_j = j < SHAPE.head_size
    is_state = (i < SHAPE.state_size)[:, None] & is_j[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(skip + head).to(tl.float32)
    wait_for_kernel(PDL)
    token, first, count, slot, start, last = rows_of_slot(
        seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS, SHAPE.block_size
    )
    if token < 0:
        return
    table = tables + row.to(tl.int64) * table_stride
    before = tl.load(table + tl.maximum(start - 1, 0) // SHAPE.block_size).to(tl.int64)
    block = tl.load(table + last).to(tl.int64)
    end, end_block = end_of_block(table, start, first, block, SHAPE.block_size)
    places = (head * SHAPE.state_size + i)[:, None] * SHAPE.head_size + j[None, :]
    of_slot = saved + slot * (SAVED * SHAPE.heads)
    S = tl.load(matrices + before * matrix_stride + places, is_state & (start > 0), 0.0)
    S = S.to(tl.float32)
    for t in tl.range(0, first + count, disable_licm=True):
        at = token + t - first  # the row's token, if it is not a replayed one
        is_row = t >= first
        earlier = replayed + (slot * SAVED + t) * CHANNELS
        S, y = advance_state(
            S, tl.where(is_row, mixed + at * mixed_stride, earlier),
            tl.where(is_row, steps + at * step_stride, of_slot + t * SHAPE.heads), head, rate,
            bias, weight, least, largest, SHAPE,
        )  # fmt: skip
        # rounded after each token, whatever the number of tokens in the step
        stored = S.to(matrices.dtype.element_ty)
        S = stored.to(tl.float32)
        if (t == first) | (t == end):
            target = matrices + tl.where(t == first, block, end_block) * matrix_stride
            tl.store(target + places, stored, is_state)
        out_places = out + at * out_stride + head * SHAPE.head_size + j
        tl.store(out_places, y.to(out.dtype.element_ty), is_j & is_row)
    tl.debug_barrier()  # every thread has read the kept steps
    keep_inputs(
        of_slot, SHAPE.heads, steps + (token + 1) * step_stride, step_stride, count - 1, head, True
    )  # fmt: skip


def mamba_lookahead(
    inputs: MambaInputs,
    weights: MambaWeights,
    matrices: StateTables,
    seq_lens: torch.Tensor,
    replays: Sequence[torch.Tensor],
    replayed: torch.Tensor,
    saved: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Computes the recurrence of the rows of one token, of which several may be of one slot;
    replays earlier tokens, and updates states and kept steps. Which entries of the tables are read
    and written is said in `delta_lookahead`.

    Args:
        inputs, weights, matrices, seq_lens, out, block_size, query_starts, pdl: as for
            `mamba_decode`.
        replays: slots, pending and counts of the rows, int32 [R] each: see `layers.step.Replays`.
        replayed: [slots, K, H P + 2 G N], contiguous, the convolution of the replayed tokens, in
            the dtype of `inputs.mixed`.
        saved: [slots, K, H], contiguous, the kept `inputs.steps` of K lookahead rows of each slot.

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = MambaShape.of(inputs, weights, matrices.states, block_size)
    check_saved([replayed, saved], inputs, block_size)
    (mixed, steps), (states, tables) = inputs, matrices
    rows = len(seq_lens) if query_starts is None else min(len(seq_lens), len(mixed))
    if rows == 0:
        return
    _mamba_lookahead_kernel[(shape.heads, rows)](
        mixed, steps, *weights, out, states, tables, seq_lens,
        seq_lens if query_starts is None else query_starts, *replays, replayed, saved,
        mixed.stride(0), steps.stride(0), out.stride(0), states.stride(0), tables.stride(0),
        SHAPE=shape, SAVED=saved.shape[1], HAS_STARTS=query_starts is not None, PDL=pdl,
        num_warps=decode_warps(shape), launch_pdl=pdl,
    )  # fmt: skip
