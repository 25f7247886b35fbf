"""Placement of a layer's experts on the ranks, and division of tokens among the copies of an
expert.

An expert may have copies on several ranks (`ipc.expert_placement`), as DeepSeek-AI's load balancer
for expert parallelism (EPLB, 2025) places them: token t takes copy t modulo their number, on every
rank alike. A place is one copy on one rank. The tokens of each place are counted (`ExpertCounter`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy

import torch

from aioinfer.ipc.expert_placement import LayerPlacement
from aioinfer.layers.backend import Backend
from aioinfer.layers.mixture_shape import MixtureShape
from aioinfer.layers.shards import Shard


class ExpertCopies:
    """Divides the tokens of experts among their places.

    Attributes:
        table: int32 [num_experts, most], the places of each expert, from the left.
        counts: int32 [num_experts], how many each has.
    """

    def __init__(self, places: Sequence[Sequence[int]], device: torch.device):
        """`places`: of each expert."""
        most = max(map(len, places))
        rows = [[*some, *[some[0]] * (most - len(some))] for some in places]
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        self.counts = torch.tensor([len(s) for s in places], dtype=torch.int32, device=device)

    def __call__(self, experts: torch.Tensor) -> torch.Tensor:
        """Returns the places, int64, for the experts of each token, int64 [T, top_k]."""
        token = torch.arange(len(experts), device=experts.device).unsqueeze(1)
        return self.table[experts, token % self.counts[experts]].long()


class ExpertCounter:
    """Counts the tokens that the experts of one layer are given, on the device.

    Attributes:
        layer: the number of the layer in the model.
        experts, ranks: of each place; see `features.expert_load.sections.ExpertTokens`.
        tokens: int32 [places], since they were last reported; modulo 2 ** 32.
    """

    def __init__(self, layer: int, placement: LayerPlacement, backend: Backend):
        self.layer = layer
        self.experts = placement.experts
        is_divided = backend.expert_parallel
        self.ranks = placement.ranks if is_divided else (-1,) * len(self.experts)
        self.tokens = torch.zeros(len(self.experts), dtype=torch.int32, device=backend.device)

    def on(self, device: torch.device) -> ExpertCounter:
        """Returns a counter of the same layer on another device, at zero."""
        made = copy(self)
        made.tokens = torch.zeros(len(self.experts), dtype=torch.int32, device=device)
        return made


class PlacedExperts:
    """The experts of one layer, and the places that a rank has of them.

    Args:
        name: of the checkpoint module of the mixture, which holds the number of its layer.
        shape: of all ranks together.
        backend: of the rank.

    Attributes:
        local: the rank's places, of all.
        by_rank: how many places each rank has.
        channels: of each expert that the rank has.
        experts: the expert of each place.
        counter: of the tokens.
        copies: divides tokens among places; None where places are experts.

    Raises:
        ConfigError: the placement does not fit the model.
    """

    def __init__(self, name: str, shape: MixtureShape, backend: Backend):
        group = backend.expert_group or backend.group
        rank, size = group.rank, group.size
        layer, count = _layer_of(name), shape.routing.num_experts
        if backend.expert_parallel:
            placement = backend.expert_placement.of(layer, count, size)
            self.by_rank = [len(experts) for experts in placement.by_rank]
            here = self.by_rank[rank]
            self.local = Shard(placement.first_place(rank), here, len(placement.experts))
            self.channels = Shard.whole(shape.expert_size)
        else:
            placement = LayerPlacement.near_equal(count, 1)
            self.by_rank = [count]
            self.local = Shard.whole(count)
            self.channels = Shard.of_rank(shape.expert_size, rank, size)
        self.experts = placement.experts
        self.counter = ExpertCounter(layer, placement, backend)
        self.copies: ExpertCopies | None = None
        if not placement.is_in_order:
            self.copies = ExpertCopies(placement.places_of(count), backend.device)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts that the rank has, by its places."""
        return self.experts[self.local.start : self.local.start + self.local.size]


def _layer_of(name: str) -> int:
    """Returns the number of the layer in a module's name; 0 for a name without."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else 0
