"""Adapters of experts: pairs sorted by adapter and expert, and sums of the products of each."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.expert_adapters import TILE, PairTiles, add_to_pairs, sort_pairs
from aioinfer.kernels.expert_routing import RoutedTokens


def route(
    tokens: int, experts: int, top_k: int, local: range | None = None, *, has_buckets: bool = False
) -> RoutedTokens:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, chosen = scores.topk(top_k)
    counts = rows = None
    if has_buckets:
        counts = torch.zeros(experts, dtype=torch.int32)
        rows = torch.full((experts, tokens), -1, dtype=torch.int32)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            rows[expert, counts[expert]] = pair
            counts[expert] += 1
    return RoutedTokens(weights.contiguous(), chosen.int().contiguous(), counts, rows, local)


def adapters_of(tokens: int, slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * tokens)
    return torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "slots"), [(1, 8, 2, 2), (40, 4, 3, 3), (700, 8, 2, 200)]
)
def test_pairs_are_sorted_by_adapter_and_expert(
    tokens: int, experts: int, top_k: int, slots: int
) -> None:
    adapters = adapters_of(tokens, slots)
    routed = route(tokens, experts, top_k, range(1, experts))  # the first is on another rank
    tiles: PairTiles = sort_pairs(adapters, routed, experts - 1, slots)
    found = {
        pair: key
        for key, of_tile in zip(
            tiles.keys.tolist(), tiles.order.view(-1, TILE).tolist(), strict=True
        )
        for pair in of_tile
        if pair >= 0
    }
    assert found == {
        token * top_k + number: adapter * (experts - 1) + expert - 1
        for token, adapter in enumerate(adapters.tolist())
        for number, expert in enumerate(routed.experts[token].tolist())
        if adapter >= 0 and expert >= 1
    }
    placed = tiles.order[tiles.order >= 0]
    assert len(placed) == len(found)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("has_buckets", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "out", "rank", "modules"), [(1, 40, 24, 8, 2), (30, 200, 136, 40, 2)]
)
def test_each_pair_gets_the_product_of_its_adapter_and_expert(
    tokens: int, width: int, out: int, rank: int, modules: int, *, is_first: bool, has_buckets: bool
) -> None:
    """Adapters of several ranks; what a slot has behind its rank is never read."""
    generator = torch.Generator().manual_seed(1)
    slots, experts, top_k = 3, 4, 2
    ranks = torch.tensor([rank, 3, rank // 2], dtype=torch.int32)
    first = torch.full((slots, experts, modules * rank, width), torch.nan)
    second = torch.full((slots, experts, out, modules * rank), torch.nan)
    for slot in range(slots):
        used = modules * int(ranks[slot])
        first[slot, :, :used] = torch.randn(experts, used, width, generator=generator)
        second[slot, ..., :used] = torch.randn(experts, out, used, generator=generator)
    adapters = adapters_of(tokens, slots)
    routed = route(tokens, experts, top_k, has_buckets=has_buckets)
    between = torch.arange(tokens * top_k)  # the row of each pair between the products
    if has_buckets:
        between = routed.experts.flatten().argsort(stable=True).argsort()
    x = torch.randn(tokens if is_first else tokens * top_k, width, generator=generator)
    y = torch.randn(tokens * top_k, out, generator=generator)
    expected = y.clone()
    for pair in range(tokens * top_k):
        token = pair // top_k
        slot, expert = int(adapters[token]), int(routed.experts.view(-1)[pair])
        if slot >= 0:
            used = modules * int(ranks[slot])
            shrunk = first[slot, expert, :used] @ x[token if is_first else between[pair]]
            added = second[slot, expert, :, :used] @ shrunk
            if is_first:
                expected[between[pair]] += added
            else:
                expected[pair] += added * routed.weights.view(-1)[pair]
    tiles = sort_pairs(adapters, routed, experts, slots)
    add_to_pairs(x, first, second, y, tiles, ranks, modules, is_first=is_first)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)
