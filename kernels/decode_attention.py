"""Attention of rows of one token over the paged KV cache, split along the keys. Called through
`paged_attention`.

The tiles of a (row, head) may lie in the spans of several programs (`decode_plan`): each leaves a
partial result. Neighbouring results are merged by the last program of them to finish, and these
results in turn (`store_part`), always in the same order.

The kernel can take the output of the fused qkv projection as it is (`Projection`): each program
applies norm and RoPE to the queries that it needs, and the program with a row's last tile does so
with the row's newest key as well, starts its softmax with it, and writes it to the cache. That
saves a launch and a round trip through memory in every layer of a decode step. Where earlier steps
have cached all other keys, a step with few rows (`_loads_early`) loads the first tiles of keys and
values before the preceding kernel, which computes the projection, has ended.

Where many rows share a prefix, its keys may be read once for all of them (`cascade_attention`): a
row then begins behind the prefix, with the softmax's state of the prefix.

Sinks join the sum of a (row, head) where its output is written: once, however it was split.
"""
# ruff: noqa: E741, N803, N806  (compile-time constants have capitals; l is the softmax's sum)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import (
    CacheArguments,
    HeadShape,
    ScoreArguments,
    add_sinks,
    cached_head,
    capped_scores,
    joined_channels,
    load_slopes,
    load_tile,
    load_with_pairs,
    normed_values,
    paired_softmax_step,
    pairs,
    rotary_angles,
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
    tile_lines,
    tile_range,
    tiles_behind,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.projection import Projection


class DecodeTiles(NamedTuple):
    """The compile-time configuration of the decode kernel.

    Attributes:
        rows, tile: of a product: query heads, padded, of one or more rows, and keys.
        joined: how many rows of a sequence are computed together at most.
        window: tokens, or 0.
        splits: see `merged_splits`.
        fp16_operands, paired: whether keys and values are converted to float16, and read as words
            of two channels: see `DecodeConfig`.
        by_assembly: see `paired_channels`.
        early: whether the loads of a row's first tiles are issued before its projection is read:
            see `_loads_early`.
    """

    rows: int
    tile: int
    joined: int
    window: int
    splits: int
    fp16_operands: bool
    paired: bool
    by_assembly: bool
    early: bool


def _uses_fp16(config: DecodeConfig, queries: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether tiles are converted to float16: see `DecodeConfig`."""
    is_narrow = queries.dtype == torch.bfloat16 and cache.dtype == torch.float8_e4m3fn
    return config.fp16_operands and is_narrow


def _uses_pairs(config: DecodeConfig, queries: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether tiles are read as words of two channels: see `DecodeConfig`."""
    is_float16 = queries.dtype == torch.float16 or _uses_fp16(config, queries, cache)
    return config.paired_channels and is_float16 and cache.dtype == torch.float8_e4m3fn


def _loads_early(rows: int, kv_heads: int, programs: int) -> bool:
    """Whether programs issue the loads of a row's first tiles before they read its projection. With
    one row a launch ends 2 us earlier on an H200. But the queries are then computed within the loop
    over tiles, and each iteration converts them to the layout of the product: programs with many
    rows take longer (notes/decode-attention.md)."""
    return 2 * rows * kv_heads <= programs


@triton.jit
def _row_and_head(g, joined, SHAPE: tl.constexpr, JOINED: tl.constexpr):
    """Returns of each line of a tile of queries the row, of the `joined` <= JOINED rows that are
    computed together, the query head within its group, and whether there is such a one."""
    if JOINED == 1:
        return g * 0, g, g < SHAPE.group
    row, head = g // SHAPE.group_pad, g % SHAPE.group_pad
    return row, head, (row < joined) & (head < SHAPE.group)


@triton.jit
def _part_entry(first, split, LINES: tl.constexpr):
    """Returns the entry in `Parts` of part `split` of a (row, KV head) whose first part is of
    program `first`; a part has LINES entries."""
    return ((first + split) * 2 + (split == 0).to(tl.int32)) * LINES


@triton.jit
def _write_part(m, l, acc, parts, entry, g, SHAPE: tl.constexpr, LINES: tl.constexpr):
    """Writes the partial result of the lines `g`; the entry of the first one is `entry`."""
    d = tl.arange(0, SHAPE.pad)
    is_head = g < LINES
    tl.store(parts.maxima + entry + g, m, is_head)
    tl.store(parts.sums + entry + g, l, is_head)
    places = parts.outputs + (entry + g)[:, None] * SHAPE.pad + d[None, :]
    tl.store(places, acc, is_head[:, None])


@triton.jit
def _write_output(
    m, l, acc, out, out_stride, row, head, is_head, v_scale, sinks, SHAPE: tl.constexpr
):  # fmt: skip
    """Writes the outputs of a tile of queries whose softmax has seen all keys. Its lines are query
    heads `head` [N] of rows `row` [N], from the row of `out` on; the sinks join the sums."""
    d = tl.arange(0, SHAPE.pad)
    if sinks is not None:
        l = add_sinks(m, l, sinks, head, is_head)
    places = out + (row * out_stride + head * SHAPE.size)[:, None] + d[None, :]
    value = acc / tl.where(l == 0.0, 1.0, l)[:, None] * v_scale
    mask = is_head[:, None] & (d < SHAPE.size)[None, :]
    tl.store(places, value.to(out.dtype.element_ty), mask)


@triton.jit
def _merge(
    parts, out, out_stride, joined, first, begin, stride, count, head, is_output, v_scale, sinks,
    SHAPE: tl.constexpr, JOINED: tl.constexpr, LINES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges `count` <= SPLITS partial results of a (row, KV head), the parts begin, begin +
    stride, ..., for SHAPE.group_pad query heads from `head` on, of JOINED rows; writes the output,
    or the result in the place of the first. A sink joins the sum of the output: no part has it."""
    ROWS: tl.constexpr = SHAPE.group_pad * JOINED
    PAD: tl.constexpr = SHAPE.pad
    g = head + tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    index = tl.arange(0, SPLITS)
    entry = _part_entry(first, begin + index * stride, LINES)[:, None] + g[None, :]
    valid = (index < count)[:, None] & (g < LINES)[None, :]
    part_m = tl.load(parts.maxima + entry, valid, float("-inf"))
    part_l = tl.load(parts.sums + entry, valid, 0.0)
    outputs = parts.outputs + entry[:, :, None] * SHAPE.pad + d[None, None, :]
    part = tl.load(outputs, valid[:, :, None], 0.0)
    m = tl.max(part_m, axis=0)
    weight = tl.exp2(part_m - tl.where(m == float("-inf"), 0.0, m)[None, :])
    l = tl.sum(part_l * weight, axis=0)
    acc = tl.sum(part * weight[:, :, None], axis=0)
    if is_output:
        row, group_head, is_head = _row_and_head(g, joined, SHAPE, JOINED)
        _write_output(
            m, l, acc, out, out_stride, row, group_head, is_head, v_scale, sinks, SHAPE
        )  # fmt: skip
    else:
        _write_part(m, l, acc, parts, _part_entry(first, begin, LINES), g, SHAPE, LINES)


@triton.jit
def store_part(
    m, l, acc, parts, out, out_stride, joined, program, tile, tiles, at, span, v_scale, sinks,
    SHAPE: tl.constexpr, JOINED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes a program's part of a (row, head) with `tiles` tiles, and merges parts: of each SPLITS
    neighbours the last program to finish merges them into the place of the first, and so on with
    these results, until one is left, which is the output.

    The part begins with the row's tile `tile`, which is tile `at` in the sequence of all tiles.
    """
    LINES: tl.constexpr = SHAPE.group if JOINED == 1 else SHAPE.group_pad * JOINED
    STEP: tl.constexpr = SHAPE.group_pad * JOINED
    first = (at - tile) // span
    count = (at - tile + tiles - 1) // span - first + 1
    part, stride = program - first, 1
    g = tl.arange(0, acc.shape[0])
    _write_part(m, l, acc, parts, _part_entry(first, part, LINES), g, SHAPE, LINES)
    while stride < count:
        part = part // (stride * SPLITS) * (stride * SPLITS)
        members = tl.minimum(tl.cdiv(count - part, stride), SPLITS)
        is_output = stride * SPLITS >= count
        if members > 1:
            # every thread has written its partial results before one thread counts them
            tl.debug_barrier()
            # a group counts at its second member, which is the second one of no other group
            counter = parts.counters + first + part + stride
            if tl.atomic_add(counter, 1, sem="acq_rel") == members - 1:
                tl.store(counter, 0)
                for head in tl.static_range(0, LINES, STEP):
                    _merge(
                        parts, out, out_stride, joined, first, part, stride, members, head,
                        is_output, v_scale, sinks, SHAPE, JOINED, LINES, SPLITS,
                    )  # fmt: skip
            else:
                stride = count
        stride *= SPLITS


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
    line, table, row, place, head, is_last, positions, axis_stride, rotation, norms, m, l, acc,
    scale, soft_cap, cache, SHAPE: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Returns the queries of a row whose newest token's projection begins at `line`, and the state
    of the softmax.

    With `is_last` the token's key and value are written to the cache, at `place` in the row, and
    the softmax begins with them, rounded as they are in the cache. All loads come before the
    computations, so that their latencies overlap. All tensors have the shape of the query heads,
    also those that are the same for every head: converting between layouts would take barriers.
    """
    g = tl.arange(0, SHAPE.group_pad)[:, None]
    d = _channels(SHAPE.group_pad, SHAPE.pad)
    pair, mask = pairs(d, ROTATION.size), d < SHAPE.size
    q_x, q_other = load_with_pairs(
        line + (head * SHAPE.group + g) * SHAPE.size, d, pair, (g < SHAPE.group) & mask
    )
    newest = line + (SHAPE.group * SHAPE.kv_heads + head) * SHAPE.size
    k_x, k_other = load_with_pairs(newest, d, pair, mask)
    value = tl.load(newest + SHAPE.kv_heads * SHAPE.size + d, mask, 0.0).to(tl.float32)
    k_inverse, v_inverse = 1.0, 1.0
    if cache.scales is not None:
        k_inverse = tl.load(cache.scales + 2 * SHAPE.kv_heads + head)
        v_inverse = tl.load(cache.scales + 3 * SHAPE.kv_heads + head)
    if cache.key_shifts is not None:
        shift = tl.load(cache.key_shifts + head * SHAPE.size + d, mask, 0.0)
    angles = (
        None
        if rotation.cos_sin is None
        else rotary_angles(rotation, positions, axis_stride, row, place, d, ROTATION)
    )
    block = tl.load(table + place // SHAPE.block_size).to(tl.int64)
    query = rotated_heads(q_x, q_other, norms[0], angles, rotation.eps, SHAPE, ROTATION).to(
        line.dtype.element_ty
    )
    if is_last:
        key = rotated_heads(k_x, k_other, norms[1], angles, rotation.eps, SHAPE, ROTATION)
        if cache.key_shifts is not None:
            key -= shift
        if rotation.value_eps is not None:
            value = normed_values(value, rotation.value_eps, SHAPE)
        offset = place % SHAPE.block_size
        key = to_cache_dtype(key * k_inverse, cache.k)
        cached = to_cache_dtype(value * v_inverse, cache.v)
        k_line = cached_head(block, offset, head, cache.k_strides)
        v_line = cached_head(block, offset, head, cache.v_strides)
        tl.store(cache.k + k_line + d, key, (g == 0) & mask)
        tl.store(cache.v + v_line + d, cached, (g == 0) & mask)
        score = tl.sum(query.to(tl.float32) * key.to(query.dtype).to(tl.float32), axis=1) * scale
        if soft_cap is not None:
            score = capped_scores(score, soft_cap)
        m = _repeated(score[:, None], m.shape[0]).reshape(m.shape[0])
        l += (tl.arange(0, l.shape[1]) == 0).to(tl.float32)[None, :]
        acc += _repeated(cached.to(tl.float32), acc.shape[0])
    return _repeated(query, m.shape[0]), m, l, acc


@triton.jit
def _halved(strides):
    """Returns the strides of words of two channels."""
    return strides[0] // 2, strides[1] // 2, strides[2] // 2


@triton.jit
def _tile_source(cache, TILES: tl.constexpr):
    """Returns the keys and values of the cache and their strides; with TILES.paired the elements
    are words of two channels."""
    source = (cache.k, cache.v, cache.k_strides, cache.v_strides)
    if TILES.paired:
        source = (
            cache.k.to(tl.pointer_type(tl.int16), bitcast=True),
            cache.v.to(tl.pointer_type(tl.int16), bitcast=True),
            _halved(cache.k_strides),
            _halved(cache.v_strides),
        )
    return source


@triton.jit
def _attend(
    query, m, l, acc, start, begin, end, seq_len, joined, scores, is_first,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Returns the state of the softmax, m, l and acc, with a row's tiles `begin` .. `end` - 1
    added. Only keys among the first `cached` of `seq_len` count; of `joined` rows that are computed
    together these are the last one's.

    `start` is the argument of `_start_row`. With TILES.early, `query` and the state are those of
    `_empty_state`, and `_start_row` is called within the loop, behind the loads of the first tiles;
    a program's first row waits there for the preceding kernel.
    """
    _, table, _, head, lines, cached, _, scale, cache = start
    keys, values, k_strides, v_strides = _tile_source(cache, TILES)
    member, heads, is_head = lines
    behind = joined - 1 - member  # how many keys each line has less
    slopes = None if scores.slopes is None else load_slopes(scores.slopes, heads, is_head)
    width: tl.constexpr = 2 if TILES.paired else 1  # channels of an element of a tile
    TILE: tl.constexpr = TILES.tile
    last = tl.minimum(end, (cached + TILE - 1) // TILE)
    if TILES.early:
        last = tl.maximum(last, begin + 1)  # one iteration even where no key is cached
    if TILES.paired:
        q_even, q_odd = split_channels(query)
        even, odd = split_channels(acc)
    for index in range(begin, last):
        key, value, position = load_tile(
            keys, values, table, index, cached, head, k_strides, v_strides, SHAPE.size // width,
            SHAPE.pad // width, SHAPE.block_size, TILE,
        )  # fmt: skip
        if TILES.early:  # noqa: SIM102  (known when it is compiled)
            if index == begin:
                if is_first:
                    wait_for_kernel(PDL)
                query, m, l, acc = _start_row(start, scores.soft_cap, SHAPE, ROTATION, TILES)
                if TILES.paired:
                    q_even, q_odd = split_channels(query)
                    even, odd = split_channels(acc)
        if TILES.joined > 1:
            from_end = seq_len - 1 - position[None, :] - behind[:, None]
            visible = from_end >= 0
        else:
            from_end = (seq_len - 1 - position)[None, :]
            visible = (position < cached)[None, :]
        if TILES.window > 0:
            visible = visible & (from_end < TILES.window)
        distance = from_end.to(tl.float32)
        if TILES.paired:
            m, l, even, odd = paired_softmax_step(
                q_even, q_odd, key, value, visible, distance, m, l, even, odd, scale,
                scores.soft_cap, slopes, TILES.by_assembly,
            )  # fmt: skip
        else:
            m, l, acc = softmax_step(
                query, key, value, visible, distance, m, l, acc, scale, scores.soft_cap, slopes
            )
    if TILES.paired:
        acc = joined_channels(even, odd)
    return m, l, acc


@triton.jit
def _norm_weights(rotation, SHAPE: tl.constexpr, ROTATION: tl.constexpr):
    """Returns the weights of the norms of queries and of keys, each also by pairs of channels."""
    d = _channels(SHAPE.group_pad, SHAPE.pad)
    pair = pairs(d, ROTATION.size)
    q_norm = load_with_pairs(rotation.q_weight, d, pair, d < SHAPE.size)
    k_norm = load_with_pairs(rotation.k_weight, d, pair, d < SHAPE.size)
    return q_norm, k_norm


@triton.jit
def _empty_state(queries, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Returns queries [TILES.rows, SHAPE.pad] that are zero, and the state m, l and acc of a
    softmax that has seen no key."""
    ROWS: tl.constexpr = TILES.rows
    TILE: tl.constexpr = TILES.tile
    PAD: tl.constexpr = SHAPE.pad
    query = tl.zeros([ROWS, PAD], queries[0].dtype.element_ty)
    if TILES.fp16_operands:
        query = query.to(tl.float16)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return query, m, tl.zeros([ROWS, TILE], tl.float32), tl.zeros([ROWS, PAD], tl.float32)


@triton.jit
def _start_row(
    start, soft_cap, SHAPE: tl.constexpr, ROTATION: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Returns the queries [TILES.rows, SHAPE.pad] of a row, or of joined ones, and the state of the
    softmax before the keys of the cache: empty, or that of `_begin_row`, which has the newest key.

    `start` is (queries, table, row, head, lines, cached, is_last, scale, cache):
        queries: projection or queries, its stride, positions, their stride, rotation, and norms.
        table: the row's block table. row, head: the row and the KV head.
        lines: of each line of the tile of queries the row among the joined rows, the query head,
            and whether the line has a query.
        cached: how many keys are cached. is_last: whether the newest key is added.
        scale: of the scores.
    """
    PAD: tl.constexpr = SHAPE.pad
    queries, table, row, head, lines, cached, is_last, scale, cache = start
    q, q_stride, positions, axis_stride, rotation, norms = queries
    line = q + row.to(tl.int64) * q_stride
    query, m, l, acc = _empty_state(queries, SHAPE, TILES)
    if ROTATION is not None:
        query, m, l, acc = _begin_row(
            line, table, row, cached, head, is_last, positions, axis_stride, rotation, norms, m, l,
            acc, scale, soft_cap, cache, SHAPE, ROTATION,
        )  # fmt: skip
    else:
        member, heads, is_head = lines
        d = tl.arange(0, PAD)
        places = (member * q_stride + heads * SHAPE.size)[:, None] + d[None, :]
        query = tl.load(line + places, is_head[:, None] & (d < SHAPE.size)[None, :], 0.0)
    if TILES.fp16_operands:
        query = query.to(tl.float16)
    return query, m, l, acc


@triton.jit
def _write_result(
    m, l, acc, parts, out, out_stride, row, head, lines, joined, program, tile, end, tiles, at,
    span, v_scale, sinks, SHAPE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Writes the result of tiles `tile` .. `end` - 1 of a (row, head): the output, where these are
    all its tiles, or a part (see `store_part`)."""
    target = out + row.to(tl.int64) * out_stride
    if end - tile == tiles:
        member, heads, is_head = lines
        _write_output(
            m, l, acc, target, out_stride, member, heads, is_head, v_scale, sinks, SHAPE
        )  # fmt: skip
    else:
        own_sinks = None if sinks is None else sinks + head * SHAPE.group
        store_part(
            m, l, acc, parts, target + head * SHAPE.group * SHAPE.size, out_stride, joined,
            program, tile, tiles, at, span, v_scale, own_sinks, SHAPE, TILES.joined, TILES.splits,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions", "block_tables", "seq_lens"])
def _decode_kernel(
    q, out, q_stride, out_stride, positions, axis_stride, block_tables, table_stride, seq_lens,
    plan, parts, cache, scores, rotation, prefix, joined_rows,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr, TILES: tl.constexpr, PREFIX: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, head, tile, todo, span, seq_len = load_plan(plan + program * FIELDS)
    if prefix is not None:
        shared = tl.load(prefix.rows + 8 + row, todo > 0, 0)
    g = tl.arange(0, TILES.rows)
    at, joined = program * span, 1
    if TILES.joined > 1:
        joined = tl.load(joined_rows + row, todo > 0, 1)
    norms = None, None
    if ROTATION is not None:  # noqa: SIM102  (without it, there is no rotation)
        if rotation.q_weight is not None:
            norms = _norm_weights(rotation, SHAPE, ROTATION)
    queries = (q, q_stride, positions, axis_stride, rotation, norms)
    if not TILES.early:
        wait_for_kernel(PDL)
    while todo > 0:
        first, tiles = tile_range(seq_len, TILES.window, TILES.tile, joined)
        if prefix is not None:
            first, tiles = shared // TILES.tile, tiles_behind(tiles, shared, TILES.tile)
        end = tl.minimum(tiles, tile + todo)
        member, group_head, is_head = _row_and_head(g, joined, SHAPE, TILES.joined)
        lines = (member, head * SHAPE.group + group_head, is_head)
        table = block_tables + (row + joined - 1).to(tl.int64) * table_stride
        # the keys' scale goes into the scores, the values' into the output: nothing for an element
        scale, v_scale = scores.scale, 1.0
        if cache.scales is not None:
            scale = scores.scale * tl.load(cache.scales + head)
            v_scale = tl.load(cache.scales + SHAPE.kv_heads + head)
        cached = seq_len if ROTATION is None else tl.maximum(seq_len - 1, 0)
        start = (
            queries, table, row, head, lines, cached, (end == tiles) & (seq_len > 0), scale, cache,
        )  # fmt: skip
        if TILES.early:
            query, m, l, acc = _empty_state(queries, SHAPE, TILES)
        else:
            query, m, l, acc = _start_row(start, scores.soft_cap, SHAPE, ROTATION, TILES)
        if prefix is not None:  # noqa: SIM102  (`shared` exists with it only)
            if (tile == 0) & (shared > 0):
                m, l, acc = add_prefix(m, l, acc, prefix, row, head, SHAPE, PREFIX)
        m, l, acc = _attend(
            query, m, l, acc, start, first + tile, first + end, seq_len, joined, scores,
            at == program * span, SHAPE, ROTATION, TILES, PDL,
        )  # fmt: skip
        _write_result(
            m, tl.sum(l, axis=1), acc, parts, out, out_stride, row, head, lines, joined, program,
            tile, end, tiles, at, span, v_scale, scores.sinks, SHAPE, TILES,
        )  # fmt: skip
        todo -= end - tile
        at += end - tile
        tile, head = 0, head + 1
        if head == SHAPE.kv_heads:
            head = 0
            row += joined
            if TILES.joined > 1:
                joined = tl.load(joined_rows + row, todo > 0, 1)
            seq_len = tl.load(seq_lens + row + joined - 1, todo > 0, 0)
            if prefix is not None:
                shared = tl.load(prefix.rows + 8 + row, todo > 0, 0)


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scores: ScoreArguments,
    scales: torch.Tensor | None = None,
    projection: Projection | None = None,
    older_keys_cached: bool = False,
    pdl: bool = False,
) -> None:
    """Launches the decode kernel; arguments as checked by `paged_attention`."""
    config, cascade = workspace.config, workspace.cascade
    shape = HeadShape.of(out.shape[1], k_cache)
    source = projection or Projection(q)
    cache = CacheArguments.of(k_cache, v_cache, scales, source.key_shifts)
    fp16_operands = _uses_fp16(config, source.qkv, k_cache)
    rotation = None if projection is None else source.rotation.arguments
    if cascade is not None:
        launch_prefix(
            source, block_tables, seq_lens, cascade, cache, scores, rotation, shape,
            fp16_operands=fp16_operands, pdl=pdl,
        )  # fmt: skip
    programs = workspace.plan.shape[0]
    may_be_early = older_keys_cached and projection is not None and cascade is None
    tiles = DecodeTiles(
        tile_lines(shape.group), config.tile, workspace.max_joined, workspace.window,
        workspace.splits, fp16_operands,
        _uses_pairs(config, source.qkv, k_cache), source.qkv.is_cuda,
        may_be_early and _loads_early(out.shape[0], shape.kv_heads, programs),
    )  # fmt: skip
    _decode_kernel[(programs,)](
        source.qkv, out, source.qkv.stride(0), out.stride(0), source.positions, source.axis_stride,
        block_tables, block_tables.stride(0), seq_lens, workspace.plan, workspace.parts, cache,
        scores, rotation, None if cascade is None else cascade.arguments, workspace.joined,
        SHAPE=shape, ROTATION=None if projection is None else source.rotation.config, TILES=tiles,
        PREFIX=None if cascade is None else cascade.shape, FIELDS=PLAN_FIELDS, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
