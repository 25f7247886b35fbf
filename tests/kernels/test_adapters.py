"""Products with adapters: tokens sorted by adapter, and sums of the products of each."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.adapters import (
    TILE,
    AdapterRoom,
    AdapterTiles,
    add_adapters,
    assign_adapters,
    max_tiles,
    sort_by_adapter,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "num_slots"), [(1, 1), (5, 3), (70, 5), (600, 2), (300, 20)])
def test_tokens_are_sorted_by_adapter(tokens: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    adapters = torch.randint(-1, num_slots, (tokens,), generator=generator, dtype=torch.int32)
    tiles = AdapterTiles.empty(2 * tokens, num_slots, CPU)
    tiles.order.fill_(77)
    tiles.slots.fill_(77)
    views = tiles.views(tokens, num_slots)
    sort_by_adapter(adapters, tiles, num_slots)
    order, of_tiles = views.order.view(-1, TILE), views.slots
    assert len(of_tiles) == max_tiles(tokens, num_slots)
    placed = order[order >= 0].tolist()
    assert sorted(placed) == torch.nonzero(adapters >= 0)[:, 0].tolist()
    for slot, tile in zip(of_tiles.tolist(), order.tolist(), strict=True):
        assert all(adapters[token] == slot for token in tile if token >= 0)
        assert slot >= 0 or set(tile) == {-1}
    assert (tiles.order[len(views.order) :] == 77).all()
    assert (tiles.slots[len(views.slots) :] == -1).all()


def test_tokens_have_the_adapters_of_their_slots() -> None:
    query_starts = torch.tensor([0, 1, 1, 71, 73], dtype=torch.int32)
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    of_slots = torch.tensor([9, 0, 2, 1], dtype=torch.int32)
    adapters = torch.full((80,), 77, dtype=torch.int32)
    assign_adapters(slots, query_starts, of_slots, adapters)
    assert adapters.tolist() == [0, *[1] * 70, -1, -1, *[-1] * 7]


@pytest.mark.parametrize(
    ("tokens", "width", "out", "rank", "modules"),
    [(1, 40, 24, 16, 1), (7, 96, 130, 16, 3), (40, 300, 40, 8, 2), (90, 64, 200, 24, 1)],
)
def test_each_token_gets_the_product_of_its_adapter(
    tokens: int, width: int, out: int, rank: int, modules: int
) -> None:
    """Adapters of several ranks in memory with other things between; one slot is never read."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    num_slots, most = 4, modules * rank
    memory = torch.full((num_slots, most * (width + out) + 5), torch.nan)
    ranks = torch.tensor([rank, rank // 2, 1, rank], dtype=torch.int32)
    first = memory[:, : most * width].view(num_slots, most, width)
    second = memory[:, most * width : -5].view(num_slots, out, most)
    for slot in range(3):
        used = modules * int(ranks[slot])
        first[slot, :used] = random(used, width)
        second[slot, :, :used] = random(out, used)
    adapters = torch.randint(-1, 3, (tokens,), generator=generator, dtype=torch.int32)
    x, y = random(tokens, width), random(tokens, out)
    expected = y.clone()
    for token, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            used = modules * int(ranks[slot])
            expected[token] += second[slot, :, :used] @ (first[slot, :used] @ x[token])
    tiles = AdapterTiles.empty(tokens, num_slots, CPU)
    sort_by_adapter(adapters, tiles, num_slots)
    room = AdapterRoom.empty(tokens, num_slots, most, torch.float32, CPU)
    room.parts.fill_(torch.nan)
    room.shrunk.fill_(torch.nan)
    add_adapters(x, first, second, y, tiles, ranks, modules, room)
    assert not room.tickets.any()
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)
