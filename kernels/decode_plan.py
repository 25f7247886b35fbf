"""The tiles of the KV cache that each program of a decode kernel computes: a plan on the GPU, made
once a step for all layers.

The work of a step is the sequence of all KV tiles, row by row and head by head. It is divided among
a fixed number of programs in spans of equal length ("stream-K", Osama et al. 2023; for attention
"Lean Attention", Sanovar et al. 2024): a span may begin in the middle of one (row, head) and end in
the middle of another. So a long sequence is split over as many programs as its length needs,
whatever else is in the batch, and the grid never changes: `plan_decode` computes the spans on the
GPU from the lengths, so that they are right in a replayed CUDA graph too.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.cascade_attention import (
    CascadeConfig,
    CascadeWorkspace,
    find_shared_prefix,
)
from aioinfer.kernels.launch import pad_rows

# first row, head and tile, number of tiles, tiles a program, keys of the first row: one 32-byte
# sector
PLAN_FIELDS = 8
# the minimum of rows in a tensor-core product; the query heads of one KV head fill the first of
# them
QUERY_ROWS = 16
#: Rows of one sequence are joined in steps of so many rows or more, for each 128 channels of a
#: head: with fewer, there are not enough tiles for all programs (notes/decode-attention.md).
MIN_JOINED_ROWS = 32


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The compile-time configuration of the decode kernel: KV tokens a tile, warps, pipeline
    stages, programs a multiprocessor; and how rows are split: no part is made longer than
    `part_tiles` tiles to have fewer of them (`_fewest_tiles`), and rows of up to `whole_tiles` are
    not split if there are enough of them to occupy the GPU.

    With `fp16_operands` a cache in float8 is multiplied in float16 where the queries are bfloat16:
    a GPU converts float8 to float16 in one instruction for two numbers, to bfloat16 in five.
    Queries above 65504 would be infinite.

    With `paired_channels`, too, where the operands are float16, keys and values in float8 are read
    from shared memory in words of two channels, which GPUs can transpose there (single bytes they
    cannot), and even and odd channels are multiplied apart.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    part_tiles: int
    fp16_operands: bool = False
    paired_channels: bool = False
    whole_tiles: int = 0


def decode_config(head_size: int, element_size: int) -> DecodeConfig:
    """Returns the configuration for a KV cache of this head size and bytes an element, measured on
    an H200."""
    bytes_a_token = triton.next_power_of_2(head_size) * element_size
    tile = max(16, min(64, 8192 // bytes_a_token))
    if tile * bytes_a_token > 8192:
        return DecodeConfig(tile, 4, 2, 2, 4)
    narrow = element_size == 1
    return DecodeConfig(
        tile, 2, 6, 4, 4, fp16_operands=narrow, paired_channels=narrow, whole_tiles=12
    )


def merged_splits(config: DecodeConfig, heads: int, head_size: int) -> int:
    """Returns how many partial results of `heads` query heads are merged at a time: from 2 to 32,
    as many as half of the registers of the warps hold."""
    numbers = triton.next_power_of_2(heads) * triton.next_power_of_2(head_size)
    return max(2, min(32, config.num_warps * 4096 // numbers))


def tile_lines(group: int) -> int:
    """Returns the rows of a product that computes `group` query heads of a row, or of several."""
    return max(QUERY_ROWS, triton.next_power_of_2(group))


def joined_rows(group: int) -> int:
    """Returns how many adjacent rows of one sequence fit into the rows of a product, with `group`
    query heads each."""
    return tile_lines(group) // triton.next_power_of_2(group)


class Parts(NamedTuple):
    """Partial results of a decode kernel with P programs, G query heads a KV head, or as many lines
    as a tile has where rows may be joined.

    Attributes:
        outputs: float32 [P, 2, G, D], unnormalised, of (row, head) pairs that a span covers in
            part: the one that the span begins in the middle of, and the one that it ends in the
            middle of.
        maxima, sums: float32 [P, 2, G], their running maxima (base 2) and sums.
        counters: int32 [P], how many partial results are there of those that are merged with the
            one of program p as the second (`store_part`). All zero between launches.
    """

    outputs: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of the decode kernel, shared by all layers of one shape. P programs.

    Attributes:
        config, num_kv_heads, window: the arguments that the buffers and the plan were made for.
        splits: see `merged_splits`.
        plan: int32 [P, 8], each program's span of the step's tiles.
        parts: the partial results.
        cascade: of the prefix that rows share, or None where it is not looked for.
        max_joined: how many adjacent rows of one sequence are computed together at most; 1: rows
            are of sequences of their own, or are taken for such.
        joined: int32 [rows], of the first of rows that are computed together, how many there are;
            None where none are.
    """

    config: DecodeConfig
    num_kv_heads: int
    window: int
    splits: int
    plan: torch.Tensor
    parts: Parts
    cascade: CascadeWorkspace | None = None
    max_joined: int = 1
    joined: torch.Tensor | None = None

    @classmethod
    def create(
        cls,
        num_q_heads: int,
        k_cache: torch.Tensor,
        *,
        window: int = 0,
        config: DecodeConfig | None = None,
        programs: int | None = None,
        cascade_rows: int = 0,
        cascade_config: CascadeConfig | None = None,
        max_rows: int = 0,
    ) -> DecodeWorkspace:
        """Returns a workspace for layers with caches like `k_cache` [num_blocks, block_size, Hkv,
        D] on its device.

        Args:
            window: the sliding window of these layers, 0 for none; layers with another one need
                another workspace.
            config: instead of `decode_config`'s (for tests and tuning).
            programs: P, instead of one number for each multiprocessor (for tests and tuning).
            cascade_rows: the maximum of rows of a step in which a shared prefix is looked for; 0:
                it is not. Not with a window.
            cascade_config: of the prefix kernel, instead of the usual one.
            max_rows: the maximum of rows of a step whose rows look ahead; 0: there is none.
        """
        _, _, kv_heads, head_size = k_cache.shape
        config = config or decode_config(head_size, k_cache.element_size())
        group = num_q_heads // kv_heads
        workspace = cls.empty(
            config, kv_heads, group, head_size, window, k_cache.device, programs, max_rows=max_rows
        )  # fmt: skip
        if not cascade_rows or window:
            return workspace
        cascade = CascadeWorkspace.create(
            num_q_heads, k_cache, cascade_rows, config.tile, config=cascade_config,
            programs=programs,
        )  # fmt: skip
        return replace(workspace, cascade=cascade)

    def for_lookahead(self, num_q_heads: int, head_size: int, rows: int) -> DecodeWorkspace:
        """Returns the workspace, with the same buffers, for steps of `rows` rows that may look
        ahead: in large ones as many adjacent rows of one sequence are computed together as the rows
        of a product hold query heads of a KV head."""
        group = num_q_heads // self.num_kv_heads
        if self.joined is None or rows < MIN_JOINED_ROWS * max(1, head_size // 128):
            return replace(self, cascade=None)
        splits = merged_splits(self.config, tile_lines(group), head_size)
        return replace(self, cascade=None, max_joined=joined_rows(group), splits=splits)

    @classmethod
    def empty(
        cls,
        config: DecodeConfig,
        kv_heads: int,
        group: int,
        head_size: int,
        window: int,
        device: torch.device,
        programs: int | None = None,
        *,
        merged_heads: int | None = None,
        max_rows: int = 0,
    ) -> DecodeWorkspace:
        """Returns a workspace for `kv_heads` groups of `group` query heads whose outputs have
        `head_size` channels, and are merged `merged_heads` heads at a time (by default all of a
        group); see `create`."""
        if programs is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = processors * config.programs_per_sm
        lines = tile_lines(group) if max_rows else group
        entries, channels = programs * 2 * lines, triton.next_power_of_2(head_size)
        splits = merged_splits(config, merged_heads or group, head_size)
        floats = torch.empty(entries * (channels + 2), dtype=torch.float32, device=device)
        maxima, sums, outputs = floats.split([entries, entries, entries * channels])
        plan = torch.zeros(programs, PLAN_FIELDS, dtype=torch.int32, device=device)
        counters = torch.zeros(programs, dtype=torch.int32, device=device)
        joined = None
        if max_rows and joined_rows(group) > 1:
            joined = torch.ones(max_rows, dtype=torch.int32, device=device)
        parts = Parts(outputs, maxima, sums, counters)
        return cls(config, kv_heads, window, splits, plan, parts, joined=joined)


@triton.jit
def tiles_behind(tiles, shared, TILE: tl.constexpr):
    """Returns how many of a row's tiles are behind a shared prefix of `shared` keys, one at
    least."""
    return tl.maximum(tiles - shared // TILE, 1)


@triton.jit
def tile_range(seq_len, WINDOW: tl.constexpr, TILE: tl.constexpr, joined=1):
    """Returns the first tile that a row's token attends to and the number of tiles, which is at
    least one so that the output of every row is written; of `joined` rows together, of which the
    last has `seq_len` keys."""
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - (joined - 1) - WINDOW, 0) // TILE
    return first, tl.maximum((seq_len + TILE - 1) // TILE - first, 1)


@triton.jit
def _fewest_tiles(longest, SPLITS: tl.constexpr, PART_TILES: tl.constexpr):
    """Returns how many tiles a part has at least, where the longest row has `longest`: its parts
    are merged SPLITS at a time, level by level. One level more takes a program as long as reading
    about PART_TILES tiles (on an H200: notes/decode-attention.md)."""
    fewest = tl.maximum(longest, 1)
    while fewest > PART_TILES:
        fewest = tl.cdiv(fewest, SPLITS)
    return fewest


@triton.jit
def _even_span(
    tiles, longest, num_rows, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr,
    PART_TILES: tl.constexpr, WHOLE_TILES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Returns how many tiles a program has if all have equally many, but no fewer than are worth a
    part. `longest` is the maximum of the rows' `tiles`.

    With enough (row, head) pairs to occupy the GPU one program reads all tiles of a short row
    sooner than several read and merge them.
    """
    fewest = _fewest_tiles(longest, SPLITS, PART_TILES)
    if 4 * num_rows * KV_HEADS >= PROGRAMS:
        fewest = tl.where(longest <= WHOLE_TILES, longest, fewest)
    return tl.maximum(tl.cdiv(tl.sum(tiles) * KV_HEADS, PROGRAMS), fewest)


@triton.jit
def _fit_apart(tiles, span, KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Whether the programs suffice for spans of `span` tiles if none has parts of two (row, head)
    pairs."""
    return tl.sum(tl.cdiv(tiles, span)) * KV_HEADS <= PROGRAMS


@triton.jit
def _shortest_apart(tiles, longest, span, KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Returns the shortest span with which no program has parts of two (row, head) pairs, and
    whether there is one that is hardly longer than the even `span`."""
    high = tl.maximum(span, tl.minimum(longest, span + span // 8 + 1))
    low = span
    while low < high:
        middle = (low + high) // 2
        fits = _fit_apart(tiles, middle, KV_HEADS, PROGRAMS)
        low, high = tl.where(fits, low, middle + 1), tl.where(fits, middle, high)
    return low, _fit_apart(tiles, low, KV_HEADS, PROGRAMS)


@triton.jit
def _at(row, rows, values):
    """Returns the value of one row, 0 where `row` is none of `rows`."""
    return tl.sum(tl.where(rows == row, values, 0))


@triton.jit
def _follows(seq_lens, offsets, rows, num_rows, JOINED: tl.constexpr):
    """Whether each row is computed together with the one before it: rows of one sequence are
    adjacent, with offsets 0, 1, ... and a key more each, and JOINED of them are together."""
    there = (rows > 0) & (rows < num_rows)
    offset, length = tl.load(offsets + rows, there, 0), tl.load(seq_lens + rows, there, 0)
    before = tl.load(offsets + rows - 1, there, 0), tl.load(seq_lens + rows - 1, there, 0)
    is_next = (offset == before[0] + 1) & (length == before[1] + 1) & (before[1] > 0)
    return is_next & (offset % JOINED != 0)


@triton.jit
def _join_rows(
    seq_lens, offsets, rows, num_rows, WINDOW: tl.constexpr, TILE: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Returns of each row how many rows are computed with it from it on, the keys of the last of
    them, and the tiles of all: 0 for rows that follow one."""
    count = tl.full(rows.shape, 1, tl.int32)
    goes_on = rows < num_rows
    for number in tl.static_range(1, JOINED):
        goes_on = goes_on & _follows(seq_lens, offsets, rows + number, num_rows, JOINED)
        count += goes_on.to(tl.int32)
    lens = tl.load(seq_lens + rows, rows < num_rows, 0) + count - 1
    _, tiles = tile_range(lens, WINDOW, TILE, count)
    return count, lens, tl.where(_follows(seq_lens, offsets, rows, num_rows, JOINED), 0, tiles)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens", "offsets"]
)  # fmt: skip
def _plan_kernel(
    seq_lens, plan, num_rows, shared_rows, offsets, joined, KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PART_TILES: tl.constexpr,
    WHOLE_TILES: tl.constexpr, PROGRAMS: tl.constexpr, ROWS_PAD: tl.constexpr, FIELDS: tl.constexpr,
    CASCADE: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS_PAD)
    if JOINED > 1:
        count, lens, tiles = _join_rows(seq_lens, offsets, rows, num_rows, WINDOW, TILE, JOINED)
        tl.store(joined + rows, count, (rows < num_rows) & (program == 0))
    else:
        lens = tl.load(seq_lens + rows, rows < num_rows, 0)
        _, tiles = tile_range(lens, WINDOW, TILE)
    if CASCADE:
        shared = tl.load(shared_rows + 8 + rows, rows < num_rows, 0)
        tiles = tiles_behind(tiles, shared, TILE)
    tiles = tl.where(rows < num_rows, tiles, 0)
    longest = tl.max(tiles)
    span = _even_span(tiles, longest, num_rows, KV_HEADS, SPLITS, PART_TILES, WHOLE_TILES, PROGRAMS)
    longer, apart = _shortest_apart(tiles, longest, span, KV_HEADS, PROGRAMS)
    span = tl.where(apart, longer, span)
    # Where no program has parts of two pairs, each pair begins with a program's span: they lie in
    # the sequence as if all spans were full.
    padded = tl.where(apart, tl.cdiv(tiles, span) * span, tiles)
    start = program * span
    row = tl.sum((tl.cumsum(padded) * KV_HEADS <= start).to(tl.int32))
    before = tl.sum(tl.where(rows < row, padded, 0)) * KV_HEADS
    here = tl.maximum(_at(row, rows, padded), 1)
    tile = (start - before) % here
    todo = tl.maximum(tl.minimum(span, tl.sum(padded) * KV_HEADS - start), 0)
    todo = tl.where(apart, tl.minimum(todo, _at(row, rows, tiles) - tile), todo)
    place = plan + program * FIELDS
    tl.store(place, row)
    tl.store(place + 1, (start - before) // here)
    tl.store(place + 2, tile)
    tl.store(place + 3, tl.maximum(todo, 0))
    tl.store(place + 4, span)
    tl.store(place + 5, _at(row, rows, lens))


@triton.jit
def load_plan(place):
    """Returns the fields of a program's span in the order in which `_plan_kernel` stores them:
    first row, head and tile, number of tiles, tiles a program, keys of the first row."""
    return (
        tl.load(place),
        tl.load(place + 1),
        tl.load(place + 2),
        tl.load(place + 3),
        tl.load(place + 4),
        tl.load(place + 5),
    )


def plan_decode(
    workspace: DecodeWorkspace,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> None:
    """Divides a step's KV tiles among the programs. Called once a step, before the first layer.

    Args:
        workspace: of the layers that the plan is for; its `plan` is written.
        seq_lens: int32 [R], keys that each row of one token attends to, its own included. A row of
            0 is padding: its output becomes zeros.
        block_tables: int32 [R, max_blocks], to look for a shared prefix where the workspace has
            buffers for it; None: there is none.
        offsets: int32 [R], of each row its number among the adjacent rows of its sequence, of which
            each has a key more than the one before; needed where rows are computed together.
    """
    rows, programs = seq_lens.shape[0], workspace.plan.shape[0]
    cascade, joined = workspace.cascade, workspace.joined
    if workspace.max_joined == 1:  # no kernel of its own for steps with offsets
        offsets = joined = None
    if cascade is not None:
        find_shared_prefix(cascade, block_tables, seq_lens)
    _plan_kernel[(programs,)](
        seq_lens, workspace.plan, rows, workspace.plan if cascade is None else cascade.rows,
        offsets, joined,
        KV_HEADS=workspace.num_kv_heads, WINDOW=workspace.window,
        TILE=workspace.config.tile,
        SPLITS=workspace.splits, PART_TILES=workspace.config.part_tiles,
        WHOLE_TILES=workspace.config.whole_tiles, PROGRAMS=programs,
        ROWS_PAD=pad_rows(rows),
        FIELDS=PLAN_FIELDS, CASCADE=cascade is not None, JOINED=workspace.max_joined,
        num_warps=4,
    )  # fmt: skip
