"""The products of a mixture of experts for several tokens: tiles of rows that have the same expert.

Launched by `expert_product`. A program computes a tile of Y^T = W X^T for rows of one expert: the
weight is the left operand, so that a tile has as few rows as an expert has (8 or more), while the
tensor cores get 64 output features. Every expert's weights are read once where its rows fit a tile.

Which rows a program has:
- with buckets, tiles are numbered expert by expert, and a program finds the expert of its tile by a
  scan over the counters. The output of the first product is sorted by expert, so that the second
  one reads whole tiles;
- for a few tokens a program belongs to a pair, looks for its expert among all pairs, and leaves if
  an earlier pair has the same one; otherwise it takes all of them. That needs neither counters nor
  a sort.

Programs beyond the last tile end at once, or there are as many programs as the GPU runs at a time,
and each takes tile after tile. Programs of one tile of rows are neighbours, so that their rows, and
the weights of the few experts in flight, are in the L2 cache.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_arguments import ExpertArguments, first_expert, scaling
from aioinfer.kernels.expert_configs import ExpertConfig
from aioinfer.kernels.expert_tiles import multiply
from aioinfer.kernels.expert_weights import (
    PackedExperts,
    ScaledExperts,
    values_and_scales,
)
from aioinfer.kernels.launch import multiprocessors, wait_for_kernel
from aioinfer.kernels.quantize import GROUP, ScaledInputs
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _ends(
    counts, tokens, EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Returns how many tiles, times 2 ** 32, and rows there are up to each expert, inclusive."""
    number = tl.arange(0, EXPERTS_PAD)
    sizes = tl.minimum(tl.load(counts + number, number < S.experts, 0), tokens)
    tiles = (sizes + ROWS - 1) // ROWS
    return tl.cumsum((tiles.to(tl.int64) << 32) + sizes, 0)


@triton.jit
def _expert_of_tile(ends, counts, item, tokens, ROWS: tl.constexpr):
    """Returns of the tile `item`, which there is: its expert, its first row in the expert's bucket,
    the rows of the expert, and the rows of all experts before it."""
    is_before = (ends >> 32) <= item
    expert = tl.sum(is_before.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before, ends, 0), 0)
    size = tl.minimum(tl.load(counts + expert), tokens)
    return expert, (item - (begin >> 32).to(tl.int32)) * ROWS, size, begin.to(tl.int32)


@triton.jit
def _pairs_like(
    experts, item, pairs, PAIRS_PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns the expert of pair `item`, its first pair, the pairs [ROWS] that have it, and how
    many they are."""
    number = tl.arange(0, PAIRS_PAD)
    every = tl.load(experts + number, number < pairs, -1)
    expert = tl.load(experts + item)
    is_same = every == expert
    first = tl.min(tl.where(is_same, number, PAIRS_PAD), 0)
    rank = tl.cumsum(is_same.to(tl.int32), 0) - 1
    place = tl.arange(0, ROWS)[:, None]
    is_here = is_same[None, :] & (rank[None, :] == place)
    pair = tl.sum(tl.where(is_here, number[None, :], 0), 1)
    return expert, first, pair, tl.sum(is_same.to(tl.int32), 0)


@triton.jit
def _multiply_bucket(
    x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, bucket, left, first,
    x_stride, factor, ROWS: tl.constexpr, TMA_ROWS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Computes a tile for the first ROWS, or the `left`, pairs of a bucket."""
    place = tl.arange(0, ROWS)
    is_row = place < left
    pair = tl.load(bucket + place, is_row, 0)
    multiply(
        x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, first + place,
        first, is_row, x_stride, factor, ROWS, TMA_ROWS, S,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first_expert", "x_stride", "factor"])
def _expert_kernel(
    x, row_tiles, weight, x_scales, w_scales, bias, factors, experts, counts, buckets, out, tokens,
    first_expert, x_stride, factor,
    ROWS: tl.constexpr, TMA_ROWS: tl.constexpr, TAIL: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr, PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Computes a product by tiles of ROWS rows. PAIRS_PAD is 0 with buckets. `row_tiles` is a
    descriptor of x with TMA_ROWS. There are weights of S.experts experts from `first_expert` on;
    with S.partial there are others."""
    LINE_TILES: tl.constexpr = (S.features + S.lines - 1) // S.lines
    wait_for_kernel(PDL)
    if PAIRS_PAD > 0:
        item, line_tile = tl.program_id(0) // LINE_TILES, tl.program_id(0) % LINE_TILES
        expert, first_pair, pair, size = _pairs_like(
            experts, item, tokens * S.top_k, PAIRS_PAD, ROWS
        )  # fmt: skip
        is_mine = first_pair == item
        if S.partial:
            expert -= first_expert
            is_mine = is_mine & (expert >= 0) & (expert < S.experts)
        if is_mine:
            multiply(
                x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, pair, 0,
                tl.arange(0, ROWS) < size, x_stride, factor, ROWS, TMA_ROWS, S,
            )  # fmt: skip
    else:
        if S.partial:
            counts += first_expert
            buckets += first_expert * tokens
        ends = _ends(counts, tokens, EXPERTS_PAD, ROWS, S)
        tiles = (tl.max(ends, 0) >> 32).to(tl.int32) * LINE_TILES
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            item, line_tile = tile // LINE_TILES, tile % LINE_TILES
            expert, begin, size, before = _expert_of_tile(ends, counts, item, tokens, ROWS)
            bucket, left = buckets + expert * tokens + begin, size - begin
            if TAIL > 0 and left <= TAIL:
                _multiply_bucket(
                    x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, bucket,
                    left, before + begin, x_stride, factor, TAIL, False, S,
                )  # fmt: skip
            else:
                _multiply_bucket(
                    row_tiles, weight, x_scales, w_scales, bias, factors, out, expert, line_tile,
                    bucket, left, before + begin, x_stride, factor, ROWS, TMA_ROWS, S,
                )  # fmt: skip


def launch_tiles(
    x: torch.Tensor | ScaledInputs, given: ExpertArguments, out: torch.Tensor, config: ExpertConfig
) -> None:
    """Launches the product of tiles."""
    weight, routed = given.weight, given.routed
    (tokens, top_k), (num_local, lines, inputs) = routed.experts.shape, weight.shape
    rows = x if isinstance(x, torch.Tensor) else x.values
    values, scales = values_and_scales(weight)
    is_packed, is_scanned = isinstance(weight, PackedExperts), routed.counts is None
    is_grouped = isinstance(weight, ScaledExperts) and weight.is_grouped
    items = tokens * top_k if is_scanned else max_tiles(tokens, top_k, num_local, config.rows)
    step = GROUP if is_grouped else config.step
    by_tma = config.tma and not is_packed and inputs * values.element_size() % 16 == 0
    rows_by_tma = by_tma and not given.gated and not is_scanned
    flat = values if is_packed else values.view(-1, inputs)
    grid = items * triton.cdiv(lines, config.lines)
    if config.programs and not is_scanned:
        grid = min(grid, config.programs * multiprocessors(rows.device))
    x_scales = rows if isinstance(x, torch.Tensor) else x.scales
    _expert_kernel[(grid,)](
        rows, TensorDescriptor.from_tensor(rows, [config.rows, step]) if rows_by_tma else rows,
        TensorDescriptor.from_tensor(flat, [config.lines, step]) if by_tma else flat,
        x_scales, scales, rows if given.bias is None else given.bias, routed.weights,
        routed.experts, routed.experts if routed.counts is None else routed.counts,
        routed.experts if routed.rows is None else routed.rows, out, tokens, first_expert(routed),
        x_scales.stride(1) if scaling(x) == 2 else len(rows),
        2.0**weight.shift if isinstance(weight, PackedExperts) else 1.0,
        ROWS=config.rows, TMA_ROWS=rows_by_tma, TAIL=config.tail,
        EXPERTS_PAD=triton.next_power_of_2(num_local),
        PAIRS_PAD=scanned_pairs(config, top_k) if is_scanned else 0, PDL=given.pdl,
        S=given.spec(config.lines, step, tma=by_tma, x_scales=scaling(x)),
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=given.pdl,
    )  # fmt: skip


def max_tiles(tokens: int, top_k: int, num_experts: int, rows: int) -> int:
    """Returns how many tiles of `rows` rows there are at most, however tokens are routed."""
    pairs = tokens * top_k
    return min(num_experts, pairs) + pairs // rows


def scanned_pairs(config: ExpertConfig, top_k: int) -> int:
    """Returns the number of pairs, a power of two, that a program without buckets scans: the pairs
    of as many tokens as a tile has rows."""
    return config.rows * triton.next_power_of_2(top_k)
