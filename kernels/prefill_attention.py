"""Attention of rows of several tokens over the paged KV cache: the plain Triton kernel, for every
GPU.

Called through `paged_attention`, which prefers `prefill_hopper` where it is supported.
FlashAttention-2 (Dao, 2023) over KV tiles gathered through the block table; the query heads of one
KV head are packed into the rows of one tile.
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import add_sinks, load_tile, softmax_step
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
    if element_size == 4:
        return PrefillConfig(32, 16 if head_size > 128 else 32, 4, 1)
    return PrefillConfig(64, 32, 4, 2) if head_size > 128 else PrefillConfig(128, 64, 8, 2)


@triton.jit(do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"])
def _prefill_kernel(
    q, k_cache, v_cache, out, block_tables, query_starts, seq_lens, plan, scale, soft_cap, scales,
    sinks, q_stride, out_stride, table_stride, k_block_stride, k_token_stride, k_head_stride,
    v_block_stride, v_token_stride, v_head_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
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
    token = packed // GROUP
    heads = head * GROUP + packed % GROUP
    d = tl.arange(0, HEAD_PAD)
    k_strides, v_strides = (
        (k_block_stride, k_token_stride, k_head_stride),
        (v_block_stride, v_token_stride, v_head_stride),
    )
    own = (token < length)[:, None] & (d < HEAD_SIZE)[None, :]
    line = (start + token).to(tl.int64)
    query = tl.load(
        q + line[:, None] * q_stride + heads[:, None] * HEAD_SIZE + d[None, :], own, 0.0
    )
    table = block_tables + row.to(tl.int64) * table_stride
    last_token = tl.minimum(((tile + 1) * ROWS - 1) // GROUP, length - 1)
    end = context + last_token + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + tile * ROWS // GROUP - WINDOW + 1, 0) // TILE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    v_scale = 1.0
    if HAS_SCALES:
        scale *= tl.load(scales + head)
        v_scale = tl.load(scales + tl.num_programs(1) + head)
    for index in range(begin, (end + TILE - 1) // TILE):
        key, value, position = load_tile(
            k_cache,
            v_cache,
            table,
            index,
            seq_len,
            head,
            k_strides,
            v_strides,
            HEAD_SIZE,
            HEAD_PAD,
            BLOCK_SIZE,
            TILE,
        )
        visible = position[None, :] <= context + token[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] > context + token[:, None] - WINDOW)
        m, l, acc = softmax_step(query, key, value, visible, m, l, acc, scale, soft_cap, SOFT_CAP)
    if HAS_SINKS:
        l = add_sinks(m, l, sinks, heads, token < length)
    place = out + line[:, None] * out_stride + heads[:, None] * HEAD_SIZE + d[None, :]
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
    scale: float,
    window: int,
    soft_cap: float,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Launches the plain kernel; arguments as checked by `paged_attention`. `scale` includes
    log2(e)."""
    _, block_size, kv_heads, head_size = k_cache.shape
    config = config or prefill_config(head_size, q.element_size())
    _prefill_kernel[(plan.capacity, kv_heads)](
        q, k_cache, v_cache, out, block_tables, query_starts, seq_lens, plan.tiles, scale, soft_cap,
        plan.tiles if scales is None else scales, plan.tiles if sinks is None else sinks,
        q.stride(0), out.stride(0), block_tables.stride(0), *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=plan.group, HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size, ROWS=config.rows, TILE=config.tile, WINDOW=window,
        SOFT_CAP=soft_cap > 0, HAS_SCALES=scales is not None, HAS_SINKS=sinks is not None, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
