"""The exchange of tokens with the ranks of their experts on real GPUs: against the experts of all
ranks in float64, over many exchanges with other numbers of tokens each, launched one by one or
replayed from graphs, whatever the other rank does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("triton")

from aioinfer.layers.parallel import ParallelGroup

HIDDEN, CHANNELS, TOP_K, PLACES, MAX_TOKENS = 2048, 256, 8, 48, 256
ROUNDS = 200
#: Tokens of the graphs.
GRAPHS = (0, 1, 7, 64, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of a rank in an exchange, and their experts."""

    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, tokens: int, device: torch.device) -> Step:
        step = cls(
            torch.empty(tokens, HIDDEN, device=device, dtype=torch.bfloat16),
            torch.empty(tokens, TOP_K, device=device),
            torch.empty(tokens, TOP_K, device=device, dtype=torch.int32),
            torch.empty(tokens, HIDDEN, device=device, dtype=torch.bfloat16),
        )
        step.fill()
        return step

    def fill(self) -> None:
        """Draws new tokens, weights and experts."""
        self.x.normal_()
        self.weights.uniform_()
        drawn = torch.rand(len(self.x), PLACES, device=self.x.device).argsort(1)[:, :TOP_K]
        self.chosen.copy_(drawn)
        self.out.fill_(torch.nan)


class Rank:
    """One rank's experts, and its side of the exchange."""

    def __init__(self, group: ParallelGroup, device: torch.device):
        from aioinfer.kernels.expert_exchange import ExchangeLayout, ExpertExchange

        size, rank, dtype = group.size, group.rank, torch.bfloat16
        layout = ExchangeLayout.of(size, MAX_TOKENS, TOP_K, HIDDEN, dtype)
        memory = group.symmetric_buffer(layout.nbytes)
        by_rank = [PLACES * (n + 1) // size - PLACES * n // size for n in range(size)]
        by_rank[0], by_rank[-1] = by_rank[0] - 2, by_rank[-1] + 2
        self.exchange = ExpertExchange(memory, layout, max(by_rank), TOP_K, HIDDEN, dtype)
        self.places = self.exchange.first_places(by_rank), by_rank[rank]
        torch.manual_seed(0)  # the same weights on every rank
        gate_up = torch.randn(PLACES, 2 * CHANNELS, HIDDEN, device=device) / HIDDEN**0.5
        down = torch.randn(PLACES, HIDDEN, CHANNELS, device=device) / CHANNELS**0.5
        self.gate_up, self.down = gate_up.bfloat16(), down.bfloat16()
        first = sum(by_rank[:rank])
        self.mine = slice(first, first + by_rank[rank])
        self.gated, self.pairs = (
            torch.full((self.exchange.max_pairs, n), torch.nan, device=device, dtype=dtype)
            for n in (CHANNELS, HIDDEN)
        )

    def launch(self, step: Step, max_few: int) -> None:
        """Launches a layer's exchange and products; up to `max_few` pairs are few."""
        from aioinfer.kernels.expert_product import expert_product
        from aioinfer.kernels.expert_routing import RoutedTokens

        routed = RoutedTokens(step.weights, step.chosen)
        pdl = torch.cuda.get_device_capability()[0] >= 9
        came = self.exchange.send(step.x, routed, *self.places, max_few)
        for x, weight, out in (
            (self.exchange.rows, self.gate_up, self.gated),
            (self.gated, self.down, self.pairs),
        ):
            for part in (came.few, came.many):
                is_first = weight is self.gate_up
                expert_product(x, weight[self.mine], part, gated=is_first, out=out, pdl=pdl)
        self.exchange.combine(self.pairs, routed, *self.places, step.x, step.out)

    def check(self, step: Step) -> None:
        from references import experts_reference

        if len(step.x):
            exact = step.x.double()
            expected = exact + experts_reference(
                exact, self.gate_up, self.down, step.weights.double(), step.chosen.long()
            )
            error = ((step.out.double() - expected).norm() / expected.norm()).item()
            assert error < 1e-2, (len(step.x), error)


def check_exchange(rank: int, size: int, folder: Path) -> None:
    from aioinfer.kernels.expert_exchange import NO_LIMIT

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), size)
    group = ParallelGroup.connect(rank, size, store, device)
    one = Rank(group, device)
    torch.manual_seed(rank + 1)
    rng = random.Random(rank)
    graphs: dict[int, tuple[Step, Any]] = {}
    for tokens in GRAPHS:
        step = Step.make(tokens, device)
        one.launch(step, 200)  # compiled before it is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.launch(step, 200)
        graphs[tokens] = step, graph
    for number in range(ROUNDS):
        if rng.random() < 0.5:
            step, graph = graphs[rng.choice(GRAPHS)]
            step.fill()
            graph.replay()
        else:
            tokens = rng.choice([0, 1, rng.randint(2, MAX_TOKENS), MAX_TOKENS])
            step = Step.make(tokens, device)
            one.launch(step, rng.choice([-1, 200, NO_LIMIT]))
        if number % 3:  # else the host is ahead of the device
            one.check(step)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_every_token_gets_its_experts(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(check_exchange, args=(2, tmp_path), nprocs=2)
