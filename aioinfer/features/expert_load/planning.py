"""The load of a model's experts, in tokens by layer and place as the workers report them, and the
placement of experts that balances it.

`/metrics`, the page and `GET /experts/placement` read it. A report comes every second at most and
takes some 50 us here.

`place_experts` places experts on ranks by the tokens that they were given, the busiest in several
copies. The method comes from DeepSeek-AI's load balancer for expert parallelism (EPLB, 2025, its
global form without groups): of the experts, the one with the most tokens a copy gets one more copy,
until there are as many copies as wanted; then the copies, the ones with the most tokens first, go
each to the rank that has the fewest so far and room left. Unlike there, a second copy of an expert
goes to a rank that has it already only where no other one has room.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.features.expert_load.sections import ExpertTokens
from aioinfer.ipc.expert_placement import LayerPlacement
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature

#: Half-life of the counted tokens in `ExpertLoad.recent`, in seconds.
HALF_LIFE_S = 60.0

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ExpertLoad:
    """The tokens routed to the experts of one engine's model. Arrays are [L, P], by layer and place
    (see `ipc.expert_placement`); empty before the first report, and for models without experts.

    Attributes:
        layers: the numbers of the layers.
        experts, ranks: of each place; -1 as in `ExpertTokens`.
        totals: tokens since the start.
        recent: tokens, of which half is forgotten every `HALF_LIFE_S`.
        version: counts the reports.
    """

    def __init__(self) -> None:
        none = np.zeros((0, 0), np.int64)
        self.layers: list[int] = []
        self.experts: Ints = none
        self.ranks: Ints = none
        self.totals: Ints = none
        self.recent: Floats = none.astype(np.float64)
        self.version = 0
        self._reported = 0.0

    def add(self, found: ExpertTokens, now: float) -> None:
        """Adds a report that came at `now`, of `time.monotonic`."""
        if not np.array_equal(self.experts, found.experts):  # the first one
            self.layers = found.layers.tolist()
            self.experts = found.experts.astype(np.int64)
            self.ranks = found.ranks.astype(np.int64)
            self.totals = np.zeros_like(self.experts)
            self.recent = np.zeros(self.experts.shape)
        tokens = found.tokens.view(np.uint32).astype(np.int64)
        self.totals += tokens
        self.recent *= 0.5 ** ((now - self._reported) / HALF_LIFE_S)
        self.recent += tokens
        self._reported = now
        self.version += 1

    @property
    def num_experts(self) -> int:
        """How many experts a layer has; 0 where nothing is known."""
        return int(self.experts.max(initial=-1)) + 1

    def by_expert(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the sums of `tokens` [L, P] over the copies of each expert, [L, num_experts]."""
        return _sum_by(self.experts, tokens, self.num_experts)

    def by_rank(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the sums of `tokens` [L, P] over the places of each rank, [L, ranks]: [L, 0]
        where all ranks compute a part of every expert."""
        return _sum_by(self.ranks, tokens, int(self.ranks.max(initial=-1)) + 1)


class Planning(StepFeature):
    """Takes the reports of the workers.

    Attributes:
        load: the tokens so far.
    """

    name = "expert_load"
    reports = ExpertTokens

    def __init__(self, host: Any = None):
        super().__init__(host)
        self.load = ExpertLoad()

    def take_report(self, section: Section) -> None:
        """See `StepFeature.take_report`."""
        assert isinstance(section, ExpertTokens)
        self.load.add(section, time.monotonic())


def imbalance(loads: npt.NDArray[Any]) -> Floats:
    """Returns the largest load over the mean in each row of `loads` [L, N]; 1 in a row of zeros,
    and where N is 0."""
    if not loads.size:
        return np.ones(len(loads))
    mean = loads.mean(axis=1)
    return np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def _sum_by(numbers: Ints, tokens: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Returns the sums of `tokens` [L, P] by the numbers [L, P] of 0 .. `count`, of which those
    below 0 are left out: [L, count]."""
    sums = np.zeros((len(numbers), count + 1), tokens.dtype)
    np.add.at(sums, (np.arange(len(numbers))[:, None], numbers), tokens)  # -1 is the last column
    return sums[:, :count]


def place_experts(tokens: Sequence[float], num_ranks: int, num_copies: int) -> LayerPlacement:
    """Returns the placement of a layer's experts.

    Args:
        tokens: of each expert.
        num_ranks: at least one expert for each.
        num_copies: beyond one for each expert; copies that would put an expert twice on every rank
            are left out.

    Raises:
        ValueError: there are more ranks than experts and copies.
    """
    counts = _count_copies(tokens, num_ranks, num_copies)
    places = sum(counts)
    if places < num_ranks:
        raise ValueError(f"{places} experts and copies for {num_ranks} ranks")
    room = [places * (n + 1) // num_ranks - places * n // num_ranks for n in range(num_ranks)]
    loads = [0.0] * num_ranks
    here: list[list[int]] = [[] for _ in range(num_ranks)]
    load_of = [total / count for total, count in zip(tokens, counts, strict=True)]
    # an expert's copies one after the other: each then finds the most ranks without it
    order = sorted(range(len(tokens)), key=lambda expert: (-load_of[expert], expert))
    for expert in (each for each in order for _ in range(counts[each])):
        rank = min(
            (rank for rank in range(num_ranks) if len(here[rank]) < room[rank]),
            key=lambda rank: (expert in here[rank], loads[rank], rank),
        )
        here[rank].append(expert)
        loads[rank] += load_of[expert]
    return LayerPlacement(tuple(tuple(sorted(experts)) for experts in here))


def _count_copies(tokens: Sequence[float], num_ranks: int, num_copies: int) -> list[int]:
    """Returns how many copies each expert gets: one, and `num_copies` more in all, but none more
    than there are ranks."""
    counts = [1] * len(tokens)
    heap = [(-float(total), expert) for expert, total in enumerate(tokens)]
    heapq.heapify(heap)
    for _ in range(num_copies if num_ranks > 1 else 0):
        if not heap:
            break
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < num_ranks:
            heapq.heappush(heap, (-float(tokens[expert]) / counts[expert], expert))
    return counts
