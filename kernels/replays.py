"""What the kernels of layers with a state share where rows may look ahead (`layers.step.Replays`):
device functions that find a slot's rows, read the inputs of its tokens, and keep what its next step
replays.

The tokens of a slot are numbered from the first one that is replayed: `first` tokens whose inputs
the slot's last step has kept (`saved`), then the rows of this step.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from aioinfer.kernels.states import decode_row


@triton.jit
def rows_of_slot(
    seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Returns of the first row of a slot: its token (int64), how many tokens are replayed before
    it, how many adjacent rows the slot has, the slot (int64), the position of the first replayed
    token, and the entry of the row's tables that has the state behind the row. The token is -1 of
    other rows, rows of several tokens, and padding."""
    token, _, _, last = decode_row(seq_lens, query_starts, row, HAS_STARTS, BLOCK_SIZE)
    count = tl.load(counts + row)
    first = tl.load(pending + row)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(seq_lens + row) - 1 - first
    return tl.where(count == 0, -1, token), first, count, slot, start, last


@triton.jit
def input_at(
    t, first, saved, rows, rows_stride, window, is_started, channels, mask, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns the convolution's input of channels at token t of a slot: of tokens below 0 from the
    window, below `first` from `saved`, else from `rows`."""
    token = tl.where(t < first, saved + t * CHANNELS, rows + (t - first) * rows_stride)
    old = window + channels * (WIDTH - 1) + (t + WIDTH - 1)
    places = tl.where(t < 0, old, token + channels)
    return tl.load(places, mask & ((t >= 0) | is_started), 0.0)


@triton.jit
def convolved_at(
    t, first, saved, rows, rows_stride, window, is_started, conv, channels, mask,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns the convolution of channels at token t, in float32.

    Each tap is a vector of its own. With a tile of channels and taps Triton would keep the matrix
    in the tile's layout beside its own, in twice the registers.
    """
    sums = tl.zeros_like(channels).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        x = input_at(
            t - (WIDTH - 1) + tap, first, saved, rows, rows_stride, window, is_started, channels,
            mask, WIDTH, CHANNELS,
        )  # fmt: skip
        sums += x.to(tl.float32) * tl.load(conv + channels * WIDTH + tap, mask, 0.0).to(tl.float32)
    return sums


@triton.jit
def _keep_window(
    t, first, saved, rows, rows_stride, window, is_started, target, channels, mask,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores the window behind token t. It may be stored over the old one: what is read of that is
    behind all that has been written."""
    for tap in tl.static_range(WIDTH - 1):
        x = input_at(
            t - (WIDTH - 2) + tap, first, saved, rows, rows_stride, window, is_started, channels,
            mask, WIDTH, CHANNELS,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has read before another one writes
        tl.store(target + channels * (WIDTH - 1) + tap, x, mask)


@triton.jit
def keep_windows(
    first, end, saved, rows, rows_stride, window, is_started, target, end_target, channels, mask,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores the windows behind token `first`, and behind token `end` if that is not negative: the
    block of the old window may be that of `end` then, but not that of `first`."""
    _keep_window(
        first, first, saved, rows, rows_stride, window, is_started, target, channels, mask, WIDTH,
        CHANNELS,
    )  # fmt: skip
    if end >= 0:
        _keep_window(
            end, first, saved, rows, rows_stride, window, is_started, end_target, channels, mask,
            WIDTH, CHANNELS,
        )  # fmt: skip


@triton.jit
def keep_inputs(saved, saved_stride, rows, rows_stride, count, channels, mask):
    """Copies channels of `count` rows."""
    for number in range(count):
        x = tl.load(rows + number * rows_stride + channels, mask)
        tl.store(saved + number * saved_stride + channels, x, mask)


@triton.jit
def end_of_block(table, start, first, last, BLOCK_SIZE: tl.constexpr):
    """Returns behind which replayed token a block ends whose state is kept, -1 if none, and the
    block; `last` is the block of the state behind the row."""
    end = (start // BLOCK_SIZE + 1) * BLOCK_SIZE
    is_passed = end <= start + first
    block = tl.load(table + end // BLOCK_SIZE - 1, is_passed, -1).to(tl.int64)
    # the table may name a block twice that was moved on to the next entry
    is_kept = is_passed & (block >= 0) & (block != last)
    return tl.where(is_kept, end - start - 1, -1), tl.maximum(block, 0)


def check_saved(
    saved: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], block_size: int
) -> None:
    """Raises ValueError unless kept inputs [slots, K, size] are contiguous, go with inputs [T,
    size], and a slot replays less than a block."""
    expected = [(x.shape[1], x.dtype) for x in inputs]
    if (
        [(x.shape[2], x.dtype) for x in saved] != expected
        or not all(x.is_contiguous() for x in saved)
        or not 0 < saved[0].shape[1] < block_size
    ):
        raise ValueError(
            f"kept inputs {[tuple(x.shape) for x in saved]} do not fit {expected} and blocks of "
            f"{block_size}"
        )
