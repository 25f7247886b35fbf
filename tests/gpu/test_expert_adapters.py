"""Adapters of experts on a GPU: products of pairs in half precision, at the shape of the experts of
Qwen3-30B-A3B."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.expert_adapters import add_to_pairs, sort_pairs
from aioinfer.kernels.expert_routing import RoutedTokens

GPU = torch.device("cuda")
SLOTS, EXPERTS, TOP_K, RANK = 4, 128, 8, 16


def route(tokens: int, generator: torch.Generator) -> RoutedTokens:
    """Random experts, with buckets for more than a few tokens."""
    scores = torch.rand(tokens, EXPERTS, generator=generator, device=GPU)
    weights, chosen = scores.topk(TOP_K)
    routed = RoutedTokens(weights.contiguous(), chosen.int().contiguous())
    if tokens <= 16:
        return routed
    flat = chosen.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=EXPERTS)
    place = torch.arange(len(flat), device=GPU) - (counts.cumsum(0) - counts)[flat[order]]
    rows = torch.zeros(EXPERTS, tokens, dtype=torch.int32, device=GPU)
    rows[flat[order], place] = order.int()
    return RoutedTokens(routed.weights, routed.experts, counts.int(), rows)


@pytest.mark.parametrize("tokens", [1, 16, 256, 3000])
@pytest.mark.parametrize(("is_first", "width", "out"), [(True, 2048, 1536), (False, 768, 2048)])
def test_pairs_in_half_precision(tokens: int, width: int, out: int, *, is_first: bool) -> None:
    generator = torch.Generator(GPU).manual_seed(tokens)

    def random_tensor(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=GPU)
        return (made / shape[-1] ** 0.5).to(torch.bfloat16)

    modules = 1 + is_first
    ranks = torch.tensor([RANK, 5, RANK, 8], dtype=torch.int32, device=GPU)
    first = random_tensor(SLOTS, EXPERTS, modules * RANK, width)
    second = random_tensor(SLOTS, EXPERTS, out, modules * RANK)
    adapters = torch.randint(
        -1, SLOTS, (tokens,), generator=generator, device=GPU, dtype=torch.int32
    )
    routed, pairs = route(tokens, generator), tokens * TOP_K
    x, y = random_tensor(tokens if is_first else pairs, width), random_tensor(pairs, out)
    between = torch.arange(pairs, device=GPU)  # the row of each pair between the products
    if routed.counts is not None:
        between = routed.experts.flatten().argsort(stable=True).argsort()
    keys = adapters.repeat_interleave(TOP_K) * EXPERTS + routed.experts.flatten()
    expected, weights = y.float(), routed.weights.flatten()
    for key in keys[adapters.repeat_interleave(TOP_K) >= 0].unique().tolist():
        slot, expert = divmod(key, EXPERTS)
        used, same = modules * int(ranks[slot]), (keys == key).nonzero()[:, 0]
        given = x[same // TOP_K if is_first else between[same]].float()
        added = given @ first[slot, expert, :used].float().t()
        added = added @ second[slot, expert, :, :used].float().t()
        if is_first:
            expected[between[same]] += added
        else:
            expected[same] += added * weights[same, None]
    tiles = sort_pairs(adapters, routed, EXPERTS, SLOTS)
    add_to_pairs(x, first, second, y, tiles, ranks, modules, is_first=is_first)
    torch.testing.assert_close(y.float(), expected, atol=0.03, rtol=0.02)
