"""Which query tiles a step's rows of several tokens have: a list on the GPU, made once a step for all layers.

The prefill kernels take their work from it, so what they do depends on nothing that the host says at their launch: a
graph that holds them serves any mixture of rows.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_ROWS_PAD = 256


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The query tiles of a step, of which each is `tile_rows` packed query rows (tokens by query heads of one KV head) of one row.

    Attributes:
        tiles: int32 [1 + N, 2]; the number of tiles first, then row and tile within the row of each.
        group: query heads a KV head.
        tile_rows: of the kernel that the plan is for.
        hopper: whether that is `prefill_hopper`.
    """

    tiles: torch.Tensor
    group: int
    tile_rows: int
    hopper: bool

    @classmethod
    def empty(cls, rows: int, tokens: int, group: int, tile_rows: int, device: torch.device, *, hopper: bool) -> PrefillPlan:
        """Returns a plan without tiles, with room for those of `rows` rows that have `tokens` tokens together."""
        return cls(torch.zeros(1 + tokens * group // tile_rows + rows, 2, dtype=torch.int32, device=device), group, tile_rows, hopper)

    @property
    def capacity(self) -> int:
        """N, the most tiles."""
        return len(self.tiles) - 1


@triton.jit(do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=["query_starts"])
def _plan_kernel(query_starts, plan, first_row, num_rows, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS_PAD: tl.constexpr):
    """The last tiles of a causal row see the most keys; they go first, so that no long tile is left for the end."""
    index = tl.program_id(0)
    r = tl.arange(0, ROWS_PAD)
    starts = query_starts + first_row + r
    lengths = tl.load(starts + 1, r < num_rows, 0) - tl.load(starts, r < num_rows, 0)
    tiles = (lengths * GROUP + TILE_ROWS - 1) // TILE_ROWS
    row = tl.sum((tl.cumsum(tiles) <= index).to(tl.int32))
    before = tl.sum(tl.where(r < row, tiles, 0))
    here = tl.sum(tl.where(r == row, tiles, 0))
    if row < num_rows:
        tl.store(plan + 2 + 2 * index, first_row + row)
        tl.store(plan + 3 + 2 * index, here - 1 - (index - before))
    if index == 0:
        tl.store(plan, tl.sum(tiles))


def plan_prefill(plan: PrefillPlan, query_starts: torch.Tensor, first_row: int, num_tokens: int) -> None:
    """Lists the query tiles of a step's rows of several tokens.

    Args:
        plan: to be filled.
        query_starts: int32 [R + 1], the first token of each row.
        first_row: of those with several tokens, which come last.
        num_tokens: at least the tokens of these rows.
    """
    rows = query_starts.shape[0] - 1 - first_row
    count = num_tokens * plan.group // plan.tile_rows + rows
    if count > plan.capacity:
        raise ValueError(f"the plan has room for {plan.capacity} tiles, not {count}")
    _plan_kernel[(max(1, count),)](
        query_starts, plan.tiles, first_row, rows,
        GROUP=plan.group, TILE_ROWS=plan.tile_rows, ROWS_PAD=max(MIN_ROWS_PAD, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
