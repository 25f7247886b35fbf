"""Short convolutions for rows of one token where rows may look ahead: one launch a layer.

    convolution_lookahead(x, weight, windows, seq_lens, replays, saved, out, block_size=...,
                          query_starts=..., replayed=...)

A program computes some channels of the adjacent rows of one slot (`layers.step.Replays`). It writes
the window behind the first of them, and keeps the inputs of the others, which may be skipped. A
layer whose recurrence takes the convolution as its input (Mamba-2) gets it for the replayed tokens,
too.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import silu
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.replays import (
    check_saved,
    convolved_at,
    end_of_block,
    keep_inputs,
    keep_windows,
    rows_of_slot,
)
from aioinfer.kernels.states import StateTables

_PART = 128  # channels of a program


@triton.jit(
    do_not_specialize_on_alignment=[
        "tables", "seq_lens", "query_starts", "slots", "pending", "counts",
    ]
)  # fmt: skip
def _convolution_lookahead_kernel(
    x, out, replayed, weight, bias, windows, tables, seq_lens, query_starts, slots, pending, counts,
    saved, x_stride, out_stride, window_stride, table_stride,
    CHANNELS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, SAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * PART + tl.arange(0, PART)
    row = tl.program_id(1)
    mask = channels < CHANNELS
    wait_for_kernel(PDL)
    token, first, count, slot, start, last = rows_of_slot(
        seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS, BLOCK_SIZE
    )
    if token < 0:
        return
    is_started = start > 0
    table = tables + row.to(tl.int64) * table_stride
    before = tl.load(table + tl.maximum(start - 1, 0) // BLOCK_SIZE).to(tl.int64)
    block = tl.load(table + last).to(tl.int64)
    end, end_block = end_of_block(table, start, first, block, BLOCK_SIZE)
    window = windows + before * window_stride
    rows = x + token * x_stride
    of_slot = saved + slot * (SAVED * CHANNELS)
    begin = first if replayed is None else 0
    for t in range(begin, first + count):
        y = convolved_at(
            t, first, of_slot, rows, x_stride, window, is_started, weight, channels, mask, WIDTH,
            CHANNELS,
        )  # fmt: skip
        if bias is not None:
            y += tl.load(bias + channels, mask, 0.0).to(tl.float32)
        if HAS_SILU:
            y = silu(y)
        target = out + (token + t - first) * out_stride
        if replayed is not None:
            target = tl.where(t < first, replayed + (slot * SAVED + t) * CHANNELS, target)
        tl.store(target + channels, y.to(out.dtype.element_ty), mask)
    tl.debug_barrier()  # every thread has read the old window and the kept inputs
    keep_windows(
        first, end, of_slot, rows, x_stride, window, is_started, windows + block * window_stride,
        windows + end_block * window_stride, channels, mask, WIDTH, CHANNELS,
    )  # fmt: skip
    keep_inputs(of_slot, CHANNELS, rows + x_stride, x_stride, count - 1, channels, mask)


def convolution_lookahead(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: StateTables,
    seq_lens: torch.Tensor,
    replays: Sequence[torch.Tensor],
    saved: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    has_silu: bool = True,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    replayed: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Computes the convolution for the rows of one token, of which several may be of one slot, and
    updates windows and kept inputs. Which entries of the tables are read and written is said in
    `delta_lookahead`.

    Args:
        x: [T, C]; rows may be strided.
        weight: [C, W], contiguous; the last column is the current token's.
        windows: [num_blocks, C, W - 1] in tables: see `StateTables`.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows.
        replays: slots, pending and counts of the rows, int32 [R] each: see `layers.step.Replays`.
        saved: [slots, K, C], contiguous, the kept inputs of K lookahead rows of each slot.
        out: [T, C], another tensor than `x`; rows may be strided.
        bias: [C], or None.
        has_silu: whether SiLU follows.
        block_size: tokens a block, more than K.
        query_starts: int32 [R + 1], the first token of each row: rows of another number of tokens
            than one are left alone. None: row r is token r.
        replayed: [slots, K, C], contiguous and in the dtype of `out`, gets the outputs of the
            replayed tokens; None where they are not needed.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes do not fit together.
    """
    channels, width = weight.shape
    states = windows.states
    check_saved([saved], [x], block_size)
    _check_shapes(x, out, states, weight)
    if replayed is not None and (replayed.shape, replayed.dtype) != (saved.shape, out.dtype):
        raise ValueError(f"replayed must be {tuple(saved.shape)} in {out.dtype}")
    rows = len(seq_lens) if query_starts is None else min(len(seq_lens), len(x))
    if rows == 0:
        return
    _convolution_lookahead_kernel[(triton.cdiv(channels, _PART), rows)](
        x, out, replayed, weight, bias, states, windows.tables, seq_lens,
        seq_lens if query_starts is None else query_starts, *replays, saved, x.stride(0),
        out.stride(0), states.stride(0), windows.tables.stride(0), CHANNELS=channels, PART=_PART,
        WIDTH=width, SAVED=saved.shape[1], BLOCK_SIZE=block_size,
        HAS_STARTS=query_starts is not None, HAS_SILU=has_silu, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def _check_shapes(
    x: torch.Tensor, out: torch.Tensor, states: torch.Tensor, weight: torch.Tensor
) -> None:
    """Raises ValueError where arguments of `convolution_lookahead` do not fit together."""
    channels, width = weight.shape
    if (
        x.shape[1] != channels
        or out.shape != x.shape
        or x.stride(1) != 1
        or states.shape[1:] != (channels, width - 1)
        or states.stride()[1:] != (width - 1, 1)
        or not weight.is_contiguous()
    ):
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)}, windows {tuple(states.shape)} and weight "
            f"{tuple(weight.shape)} do not fit together"
        )
