"""The placement of a model's experts on ranks, with copies: the file `parallel.expert_parallel`.

An expert may have several copies, on different ranks as a rule, among which its tokens are divided.
A copy of an expert on a rank is a place. Places are numbered rank by rank; where there are no
copies and experts lie in their order, a place has the number of its expert. The layers read a
placement (`layers.mixture`), and `engine.expert_load` makes one from counted tokens. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError

VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The experts of one layer on the ranks.

    Attributes:
        by_rank: the experts that each rank has, one after the other in its memory.
    """

    by_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def near_equal(cls, num_experts: int, num_ranks: int) -> LayerPlacement:
        """Returns each expert once, in order, in parts that differ by one expert at most."""
        ends = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
        return cls(tuple(tuple(range(a, b)) for a, b in pairwise(ends)))

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert of each place."""
        return tuple(expert for experts in self.by_rank for expert in experts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each place."""
        return tuple(rank for rank, experts in enumerate(self.by_rank) for _ in experts)

    def first_place(self, rank: int) -> int:
        """Returns the first place of a rank."""
        return sum(map(len, self.by_rank[:rank]))

    @property
    def is_in_order(self) -> bool:
        """Whether each expert has one place, of its own number."""
        return self.experts == tuple(range(len(self.experts)))

    def places_of(self, num_experts: int) -> list[list[int]]:
        """Returns the places of each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(num_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return found


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The placements of some layers; the experts of others lie in order, in near-equal parts.

    Attributes:
        layers: by the number of the layer in the model.
    """

    layers: Mapping[int, LayerPlacement] = field(default_factory=dict)

    def of(self, layer: int, num_experts: int, num_ranks: int) -> LayerPlacement:
        """Returns the placement of a layer.

        Raises:
            ConfigError: it was made for other numbers of experts or ranks, an expert is missing, or
                a rank has none.
        """
        found = self.layers.get(layer)
        about = f"parallel.expert_parallel: layer {layer}"
        if found is None:
            found = LayerPlacement.near_equal(num_experts, num_ranks)
            about = f"parallel.expert_parallel: layer {layer}"
        if len(found.by_rank) != num_ranks:
            raise ConfigError(
                f"{about} is placed on {len(found.by_rank)} ranks; there are {num_ranks} "
                f"(parallel.tensor_parallel_size, or data_parallel_size)"
            )
        if not all(found.by_rank):
            raise ConfigError(f"{about}: a rank has no expert")
        beyond = {expert for expert in found.experts if not 0 <= expert < num_experts}
        if beyond:
            raise ConfigError(f"{about} has no expert {min(beyond)}: there are {num_experts}")
        missing = set(range(num_experts)) - set(found.experts)
        if missing:
            raise ConfigError(f"{about}: expert {min(missing)} is on no rank")
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of a file for `read`."""
        layers = {str(n): [list(e) for e in self.layers[n].by_rank] for n in sorted(self.layers)}
        return {"version": VERSION, "layers": layers}

    @classmethod
    def read(cls, path: Path) -> ExpertPlacement:
        """Reads a file: `{"version": 1, "layers": {"0": [[experts of rank 0], ...], ...}}`.

        Raises:
            ConfigError: it cannot be read, or is something else.
        """
        try:
            decoded = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"parallel.expert_parallel: {path}: {error}") from error
        if not isinstance(decoded, dict) or decoded.get("version") != VERSION:
            raise ConfigError(
                f"parallel.expert_parallel: {path} is not a placement of version {VERSION}"
            )
        layers = decoded.get("layers")
        if not isinstance(layers, dict) or not all(map(_is_placement, layers.items())):
            raise ConfigError(
                f"parallel.expert_parallel: 'layers' of {path} must map numbers of layers to a "
                f"list of expert numbers for each rank"
            )
        return cls({int(number): _as_placement(ranks) for number, ranks in layers.items()})


def _as_placement(by_rank: Sequence[Sequence[int]]) -> LayerPlacement:
    return LayerPlacement(tuple(tuple(experts) for experts in by_rank))


def _is_placement(item: tuple[str, Any]) -> bool:
    number, by_rank = item
    if not number.isdecimal() or not isinstance(by_rank, list) or not by_rank:
        return False
    return all(
        isinstance(experts, list) and all(type(expert) is int for expert in experts)
        for experts in by_rank
    )
