"""Places experts on ranks by the tokens that they were given, the busiest in several copies.

The method is that of DeepSeek-AI's load balancer for expert parallelism (EPLB, 2025, its global
form without groups): of the experts, the one with the most tokens a copy gets one more copy, until
there are as many copies as wanted; then the copies, those with the most tokens first, go each to
the rank that has the fewest so far and room left. Unlike there, a second copy of an expert goes to
a rank that has it already only where no other one has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from aioinfer.ipc.expert_placement import LayerPlacement


def place_experts(tokens: Sequence[float], num_ranks: int, num_copies: int) -> LayerPlacement:
    """Returns the placement of a layer's experts.

    Args:
        tokens: of each expert.
        num_ranks: at least one expert for each.
        num_copies: beyond one for each expert; what would put an expert twice on every rank is left
            out.

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
