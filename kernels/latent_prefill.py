"""Latent attention of rows of several tokens on GPUs: over keys and values that were expanded from
latent vectors, a segment of the context at a time.

The context of a step's rows is divided into segments that fit into a buffer of fixed size
(`plan_segments`, on the host). For each of them the latent vectors are gathered and expanded, and
the kernel attends to them; where a row's context lies in several segments, the state of its softmax
is carried from one to the next in float32. The loop is FlashAttention-2's (Dao 2023). Keys are in
two parts, since all heads share the rotated one: it is never copied for each head.
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import LOG2_E, softmax_weights, tile_channels
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Of a work item: the row's first token and number of tokens, the tokens before these, the tile of
#: queries, the first of the row's tokens in the segment, how many there are and where they begin,
#: and whether they are the row's first (1) and its last (2).
ITEM_FIELDS = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The compile-time configuration of the kernel: queries and keys a tile, warps, pipeline
    stages."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def tile_config(element_size: int) -> TileConfig:
    """Returns the configuration for bytes an element. Chosen by the compiler's output for Hopper
    (191 registers, 168 KiB of shared memory), not measured."""
    return TileConfig(32, 32, 4, 1) if element_size == 4 else TileConfig(128, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class ContextSegment:
    """A part of the context of a step's rows.

    Attributes:
        rows, positions: int64 [S], of each of its tokens the row and the position in the row.
        items: int32 [N, 8]: see `ITEM_FIELDS`.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    items: torch.Tensor


def plan_segments(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    first_row: int,
    capacity: int,
    tile_rows: int,
    device: torch.device,
) -> list[ContextSegment]:
    """Divides the context of a step's rows from `first_row` on into segments.

    Args:
        query_lens, seq_lens: of all rows: tokens in this step, and with those before it.
        capacity: the maximum of tokens in a segment.
        tile_rows: queries a tile.
        device: of the segments.
    """
    start = sum(query_lens[:first_row])
    segments: list[list[tuple[int, ...]]] = [[]]
    room = capacity
    for row in range(first_row, len(query_lens)):
        first, length, count = 0, seq_lens[row], query_lens[row]
        while first < length:
            if not room:
                segments.append([])
                room = capacity
            taken = min(room, length - first)
            segments[-1].append((row, start, count, length, first, taken, capacity - room))
            room, first = room - taken, first + taken
        start += count
    return [_make_segment(pieces, tile_rows, device) for pieces in segments if pieces]


def _make_segment(
    pieces: list[tuple[int, ...]], tile_rows: int, device: torch.device
) -> ContextSegment:
    """Returns a segment; its pieces are (row, first token, tokens, length, first position, tokens
    of the context, their first place)."""
    rows = np.concatenate([np.full(piece[5], piece[0]) for piece in pieces])
    positions = np.concatenate([np.arange(piece[4], piece[4] + piece[5]) for piece in pieces])
    items = [
        (start, count, length - count, tile, first, taken, place,
         (first == 0) + 2 * (first + taken == length))
        for _, start, count, length, first, taken, place in pieces
        for tile in range(-(-count // tile_rows))
    ]  # fmt: skip
    # those with most visible keys begin first
    items.sort(key=lambda item: -min(item[5], item[2] + (item[3] + 1) * tile_rows - item[4]))
    tokens = torch.from_numpy(np.stack((rows, positions)).astype(np.int64)).to(device)
    return ContextSegment(tokens[0], tokens[1], torch.tensor(items, dtype=torch.int32).to(device))


@triton.jit
def _latent_prefill_kernel(
    queries, expanded, keys, out, sums_out, maxima, sums, items, scale,
    query_stride, query_head_stride, expanded_stride, key_stride, out_stride,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, PLAIN_PAD: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, FIELDS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item = items + tl.program_id(0) * FIELDS
    start, length, context = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    token = tl.load(item + 3) * ROWS + tl.arange(0, ROWS)
    first, count, place = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    flags = tl.load(item + 7)
    p, r, v = tl.arange(0, PLAIN_PAD), tl.arange(0, ROTARY_PAD), tl.arange(0, VALUE_PAD)
    is_own = token < length
    line = (start + token).to(tl.int64)
    query = queries + line[:, None] * query_stride + head * query_head_stride
    plain = tl.load(query + p[None, :], is_own[:, None] & (p < PLAIN)[None, :], 0.0)
    turned = tl.load(query + PLAIN + r[None, :], is_own[:, None] & (r < ROTARY)[None, :], 0.0)
    # the state from earlier segments
    entry = line * NUM_HEADS + head
    is_carried = is_own & (flags % 2 == 0)
    m = tl.load(maxima + entry, is_carried, float("-inf"))
    l = tl.load(sums + entry, is_carried, 0.0)
    own_values = is_own[:, None] & (v < VALUE)[None, :]
    acc = tl.load(
        sums_out + entry[:, None] * VALUE + v[None, :], is_carried[:, None] & own_values, 0.0
    )
    limit = context + token - first  # the last place of the segment's piece that a token sees
    end = tl.minimum(count, tl.max(tl.where(is_own, limit, -1)) + 1)
    for begin in range(0, end, TILE):
        k = begin + tl.arange(0, TILE)
        is_key = k < count
        source = (place + k).to(tl.int64)
        parts = expanded + source[:, None] * expanded_stride + head * (PLAIN + VALUE)
        key = tl.load(parts + p[None, :], is_key[:, None] & (p < PLAIN)[None, :], 0.0)
        shared = tl.load(
            keys + source[:, None] * key_stride + r[None, :],
            is_key[:, None] & (r < ROTARY)[None, :], 0.0,
        )  # fmt: skip
        value = tl.load(parts + PLAIN + v[None, :], is_key[:, None] & (v < VALUE)[None, :], 0.0)
        s = tl.dot(plain, tl.trans(key), input_precision="ieee")
        s = tl.dot(turned, tl.trans(shared), s, input_precision="ieee") * scale
        visible = (k[None, :] <= limit[:, None]) & is_key[None, :]
        weight, m, old = softmax_weights(s, visible, None, m, None, None)
        l = l * old + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None], input_precision="ieee")
    if flags >= 2:
        output = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        target = out + line[:, None] * out_stride + head * VALUE + v[None, :]
        tl.store(target, output.to(out.dtype.element_ty), own_values)
    else:
        tl.store(maxima + entry, m, is_own)
        tl.store(sums + entry, l, is_own)
        tl.store(sums_out + entry[:, None] * VALUE + v[None, :], acc, own_values)


@dataclass(frozen=True, slots=True)
class PrefillState:
    """The softmax of rows whose context lies in several segments. T tokens of a step, H heads.

    Attributes:
        outputs: float32 [T, H, V], not normalised.
        maxima, sums: float32 [T, H].
    """

    outputs: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, num_heads: int, value_size: int, device: torch.device
    ) -> PrefillState:
        """Returns the state of so many tokens."""
        outputs = torch.empty(tokens, num_heads, value_size, device=device)
        return cls(outputs, *torch.empty(2, tokens, num_heads, device=device).unbind())


def latent_prefill(
    queries: torch.Tensor,
    expanded: torch.Tensor,
    keys: torch.Tensor,
    segment: ContextSegment,
    state: PrefillState,
    out: torch.Tensor,
    *,
    plain_size: int,
    scale: float,
    config: TileConfig | None = None,
    pdl: bool = False,
) -> None:
    """Attends the queries of a segment's rows to the segment. Called for all segments of a step in
    their order.

    Args:
        queries: [T, H, N + P] of the step, N channels that are not rotated and P that are; bf16,
            fp16 or fp32; channels contiguous.
        expanded: [S, H * (N + V)], keys and values of the segment's tokens, head by head.
        keys: [S, P], the rotated keys of these tokens; channels contiguous.
        segment: of `plan_segments` for the `rows` of the configuration.
        state: for all tokens of the step.
        out: [T, H, V], contiguous heads; written where a row's last segment is this one.
        plain_size: N.
        scale: of the scores.
        config: instead of `tile_config`'s.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    _, num_heads, head_size = queries.shape
    value_size, rotary = out.shape[2], head_size - plain_size
    if expanded.shape[1] != num_heads * (plain_size + value_size) or keys.shape[1] != rotary:
        raise ValueError(
            f"{tuple(expanded.shape)} and {tuple(keys.shape)} are not the keys and values of "
            f"{num_heads} heads of {plain_size} + {rotary} and {value_size} channels"
        )
    if not 1 == queries.stride(2) == expanded.stride(1) == keys.stride(1):
        raise ValueError("channels must be contiguous")
    if out.stride()[1:] != (value_size, 1) or len(state.maxima) < len(queries):
        raise ValueError("heads of the output must be contiguous, and the state of all tokens")
    config = config or tile_config(queries.element_size())
    _latent_prefill_kernel[(len(segment.items), num_heads)](
        queries, expanded, keys, out, state.outputs, state.maxima, state.sums, segment.items,
        scale * LOG2_E.value, *queries.stride()[:2], expanded.stride(0), keys.stride(0),
        out.stride(0),
        NUM_HEADS=num_heads, PLAIN=plain_size, PLAIN_PAD=tile_channels(plain_size), ROTARY=rotary,
        ROTARY_PAD=tile_channels(rotary), VALUE=value_size, VALUE_PAD=tile_channels(value_size),
        FIELDS=ITEM_FIELDS, ROWS=config.rows, TILE=config.tile, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
