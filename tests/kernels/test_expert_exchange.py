"""Tokens that go to the ranks of their experts and come back, between processes."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.expert_configs import ExpertConfig
from aioinfer.kernels.expert_exchange import ExchangeLayout, ExpertExchange
from aioinfer.kernels.expert_product import expert_product
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from peer_processes import run_ranks
from references import experts_reference

pytestmark = pytest.mark.extended

HIDDEN, CHANNELS, TOP_K, MAX_TOKENS = 24, 16, 3, 9
#: Tokens of each rank in one exchange after the other.
STEPS = ((4, 0), (9, 1), (0, 0), (2, 7))
CONFIG = ExpertConfig(32, 16, 32, 4, 2, tma=False)


def weights(places: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(places, 2 * CHANNELS, HIDDEN, generator=generator) / HIDDEN**0.5
    return gate_up, torch.randn(places, HIDDEN, CHANNELS, generator=generator) / CHANNELS**0.5


def tokens(rank: int, step: int, places: list[int]) -> tuple[torch.Tensor, RoutedTokens]:
    """Returns the tokens of a rank in a step, routed to some of `places`."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    count = STEPS[step][rank]
    order = torch.rand(count, len(places), generator=generator).argsort(1)[:, :TOP_K]
    x = torch.randn(count, HIDDEN, generator=generator)
    factors = torch.rand(count, TOP_K, generator=generator)
    return x, RoutedTokens(factors, torch.tensor(places)[order].int())


def exchange(
    peers: SymmetricBuffer, by_rank: list[int], places: list[int], max_few: int
) -> list[torch.Tensor]:
    layout = ExchangeLayout.of(peers.size, MAX_TOKENS, TOP_K, HIDDEN, torch.float32)
    # as another layer may have more places
    whole = ExpertExchange(peers, layout, 9, TOP_K, HIDDEN, torch.float32)
    firsts, count = whole.first_places(by_rank), by_rank[peers.rank]
    first = sum(by_rank[: peers.rank])
    mine = slice(first, first + count)
    gate_up, down = (each[mine].contiguous() for each in weights(sum(by_rank)))
    found = []
    for step in range(len(STEPS)):
        x, routed = tokens(peers.rank, step, places)
        came = whole.send(x, routed, firsts, count, max_few)
        numbers = [int(part.counts.sum()) for part in (came.few, came.many)]
        assert (sum(numbers) <= max_few) == (numbers[1] == 0)
        gated = torch.full((whole.max_pairs, CHANNELS), torch.nan)
        pairs = torch.full((whole.max_pairs, HIDDEN), torch.nan)
        for part in (came.few, came.many):
            expert_product(whole.rows, gate_up, part, gated=True, config=CONFIG, out=gated)
        for part in (came.few, came.many):
            expert_product(gated, down, part, gated=False, config=CONFIG, out=pairs)
        out = torch.full_like(x, torch.nan)
        added = 3.0 * x if step % 2 else None
        found.append(whole.combine(pairs, routed, firsts, count, 2.0 * x, out, added))
    return found


@pytest.mark.parametrize(
    ("by_rank", "places"),
    [([3, 4], [0, 1, 2, 3, 4, 5, 6]), ([3, 4], [3, 5, 6]), ([4, 3], [0, 1, 3, 6])],
)
def test_every_token_gets_its_experts(by_rank: list[int], places: list[int]) -> None:
    """Of ranks with fewer tokens than others, none at all, and experts of one rank alone; with
    products for few rows or for many."""
    layout = ExchangeLayout.of(2, MAX_TOKENS, TOP_K, HIDDEN, torch.float32)
    found = run_ranks(2, layout.nbytes, exchange, by_rank, places, 12)
    gate_up, down = (each.double() for each in weights(sum(by_rank)))
    for rank, outputs in enumerate(found):
        for step, output in enumerate(outputs):
            x, routed = tokens(rank, step, places)
            expected = (2.0 + 3.0 * (step % 2)) * x.double() + experts_reference(
                x.double(), gate_up, down, routed.weights.double(), routed.experts.long()
            )
            torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
