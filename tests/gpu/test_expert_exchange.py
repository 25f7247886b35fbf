"""The exchange of tokens with the ranks of their experts on real GPUs: against the experts of all
ranks in float64, over many exchanges with other numbers of tokens each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("triton")

from aioinfer.layers.parallel import ParallelGroup

HIDDEN, CHANNELS, TOP_K, PLACES, MAX_TOKENS = 2048, 256, 8, 48, 256
ROUNDS = 200


def check_exchange(rank: int, size: int, folder: Path) -> None:
    from aioinfer.kernels.expert_exchange import NO_LIMIT, ExchangeLayout, ExpertExchange
    from aioinfer.kernels.expert_linear import expert_product, experts_reference
    from aioinfer.kernels.expert_routing import RoutedTokens

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), size)
    group = ParallelGroup.connect(rank, size, store, device)
    layout = ExchangeLayout.of(size, MAX_TOKENS, TOP_K, HIDDEN, torch.bfloat16)
    memory = group.symmetric_buffer(layout.nbytes)
    by_rank = [PLACES * (n + 1) // size - PLACES * n // size for n in range(size)]
    by_rank[0], by_rank[-1] = by_rank[0] - 2, by_rank[-1] + 2
    exchange = ExpertExchange(memory, layout, max(by_rank), TOP_K, HIDDEN, torch.bfloat16)
    firsts, count = exchange.first_places(by_rank), by_rank[rank]
    torch.manual_seed(0)  # the same weights on every rank
    gate_up = torch.randn(PLACES, 2 * CHANNELS, HIDDEN, device=device) / HIDDEN**0.5
    down = torch.randn(PLACES, HIDDEN, CHANNELS, device=device) / CHANNELS**0.5
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    first = sum(by_rank[:rank])
    mine = slice(first, first + by_rank[rank])
    gated, pairs = (
        torch.full((exchange.max_pairs, n), torch.nan, device=device, dtype=torch.bfloat16)
        for n in (CHANNELS, HIDDEN)
    )
    torch.manual_seed(rank + 1)
    rng = random.Random(rank)
    for _ in range(ROUNDS):
        tokens = rng.choice([0, 1, rng.randint(2, MAX_TOKENS), MAX_TOKENS])
        x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        chosen = torch.rand(tokens, PLACES, device=device).argsort(1)[:, :TOP_K].int()
        routed = RoutedTokens(torch.rand(tokens, TOP_K, device=device), chosen.contiguous())
        came = exchange.send(x, routed, firsts, count, rng.choice([-1, 200, NO_LIMIT]))
        for part in (came.few, came.many):
            expert_product(exchange.rows, gate_up[mine], part, gated=True, out=gated)
        for part in (came.few, came.many):
            expert_product(gated, down[mine], part, gated=False, out=pairs)
        out = torch.full_like(x, torch.nan)
        exchange.combine(pairs, routed, firsts, count, x, out)
        if tokens:
            expected = x.double() + experts_reference(
                x.double(), gate_up, down, routed.weights.double(), chosen.long()
            )
            error = ((out.double() - expected).norm() / expected.norm()).item()
            assert error < 1e-2, (tokens, error)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_every_token_gets_its_experts(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(check_exchange, args=(2, tmp_path), nprocs=2)
