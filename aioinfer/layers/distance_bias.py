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
        num_buckets: how many there are, of both directions together.
        heads: which heads this rank has.
        max_len: the longest text, in tokens.
        backend: of the rank.
        max_distance: from this distance on all keys are in the last bucket.
        both_ways: whether a query attends to keys after it, too.

    Attributes:
        table: float32 [heads, 2 * max_len - 1], once the weights are loaded: entry max_len - 1 + d
            is the bias of a key d tokens after its query, or -d tokens before it.
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
        """Returns the biases float32 [heads, ...] of keys that are `distances` [...] tokens before
        their queries; keys after them, which are to be masked, have the bias of distance 0."""
        return self.table[:, self._max_len - 1 - distances.long().clamp(min=0)]


def buckets_of(
    distances: torch.Tensor, num_buckets: int, max_distance: int = 128, *, both_ways: bool = True
) -> torch.Tensor:
    """Returns the bucket of each distance, int64.

    The buckets of a direction begin at distance 0. Each bucket of the first half has one distance;
    the buckets of the second half widen logarithmically up to `max_distance`, and the last one has
    all larger distances, too.

    Args:
        distances: the position of a key less the position of its query.
        num_buckets, max_distance: as in `DistanceBias`.
        both_ways: whether the second half of all buckets is for keys after the query; otherwise
            all buckets are for keys up to the query, and keys after it are in bucket 0.
    """
    half = num_buckets // 2 if both_ways else num_buckets
    exact = half // 2
    away = distances.abs() if both_ways else (-distances).clamp(min=0)
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, wide) + half * ((distances > 0) & both_ways)
