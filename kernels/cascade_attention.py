"""Decode attention over a prefix that many rows share: its keys are read once for all of them.

Rows whose block tables begin with the same blocks attend to the same keys (requests with one system
prompt). `find_shared_prefix` finds them once a step, on the GPU, so that it is right in a replayed
CUDA graph too: a row whose blocks many others have, how far each of these agrees with it, and the
length that saves most reads. `launch_prefix` multiplies the queries of all
these rows with the prefix, tile by tile: rows × query heads of one KV head fill the rows of a
product. The prefix is divided among programs (split-KV), and a partial result of each part is left
in the workspace. The decode kernel then begins a row behind the prefix, with the softmax's state
that the parts give (`add_prefix`): no kernel more to merge them.

Where too few rows share too little, the prefix has length 0, and nothing is done. (The scheme is
that of Hydragen, Juravsky et al. 2024, and of FlashInfer's cascade inference, Ye et al. 2024.)
"""
# ruff: noqa: E741, N803, N806  (compile-time constants have capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import (
    CacheArguments,
    HeadShape,
    RotationArguments,
    ScoreArguments,
    load_tile,
    load_with_pairs,
    pairs,
    rotary_angles,
    rotated_heads,
    softmax_step,
)
from aioinfer.kernels.launch import pad_rows
from aioinfer.kernels.projection import Projection
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Numbers before the lists of rows in `CascadeWorkspace.rows`: keys of the prefix, rows that share
#: it, tiles of such rows, parts of the prefix, KV tiles a part, the row whose table is read.
_FIELDS = 8
_CHUNK = 32
#: Rows a warp when the prefix is searched for. Each is compared with `_CHUNK` others at a time, in
#: unrolled code: with 128 rows a warp, 1024 rows took 3 s to compile.
_ROWS_PER_WARP = 32
#: Of `CascadeConfig`: fewer rows, or fewer keys saved, are not worth the launch.
MIN_ROWS, MIN_SAVED_KEYS = 8, 8192


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """The compile-time configuration of the prefix kernel, and when it is worth its launch.

    Attributes:
        rows, tile: of a product: queries (rows times query heads of a KV head), and keys.
        num_warps, num_stages, programs_per_sm: of the kernel.
        max_splits, min_split: parts of the prefix at most, and keys of a part at least.
        min_rows, min_saved: rows that share a prefix at least, and keys that need not be read
            again at least (8192 are 32 MiB of an 8B model's layer: 8 us of an H200).
    """

    rows: int = 64
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    max_splits: int = 16
    min_split: int = 256
    min_rows: int = MIN_ROWS
    min_saved: int = MIN_SAVED_KEYS


def cascade_config(head_size: int, group: int, element_size: int) -> CascadeConfig:
    """Returns the configuration for `group` query heads a KV head and this many bytes an element of
    the cache. Three tiles of keys and of values fit into shared memory twice."""
    rows = max(64, triton.next_power_of_2(group))
    bytes_a_token = triton.next_power_of_2(head_size) * element_size
    return CascadeConfig(rows=rows, tile=max(16, min(64, 16384 // bytes_a_token)))


class PrefixArguments(NamedTuple):
    """The attributes of `CascadeWorkspace` of the same names."""

    rows: torch.Tensor
    states: torch.Tensor


class PrefixShape(NamedTuple):
    """The compile-time part of `CascadeWorkspace`: rows and keys of a product, and attributes of
    the same names."""

    rows: int
    tile: int
    max_rows: int
    lines: int
    programs: int


@dataclass(frozen=True, slots=True)
class CascadeWorkspace:
    """Buffers of a step's shared prefix, for all layers of one shape and one block table.

    Attributes:
        config: how the kernel is compiled.
        max_rows: rows of a step at most.
        num_kv_heads, group: KV heads, and query heads of each.
        programs: of the prefix kernel.
        block_size: tokens of a KV block.
        lines: queries whose partial results have a place in `states`.
        step: the length of a prefix is a multiple of this, and so of blocks and of all tiles. rows:
        int32 [8 + 3 * max_rows]: see `_FIELDS`; then of each row how many of its keys are in
            the shared prefix (0: none), and which of the sharing rows it is; then the sharing rows.
        states: float32, of each query of each part the maximum (base 2), then the sums, then the
            unnormalised outputs.
    """

    config: CascadeConfig
    max_rows: int
    num_kv_heads: int
    group: int
    programs: int
    block_size: int
    lines: int
    step: int
    rows: torch.Tensor
    states: torch.Tensor

    @classmethod
    def create(
        cls,
        num_q_heads: int,
        k_cache: torch.Tensor,
        max_rows: int,
        decode_tile: int,
        *,
        config: CascadeConfig | None = None,
        programs: int | None = None,
    ) -> CascadeWorkspace:
        """Returns a workspace for caches like `k_cache` [num_blocks, block_size, Hkv, D].

        Args:
            num_q_heads: of the layers.
            k_cache: of one of them.
            max_rows: decode rows of a step at most.
            decode_tile: keys of a tile of the decode kernel.
            config, programs: instead of the usual ones (for tests and tuning).
        """
        _, block_size, kv_heads, head_size = k_cache.shape
        group = num_q_heads // kv_heads
        config = config or cascade_config(head_size, group, k_cache.element_size())
        device = k_cache.device
        if programs is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = processors * config.programs_per_sm
        tiles = -(-max_rows // (config.rows // triton.next_power_of_2(group)))
        lines = max(programs, kv_heads * tiles) * config.rows
        width = triton.next_power_of_2(head_size) + 2
        return cls(
            config, max_rows, kv_heads, group, programs, block_size, lines,
            max(block_size, config.tile, decode_tile),
            torch.zeros(_FIELDS + 3 * max_rows, dtype=torch.int32, device=device),
            torch.empty(lines * width, dtype=torch.float32, device=device),
        )  # fmt: skip

    @property
    def arguments(self) -> PrefixArguments:
        """The buffers, as kernels take them."""
        return PrefixArguments(self.rows, self.states)

    @property
    def shape(self) -> PrefixShape:
        """The constants of the kernels."""
        rows, tile = self.config.rows, self.config.tile
        return PrefixShape(rows, tile, self.max_rows, self.lines, self.programs)

    @property
    def shared_len(self) -> int:
        """Keys of the shared prefix; reads from the GPU (for tests)."""
        return int(self.rows[0])


@triton.jit
def _count_rows(values, buffer, rows, num_rows, AT_LEAST: tl.constexpr, CHUNK: tl.constexpr):
    """Returns how many rows have the value of each row, or with AT_LEAST as much at least; the
    values [ROWS_PAD] pass through `buffer`."""
    tl.store(buffer + rows, values, rows < num_rows)
    tl.debug_barrier()
    count = rows * 0
    for begin in range(0, num_rows, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_values = tl.load(buffer + other, other < num_rows, -1, volatile=True)[None, :]
        is_like = other_values >= values[:, None] if AT_LEAST else values[:, None] == other_values
        count += tl.sum(is_like.to(tl.int32), axis=1)
    tl.debug_barrier()
    return count


@triton.jit
def _model_row(
    tables, limits, buffer, rows, num_rows, MIN_ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Returns the row whose beginning the most others seem to share, and the reads of blocks that
    this saves: by its blocks at the indices 0, 1, 3, 7 ..., of the first `limits` [ROWS_PAD]."""
    gain = rows * 0
    depth = num_rows * 0 + 1
    while depth <= tl.max(limits):
        block = tl.load(tables + depth - 1, limits >= depth, -1)
        alike = _count_rows(block, buffer, rows, num_rows, False, CHUNK)
        pays = (limits >= depth) & (alike >= MIN_ROWS)
        gain = tl.maximum(gain, tl.where(pays, (alike - 1) * depth, 0))
        depth *= 2
    return tl.argmax(gain, axis=0), tl.max(gain)


@triton.jit
def _common_blocks(tables, model_table, longest, limits, agrees, CHUNK: tl.constexpr):
    """Returns how many blocks at the beginning of each row are the same as in `model_table`, which
    has `longest`: [ROWS_PAD], `limits` at most, 0 where `agrees` is false."""
    common = tl.where(agrees, tl.minimum(limits, longest), 0)
    begin = longest * 0
    while begin < tl.max(common):
        index = begin + tl.arange(0, CHUNK)
        model_blocks = tl.load(model_table + index, index < longest, -1)
        row_blocks = tl.load(
            tables[:, None] + index[None, :],
            agrees[:, None] & (index[None, :] < common[:, None]),
            -1,
        )
        differs = tl.where(row_blocks != model_blocks[None, :], index[None, :], 2**30)
        common = tl.minimum(common, tl.min(differs, axis=1))
        begin += CHUNK
    return common


@triton.jit
def _best_length(
    common, buffer, rows, num_rows, MIN_ROWS: tl.constexpr, MIN_SAVED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns the length that saves most reads, of the rows' lengths `common` [ROWS_PAD]; 0 where
    too few rows have it, or too little is saved."""
    sharing = _count_rows(common, buffer, rows, num_rows, True, CHUNK)
    saved = tl.where(common > 0, (sharing - 1) * common, 0)
    best = tl.argmax(saved, axis=0)
    shared = tl.sum(tl.where(rows == best, common, 0))
    count = tl.sum(tl.where(rows == best, sharing, 0))
    if (count < MIN_ROWS) | (tl.max(saved) < MIN_SAVED):
        shared = shared * 0
    return shared


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["block_tables", "seq_lens"]
)
def _find_kernel(
    block_tables, seq_lens, out, num_rows, table_stride,
    KV_HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MIN_ROWS: tl.constexpr, MIN_SAVED: tl.constexpr,
    MAX_ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS_PAD)
    lens = tl.load(seq_lens + rows, rows < num_rows, 0)
    # a row's newest key is its own: it is written by the decode kernel
    limits = tl.maximum(lens - 1, 0) // BLOCK_SIZE
    tables = block_tables + rows.to(tl.int64) * table_stride
    shared_lens, places = out + 8, out + 8 + MAX_ROWS
    members = places + MAX_ROWS
    model, gain = _model_row(tables, limits, places, rows, num_rows, MIN_ROWS, CHUNK)
    longest = tl.sum(tl.where(rows == model, limits, 0))
    common = _common_blocks(
        tables, block_tables + model * table_stride, longest, limits, (limits > 0) & (gain > 0),
        CHUNK,
    )  # fmt: skip
    common = common * BLOCK_SIZE // STEP * STEP
    shared = _best_length(common, shared_lens, rows, num_rows, MIN_ROWS, MIN_SAVED, CHUNK)
    is_member = (common >= shared) & (common > 0) & (shared > 0)
    count = tl.sum(is_member.to(tl.int32))
    place = tl.cumsum(is_member.to(tl.int32)) - 1
    tl.store(shared_lens + rows, tl.where(is_member, shared, 0), rows < num_rows)
    tl.store(places + rows, place, rows < num_rows)
    tl.store(members + place, rows, is_member)
    row_tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    splits = tl.minimum(PROGRAMS // tl.maximum(row_tiles * KV_HEADS, 1), shared // MIN_SPLIT)
    splits = tl.maximum(tl.minimum(splits, MAX_SPLITS), 1)
    tiles = shared // TILE
    split_tiles = tl.maximum((tiles + splits - 1) // splits, 1)
    tl.store(out, shared)
    tl.store(out + 1, count)
    tl.store(out + 2, row_tiles)
    tl.store(out + 3, (tiles + split_tiles - 1) // split_tiles)
    tl.store(out + 4, split_tiles)
    tl.store(out + 5, model)


def find_shared_prefix(
    workspace: CascadeWorkspace, block_tables: torch.Tensor | None, seq_lens: torch.Tensor
) -> None:
    """Finds the prefix that the decodes of a step share. Called once a step, by `plan_decode`.

    Args:
        workspace: of the layers; its `rows` are written.
        block_tables: int32 [R, max_blocks]; None: no prefix is shared.
        seq_lens: int32 [R], as in `plan_decode`. Fewer than `min_rows` share nothing.
    """
    rows, config = seq_lens.shape[0], workspace.config
    if block_tables is None or rows < config.min_rows:
        workspace.rows.zero_()
        return
    padded = pad_rows(rows)
    _find_kernel[(1,)](
        block_tables, seq_lens, workspace.rows, rows, block_tables.stride(0),
        KV_HEADS=workspace.num_kv_heads,
        TILE_ROWS=config.rows // triton.next_power_of_2(workspace.group), TILE=config.tile,
        STEP=workspace.step, BLOCK_SIZE=workspace.block_size, PROGRAMS=workspace.programs,
        MAX_SPLITS=config.max_splits, MIN_SPLIT=config.min_split, MIN_ROWS=config.min_rows,
        MIN_SAVED=config.min_saved, MAX_ROWS=workspace.max_rows,
        ROWS_PAD=padded, CHUNK=_CHUNK, num_warps=min(32, padded // _ROWS_PER_WARP),
    )  # fmt: skip


@triton.jit
def _prefix_queries(
    q, q_row, row, place, head_of, valid, positions, axis_stride, rotation,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Returns queries [N, pad] of heads `head_of` of the lines at `q_row` elements, normed and
    rotated with a rotation."""
    d = tl.arange(0, SHAPE.pad)[None, :] + head_of[:, None] * 0
    lines = q + q_row[:, None] + head_of[:, None] * SHAPE.size
    mask = valid[:, None] & (d < SHAPE.size)
    if ROTATION is not None:
        pair = pairs(d, ROTATION.size)
        x, other = load_with_pairs(lines, d, pair, mask)
        norm = (
            None
            if rotation.q_weight is None
            else load_with_pairs(rotation.q_weight, d, pair, d < SHAPE.size)
        )
        angles = (
            None
            if rotation.cos_sin is None
            else rotary_angles(
                rotation, positions, axis_stride, row[:, None], place[:, None], d, ROTATION
            )
        )
        rotated = rotated_heads(x, other, norm, angles, rotation.eps, SHAPE, ROTATION)
        query = rotated.to(q.dtype.element_ty)
    else:
        query = tl.load(lines + d, mask, 0.0)
    return query


@triton.jit(do_not_specialize_on_alignment=["positions", "block_tables", "seq_lens"])
def _prefix_kernel(
    q, q_stride, positions, axis_stride, block_tables, table_stride, seq_lens, prefix, cache,
    scores, rotation,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr, PREFIX: tl.constexpr,
    FP16_OPERANDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    shared, count = tl.load(prefix.rows), tl.load(prefix.rows + 1)
    row_tiles, splits = tl.load(prefix.rows + 2), tl.load(prefix.rows + 3)
    split_tiles, model = tl.load(prefix.rows + 4), tl.load(prefix.rows + 5)
    members = prefix.rows + 8 + 2 * PREFIX.max_rows
    ROWS: tl.constexpr = PREFIX.rows
    PAD: tl.constexpr = SHAPE.pad
    line = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    table = block_tables + model.to(tl.int64) * table_stride
    # also where no prefix is shared: a kernel that depends on this one depends on all before it
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    items = row_tiles * splits * SHAPE.kv_heads
    for item in range(tl.program_id(0), items, PREFIX.programs):
        row_tile, rest = item % row_tiles, item // row_tiles
        split, head = rest % splits, rest // splits
        place = row_tile * (ROWS // SHAPE.group_pad) + line // SHAPE.group_pad
        member = line % SHAPE.group_pad
        valid = (place < count) & (member < SHAPE.group)
        row = tl.load(members + place, place < count, 0)
        newest = tl.maximum(tl.load(seq_lens + row, place < count, 1) - 1, 0)
        query = _prefix_queries(
            q, row.to(tl.int64) * q_stride, row, newest, head * SHAPE.group + member, valid,
            positions, axis_stride, rotation, SHAPE, ROTATION,
        )  # fmt: skip
        if FP16_OPERANDS:
            query = query.to(tl.float16)
        score_scale = scores.scale
        if cache.scales is not None:
            score_scale = scores.scale * tl.load(cache.scales + head)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PAD], tl.float32)
        first = split * split_tiles
        for index in range(first, tl.minimum(first + split_tiles, shared // PREFIX.tile)):
            key, value, at = load_tile(
                cache.k, cache.v, table, index, shared, head, cache.k_strides,
                cache.v_strides, SHAPE.size, SHAPE.pad, SHAPE.block_size, PREFIX.tile,
            )  # fmt: skip
            m, l, acc = softmax_step(
                query, key, value, (at < shared)[None, :], None, m, l, acc, score_scale,
                scores.soft_cap, None,
            )  # fmt: skip
        entry = item * ROWS + line
        tl.store(prefix.states + entry, m)
        tl.store(prefix.states + PREFIX.lines + entry, l)
        outputs = prefix.states + 2 * PREFIX.lines + entry.to(tl.int64)[:, None] * PAD
        tl.store(outputs + d[None, :], acc)


@triton.jit
def add_prefix(m, l, acc, prefix, row, head, SHAPE: tl.constexpr, PREFIX: tl.constexpr):
    """Returns the softmax's state of a sharing row's query heads of one KV head, m [N], l [N, TILE]
    and acc [N, pad], with the shared prefix's state added."""
    g = tl.arange(0, m.shape[0])
    d = tl.arange(0, SHAPE.pad)
    row_tiles, splits = tl.load(prefix.rows + 2), tl.load(prefix.rows + 3)
    place = tl.load(prefix.rows + 8 + PREFIX.max_rows + row)
    row_tile = place // (PREFIX.rows // SHAPE.group_pad)
    line = place % (PREFIX.rows // SHAPE.group_pad) * SHAPE.group_pad + g
    first = (tl.arange(0, l.shape[1]) == 0).to(tl.float32)[None, :]
    for split in range(splits):
        entry = ((head * splits + split) * row_tiles + row_tile) * PREFIX.rows + line
        part_m = tl.load(prefix.states + entry, g < SHAPE.group, float("-inf"))
        part_l = tl.load(prefix.states + PREFIX.lines + entry, g < SHAPE.group, 0.0)
        outputs = prefix.states + 2 * PREFIX.lines + entry.to(tl.int64)[:, None] * SHAPE.pad
        part = tl.load(outputs + d[None, :], (g < SHAPE.group)[:, None], 0.0)
        new_m = tl.maximum(m, part_m)
        safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)
        old, weight = tl.exp2(m - safe_m), tl.exp2(part_m - safe_m)
        l = l * old[:, None] + (part_l * weight)[:, None] * first
        acc = acc * old[:, None] + part * weight[:, None]
        m = new_m
    return m, l, acc


def launch_prefix(
    source: Projection,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: CascadeWorkspace,
    cache: CacheArguments,
    scores: ScoreArguments,
    rotation: RotationArguments | None,
    shape: HeadShape,
    *,
    fp16_operands: bool,
    pdl: bool,
) -> None:
    """Launches the prefix kernel, whose results the decode kernel behind it takes up, unless there
    are too few rows for a prefix; arguments as in `launch_decode`. `source.qkv` are the queries
    themselves without a rotation. There are no slopes."""
    config = workspace.config
    if seq_lens.shape[0] < config.min_rows:
        return
    _prefix_kernel[(workspace.programs,)](
        source.qkv, source.qkv.stride(0), source.positions, source.axis_stride, block_tables,
        block_tables.stride(0), seq_lens, workspace.arguments, cache, scores, rotation,
        SHAPE=shape, ROTATION=None if rotation is None else source.rotation.config,
        PREFIX=workspace.shape, FP16_OPERANDS=fp16_operands, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
