"""A learned bias of attention scores by the distance of a key from its query, in buckets that widen
with the distance (T5, Raffel et al. 2019), the same for all layers (MPNet, Song et al. 2020)."""

from __future__ import annotations

import math

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.shards import NamedShards, Shard, WeightShard

#: From this distance on all keys are in the last bucket.
_MAX_DISTANCE = 128


class DistanceBias:
    """The biases of one rank's heads.

    Args:
        name: of the checkpoint module.
        num_buckets: of both directions together.
        heads: which heads this rank has.
        max_len: of a text.
        backend: of the rank.

    Attributes:
        table: float32 [heads, 2 * max_len - 1], once the weights are loaded: entry max_len - 1 + d
            where the key is d tokens behind the query.
    """

    def __init__(self, name: str, num_buckets: int, heads: Shard, max_len: int, backend: Backend):
        self._name, self._heads, self._max_len = name, heads, max_len
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
        found = self._weight[buckets_of(distances, len(self._weight))]
        table = found.float().t().contiguous()
        self.table = table if self.table is self._weight else self.table.copy_(table)

    def of_length(self, length: int) -> torch.Tensor:
        """Returns the biases of a text of so many tokens: float32 [heads, length, length], by query
        and key."""
        places = torch.arange(length, device=self.table.device)
        return self.table[:, self._max_len - 1 + places - places[:, None]]


def buckets_of(distances: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Returns the bucket of each distance, int64: a half of the buckets is for keys behind the
    query; the first half of those of a direction have one distance each, and the others grow
    logarithmically."""
    half = num_buckets // 2
    exact = half // 2
    away = distances.abs()
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact)
    wide = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, wide) + half * (distances > 0)
