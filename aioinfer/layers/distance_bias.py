"""A learned bias of attention scores by the distance of a key from its query, in buckets that widen
with the distance, the same for all layers (T5, Raffel et al. 2019; MPNet, Song et al. 2020)."""

from __future__ import annotations

import math

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.shards import NamedShards, Shard, WeightShard


class DistanceBias:
    """The biases of one rank's heads.

    Args:
        name: of the checkpoint module.
        num_buckets: of both directions together.
        heads: which heads this rank has.
        max_len: of a text.
        backend: of the rank.
        max_distance: from this distance on all keys are in the last bucket.
        both_ways: whether tokens attend to keys behind them, too.

    Attributes:
        table: float32 [heads, 2 * max_len - 1], once the weights are loaded: entry max_len - 1 + d
            where the key is d tokens behind the query.
    """

    def __init__(
        self, name: str, num_buckets: int, heads: Shard, max_len: int, backend: Backend, *,
        max_distance: int = 128, both_ways: bool = True,
    ):  # fmt: skip
        self._name, self._heads, self._max_len = name, heads, max_len
        self._max_distance, self._both_ways = max_distance, both_ways
        self._weight = torch.zeros(
            num_buckets, heads.size, dtype=backend.dtype, device=backend.device
        )
        self.table: torch.Tensor = self._weight

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's heads of the checkpoint's tensor go."""
        heads = self._heads
        yield f"{self._name}.weight", WeightShard(self._weight, 1, heads.start, heads.total)

    def finalize(self) -> None:
        """Makes the table."""
        distances = torch.arange(1 - self._max_len, self._max_len, device=self._weight.device)
        buckets = buckets_of(
            distances, len(self._weight), self._max_distance, both_ways=self._both_ways
        )
        table = self._weight[buckets].float().t().contiguous()
        self.table = table if self.table is self._weight else self.table.copy_(table)

    def of_length(self, length: int) -> torch.Tensor:
        """Returns the biases of a text of so many tokens: float32 [heads, length, length], by query
        and key."""
        places = torch.arange(length, device=self.table.device)
        return self.table[:, self._max_len - 1 + places - places[:, None]]

    def of_keys_before(self, distances: torch.Tensor) -> torch.Tensor:
        """Returns the biases of keys that are so many tokens before the query: float32 [heads,
        ...]; any for negative numbers."""
        return self.table[:, self._max_len - 1 - distances.long().clamp(min=0)]


def buckets_of(
    distances: torch.Tensor, num_buckets: int, max_distance: int = 128, *, both_ways: bool = True
) -> torch.Tensor:
    """Returns the bucket of each distance, int64: where tokens attend both ways, a half of the
    buckets is for keys behind the query; the first half of those of a direction have one distance
    each, and the others grow logarithmically."""
    half = num_buckets // 2 if both_ways else num_buckets
    exact = half // 2
    away = distances.abs() if both_ways else (-distances).clamp(min=0)
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, wide) + half * ((distances > 0) & both_ways)
