"""The list of a step's query tiles: every tile once, by descending number of visible keys."""

from __future__ import annotations

import random

import pytest
import torch
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill

Rows = list[tuple[int, int]]  # (tokens, keys)


def plan_of(rows: Rows, decodes: int, group: int, tile_rows: int) -> PrefillPlan:
    tokens = [tokens for tokens, _ in rows]
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    plan = PrefillPlan.empty(
        len(rows), sum(tokens), group, tile_rows, torch.device("cpu"), hopper=False
    )
    plan.tiles.fill_(-1)
    plan_prefill(
        plan,
        starts,
        torch.tensor([keys for _, keys in rows], dtype=torch.int32),
        decodes,
        sum(tokens),
    )
    return plan


def visible_keys(rows: Rows, row: int, tile: int, group: int, tile_rows: int) -> int:
    """Returns how many keys are visible to the last token of a tile."""
    tokens, keys = rows[row]
    return keys - tokens + min(((tile + 1) * tile_rows - 1) // group, tokens - 1) + 1


@pytest.mark.parametrize(
    ("group", "tile_rows"),
    [(1, 16), pytest.param(3, 16, marks=pytest.mark.extended), (4, 64), (2, 128)],
)
def test_every_tile_is_listed_once_in_descending_order_of_its_visible_keys(
    group: int, tile_rows: int
) -> None:
    rng = random.Random(group)
    for _ in range(3):  # random steps
        decodes = rng.randint(0, 5)
        rows = [(1, rng.randint(1, 900)) for _ in range(decodes)]
        rows += [
            (tokens, tokens + rng.choice([0, 0, rng.randint(0, 300)]))
            for tokens in (1, 2, *(rng.randint(1, 200) for _ in range(5)))
        ]
        count, *listed = plan_of(rows, decodes, group, tile_rows).tiles.tolist()
        listed = [(row, tile) for row, tile in listed[: count[0]]]
        expected = [
            (row, tile)
            for row in range(decodes, len(rows))
            for tile in range(-(-rows[row][0] * group // tile_rows))
        ]
        assert sorted(listed) == expected
        keys = [visible_keys(rows, *one, group, tile_rows) for one in listed]
        assert keys == sorted(keys, reverse=True)


def test_more_tiles_than_the_capacity_are_rejected() -> None:
    plan = PrefillPlan.empty(1, 64, 1, 64, torch.device("cpu"), hopper=False)
    with pytest.raises(ValueError, match="room for"):
        plan_prefill(
            plan, torch.tensor([0, 64, 128], dtype=torch.int32),
            torch.tensor([64, 64], dtype=torch.int32), 0, 128,
        )  # fmt: skip
