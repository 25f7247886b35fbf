"""Attention of rows of several tokens over the paged KV cache: the plain Triton kernel, for every
GPU.

Called through `paged_attention`, which prefers `prefill_hopper` where it is supported.
FlashAttention-2 (Dao, 2023) over KV tiles gathered through the block table; the query heads of one
KV head are packed into the rows of one tile.
"""
# ruff: noqa: E741, N803, N806  (compile-time constants have capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import (
    CacheArguments,
    HeadShape,
    ScoreArguments,
    add_sinks,
    load_slopes,
    load_tile,
    softmax_step,
)
from aioinfer.kernels.prefill_plan import PrefillPlan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The compile-time configuration of the prefill kernel: packed query rows and KV tokens a tile,
    warps, pipeline stages."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_config(head_size: int, element_size: int) -> PrefillConfig:
    """Returns the configuration for queries of this head size and bytes an element."""
    if head_size > 256:  # twice the warps: a row's sums take 512 registers
        return PrefillConfig(32, 16, 8, 1) if element_size == 4 else PrefillConfig(64, 32, 8, 2)
    if element_size == 4:
        return PrefillConfig(32, 16 if head_size > 128 else 32, 4, 1)
    return PrefillConfig(64, 32, 4, 2) if head_size > 128 else PrefillConfig(128, 64, 8, 2)


@triton.jit(do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"])
def _prefill_kernel(
    q, out, q_stride, out_stride, block_tables, table_stride, query_starts, seq_lens, plan, cache,
    scores, SHAPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    if index >= tl.load(plan):
        return
    row = tl.load(plan + 2 + 2 * index)
    tile = tl.load(plan + 3 + 2 * index)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    context = seq_len - length
    packed = tile * ROWS + tl.arange(0, ROWS)
    token = packed // SHAPE.group
    heads = head * SHAPE.group + packed % SHAPE.group
    PAD: tl.constexpr = SHAPE.pad
    d = tl.arange(0, PAD)
    own = (token < length)[:, None] & (d < SHAPE.size)[None, :]
    line = (start + token).to(tl.int64)
    query = tl.load(
        q + line[:, None] * q_stride + heads[:, None] * SHAPE.size + d[None, :], own, 0.0
    )
    table = block_tables + row.to(tl.int64) * table_stride
    last_token = tl.minimum(((tile + 1) * ROWS - 1) // SHAPE.group, length - 1)
    end = context + last_token + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + tile * ROWS // SHAPE.group - WINDOW + 1, 0) // TILE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    score_scale, v_scale = scores.scale, 1.0
    if cache.scales is not None:
        score_scale = scores.scale * tl.load(cache.scales + head)
        v_scale = tl.load(cache.scales + SHAPE.kv_heads + head)
    slopes = None if scores.slopes is None else load_slopes(scores.slopes, heads, token < length)
    for index in range(begin, (end + TILE - 1) // TILE):
        key, value, position = load_tile(
            cache.k, cache.v, table, index, seq_len, head, cache.k_strides,
            cache.v_strides, SHAPE.size, SHAPE.pad, SHAPE.block_size, TILE,
        )  # fmt: skip
        visible = position[None, :] <= context + token[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] > context + token[:, None] - WINDOW)
        distance = (context + token[:, None] - position[None, :]).to(tl.float32)
        m, l, acc = softmax_step(
            query, key, value, visible, distance, m, l, acc, score_scale, scores.soft_cap, slopes
        )
    if scores.sinks is not None:
        l = add_sinks(m, l, scores.sinks, heads, token < length)
    place = out + line[:, None] * out_stride + heads[:, None] * SHAPE.size + d[None, :]
    tl.store(
        place, (acc / tl.where(l == 0.0, 1.0, l)[:, None] * v_scale).to(out.dtype.element_ty), own
    )


def launch_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    *,
    window: int,
    scores: ScoreArguments,
    scales: torch.Tensor | None = None,
    pdl: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Launches the plain kernel; arguments as checked by `paged_attention`."""
    shape = HeadShape.of(q.shape[1], k_cache)
    config = config or prefill_config(shape.size, q.element_size())
    _prefill_kernel[(plan.capacity, shape.kv_heads)](
        q, out, q.stride(0), out.stride(0), block_tables, block_tables.stride(0), query_starts,
        seq_lens, plan.tiles, CacheArguments.of(k_cache, v_cache, scales), scores, SHAPE=shape,
        ROWS=config.rows, TILE=config.tile, WINDOW=window, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
