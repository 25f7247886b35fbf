"""Adapters of experts: each pair of a token and one of its experts has the matrices of the token's
adapter and of the expert.

An adapter has matrices of each expert's modules (`experts.3.gate_proj`), or of a stack of all
experts (`experts.gate_up_proj`: A [experts, rank, in], B [experts, out, rank]); a slot holds either
in one form, for the experts that the rank has. `MixtureMLP` adds the products; see
`kernels.expert_adapters` for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from aioinfer.errors import ConfigError
from aioinfer.features.adapters.layers.parts import (
    AdapterPart,
    AdapterWeights,
    ModuleShape,
    Piece,
    pieces_of_rows,
)
from aioinfer.features.adapters.layers.tokens import AdapterTokens
from aioinfer.layers.extension import ExpertExtension, Terms
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.expert_adapters import PairTiles
    from aioinfer.kernels.expert_routing import RoutedTokens
    from aioinfer.layers.mixture import PlacedExperts


class ExpertProduct(AdapterPart):
    """What adapters add to one product of all experts of a layer that a rank has.

    Args:
        slots: of the rank.
        stack: the checkpoint module of all experts' weights, whether or not the checkpoint has it.
        sources: of each of the rank's experts: the rows of its weight.
        columns: the input features that this rank has.
        experts: the number of each of the rank's experts, and of how many, `total`.
        merged: how many modules the product merges.
        order: int64 [out], the row in checkpoint order at each place; None for the same order.

    Attributes:
        merged: the same.
    """

    def __init__(
        self, slots: AdapterTokens, stack: str, sources: Sequence[Sequence[Source]],
        columns: Shard, experts: Sequence[int], total: int, *, merged: int,
        order: torch.Tensor | None = None,
    ):  # fmt: skip
        self._slots, self._stack, self._sources = slots, stack, sources
        self._columns, self._experts, self._total = columns, experts, total
        self.merged = merged
        self._order = None if order is None else order.to(slots.backend.device)
        rows = sum(source.rows.size for source in sources[0])
        width = merged * slots.max_rank
        self.shapes = [(len(sources), width, columns.size), (len(sources), rows, width)]

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """See `AdapterPart.modules`."""
        inputs = self._columns.total
        all_rows = [source for sources in self._sources for source in sources]
        found = {s.name: ModuleShape(s.rows.total, inputs) for s in all_rows if s.stack is None}
        by_name = {source.name: source.rows.total for source in self._sources[0]}
        whole = ModuleShape(sum(by_name.values()), inputs, self._total, self.merged)
        return {**found, self._stack: whole}

    def pieces(
        self, tensors: Sequence[torch.Tensor], weights: Mapping[str, AdapterWeights], rank: int
    ) -> Iterator[Piece]:
        """See `AdapterPart.pieces`."""
        for number, sources, down, up in zip(self._experts, self._sources, *tensors, strict=True):
            totals = {source.name: source.rows.total for source in sources}
            given, first = dict[str, tuple[AdapterWeights, int]](), 0
            for index, (name, total) in enumerate(totals.items()):
                if (stack := weights.get(self._stack)) is not None:
                    own = stack.up[number][first : first + total]
                    given[name] = stack._replace(down=stack.down[number], up=own), 0
                    first += total
                elif name in weights:
                    given[name] = weights[name], index * rank
            yield from pieces_of_rows(down, up, sources, self._columns, given)

    def enter(self, slot: int, tensors: Sequence[torch.Tensor]) -> None:
        """See `AdapterPart.enter`."""
        super().enter(slot, tensors)
        if self._order is not None:
            up = self.tensors[1][slot]
            up.copy_(up.index_select(1, self._order))


class ExpertAdapters(ExpertExtension):
    """What adapters add to the experts of one layer on a rank.

    Args:
        slots: of the rank.
        first, second: the two products.

    Attributes:
        products: the second and the first.
    """

    def __init__(self, slots: AdapterTokens, first: ExpertProduct, second: ExpertProduct):
        self._slots, self.products = slots, (second, first)

    @property
    def is_active(self) -> bool:
        """See `Extending.is_active`."""
        return self._slots.is_active

    def terms_of(self, step: Step, rows: int) -> Terms | None:
        """See `ExpertExtension.terms_of`."""
        return self._slots.of_rows(step, rows)

    def add(
        self, place: int, x: torch.Tensor, y: torch.Tensor, terms: Terms, *, is_first: bool
    ) -> None:
        """See `ExpertExtension.add`."""
        product = self.products[is_first]
        down, up = product.tensors
        for slot in terms.unique().tolist():
            used = 0 if slot < 0 else int(self._slots.ranks[slot]) * product.merged
            if used:
                rows = torch.nonzero(terms == slot)[:, 0]
                shrunk = x.index_select(0, rows) @ down[slot, place, :used].t()
                y.index_add_(0, rows, shrunk @ up[slot, place, :, :used].t())

    def sort(self, terms: Terms, routed: RoutedTokens) -> PairTiles:
        """See `ExpertExtension.sort`."""
        from aioinfer.kernels.expert_adapters import sort_pairs

        (experts, _, _) = self.products[0].shapes[0]
        return sort_pairs(terms, routed, experts, self._slots.count)

    def add_to_pairs(
        self, x: torch.Tensor, y: torch.Tensor, pairs: PairTiles, *, is_first: bool
    ) -> None:
        """See `ExpertExtension.add_to_pairs`."""
        from aioinfer.kernels.expert_adapters import add_to_pairs

        product = self.products[is_first]
        (down, up), ranks = product.tensors, self._slots.ranks
        add_to_pairs(x, down, up, y, pairs, ranks, product.merged, is_first=is_first)


def adapt_experts(
    slots: AdapterTokens, stacks: tuple[str, str], here: Sequence[Sequence[Source]],
    placed: PlacedExperts, *, takes_stacked: bool, in_turns: bool = False,
    channels: Shard | None = None,
) -> ExpertAdapters:  # fmt: skip
    """Returns what adapters add to a rank's experts; see `Extension.extend_experts`."""
    channels = channels or placed.channels
    if slots.backend.expert_group is not None:
        raise ConfigError(
            "'experts' in lora.targets is not supported with parallel.expert_parallel between "
            "engines"
        )
    order, is_gated = None, in_turns or len(here[0]) > 2
    if takes_stacked and is_gated:
        from aioinfer.layers.expert_stacks import interleaved_order

        order = interleaved_order(channels.size, in_turns=in_turns)
    elif in_turns:
        order = torch.arange(2 * channels.size).view(-1, 2).t().flatten()
    numbers, total = placed.local_experts, len(set(placed.experts))
    first, second = [each[:-1] for each in here], [each[-1:] for each in here]
    whole = Shard.whole(second[0][0].rows.total)
    return ExpertAdapters(
        slots,
        ExpertProduct(
            slots, stacks[0], first, whole, numbers, total, merged=1 + is_gated, order=order
        ),
        ExpertProduct(slots, stacks[1], second, channels, numbers, total, merged=1),
    )
