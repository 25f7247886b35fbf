"""Products with adapters of experts (LoRA, Hu et al. 2021): y += (x A^T) B^T, where a pair of a
token and one of its experts has the matrices of the token's adapter and of the expert, or none.

Pairs are sorted by (adapter, expert) into tiles of `TILE`, so that a program multiplies the
matrices of one. The first product divides its input channels among programs, whose sums the second
adds up. Everything that depends on adapters and routing is on the GPU: a CUDA graph holds for any.
Called by `features.adapters.layers.experts` behind the products of `expert_product`.
"""
# ruff: noqa: N803  (matrices and compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_arguments import first_expert
from aioinfer.kernels.expert_routing import RoutedTokens

#: Pairs of a tile.
TILE = 16
#: Pairs, or matrices, that the sort takes at a time.
_BLOCK = 1024
#: Output channels of a program, the maximum of ranks that it takes at a time, and the bytes of a
#: row's input channels.
_CHANNELS, _MAX_RANKS, _INPUT_BYTES = 128, 64, 512
#: Up to so many pairs, among how many programs the input channels of a tile are divided.
_SPLITS = ((128, 8), (1024, 2))


@dataclass(frozen=True, slots=True)
class PairTiles:
    """The pairs of a step by adapter and expert. A pair is token * top_k + j, as in `RoutedTokens`.

    Attributes:
        order: int32 [tiles * TILE], the pair at each place; -1 for none.
        keys: int32 [tiles], adapter slot * experts + expert of each tile, of the experts that the
            rank has; -1 for a tile without pairs.
        experts: how many the rank has.
        top_k: experts of a token.
        weights: float32 [T, top_k], of the pairs.
        rows: int32 [T * top_k], the row of each pair in the tensor between the two products, which
            buckets sort by expert; None for pairs in order.
    """

    order: torch.Tensor
    keys: torch.Tensor
    experts: int
    top_k: int
    weights: torch.Tensor
    rows: torch.Tensor | None


@triton.jit(do_not_specialize=["pairs", "tiles", "first_expert"])
def _sort_kernel(
    adapters, experts, order, keys, counts, starts, places, pairs, tiles, first_expert,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """`counts`, `starts`: int32 [NUM], of each key; `places`: int32 [pairs], among those with the
    same key."""
    column = tl.arange(0, BLOCK)
    for first in range(0, tiles * TILE, BLOCK):
        tl.store(order + first + column, -1, first + column < tiles * TILE)
    for first in range(0, NUM, BLOCK):
        tl.store(counts + first + column, 0, first + column < NUM)
    tl.debug_barrier()  # the counts are zero before they grow
    for first in range(0, pairs, BLOCK):
        pair = first + column
        adapter = tl.load(adapters + pair // TOP_K, pair < pairs, -1)
        expert = tl.load(experts + pair, pair < pairs, -1) - first_expert
        here = (adapter >= 0) & (expert >= 0) & (expert < EXPERTS)
        place = tl.atomic_add(counts + adapter * EXPERTS + expert, 1, here)
        tl.store(places + pair, place, here)
    tl.debug_barrier()
    total = tl.zeros([], tl.int32)
    for first in range(0, NUM, BLOCK):
        key = first + column
        used = (tl.load(counts + key, key < NUM, 0) + TILE - 1) // TILE
        tl.store(starts + key, total + tl.cumsum(used, 0) - used, key < NUM)
        total += tl.sum(used, 0)
    for first in range(0, tiles, BLOCK):
        tile = first + column
        tl.store(keys + tile, -1, (tile >= total) & (tile < tiles))
    tl.debug_barrier()
    for first in range(0, pairs, BLOCK):
        pair = first + column
        adapter = tl.load(adapters + pair // TOP_K, pair < pairs, -1)
        expert = tl.load(experts + pair, pair < pairs, -1) - first_expert
        here = (adapter >= 0) & (expert >= 0) & (expert < EXPERTS)
        key = adapter * EXPERTS + expert
        place = tl.load(places + pair, here, 0)
        tile = tl.load(starts + key, here, 0) + place // TILE
        tl.store(order + tile * TILE + place % TILE, pair, here)
        tl.store(keys + tile, key, here & (place % TILE == 0))


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def _rows_kernel(
    counts, buckets, rows, tokens, first_expert, EXPERTS: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the row of each pair of an expert: behind the pairs of all experts before it."""
    expert = tl.program_id(0)
    number = tl.arange(0, PAD)
    sizes = tl.minimum(tl.load(counts + first_expert + number, number < EXPERTS, 0), tokens)
    before = tl.sum(tl.where(number < expert, sizes, 0), 0)
    size = tl.sum(tl.where(number == expert, sizes, 0), 0)
    bucket = buckets + (first_expert + expert).to(tl.int64) * tokens
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        pair = tl.load(bucket + place, place < size, 0)
        tl.store(rows + pair, before + place, place < size)


def sort_pairs(
    adapters: torch.Tensor, routed: RoutedTokens, experts: int, num_slots: int
) -> PairTiles:
    """Returns the pairs of tokens with adapters.

    Args:
        adapters: int32 [T], the adapter slot of each token, below `num_slots`; negative for none.
        routed: the experts of the T tokens.
        experts: how many this rank has.
    """
    top_k = routed.experts.shape[1]
    pairs, keys = len(adapters) * top_k, num_slots * experts
    tiles = min(pairs, -(-pairs // TILE) + keys)
    sizes = tiles * TILE, tiles, keys, keys, pairs
    order, of_tiles, counts, starts, places = torch.empty(
        sum(sizes), dtype=torch.int32, device=adapters.device
    ).split(sizes)
    _sort_kernel[(1,)](
        adapters, routed.experts, order, of_tiles, counts, starts, places, pairs, tiles,
        first_expert(routed), EXPERTS=experts, TOP_K=top_k, NUM=keys, BLOCK=_BLOCK, TILE=TILE,
        num_warps=8,
    )  # fmt: skip
    rows = None
    if routed.counts is not None:
        rows = torch.empty(pairs, dtype=torch.int32, device=adapters.device)
        _rows_kernel[(experts,)](
            routed.counts, routed.rows, rows, len(adapters), first_expert(routed),
            EXPERTS=experts, PAD=triton.next_power_of_2(experts), BLOCK=256, num_warps=4,
        )  # fmt: skip
    return PairTiles(order, of_tiles, experts, top_k, routed.weights, rows)


@triton.jit(do_not_specialize=["modules", "tiles"])
def _shrink_kernel(
    x, A, parts, order, keys, ranks, rows, width, modules, tiles, x_stride,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PER_ROW: tl.constexpr, SORTED: tl.constexpr,
    SPLITS: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = tl.load(keys + tile)
    if key < 0:
        return
    used = tl.load(ranks + key // EXPERTS) * modules
    if block * RANKS >= used:
        return
    rank = block * RANKS + tl.arange(0, RANKS)
    pair = tl.load(order + tile * TILE + tl.arange(0, TILE))
    number = pair // PER_ROW
    if SORTED:
        number = tl.load(rows + pair, pair >= 0, 0)
    row = x + number.to(tl.int64)[:, None] * x_stride
    weight = A + (key.to(tl.int64) * WIDTH + rank)[:, None] * width
    total = tl.zeros([TILE, RANKS], tl.float32)
    for first in range(split * INPUTS, width, SPLITS * INPUTS):
        channel = first + tl.arange(0, INPUTS)
        here = channel < width
        given = tl.load(row + channel[None, :], (pair >= 0)[:, None] & here[None, :], 0.0)
        part = tl.load(weight + channel[None, :], (rank < used)[:, None] & here[None, :], 0.0)
        total = tl.dot(given, tl.trans(part), total, input_precision="ieee")
    at = tl.arange(0, TILE)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    number = (split * tiles + tile) * tl.num_programs(1) + block
    tl.store(parts + number * TILE * RANKS + at, total)


@triton.jit(do_not_specialize=["modules", "tiles", "blocks"])
def _expand_kernel(
    parts, B, y, order, keys, ranks, rows, weights, channels, modules, tiles, blocks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, SORTED: tl.constexpr,
    SPLITS: tl.constexpr, CHANNELS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    key = tl.load(keys + tile)
    if key < 0:
        return
    used = tl.load(ranks + key // EXPERTS) * modules
    pair = tl.load(order + tile * TILE + tl.arange(0, TILE))
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    weight = B + (key.to(tl.int64) * channels + channel)[:, None] * WIDTH
    total = tl.zeros([TILE, CHANNELS], tl.float32)
    at = tl.arange(0, TILE)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    for first in range(0, used, RANKS):
        shrunk = tl.zeros([TILE, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            number = (split * tiles + tile) * blocks + first // RANKS
            shrunk += tl.load(parts + number * TILE * RANKS + at)
        rank = first + tl.arange(0, RANKS)
        here = (channel < channels)[:, None] & (rank < used)[None, :]
        part = tl.load(weight + rank[None, :], here, 0.0)
        total = tl.dot(shrunk.to(part.dtype), tl.trans(part), total, input_precision="ieee")
    if WEIGHTED:
        total *= tl.load(weights + pair, pair >= 0, 0.0)[:, None]
    number = pair
    if SORTED:
        number = tl.load(rows + pair, pair >= 0, 0)
    target = y + number.to(tl.int64)[:, None] * channels + channel[None, :]
    here = (pair >= 0)[:, None] & (channel < channels)[None, :]
    old = tl.load(target, here, 0.0)
    tl.store(target, (old.to(tl.float32) + total).to(old.dtype), here)


def add_to_pairs(
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    y: torch.Tensor,
    tiles: PairTiles,
    ranks: torch.Tensor,
    modules: int,
    *,
    is_first: bool,
) -> None:
    """Adds the product of each pair with the matrices of its adapter and expert to y, in place.

    Args:
        x: [T, in] if it `is_first`, of each token; else [T * top_k, in], of `tiles.rows`;
            contiguous channels.
        A: [slots, experts, width, in], B: [slots, experts, out, width], of x's dtype; contiguous.
            Of a slot the first modules * ranks[s] of the width count.
        y: [T * top_k, out], contiguous: of `tiles.rows` if it `is_first`; else by pairs, multiplied
            by the routing weights, as is what is added.
        tiles: of the T tokens.
        ranks: int32 [slots], of each adapter.
        modules: how many modules the product merges.
    """
    width = A.shape[2]
    pairs, is_sorted = len(y), tiles.rows is not None
    rows = tiles.order if tiles.rows is None else tiles.rows
    splits = next((splits for limit, splits in _SPLITS if pairs <= limit), 1)
    block = min(max(16, triton.next_power_of_2(width)), _MAX_RANKS)
    blocks, count = triton.cdiv(width, block), len(tiles.keys)
    parts = torch.empty(
        splits * count * blocks * TILE * block, dtype=torch.float32, device=x.device
    )
    constants = {
        "EXPERTS": tiles.experts, "WIDTH": width, "SPLITS": splits, "RANKS": block, "TILE": TILE,
    }  # fmt: skip
    _shrink_kernel[(count, blocks, splits)](
        x, A, parts, tiles.order, tiles.keys, ranks, rows, x.shape[1], modules, count, x.stride(0),
        PER_ROW=tiles.top_k if is_first else 1, SORTED=is_sorted and not is_first,
        INPUTS=_INPUT_BYTES // x.element_size(),
        num_warps=4, **constants,
    )  # fmt: skip
    _expand_kernel[(count, triton.cdiv(y.shape[1], _CHANNELS))](
        parts, B, y, tiles.order, tiles.keys, ranks, rows, tiles.weights, y.shape[1], modules,
        count, blocks, WEIGHTED=not is_first, SORTED=is_sorted and is_first, CHANNELS=_CHANNELS,
        num_warps=4, **constants,
    )  # fmt: skip
