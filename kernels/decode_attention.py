"""Attention of rows of one token over the paged KV cache, split along the keys. Called through
`paged_attention`.

The tiles of a (row, head) may lie in the spans of several programs (`decode_plan`): each leaves a
partial result, and the last of them to finish merges these, always in the same order.

The kernel can take the output of the fused qkv projection as it is (`Projection`): each program
applies norm and RoPE to the queries that it needs, and the program with a row's last tile does so
with the row's newest key as well, starts its softmax with it, and writes it to the cache. That
saves a launch and a round trip through memory in every layer of a decode step.

Where many rows share a prefix, its keys may be read once for all of them (`cascade_attention`): a
row then begins behind the prefix, with the softmax's state of the prefix.

Sinks join the sum of a (row, head) where its output is written: once, however it was split.
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import (
    add_sinks,
    cached_head,
    capped_scores,
    joined_channels,
    load_angles,
    load_tile,
    load_with_pairs,
    paired_softmax_step,
    pairs,
    rotated_heads,
    softmax_step,
    split_channels,
    to_cache_dtype,
)
from aioinfer.kernels.cascade_attention import add_prefix, launch_prefix
from aioinfer.kernels.decode_plan import (
    PLAN_FIELDS,
    DecodeConfig,
    DecodeWorkspace,
    load_plan,
    tile_range,
    tiles_behind,
)
from aioinfer.kernels.projection import Projection
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# the minimum of rows in a tensor-core product; the query heads of one KV head fill the first of
# them
QUERY_ROWS = 16


def _uses_fp16(config: DecodeConfig, queries: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether tiles are converted to float16: see `DecodeConfig`."""
    is_narrow = queries.dtype == torch.bfloat16 and cache.dtype == torch.float8_e4m3fn
    return config.fp16_operands and is_narrow


def _uses_pairs(config: DecodeConfig, queries: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether tiles are read as words of two channels: see `DecodeConfig`."""
    is_float16 = queries.dtype == torch.float16 or _uses_fp16(config, queries, cache)
    return config.paired_channels and is_float16 and cache.dtype == torch.float8_e4m3fn


def merged_splits(group: int, head_size: int) -> int:
    """Returns how many partial results are merged at a time: 8192 numbers, which fit in the
    registers of four warps."""
    return max(
        2, min(32, 8192 // (triton.next_power_of_2(group) * triton.next_power_of_2(head_size)))
    )


@triton.jit
def _merge(
    partials, maxima, sums, out, first, count, v_scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr, sinks=None, HAS_SINKS: tl.constexpr = False,
):  # fmt: skip
    """Merges the partial results of the programs first .. first + count - 1 for one (row, head),
    and writes the output. A sink joins the merged sum: no part has it."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_PAD)
    m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    l = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for begin in range(0, count, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        entry = ((first + split) * 2 + (split == 0).to(tl.int32))[:, None] * GROUP + g[None, :]
        valid = (split < count)[:, None] & (g < GROUP)[None, :]
        part_m = tl.load(maxima + entry, valid, float("-inf"))
        part_l = tl.load(sums + entry, valid, 0.0)
        part = tl.load(
            partials + entry[:, :, None] * HEAD_PAD + d[None, None, :], valid[:, :, None], 0.0
        )
        new_m = tl.maximum(m, tl.max(part_m, axis=0))
        safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(part_m - safe_m[None, :])
        old = tl.exp2(m - safe_m)
        l = l * old + tl.sum(part_l * weight, axis=0)
        acc = acc * old[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        m = new_m
    if HAS_SINKS:
        l = add_sinks(m, l, sinks, g, g < GROUP)
    value = acc / tl.where(l == 0.0, 1.0, l)[:, None] * v_scale
    tl.store(
        out + g[:, None] * HEAD_SIZE + d[None, :],
        value.to(out.dtype.element_ty),
        (g < GROUP)[:, None] & (d < HEAD_SIZE)[None, :],
    )


@triton.jit
def store_part(
    m, l, acc, partials, maxima, sums, counters, out, program, tile, tiles, at, span, v_scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr, sinks=None, HAS_SINKS: tl.constexpr = False,
):  # fmt: skip
    """Writes a program's part of a (row, head) with `tiles` tiles; the last program to finish a
    part of it merges them, GROUP_PAD query heads at a time.

    The part begins with the row's tile `tile`, which is tile `at` in the sequence of all tiles.
    """
    g = tl.arange(0, acc.shape[0])
    d = tl.arange(0, HEAD_PAD)
    entry = (program * 2 + (tile == 0).to(tl.int32)) * GROUP + g
    tl.store(maxima + entry, m, g < GROUP)
    tl.store(sums + entry, l, g < GROUP)
    tl.store(
        partials + entry[:, None] * HEAD_PAD + d[None, :],
        acc,
        (g < GROUP)[:, None] & (d < HEAD_PAD)[None, :],
    )
    first_program = (at - tile) // span
    parts = (at - tile + tiles - 1) // span - first_program + 1
    # every thread has written its partial results before one thread counts them
    tl.debug_barrier()
    if tl.atomic_add(counters + first_program, 1, sem="acq_rel") == parts - 1:
        tl.store(counters + first_program, 0)
        for head in tl.static_range(0, GROUP, GROUP_PAD):
            _merge(
                partials + head * HEAD_PAD,
                maxima + head,
                sums + head,
                out + head * HEAD_SIZE,
                first_program,
                parts,
                v_scale,
                GROUP,
                GROUP_PAD,
                HEAD_SIZE,
                HEAD_PAD,
                SPLITS,
                sinks + head if HAS_SINKS else sinks,
                HAS_SINKS,
            )


@triton.jit
def _channels(ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Returns the channels of a head [ROWS, HEAD_PAD], the same in each row."""
    return tl.arange(0, HEAD_PAD)[None, :] + tl.zeros([ROWS, 1], tl.int32)


@triton.jit
def _repeated(x, ROWS: tl.constexpr):
    """Returns x [N, D] repeated ROWS / N times: [ROWS, D]."""
    return tl.broadcast_to(x[None, :, :], ROWS // x.shape[0], x.shape[0], x.shape[1]).reshape(
        ROWS, x.shape[1]
    )


@triton.jit
def _begin_row(
    line, table, position, head, is_last, angles, q_norm, k_norm, m, l, acc, eps, scale, soft_cap,
    k_cache, v_cache, scales, key_shifts, k_strides, v_strides,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SHIFTS: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Returns the queries of a row whose newest token's projection begins at `line`, and the state
    of the softmax.

    With `is_last` the token's key and value are written to the cache, and the softmax begins with
    them, rounded as they are in the cache. All loads come before the computations, so that their
    latencies overlap. All tensors have the shape of the query heads, also those that are the same
    for every head: converting between layouts would take barriers.
    """
    g = tl.arange(0, GROUP_PAD)[:, None]
    d = _channels(GROUP_PAD, HEAD_PAD)
    pair, mask = pairs(d, ROTARY), d < HEAD_SIZE
    q_x, q_other = load_with_pairs(
        line + (head * GROUP + g) * HEAD_SIZE, d, pair, (g < GROUP) & mask
    )
    newest = line + (GROUP * KV_HEADS + head) * HEAD_SIZE
    k_x, k_other = load_with_pairs(newest, d, pair, mask)
    value = tl.load(newest + KV_HEADS * HEAD_SIZE + d, mask, 0.0).to(tl.float32)
    k_inverse, v_inverse = 1.0, 1.0
    if HAS_SCALES:
        k_inverse = tl.load(scales + 2 * KV_HEADS + head)
        v_inverse = tl.load(scales + 3 * KV_HEADS + head)
    if HAS_SHIFTS:
        shift = tl.load(key_shifts + head * HEAD_SIZE + d, mask, 0.0)
    cos, sin = load_angles(angles, d, ROTARY)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    query = rotated_heads(q_x, q_other, *q_norm, cos, sin, eps, HEAD_SIZE, HAS_NORM).to(
        line.dtype.element_ty
    )
    if is_last:
        key = rotated_heads(k_x, k_other, *k_norm, cos, sin, eps, HEAD_SIZE, HAS_NORM)
        if HAS_SHIFTS:
            key -= shift
        offset = position % BLOCK_SIZE
        key = to_cache_dtype(key * k_inverse, k_cache)
        cached = to_cache_dtype(value * v_inverse, v_cache)
        tl.store(k_cache + cached_head(block, offset, head, k_strides) + d, key, (g == 0) & mask)
        tl.store(v_cache + cached_head(block, offset, head, v_strides) + d, cached, (g == 0) & mask)
        score = tl.sum(query.to(tl.float32) * key.to(query.dtype).to(tl.float32), axis=1) * scale
        if SOFT_CAP:
            score = capped_scores(score, soft_cap)
        m = _repeated(score[:, None], m.shape[0]).reshape(m.shape[0])
        l += (tl.arange(0, l.shape[1]) == 0).to(tl.float32)[None, :]
        acc += _repeated(cached.to(tl.float32), acc.shape[0])
    return _repeated(query, m.shape[0]), m, l, acc


@triton.jit
def _attend(
    query, m, l, acc, k_tiles, v_tiles, k_strides, v_strides, table, head, begin, end, cached,
    seq_len, scale, soft_cap,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PAIRED: tl.constexpr, BY_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Returns the state of the softmax, m, l and acc, with a row's tiles `begin` .. `end` - 1
    added. Only keys among the first `cached` of `seq_len` count. With PAIRED the elements of tiles
    are words of two channels."""
    width: tl.constexpr = 2 if PAIRED else 1  # channels of an element of a tile
    if PAIRED:
        q_even, q_odd = split_channels(query)
        even, odd = split_channels(acc)
    for index in range(begin, tl.minimum(end, (cached + TILE - 1) // TILE)):
        key, value, position = load_tile(
            k_tiles, v_tiles, table, index, cached, head, k_strides, v_strides,
            HEAD_SIZE // width, HEAD_PAD // width, BLOCK_SIZE, TILE,
        )  # fmt: skip
        visible = position < cached
        if WINDOW > 0:
            visible = visible & (position >= seq_len - WINDOW)
        if PAIRED:
            m, l, even, odd = paired_softmax_step(
                q_even, q_odd, key, value, visible[None, :], m, l, even, odd, scale, soft_cap,
                SOFT_CAP, BY_ASSEMBLY,
            )  # fmt: skip
        else:
            m, l, acc = softmax_step(
                query, key, value, visible[None, :], m, l, acc, scale, soft_cap, SOFT_CAP
            )
    if PAIRED:
        acc = joined_channels(even, odd)
    return m, l, acc


@triton.jit(do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _decode_kernel(
    q, k_cache, v_cache, out, block_tables, seq_lens, plan, partials, maxima, sums, counters, scale,
    soft_cap, scales, key_shifts, sinks,
    cos_sin, q_weight, k_weight, eps, cos_sin_stride, q_stride, out_stride, table_stride,
    k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
    shared_rows, prefix_states,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FIELDS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
    PROJECTED: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SHIFTS: tl.constexpr, FP16_OPERANDS: tl.constexpr,
    HAS_SINKS: tl.constexpr, CASCADE: tl.constexpr = False, PREFIX_ROWS: tl.constexpr = 0,
    MAX_ROWS: tl.constexpr = 0, PREFIX_LINES: tl.constexpr = 0, PAIRED: tl.constexpr = False,
    BY_ASSEMBLY: tl.constexpr = False,
):  # fmt: skip
    program = tl.program_id(0)
    row, head, tile, todo, span, seq_len = load_plan(plan + program * FIELDS)
    if CASCADE:
        shared = tl.load(shared_rows + 8 + row, todo > 0, 0)
    at = program * span
    g = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_PAD)
    own = (g < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    k_strides, v_strides = (
        (k_block_stride, k_token_stride, k_head_stride),
        (v_block_stride, v_token_stride, v_head_stride),
    )
    k_tiles, v_tiles, k_tile_strides, v_tile_strides = k_cache, v_cache, k_strides, v_strides
    if PAIRED:
        k_tiles = k_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        v_tiles = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        k_tile_strides = (k_block_stride // 2, k_token_stride // 2, k_head_stride // 2)
        v_tile_strides = (v_block_stride // 2, v_token_stride // 2, v_head_stride // 2)
    # without norms the results of these loads are unused, and the compiler removes the loads
    if PROJECTED:
        wide = _channels(GROUP_PAD, HEAD_PAD)
        q_norm = load_with_pairs(q_weight, wide, pairs(wide, ROTARY), wide < HEAD_SIZE)
        k_norm = load_with_pairs(k_weight, wide, pairs(wide, ROTARY), wide < HEAD_SIZE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while todo > 0:
        first, tiles = tile_range(seq_len, WINDOW, TILE)
        if CASCADE:
            first, tiles = shared // TILE, tiles_behind(tiles, shared, TILE)
        end = tl.minimum(tiles, tile + todo)
        heads = head * GROUP + g
        line = q + row.to(tl.int64) * q_stride
        table = block_tables + row.to(tl.int64) * table_stride
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS, TILE], tl.float32)
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        cached = seq_len
        # the keys' scale goes into the scores, the values' into the output: nothing for an element
        score_scale, v_scale = scale, 1.0
        if HAS_SCALES:
            score_scale = scale * tl.load(scales + head)
            v_scale = tl.load(scales + KV_HEADS + head)
        if PROJECTED:
            cached = tl.maximum(seq_len - 1, 0)
            query, m, l, acc = _begin_row(
                line, table, cached, head, (end == tiles) & (seq_len > 0),
                cos_sin + cached.to(tl.int64) * cos_sin_stride,
                q_norm, k_norm, m, l, acc, eps, score_scale, soft_cap, k_cache, v_cache, scales,
                key_shifts, k_strides, v_strides,
                KV_HEADS, GROUP, GROUP_PAD, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, ROTARY, HAS_NORM,
                HAS_SCALES, HAS_SHIFTS, SOFT_CAP,
            )  # fmt: skip
        else:
            query = tl.load(line + heads[:, None] * HEAD_SIZE + d[None, :], own, 0.0)
        if FP16_OPERANDS:
            query = query.to(tl.float16)
        if CASCADE:  # noqa: SIM102  (`shared` exists with it only)
            if (tile == 0) & (shared > 0):
                m, l, acc = add_prefix(
                    m, l, acc, shared_rows, prefix_states, row, head, GROUP, GROUP_PAD, HEAD_PAD,
                    PREFIX_ROWS, MAX_ROWS, PREFIX_LINES,
                )  # fmt: skip
        m, l, acc = _attend(
            query, m, l, acc, k_tiles, v_tiles, k_tile_strides, v_tile_strides, table, head,
            first + tile, first + end, cached, seq_len, score_scale, soft_cap,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, PAIRED, BY_ASSEMBLY,
        )  # fmt: skip
        l = tl.sum(l, axis=1)
        place = out + row.to(tl.int64) * out_stride + heads[:, None] * HEAD_SIZE + d[None, :]
        if end - tile == tiles:
            if HAS_SINKS:
                l = add_sinks(m, l, sinks, heads, g < GROUP)
            tl.store(
                place,
                (acc / tl.where(l == 0.0, 1.0, l)[:, None] * v_scale).to(out.dtype.element_ty),
                own,
            )
        else:
            store_part(
                m, l, acc, partials, maxima, sums, counters,
                out + row.to(tl.int64) * out_stride + head * GROUP * HEAD_SIZE,
                program, tile, tiles, at, span, v_scale, GROUP, GROUP_PAD, HEAD_SIZE, HEAD_PAD,
                SPLITS, sinks + head * GROUP, HAS_SINKS,
            )  # fmt: skip
        todo -= end - tile
        at += end - tile
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            row += 1
            seq_len = tl.load(seq_lens + row, todo > 0, 0)
            if CASCADE:
                shared = tl.load(shared_rows + 8 + row, todo > 0, 0)


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    soft_cap: float,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    projection: Projection | None = None,
    pdl: bool = False,
) -> None:
    """Launches the decode kernel; arguments as checked by `paged_attention`. `scale` includes
    log2(e)."""
    _, block_size, kv_heads, head_size = k_cache.shape
    config = workspace.config
    group = out.shape[1] // kv_heads
    source = projection or Projection(q, q)
    norms = (
        (source.qkv, source.qkv) if source.q_weight is None else (source.q_weight, source.k_weight)
    )
    uses_fp16, cascade = _uses_fp16(config, source.qkv, k_cache), workspace.cascade
    if cascade is not None:
        launch_prefix(
            source, k_cache, v_cache, block_tables, seq_lens, cascade, scale=scale,
            soft_cap=soft_cap, scales=scales, is_projected=projection is not None,
            fp16_operands=uses_fp16, pdl=pdl,
        )  # fmt: skip
    _decode_kernel[(workspace.plan.shape[0],)](
        source.qkv, k_cache, v_cache, out, block_tables, seq_lens, workspace.plan,
        workspace.partials, workspace.maxima, workspace.sums,
        workspace.counters, scale, soft_cap, workspace.plan if scales is None else scales,
        source.cos_sin if source.key_shifts is None else source.key_shifts,
        workspace.sums if sinks is None else sinks,
        source.cos_sin, *norms, source.eps, source.cos_sin.stride(0),
        source.qkv.stride(0), out.stride(0), block_tables.stride(0), *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        workspace.plan if cascade is None else cascade.rows,
        workspace.sums if cascade is None else cascade.states,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group),
        ROWS=max(QUERY_ROWS, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=block_size,
        TILE=config.tile,
        WINDOW=workspace.window, SOFT_CAP=soft_cap > 0, FIELDS=PLAN_FIELDS,
        SPLITS=merged_splits(group, head_size),
        PDL=pdl, PROJECTED=projection is not None,
        ROTARY=source.cos_sin.shape[1] if projection is not None else 0,
        HAS_NORM=source.q_weight is not None, HAS_SCALES=scales is not None,
        HAS_SHIFTS=source.key_shifts is not None,
        FP16_OPERANDS=uses_fp16, HAS_SINKS=sinks is not None, CASCADE=cascade is not None,
        PREFIX_ROWS=0 if cascade is None else cascade.config.rows,
        MAX_ROWS=0 if cascade is None else cascade.max_rows,
        PREFIX_LINES=0 if cascade is None else cascade.lines,
        PAIRED=_uses_pairs(config, source.qkv, k_cache), BY_ASSEMBLY=source.qkv.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
