"""Products with the adapters of a step's tokens (LoRA, Hu et al. 2021): y += (x A^T) B^T, where a
token has an adapter of its own or none.

Tokens are sorted by adapter into tiles of `TILE`, so that a program has one adapter and multiplies
matrices (as S-LoRA, Sheng et al. 2023, and Punica, Chen et al. 2023, do). The first product divides
its input channels among programs, of which the last adds up the sums of all. Everything that
depends on the mix of adapters is on the GPU: a CUDA graph holds for any mix.
"""
# ruff: noqa: N803  (matrices and compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import is_last_of, wait_for_kernel

#: Tokens of a tile.
TILE = 32
#: Tokens that the sort takes at a time.
_BLOCK = 256
#: Output channels of a program, the maximum of ranks that it takes at a time, and the bytes of a
#: token's input channels.
_CHANNELS, _MAX_RANKS, _INPUT_BYTES = 128, 64, 512


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """The tokens of a step by adapter.

    Attributes:
        order: int32 [tiles * TILE], the token at each place; -1 for none.
        slots: int32 [tiles], the adapter slot of each tile; -1 for a tile without tokens.
    """

    order: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, num_slots: int, device: torch.device) -> AdapterTiles:
        """Returns buffers for up to `tokens` tokens of `num_slots` adapters."""
        tiles = max_tiles(tokens, num_slots)
        order = torch.full((tiles * TILE,), -1, dtype=torch.int32, device=device)
        return cls(order, torch.full((tiles,), -1, dtype=torch.int32, device=device))

    def views(self, tokens: int, num_slots: int) -> AdapterTiles:
        """Returns the beginnings for `tokens` tokens."""
        tiles = max_tiles(tokens, num_slots)
        return AdapterTiles(self.order[: tiles * TILE], self.slots[:tiles])


def max_tiles(tokens: int, num_slots: int) -> int:
    """Returns how many tiles `tokens` tokens of `num_slots` adapters may take: every adapter's last
    tile may be nearly empty."""
    return min(tokens, -(-tokens // TILE) + num_slots)


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=["slots"])
def _assign_kernel(slots, query_starts, of_slots, adapters, rows, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first, end, adapter = tl.load(query_starts + row), tokens, -1
    if row < rows:
        end = tl.load(query_starts + row + 1)
        adapter = tl.load(of_slots + tl.load(slots + row)) - 1
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        tl.store(adapters + token, adapter, token < end)


def assign_adapters(
    slots: torch.Tensor, query_starts: torch.Tensor, of_slots: torch.Tensor, adapters: torch.Tensor
) -> None:
    """Writes the adapter slot of each token of a step, -1 for none and in padding.

    Args:
        slots: int32 [R], of each row.
        query_starts: int32 [R + 1], the first token of each row.
        of_slots: int32 [num_slots], the adapter slot of each request slot plus 1; 0 for none.
        adapters: int32 [T], overwritten.
    """
    rows = len(slots)
    _assign_kernel[(rows + 1,)](
        slots, query_starts, of_slots, adapters, rows, len(adapters), BLOCK=64, num_warps=1
    )


@triton.jit(
    do_not_specialize=["tokens", "tiles", "room"], do_not_specialize_on_alignment=["adapters"]
)
def _sort_kernel(
    adapters, order, slots, tokens, tiles, room,
    NUM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, NUM)
    column = tl.arange(0, BLOCK)
    for first in range(0, tiles * TILE, BLOCK):
        tl.store(order + first + column, -1, first + column < tiles * TILE)
    counts = tl.zeros([NUM], tl.int32)
    for first in range(0, tokens, BLOCK):
        adapter = tl.load(adapters + first + column, first + column < tokens, -1)
        counts += tl.sum((adapter[None, :] == number[:, None]).to(tl.int32), 1)
    used = (counts + TILE - 1) // TILE
    ends = tl.cumsum(used, 0)
    for first in range(0, room, BLOCK):
        tile = first + column
        slot = tl.sum((ends[:, None] <= tile[None, :]).to(tl.int32), 0)
        tl.store(slots + tile, tl.where(tile < tl.max(ends, 0), slot, -1), tile < room)
    tl.debug_barrier()  # the order is empty before it is filled
    places = (ends - used) * TILE
    for first in range(0, tokens, BLOCK):
        token = first + column
        adapter = tl.load(adapters + token, token < tokens, -1)
        is_of = (adapter[None, :] == number[:, None]).to(tl.int32)
        place = tl.sum((places[:, None] + tl.cumsum(is_of, 1) - 1) * is_of, 0)
        tl.store(order + place, token, adapter >= 0)
        places += tl.sum(is_of, 1)


def sort_by_adapter(adapters: torch.Tensor, tiles: AdapterTiles, num_slots: int) -> None:
    """Sorts the tokens of a step by their adapters.

    Args:
        adapters: int32 [T], below `num_slots`; negative for tokens without one.
        tiles: for T tokens at least; all of its slots are overwritten.
    """
    count = max_tiles(len(adapters), num_slots)
    _sort_kernel[(1,)](
        adapters, tiles.order, tiles.slots, len(adapters), count, len(tiles.slots),
        NUM=max(2, triton.next_power_of_2(num_slots)), BLOCK=_BLOCK, TILE=TILE, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "x_stride", "a_stride", "slot_stride"])
def _shrink_kernel(
    x, A, parts, shrunk, tickets, order, slots, widths, width, modules, x_stride, a_stride,
    slot_stride,
    SPLITS: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_kernel(PDL)
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    rank = block * RANKS + tl.arange(0, RANKS)
    ranks = tl.load(widths + slot) * modules
    if block * RANKS >= ranks:
        return
    place = tile * TILE + tl.arange(0, TILE)
    token = tl.load(order + place)
    row = x + token.to(tl.int64)[:, None] * x_stride
    weight = A + slot.to(tl.int64) * slot_stride + rank.to(tl.int64)[:, None] * a_stride
    total = tl.zeros([TILE, RANKS], tl.float32)
    for first in range(split * INPUTS, width, SPLITS * INPUTS):
        channel = first + tl.arange(0, INPUTS)
        here = channel < width
        given = tl.load(row + channel[None, :], (token >= 0)[:, None] & here[None, :], 0.0)
        part = tl.load(weight + channel[None, :], (rank < ranks)[:, None] & here[None, :], 0.0)
        total = tl.dot(given, tl.trans(part), total, input_precision="ieee")
    number = tile * tl.num_programs(1) + block
    at = tl.arange(0, TILE)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    if SPLITS > 1:
        part_size: tl.constexpr = TILE * RANKS
        tl.store(parts + (number * SPLITS + split) * part_size + at, total)
        if not is_last_of(tickets + number, SPLITS):
            return
        total = tl.zeros([TILE, RANKS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(
                parts + (number * SPLITS + other) * part_size + at, cache_modifier=".cg"
            )
    tl.store(shrunk + number * TILE * RANKS + at, total.to(shrunk.dtype.element_ty))


@triton.jit(do_not_specialize=["channels", "y_stride", "b_stride", "slot_stride"])
def _expand_kernel(
    shrunk, B, y, order, slots, widths, channels, modules, blocks, y_stride, b_stride, slot_stride,
    CHANNELS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    wait_for_kernel(PDL)
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    ranks = tl.load(widths + slot) * modules
    place = tile * TILE + tl.arange(0, TILE)
    token = tl.load(order + place)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    weight = B + slot.to(tl.int64) * slot_stride + channel.to(tl.int64)[:, None] * b_stride
    total = tl.zeros([TILE, CHANNELS], tl.float32)
    at = tl.arange(0, TILE)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    for first in range(0, ranks, RANKS):
        rank = first + tl.arange(0, RANKS)
        given = tl.load(shrunk + (tile * blocks + first // RANKS) * TILE * RANKS + at)
        here = (channel < channels)[:, None] & (rank < ranks)[None, :]
        part = tl.load(weight + rank[None, :], here, 0.0)
        total = tl.dot(given, tl.trans(part), total, input_precision="ieee")
    target = y + token.to(tl.int64)[:, None] * y_stride + channel[None, :]
    here = (token >= 0)[:, None] & (channel < channels)[None, :]
    old = tl.load(target, here, 0.0)
    tl.store(target, (old.to(tl.float32) + total).to(old.dtype), here)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Memory between the two products.

    Attributes:
        parts: float32, sums over a part of the input channels.
        shrunk: the sums of these, in the dtype of the products.
        tickets: int32, zeros, which count programs.
    """

    parts: torch.Tensor
    shrunk: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, num_slots: int, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterRoom:
        """Returns the memory for up to `tokens` tokens, and modules of `ranks` ranks together."""
        block = _ranks_at_a_time(ranks)
        blocks = triton.cdiv(ranks, block)
        sizes = {*(limit for limit, _ in _SPLITS if limit < tokens), tokens}
        most = max(_splits(size) * max_tiles(size, num_slots) for size in sizes)
        tiles, numbers = max_tiles(tokens, num_slots), blocks * TILE * block
        return cls(
            torch.empty(most * numbers, dtype=torch.float32, device=device),
            torch.empty(tiles * numbers, dtype=dtype, device=device),
            torch.zeros(tiles * blocks, dtype=torch.int32, device=device),
        )


#: Up to so many tokens, among how many programs the input channels of a tile are divided.
_SPLITS = ((64, 16), (256, 8), (1024, 2))


def _splits(tokens: int) -> int:
    return next((splits for limit, splits in _SPLITS if tokens <= limit), 1)


def _ranks_at_a_time(ranks: int) -> int:
    return min(max(16, triton.next_power_of_2(ranks)), _MAX_RANKS)


def add_adapters(
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    y: torch.Tensor,
    tiles: AdapterTiles,
    ranks: torch.Tensor,
    modules: int,
    room: AdapterRoom,
    *,
    pdl: bool = False,
) -> None:
    """Adds the product of each token with its adapter to y, in place.

    Args:
        x: [T, in], contiguous channels.
        A: [slots, modules * rank, in], B: [slots, out, modules * rank], of x's dtype; views of
            memory in which the slots lie equally far apart. Of a slot the first modules * ranks[s]
            ranks count.
        y: [T, out], contiguous channels.
        tiles: of the T tokens.
        ranks: int32 [slots], of each adapter.
        modules: how many modules the product merges.
        room: for T tokens and A's ranks at least.
        pdl: launch as programmatic dependents of the kernel before (Hopper and later).
    """
    splits, block = _splits(len(x)), _ranks_at_a_time(A.shape[1])
    blocks = triton.cdiv(A.shape[1], block)
    count = len(tiles.slots)
    _shrink_kernel[(count, blocks, splits)](
        x, A, room.parts, room.shrunk, room.tickets, tiles.order, tiles.slots, ranks, x.shape[1],
        modules, x.stride(0), A.stride(1), A.stride(0),
        SPLITS=splits, INPUTS=_INPUT_BYTES // x.element_size(), RANKS=block, TILE=TILE, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _expand_kernel[(count, triton.cdiv(y.shape[1], _CHANNELS))](
        room.shrunk, B, y, tiles.order, tiles.slots, ranks, y.shape[1], modules, blocks,
        y.stride(0), B.stride(1), B.stride(0),
        CHANNELS=_CHANNELS, RANKS=block, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
