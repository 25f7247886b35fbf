"""Attention of rows of one token over paged latent vectors, split along the tokens: multi-head
latent attention with absorbed projections (DeepSeek-V2, DeepSeek-AI 2024).

All heads attend to one key a token: its latent vector (512 channels in DeepSeek's models) and a
rotated key (64). The values are the latent vectors themselves, so a tile is loaded once for both
products. A program computes a group of heads (`head_group`), as many as fill the rows of a
tensor-core product.

The work is divided by `decode_plan`: all tiles of a step, row by row and group by group, in spans
of equal length, which `plan_decode` computes on the GPU from the lengths. So the launch depends on
the number of rows alone, and a CUDA graph may hold it. Parts are merged as in `decode_attention`.
"""
# ruff: noqa: E741, N803, N806  (compile-time constants have capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import LOG2_E, HeadShape, softmax_weights, tile_channels
from aioinfer.kernels.decode_attention import store_part
from aioinfer.kernels.decode_plan import (
    PLAN_FIELDS,
    QUERY_ROWS,
    DecodeConfig,
    DecodeWorkspace,
    load_plan,
    tile_lines,
    tile_range,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: A tensor-core product of two warpgroups has so many rows.
WIDE_ROWS = 64


def head_group(num_heads: int, element_size: int) -> int:
    """Returns how many heads a program computes: 64 of 16 bits where that divides them, else at
    most 16."""
    if num_heads % WIDE_ROWS == 0 and element_size == 2:
        return WIDE_ROWS
    return max(size for size in range(1, QUERY_ROWS + 1) if num_heads % size == 0)


def latent_config(num_heads: int, element_size: int) -> DecodeConfig:
    """Returns the configuration for so many heads and bytes an element.

    Chosen by the compiler's output for Hopper, not measured: with 5 stages two tiles of 36 KiB are
    in flight, since the pipeliner spends the others on the block table; the queries of 16 heads
    take 128 registers of each thread, so that two programs fill a multiprocessor.
    """
    if element_size == 4:
        return DecodeConfig(tile=16, num_warps=4, num_stages=1, programs_per_sm=1, part_tiles=4)
    if head_group(num_heads, element_size) == WIDE_ROWS:
        return DecodeConfig(tile=32, num_warps=8, num_stages=5, programs_per_sm=1, part_tiles=4)
    return DecodeConfig(tile=32, num_warps=4, num_stages=5, programs_per_sm=2, part_tiles=4)


def make_latent_workspace(
    num_heads: int,
    latent_size: int,
    cache: torch.Tensor,
    *,
    config: DecodeConfig | None = None,
    programs: int | None = None,
) -> DecodeWorkspace:
    """Returns the buffers of `latent_decode`, to be planned by `plan_decode`.

    Args:
        num_heads, latent_size: of the layers that share it.
        cache: one of the layers' caches, for dtype and device.
        config: instead of `latent_config`'s (for tests and tuning).
        programs: instead of the number that fits the GPU (for tests and tuning).
    """
    group = head_group(num_heads, cache.element_size())
    config = config or latent_config(num_heads, cache.element_size())
    return DecodeWorkspace.empty(
        config, num_heads // group, group, tile_channels(latent_size), 0, cache.device, programs,
        merged_heads=min(QUERY_ROWS, group),
    )  # fmt: skip


@triton.jit
def load_latents(
    cache, table, index, seq_len, block_stride, token_stride,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the latent vectors [TILE, LATENT_PAD], rotated keys [TILE, ROTARY_PAD] and positions
    [TILE] of tile `index` of a row. Positions past the row's end are loaded as zeros, whatever the
    cache contains there."""
    d, r = tl.arange(0, LATENT_PAD), tl.arange(0, ROTARY_PAD)
    position = index * TILE + tl.arange(0, TILE)
    in_row = position < seq_len
    if TILE <= BLOCK_SIZE:
        block = tl.load(table + index * TILE // BLOCK_SIZE).to(tl.int64)
        offset = index * TILE % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        block = tl.load(table + position // BLOCK_SIZE, in_row, 0).to(tl.int64)
        offset = position % BLOCK_SIZE
    line = (cache + block * block_stride + offset * token_stride)[:, None]
    latent = tl.load(line + d[None, :], in_row[:, None] & (d < LATENT)[None, :], 0.0)
    key = tl.load(line + LATENT + r[None, :], in_row[:, None] & (r < ROTARY)[None, :], 0.0)
    return latent, key, position


@triton.jit(do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _latent_decode_kernel(
    absorbed, rotated, cache, out, block_tables, seq_lens, plan, parts, scale,
    absorbed_stride, rotated_strides, out_stride, table_stride, cache_strides,
    SHAPE: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    TILE: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PAD: tl.constexpr = SHAPE.pad
    program = tl.program_id(0)
    g, d, r = tl.arange(0, ROWS), tl.arange(0, PAD), tl.arange(0, ROTARY_PAD)
    own = (g < SHAPE.group)[:, None] & (d < SHAPE.size)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, head, tile, todo, span, seq_len = load_plan(plan + program * FIELDS)
    at = program * span
    while todo > 0:
        _, tiles = tile_range(seq_len, 0, TILE)
        end = tl.minimum(tiles, tile + todo)
        heads = (head * SHAPE.group + g)[:, None]
        line = row.to(tl.int64)
        table = block_tables + line * table_stride
        query = tl.load(
            absorbed + line * absorbed_stride + heads * SHAPE.size + d[None, :], own, 0.0
        )
        turned = tl.load(
            rotated + line * rotated_strides[0] + heads * rotated_strides[1] + r[None, :],
            (g < SHAPE.group)[:, None] & (r < ROTARY)[None, :], 0.0,
        )  # fmt: skip
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PAD], tl.float32)
        for index in range(tile, tl.minimum(end, (seq_len + TILE - 1) // TILE)):
            latent, key, position = load_latents(
                cache, table, index, seq_len, cache_strides[0], cache_strides[1],
                SHAPE.size, SHAPE.pad, ROTARY, ROTARY_PAD, SHAPE.block_size, TILE,
            )  # fmt: skip
            s = tl.dot(query, tl.trans(latent), input_precision="ieee")
            s = tl.dot(turned, tl.trans(key), s, input_precision="ieee") * scale
            visible = (position < seq_len)[None, :]
            p, m, old = softmax_weights(s, visible, None, m, None, None)
            l = l * old + tl.sum(p, axis=1)
            acc = tl.dot(p.to(latent.dtype), latent, acc * old[:, None], input_precision="ieee")
        if end - tile == tiles:
            place = out + line * out_stride + heads * SHAPE.size + d[None, :]
            output = acc / tl.where(l == 0.0, 1.0, l)[:, None]
            tl.store(place, output.to(out.dtype.element_ty), own)
        else:
            store_part(
                m, l, acc, parts, out + line * out_stride + head * SHAPE.group * SHAPE.size,
                out_stride, 1, program, tile, tiles, at, span, 1.0, None, SHAPE, 1, SPLITS,
            )  # fmt: skip
        todo -= end - tile
        at += end - tile
        tile = 0
        head += 1
        if head == SHAPE.kv_heads:
            head = 0
            row += 1
            seq_len = tl.load(seq_lens + row, todo > 0, 0)


def latent_decode(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns for each row and head the sum of its latent vectors, weighted by the softmax of the
    scores: [R, H, L].

    Args:
        absorbed: [R, H, L], the queries over latent vectors, contiguous; bf16, fp16 or fp32.
        rotated: [R, H, P], the rotated part of the queries; channels contiguous.
        cache: [num_blocks, block_size, L + P], latent vectors, then rotated keys; the entries of
            this step are already written.
        block_tables: int32 [R, max_blocks]; entries past a row's length are not read.
        seq_lens: int32 [R], tokens of each row, its own included; 0 is padding, whose output
            becomes zeros.
        workspace: of `make_latent_workspace`; `plan_decode` has been called for `seq_lens`.
        scale: of the scores.
        out: [R, H, L], contiguous, to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    rows, num_heads, latent = absorbed.shape
    rotary = rotated.shape[2]
    if cache.shape[2] != latent + rotary or cache.stride(2) != 1:
        raise ValueError(
            f"the cache must have {latent} + {rotary} contiguous channels, not {tuple(cache.shape)}"
        )
    if not absorbed.is_contiguous() or rotated.stride(2) != 1 or len(rotated) != rows:
        raise ValueError("the queries must be of as many rows, with contiguous heads")
    out = torch.empty_like(absorbed) if out is None else out
    group = head_group(num_heads, cache.element_size())
    config = workspace.config
    shape = HeadShape(
        num_heads // group, group, latent, min(QUERY_ROWS, triton.next_power_of_2(group)),
        tile_channels(latent), cache.shape[1],
    )  # fmt: skip
    _latent_decode_kernel[(workspace.plan.shape[0],)](
        absorbed, rotated, cache, out, block_tables, seq_lens, workspace.plan, workspace.parts,
        scale * LOG2_E.value, absorbed.stride(0), rotated.stride()[:2], out.stride(0),
        block_tables.stride(0), cache.stride()[:2],
        SHAPE=shape, ROWS=tile_lines(group), ROTARY=rotary,
        ROTARY_PAD=tile_channels(rotary), TILE=config.tile, FIELDS=PLAN_FIELDS,
        SPLITS=workspace.splits, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
