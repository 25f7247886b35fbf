"""Causal convolutions of each channel over a few tokens, whose last inputs are a row's state
(Mamba, the gated delta rule, LFM2).

    short_convolution(x, weight, windows, plan, query_starts, out, block_size=..., max_tokens=...)

A program computes up to `block_size` tokens of one row for some channels. Chunks are counted from
the row's first token of the step, so the first of them alone reads the row's window, and has the
end of the block that the window lies in: the program that reads it is the one that replaces it.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import silu
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.states import ChunkPlan, StateTables, programs_for

_CHANNELS = 128  # of a program
TILE_TOKENS = 16  # that a program computes at a time


@triton.jit
def block_of(table, entry):
    """Returns the block (int64) of an entry of a row's table."""
    return tl.load(table + entry).to(tl.int64)


@triton.jit
def taps_of(weight, channels, mask, WIDTH: tl.constexpr):
    """Returns the weights [channels] of each of the WIDTH taps, in float32. A program loads them
    once for all of its tiles: those of a tap are not contiguous, so that no load is a vector."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        loaded = tl.load(weight + channels * WIDTH + tap, mask, 0.0)
        taps = taps + (loaded.to(tl.float32),)  # noqa: RUF005  (a list is no value of Triton's)
    return taps


@triton.jit
def convolved(
    x, x_stride, taps, offset, count, channels, mask, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns the convolution [TOKENS, channels] in float32 of `count` tokens at most. Inputs
    before the row's first token of this step are taken as 0: `add_window` adds them.

    `x` points to the first of the tokens, `offset` tokens after the row's first in this step;
    `taps` are those of `taps_of`.
    """
    t = tl.arange(0, TOKENS)
    acc = tl.zeros([TOKENS, channels.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = t - (WIDTH - 1) + tap
        own = ((back + offset >= 0) & (t < count))[:, None] & mask[None, :]
        places = x + back[:, None] * x_stride + channels[None, :]
        acc += tl.load(places, own, 0.0).to(tl.float32) * taps[tap][None, :]
    return acc


@triton.jit
def add_window(
    acc, window, taps, offset, count, channels, mask, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """Returns `acc` of `convolved` with the inputs that `window` keeps, of the tokens before this
    step. Only a row's first WIDTH - 1 tokens reach them: a program has these in a tile of their
    own, since the registers of this would leave room for fewer programs."""
    t = tl.arange(0, TOKENS)
    for tap in tl.static_range(WIDTH - 1):
        place = t + tap + offset  # in the window
        own = ((place < WIDTH - 1) & (t < count))[:, None] & mask[None, :]
        places = window + channels[None, :] * (WIDTH - 1) + place[:, None]
        acc += tl.load(places, own, 0.0).to(tl.float32) * taps[tap][None, :]
    return acc


@triton.jit
def _store_window(
    x, x_stride, window, is_started, next_window, offset, count, channels, mask,
    WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Stores the window after the chunk's first `count` tokens; arguments as for `convolved`."""
    taps = tl.arange(0, TAPS)
    back = count - (WIDTH - 1) + taps
    own = mask[:, None] & (taps < WIDTH - 1)[None, :]
    is_new = (back + offset >= 0)[None, :]
    places = x + back[None, :] * x_stride + channels[:, None]
    new = tl.load(places, own & is_new, 0.0)
    place = (WIDTH - 1) + back + offset
    old_places = window + channels[:, None] * (WIDTH - 1) + place[None, :]
    old = tl.load(old_places, own & (is_new == 0) & is_started, 0.0)
    tl.debug_barrier()  # every thread has read the old window, which may be the same
    kept = tl.where(is_new, new.to(window.dtype.element_ty), old)
    tl.store(next_window + channels[:, None] * (WIDTH - 1) + taps[None, :], kept, own)


@triton.jit
def store_windows(
    x, x_stride, windows, window_stride, table, window, start, offset, count, tokens, channels,
    mask, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Stores the windows after a chunk's tokens that end a block or the row, where the table has a
    block; `start` is the position of the row's first token in this step, `tokens` their number, and
    the others are as for `convolved`."""
    position = start + offset
    boundary = (position // BLOCK_SIZE + 1) * BLOCK_SIZE - position  # in tokens of the chunk
    # The row's end comes first: the block at the boundary may be that of the old window.
    if (offset + count == tokens) & (boundary != count):
        block = block_of(table, (position + count - 1) // BLOCK_SIZE)
        if block >= 0:
            _store_window(
                x, x_stride, window, start > 0, windows + block * window_stride, offset, count,
                channels, mask, WIDTH, TAPS,
            )  # fmt: skip
    if boundary <= count:
        block = block_of(table, position // BLOCK_SIZE)
        if block >= 0:
            _store_window(
                x, x_stride, window, start > 0, windows + block * window_stride, offset, boundary,
                channels, mask, WIDTH, TAPS,
            )  # fmt: skip


@triton.jit
def _store_tile(
    acc, target, stride, bias, count, channels, mask, TOKENS: tl.constexpr, HAS_SILU: tl.constexpr
):
    """Stores the outputs of `count` tokens at most, the first of which `target` points to."""
    if bias is not None:
        acc += tl.load(bias + channels, mask, 0.0).to(tl.float32)[None, :]
    if HAS_SILU:
        acc = silu(acc)
    t = tl.arange(0, TOKENS)
    places = target + t[:, None] * stride + channels[None, :]
    tl.store(places, acc.to(target.dtype.element_ty), (t < count)[:, None] & mask[None, :])


@triton.jit(do_not_specialize_on_alignment=["tables", "query_starts"])
def _short_convolution_kernel(
    x, out, weight, bias, windows, tables, chunks, query_starts, num_channels, x_stride, out_stride,
    window_stride, table_stride, TOKENS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernel(PDL)
    parts = (num_channels + CHANNELS - 1) // CHANNELS
    items = tl.load(chunks) * parts
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        channels = item % parts * CHANNELS + tl.arange(0, CHANNELS)
        mask = channels < num_channels
        record = chunks + (1 + item // parts) * 4
        row, token = tl.load(record), tl.load(record + 1)
        position, count = tl.load(record + 2), tl.load(record + 3)
        row_token = tl.load(query_starts + row)
        tokens = tl.load(query_starts + row + 1) - row_token
        offset = token - row_token
        start = position - offset
        table = tables + row.to(tl.int64) * table_stride
        window = windows + block_of(table, tl.maximum(start - 1, 0) // BLOCK_SIZE) * window_stride
        place = x + token.to(tl.int64) * x_stride
        taps = taps_of(weight, channels, mask, WIDTH)
        target = out + token.to(tl.int64) * out_stride
        begin = 0
        if (start > 0) & (offset < WIDTH - 1):
            acc = convolved(place, x_stride, taps, offset, count, channels, mask, TAPS, WIDTH)
            acc = add_window(acc, window, taps, offset, count, channels, mask, TAPS, WIDTH)
            _store_tile(acc, target, out_stride, bias, count, channels, mask, TAPS, HAS_SILU)
            begin = TAPS
        for first in range(begin, count, TOKENS):
            acc = convolved(
                place + first * x_stride, x_stride, taps, offset + first, count - first, channels,
                mask, TOKENS, WIDTH,
            )  # fmt: skip
            _store_tile(
                acc, target + first * out_stride, out_stride, bias, count - first,
                channels, mask, TOKENS, HAS_SILU,
            )  # fmt: skip
        store_windows(
            place, x_stride, windows, window_stride, table, window, start, offset, count, tokens,
            channels, mask, WIDTH, TAPS, BLOCK_SIZE,
        )  # fmt: skip


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: StateTables,
    plan: ChunkPlan,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    has_silu: bool = True,
    block_size: int,
    max_tokens: int,
    pdl: bool = False,
) -> None:
    """Computes the convolution for the rows of a plan, and writes their windows into the cache.

    Args:
        x: [T, C]; rows may be strided.
        weight: [C, W], contiguous; the last column is the current token's.
        windows: [num_blocks, C, W - 1] in tables: see `StateTables`.
        plan: of chunks of `block_size` tokens that are not aligned; rows without chunks are left
            alone.
        query_starts: int32 [R + 1], as the plan is made of.
        out: [T, C], another tensor than `x`; rows may be strided.
        bias: [C], or None.
        has_silu: whether SiLU follows.
        block_size: tokens a block.
        max_tokens: an upper bound of a row's tokens in this step: 1 for decodes, for which each
            program then computes one token.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes do not fit together.
    """
    (tokens, channels), width = x.shape, weight.shape[1]
    check_windows(weight, windows, plan, block_size)
    if weight.shape[0] != channels or out.shape != x.shape or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)}, out {tuple(out.shape)}, weight {weight.shape}")
    chunks = plan.max_chunks(len(query_starts) - 1, tokens)
    if chunks == 0:
        return
    tile = 1 if max_tokens == 1 else TILE_TOKENS
    programs = programs_for(chunks * triton.cdiv(channels, _CHANNELS), x.device)
    _short_convolution_kernel[(programs,)](
        x, out, weight, bias, windows.states, windows.tables, plan.chunks, query_starts, channels,
        x.stride(0), out.stride(0), windows.states.stride(0), windows.tables.stride(0),
        TOKENS=tile, WIDTH=width, TAPS=triton.next_power_of_2(width), CHANNELS=_CHANNELS,
        BLOCK_SIZE=block_size, HAS_SILU=has_silu, PDL=pdl, num_warps=4, num_stages=1,
        launch_pdl=pdl,
    )  # fmt: skip


def check_windows(
    weight: torch.Tensor, windows: StateTables, plan: ChunkPlan, block_size: int
) -> None:
    """Raises ValueError unless windows fit the weight [C, W] of a convolution, and the plan the
    blocks."""
    channels, width = weight.shape
    states = windows.states
    if (
        states.shape[1:] != (channels, width - 1)
        or states.stride()[1:] != (width - 1, 1)
        or not weight.is_contiguous()
        or plan.length != block_size
        or plan.is_aligned
    ):
        raise ValueError(
            f"windows {tuple(states.shape)} and chunks of {plan.length} tokens do not fit the "
            f"weight {tuple(weight.shape)} and blocks of {block_size}"
        )
