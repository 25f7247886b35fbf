"""The convolution of the gated delta rule for rows of several tokens, with SiLU, the norms of
queries and keys, and the windows that rows leave: the first launch of `delta_prefill`.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import L2_EPS, DeltaShape, silu
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.short_convolution import (
    TILE_TOKENS,
    add_window,
    block_of,
    convolved,
    store_windows,
    taps_of,
)
from aioinfer.kernels.states import ChunkPlan, StateTables, programs_for

#: Of a thread, and programs that a multiprocessor then has room for: the fastest of ten variants on
#: an H200 (notes/states.md).
REGISTERS, RESIDENT = 96, 5


@triton.jit
def _store_tile(
    acc, target, stride, head, count, channels, mask, TOKENS: tl.constexpr, SHAPE: tl.constexpr
):
    """Stores SiLU of the convolution of `count` tokens at most, the first of which `target` points
    to, of queries and keys with their norm."""
    acc = silu(acc)
    if head < 2 * SHAPE.key_heads:
        acc *= tl.rsqrt(tl.sum(acc * acc, 1) + L2_EPS)[:, None]
    if head < SHAPE.key_heads:
        acc *= SHAPE.key_size**-0.5
    t = tl.arange(0, TOKENS)
    places = target + t[:, None] * stride + channels[None, :]
    tl.store(places, acc.to(target.dtype.element_ty), (t < count)[:, None] & mask[None, :])


@triton.jit(do_not_specialize_on_alignment=["tables", "query_starts"])
def _inputs_kernel(
    mixed, out, conv, windows, tables, tiles, query_starts, mixed_stride, out_stride,
    window_stride, table_stride, SHAPE: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
    TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolution, SiLU and norms of a chunk's queries, keys or values of one head."""
    KEYS: tl.constexpr = 2 * SHAPE.key_heads
    HEADS: tl.constexpr = KEYS + SHAPE.key_heads * SHAPE.group
    wait_for_kernel(PDL)
    items = tl.load(tiles) * HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % HEADS
        record = tiles + (1 + item // HEADS) * 4
        row, token = tl.load(record), tl.load(record + 1)
        position, count = tl.load(record + 2), tl.load(record + 3)
        row_token = tl.load(query_starts + row)
        tokens = tl.load(query_starts + row + 1) - row_token
        offset = token - row_token
        start = position - offset
        i = tl.arange(0, CHANNELS)
        value_first = KEYS * SHAPE.key_size + (head - KEYS) * SHAPE.value_size
        channels = tl.where(head < KEYS, head * SHAPE.key_size, value_first) + i
        mask = i < tl.where(head < KEYS, SHAPE.key_size, SHAPE.value_size)
        table = tables + row.to(tl.int64) * table_stride
        before = tl.maximum(start - 1, 0) // SHAPE.block_size
        window = windows + block_of(table, before) * window_stride
        x = mixed + token.to(tl.int64) * mixed_stride
        taps = taps_of(conv, channels, mask, SHAPE.width)
        target = out + token.to(tl.int64) * out_stride
        begin = 0
        if (start > 0) & (offset < SHAPE.width - 1):
            acc = convolved(x, mixed_stride, taps, offset, count, channels, mask, TAPS, SHAPE.width)
            acc = add_window(acc, window, taps, offset, count, channels, mask, TAPS, SHAPE.width)
            _store_tile(acc, target, out_stride, head, count, channels, mask, TAPS, SHAPE)
            begin = TAPS
        for first in range(begin, count, TOKENS):
            acc = convolved(
                x + first * mixed_stride, mixed_stride, taps, offset + first, count - first,
                channels, mask, TOKENS, SHAPE.width,
            )  # fmt: skip
            _store_tile(
                acc, target + first * out_stride, out_stride, head, count - first,
                channels, mask, TOKENS, SHAPE,
            )  # fmt: skip
        store_windows(
            x, mixed_stride, windows, window_stride, table, window, start, offset, count, tokens,
            channels, mask, SHAPE.width, TAPS, SHAPE.block_size,
        )  # fmt: skip


def delta_inputs(
    mixed: torch.Tensor,
    conv: torch.Tensor,
    windows: StateTables,
    tiles: ChunkPlan,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    shape: DeltaShape,
    *,
    rows: int,
    pdl: bool,
) -> None:
    """Computes queries, keys and values of the rows of a plan, and writes their windows.

    Args:
        mixed, conv, windows, tiles, query_starts, pdl: as for `delta_prefill`.
        out: [T, C], another tensor than `mixed`.
        shape: of the layer.
        rows: an upper bound of the rows of several tokens.
    """
    heads = shape.key_heads * (2 + shape.group)
    items = tiles.max_chunks(rows, len(mixed)) * heads
    programs = programs_for(items, mixed.device, 2 * RESIDENT)
    states, tables = windows
    _inputs_kernel[(programs,)](
        mixed, out, conv, states, tables, tiles.chunks, query_starts, mixed.stride(0),
        out.stride(0), states.stride(0), tables.stride(0), SHAPE=shape,
        CHANNELS=max(shape.key_pad, shape.value_pad), TOKENS=TILE_TOKENS,
        TAPS=triton.next_power_of_2(shape.width), PDL=pdl, num_warps=4, num_stages=1,
        maxnreg=REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
