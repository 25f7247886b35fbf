"""The query tiles of a step's rows of several tokens: a list on the GPU, made once a step for all
layers.

The prefill kernels read their work from this list, and depend on nothing that the host knows at
launch: so a captured CUDA graph serves any mixture of rows. Tiles are sorted by descending number
of visible keys, whatever row they are of, so that programs which are assigned tiles in snake order
end at nearly the same time.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import pad_rows


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The query tiles of a step. A tile is `tile_rows` packed query rows (tokens times query heads
    of one KV head) of one row of the step.

    Attributes:
        tiles: int32 [1 + N, 2]; the number of tiles first, then for each tile its row and its index
            within the row.
        group: query heads a KV head.
        tile_rows: packed query rows of a tile of the kernel that the plan is for.
        hopper: whether that kernel is `prefill_hopper`.
    """

    tiles: torch.Tensor
    group: int
    tile_rows: int
    hopper: bool

    @classmethod
    def empty(
        cls,
        rows: int,
        tokens: int,
        group: int,
        tile_rows: int,
        device: torch.device,
        *,
        hopper: bool,
    ) -> PrefillPlan:
        """Returns a plan without tiles, with capacity for `rows` rows of `tokens` tokens in
        total."""
        capacity = tokens * group // tile_rows + rows
        tiles = torch.zeros(1 + capacity, 2, dtype=torch.int32, device=device)
        return cls(tiles, group, tile_rows, hopper)

    @property
    def capacity(self) -> int:
        """N, the maximum number of tiles."""
        return len(self.tiles) - 1


@triton.jit
def _tiles_that_see(keys, tiles, lengths, contexts, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Returns how many tiles of each row have a token that sees `keys` keys or more."""
    needed = keys - 1 - contexts  # the row's tokens before the first that sees so many
    some = tiles - tl.maximum(needed, 0) * GROUP // TILE_ROWS
    return tl.where(needed < lengths, some, 0)


@triton.jit(
    do_not_specialize=["first_row", "num_rows"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens"],
)
def _plan_kernel(
    query_starts, seq_lens, plan, first_row, num_rows, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    r = tl.arange(0, ROWS_PAD)
    long = (r >= first_row) & (r < num_rows)
    lengths = tl.load(query_starts + r + 1, long, 0) - tl.load(query_starts + r, long, 0)
    contexts = tl.load(seq_lens + r, long, 0) - lengths
    tiles = (lengths * GROUP + TILE_ROWS - 1) // TILE_ROWS
    row = tl.sum((tl.cumsum(tiles) <= index).to(tl.int32))
    if row < num_rows:
        own = r == row
        here = tl.sum(tl.where(own, tiles, 0))
        tile = index - tl.sum(tl.where(r < row, tiles, 0))
        length = tl.sum(tl.where(own, lengths, 0))
        last = tl.minimum(((tile + 1) * TILE_ROWS - 1) // GROUP, length - 1)
        seen = tl.sum(tl.where(own, contexts, 0)) + last + 1
        more = _tiles_that_see(seen + 1, tiles, lengths, contexts, GROUP, TILE_ROWS)
        as_many = _tiles_that_see(seen, tiles, lengths, contexts, GROUP, TILE_ROWS) - more
        # add the tiles of the same row that see as many keys
        before = tl.sum(more) + tl.sum(tl.where(r < row, as_many, 0))
        rank = before + here - 1 - tile - tl.sum(tl.where(own, more, 0))
        tl.store(plan + 2 + 2 * rank, row)
        tl.store(plan + 3 + 2 * rank, tile)
    if index == 0:
        tl.store(plan, tl.sum(tiles))


def plan_prefill(
    plan: PrefillPlan,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    first_row: int,
    num_tokens: int,
) -> None:
    """Lists the query tiles of a step's rows of several tokens.

    Args:
        plan: is filled.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], the keys of each row, its own tokens included.
        first_row: the first of the rows with several tokens, which come last.
        num_tokens: an upper bound of the tokens of these rows.

    Raises:
        ValueError: the plan has no capacity for so many.
    """
    rows = len(seq_lens)
    count = num_tokens * plan.group // plan.tile_rows + rows - first_row
    if count > plan.capacity:
        raise ValueError(f"the plan has room for {plan.capacity} tiles, not {count}")
    _plan_kernel[(max(1, count),)](
        query_starts, seq_lens, plan.tiles, first_row, rows,
        GROUP=plan.group, TILE_ROWS=plan.tile_rows,
        ROWS_PAD=pad_rows(rows), num_warps=4,
    )  # fmt: skip
