"""The tokens of a step by adapter: found on the GPU, so that a CUDA graph holds for any mix.

Tokens are sorted by adapter into tiles of 16 to 64, so that a program has one adapter and
multiplies matrices (as S-LoRA, Sheng et al. 2023, and Punica, Chen et al. 2023, do). For products
that compute the adapters of few tokens in their own launch, the blocks of `BLOCK` ranks that the
step's adapters have are listed, too.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

#: Up to so many tokens, tokens of a tile. A step is sorted by its own number of tokens, and a CUDA
#: graph reads the tiles of the number that it was captured for: the bounds here and below are
#: among the sizes of graphs (`worker.step_graphs.mixed_sizes`), so both have tiles of one size.
_TILES = ((128, 16), (1024, 32), (None, 64))
#: Tokens that the sort takes at a time.
_SORTED = 256
#: Ranks of a block.
BLOCK = 64
#: What `AdapterTiles.words` has where no number is: the bits of a NaN.
MISSING = -1
#: Up to so many tokens a product may compute the adapters in its own launch; any number where the
#: products of a layer have at most so many columns together.
MAX_FUSED_ROWS, _FEW_COLUMNS = 256, 2048


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Where the ranks of adapters are, in the rows of A and the columns of B and of x A^T.

    A product of `n` merged modules has, for each slot, the ranks of its modules, `n * max_rank`
    columns. Products of as many modules have the same columns.

    Attributes:
        num_slots: of adapters.
        max_rank: of an adapter.
        modules: the numbers of modules that products merge, in ascending order.
    """

    num_slots: int
    max_rank: int
    modules: tuple[int, ...]

    def columns(self, modules: int) -> int:
        """Returns the columns of a product, in whole blocks."""
        return -(-self.num_slots * modules * self.max_rank // BLOCK) * BLOCK

    def start(self, modules: int) -> int:
        """Returns the first column of a product in a row of x A^T."""
        return sum(self.columns(fewer) for fewer in self.modules if fewer < modules)

    @property
    def total(self) -> int:
        """Columns of all products."""
        return sum(self.columns(modules) for modules in self.modules)

    @property
    def max_blocks(self) -> int:
        """Blocks of the product with the most."""
        return self.columns(self.modules[-1]) // BLOCK


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """The tokens of a step by adapter.

    Attributes:
        layout: of ranks.
        order: int32 [tiles * tile size], the token at each place; -1 for none.
        slots: int32 [tiles], the adapter slot of each tile; -1 for a tile without tokens.
        blocks: int32 [kinds, 1 + max_blocks]: for each number of merged modules the number of
            blocks of ranks that the adapters of the tokens have, and then these blocks.
        modules: int32 [kinds], `layout.modules`.
        shrunk: [tokens, layout.total], x A^T of each token in the columns of its adapter; zeros
            elsewhere. With more than `_FEW_COLUMNS` columns of up to MAX_FUSED_ROWS tokens.
        words: integers of the dtype's size [2, columns of a slot], MISSING: x A^T of a single
            token, which launches in turns write to one half and empty the other.
    """

    layout: RankLayout
    order: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    modules: torch.Tensor
    shrunk: torch.Tensor
    words: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, layout: RankLayout, dtype: torch.dtype, device: torch.device
    ) -> AdapterTiles:
        """Returns buffers for up to `tokens` tokens, of products of a dtype."""
        sizes = {*(bound for bound, _ in _TILES if bound is not None and bound < tokens), tokens}
        counts = [(max_tiles(size, layout.num_slots), tile_size(size)) for size in sizes]
        shape = max(count * size for count, size in counts), max(count for count, _ in counts)
        order, slots = (torch.full((n,), -1, dtype=torch.int32, device=device) for n in shape)
        kinds = len(layout.modules)
        blocks = torch.zeros(kinds, 1 + layout.max_blocks, dtype=torch.int32, device=device)
        modules = torch.tensor(layout.modules, dtype=torch.int32, device=device)
        rows = tokens if layout.total <= _FEW_COLUMNS else min(tokens, MAX_FUSED_ROWS)
        shrunk = torch.zeros(rows, layout.total, dtype=dtype, device=device)
        word = torch.int16 if dtype.itemsize == 2 else torch.int32
        width = -(-layout.modules[-1] * layout.max_rank // 16) * 16  # halves of one alignment
        words = torch.full((2, width), MISSING, dtype=word, device=device)
        return cls(layout, order, slots, blocks, modules, shrunk, words)

    def views(self, tokens: int) -> AdapterTiles:
        """Returns the beginnings for `tokens` tokens."""
        tiles = max_tiles(tokens, self.layout.num_slots)
        order, slots = self.order[: tiles * tile_size(tokens)], self.slots[:tiles]
        return replace(self, order=order, slots=slots, shrunk=self.shrunk[:tokens])

    def blocks_of(self, modules: int) -> torch.Tensor:
        """Returns int32 [1 + max_blocks] of `blocks` for products of so many modules."""
        return self.blocks[self.layout.modules.index(modules)]

    def shrunk_of(self, modules: int) -> torch.Tensor:
        """Returns the columns of `shrunk` of products of so many modules."""
        start = self.layout.start(modules)
        return self.shrunk[:, start : start + self.layout.columns(modules)]


def tile_size(tokens: int) -> int:
    """Returns how many tokens a tile has in a step of `tokens`."""
    return next(size for bound, size in _TILES if bound is None or tokens <= bound)


def max_tiles(tokens: int, num_slots: int) -> int:
    """Returns how many tiles `tokens` tokens of `num_slots` adapters may take: every adapter's last
    tile may be nearly empty."""
    return min(tokens, -(-tokens // tile_size(tokens)) + num_slots)


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


@triton.jit
def _list_blocks(
    number, is_used, ranks, num_slots, modules, max_rank, blocks, stride,
    KINDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes `AdapterTiles.blocks`, given whether each slot `number` [NUM] has tokens."""
    rank = tl.load(ranks + number, number < num_slots, 0)
    place = tl.arange(0, BLOCKS)
    for kind in tl.static_range(KINDS):
        merged = tl.load(modules + kind)
        begin = number * merged * max_rank
        end = begin + rank * merged
        overlaps = (begin[None, :] < (place * BLOCK + BLOCK)[:, None]) & (
            end[None, :] > (place * BLOCK)[:, None]
        )
        has = tl.max((overlaps & is_used[None, :]).to(tl.int32), 1)
        tl.store(blocks + kind * stride + tl.cumsum(has, 0), place, has > 0)
        tl.store(blocks + kind * stride, tl.sum(has, 0))


@triton.jit(
    do_not_specialize=["tokens", "tiles", "max_tiles", "num_slots", "max_rank"],
    do_not_specialize_on_alignment=["adapters"],
)
def _sort_kernel(
    adapters, order, slots, ranks, modules, blocks, words, tokens, tiles, max_tiles, num_slots,
    max_rank, num_words, stride, MISSING: tl.constexpr, KINDS: tl.constexpr, NUM: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, NUM)
    column = tl.arange(0, SORTED)
    for first in range(0, tiles * TILE, SORTED):
        tl.store(order + first + column, -1, first + column < tiles * TILE)
    for first in range(0, num_words, SORTED):
        tl.store(words + first + column, MISSING, first + column < num_words)
    counts = tl.zeros([NUM], tl.int32)
    for first in range(0, tokens, SORTED):
        adapter = tl.load(adapters + first + column, first + column < tokens, -1)
        counts += tl.sum((adapter[None, :] == number[:, None]).to(tl.int32), 1)
    _list_blocks(
        number, counts > 0, ranks, num_slots, modules, max_rank, blocks, stride, KINDS, BLOCKS,
        BLOCK,
    )  # fmt: skip
    used = (counts + TILE - 1) // TILE
    ends = tl.cumsum(used, 0)
    for first in range(0, max_tiles, SORTED):
        tile = first + column
        slot = tl.sum((ends[:, None] <= tile[None, :]).to(tl.int32), 0)
        tl.store(slots + tile, tl.where(tile < tl.max(ends, 0), slot, -1), tile < max_tiles)
    tl.debug_barrier()  # the order is empty before it is filled
    places = (ends - used) * TILE
    for first in range(0, tokens, SORTED):
        token = first + column
        adapter = tl.load(adapters + token, token < tokens, -1)
        is_of = (adapter[None, :] == number[:, None]).to(tl.int32)
        place = tl.sum((places[:, None] + tl.cumsum(is_of, 1) - 1) * is_of, 0)
        tl.store(order + place, token, adapter >= 0)
        places += tl.sum(is_of, 1)


def sort_by_adapter(adapters: torch.Tensor, tiles: AdapterTiles, ranks: torch.Tensor) -> None:
    """Sorts the tokens of a step by their adapters.

    Args:
        adapters: int32 [T], below the number of slots; negative for tokens without one.
        tiles: for T tokens at least; all of its slots and blocks are overwritten, and the rows of
            `shrunk` are zeros then if it has as many, and its words MISSING.
        ranks: int32 [num_slots], of each adapter.
    """
    tokens, layout = len(adapters), tiles.layout
    if tokens <= len(tiles.shrunk):
        tiles.shrunk[:tokens].zero_()
    count = max_tiles(tokens, layout.num_slots)
    _sort_kernel[(1,)](
        adapters, tiles.order, tiles.slots, ranks, tiles.modules, tiles.blocks, tiles.words, tokens,
        count, len(tiles.slots), layout.num_slots, layout.max_rank, tiles.words.numel(),
        tiles.blocks.stride(0), MISSING=MISSING, KINDS=len(layout.modules),
        NUM=max(2, triton.next_power_of_2(layout.num_slots)),
        BLOCKS=max(2, triton.next_power_of_2(layout.max_blocks)), BLOCK=BLOCK, SORTED=_SORTED,
        TILE=tile_size(tokens), num_warps=8,
    )  # fmt: skip
