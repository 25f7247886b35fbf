"""Adapters of experts: each pair of a token and one of its experts has the matrices of the token's
adapter and of the expert.

An adapter has matrices of each expert's modules (`experts.3.gate_proj`), or of a stack of all
experts (`experts.gate_up_proj`: A [experts, rank, in], B [experts, out, rank]); a slot holds either
in one form, for the experts that the rank has. `MixtureMLP` adds the products; see
`kernels.expert_adapters` for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from aioinfer.layers.adapters.parts import AdapterPart, AdapterWeights, ModuleShape
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.expert_adapters import PairTiles
    from aioinfer.kernels.expert_routing import RoutedTokens
    from aioinfer.layers.adapters.slots import AdapterSlots


class ExpertProduct(AdapterPart):
    """What adapters add to one product of all experts of a layer that a rank has.

    Args:
        slots: that hold the matrices.
        stack: the checkpoint module of all experts' weights, whether or not the checkpoint has it.
        sources: of each of the rank's experts: the rows of its weight.
        columns: the input features that this rank has.
        experts: the number of each of the rank's experts, and of how many, `total`.
        merged: how many modules the product merges.
        order: int64 [out], the row in checkpoint order at each place; None for the same order.
    """

    def __init__(
        self, slots: AdapterSlots, stack: str, sources: Sequence[Sequence[Source]],
        columns: Shard, experts: Sequence[int], total: int, *, merged: int,
        order: torch.Tensor | None = None,
    ):  # fmt: skip
        self._slots, self._stack, self._sources = slots, stack, sources
        self._columns, self._experts, self._total = columns, experts, total
        self._merged, self._order = merged, order
        rows = sum(source.rows.size for source in sources[0])
        width = merged * slots.tokens.max_rank
        self.shapes = [(len(sources), width, columns.size), (len(sources), rows, width)]
        slots.parts.add(self)

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """See `AdapterPart.modules`."""
        inputs = self._columns.total
        found = {
            source.name: ModuleShape(source.rows.total, inputs)
            for sources in self._sources
            for source in sources
            if source.stack is None
        }
        by_name = {source.name: source.rows.total for source in self._sources[0]}
        whole = ModuleShape(sum(by_name.values()), inputs, self._total, self._merged)
        return {**found, self._stack: whole}

    def put(
        self, tensors: Sequence[torch.Tensor], weights: Mapping[str, AdapterWeights], rank: int
    ) -> None:
        """See `AdapterPart.put`."""
        of_stack = weights.get(self._stack)
        for number, sources, down, up in zip(self._experts, self._sources, *tensors, strict=True):
            if of_stack is not None:
                own = of_stack._replace(down=of_stack.down[number], up=of_stack.up[number])
                self._put_rows(down, up, sources, None, own, 0)
                continue
            for index, name in enumerate(dict.fromkeys(source.name for source in sources)):
                if (found := weights.get(name)) is not None:
                    self._put_rows(down, up, sources, name, found, index * rank)
        if self._order is not None:
            tensors[1].copy_(tensors[1][:, self._order])

    def _put_rows(
        self, down: torch.Tensor, up: torch.Tensor, sources: Sequence[Source], name: str | None,
        given: AdapterWeights, first_rank: int,
    ) -> None:  # fmt: skip
        """Writes the matrices of one expert's module `name`, or with None of all its modules."""
        ranks = slice(first_rank, first_rank + len(given.down))
        columns = slice(self._columns.start, self._columns.start + self._columns.size)
        down[ranks] = given.down[:, columns]
        row, before, names = 0, 0, [source.name for source in sources]
        for index, source in enumerate(sources):
            rows = slice(row, row := row + source.rows.size)
            if index and names[index] != names[index - 1] and name is None:
                before += sources[index - 1].rows.total
            if name in (None, source.name):
                start = before + source.rows.start
                own = given.up[start : start + source.rows.size].float()
                up[rows, ranks] = (own * (given.scale * source.scale)).to(up.dtype)

    def add(self, place: int, x: torch.Tensor, y: torch.Tensor, adapters: torch.Tensor) -> None:
        """Adds the products of the rows x [R, in] of one expert to y [R, out], in plain torch.

        Args:
            place: of the expert, among the rank's.
            adapters: int32 [R], the adapter slot of each row; negative for none.
        """
        down, up = self.tensors
        for slot in adapters.unique().tolist():
            used = 0 if slot < 0 else int(self._slots.tokens.ranks[slot]) * self._merged
            if used:
                rows = torch.nonzero(adapters == slot)[:, 0]
                shrunk = x.index_select(0, rows) @ down[slot, place, :used].t()
                y.index_add_(0, rows, shrunk @ up[slot, place, :, :used].t())

    def add_to_pairs(
        self, x: torch.Tensor, y: torch.Tensor, tiles: PairTiles, *, is_first: bool
    ) -> None:
        """Adds the products of all pairs; see `kernels.expert_adapters.add_to_pairs`."""
        from aioinfer.kernels.expert_adapters import add_to_pairs

        (down, up), ranks = self.tensors, self._slots.tokens.ranks
        add_to_pairs(x, down, up, y, tiles, ranks, self._merged, is_first=is_first)


class ExpertAdapters:
    """What adapters add to the experts of one layer on a rank.

    Args:
        slots: of the rank.
        first, second: the two products.
    """

    def __init__(self, slots: AdapterSlots, first: ExpertProduct, second: ExpertProduct):
        self._slots = slots
        self.first, self.second = first, second

    @property
    def is_active(self) -> bool:
        """Whether a token of the step may have an adapter."""
        return self._slots.tokens.is_active

    def of_rows(self, step: Step, rows: int) -> torch.Tensor | None:
        """See `AdapterTokens.adapters_of`."""
        return self._slots.tokens.adapters_of(step, rows)

    def tiles_of(self, adapters: torch.Tensor, routed: RoutedTokens) -> PairTiles:
        """Returns the pairs of tokens with adapters (int32 [T], negative for none), sorted."""
        from aioinfer.kernels.expert_adapters import sort_pairs

        (experts, _, _) = self.first.shapes[0]
        return sort_pairs(adapters, routed, experts, self._slots.count)
