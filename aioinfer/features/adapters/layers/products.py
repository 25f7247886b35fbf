"""What adapters add to products (LoRA, Hu et al. 2021): to a linear layer's product y = x W^T, a
token with an adapter adds (x A^T) B^T, with matrices of low rank.

A slot holds the matrices of all of them. Modules that a product merges have their ranks one after
the other: A is [modules * rank, in], and B [out, modules * rank] with zeros where a row's module
has other ranks. The matrices B of all slots lie side by side, as one matrix that a kernel may
multiply with together with the layer's weight. Tensor-parallel ranks have the rows of B or the
columns of A that belong to their part of the weight, so no sum over the ranks is added.

`Weight.multiply` adds an `AdaptedProduct` while a step has adapters. The embedding, the head and
the expansion of latent vectors, whose rows are not the step's tokens, add a `RowProduct`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from aioinfer.features.adapters.layers.addition import Addition
from aioinfer.features.adapters.layers.parts import (
    AdapterWeights,
    ModuleShape,
    Piece,
    aligned,
    pieces_of_rows,
)
from aioinfer.features.adapters.layers.tokens import AdapterTokens
from aioinfer.layers.extension import ProductExtension, RowExtension, RowPart, Terms
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.adapter_slots import ProductRows
    from aioinfer.kernels.adapters import AdapterOperand, Adapters, RowOperand


class AdaptedProduct(ProductExtension):
    """What the adapters add to one product on one rank.

    Args:
        tokens: of a step by adapter.
        sources, columns: of the product's weight.

    Attributes:
        modules: the checkpoint modules that it merges, in their order.
        inputs: input features on this rank.
        width: columns of a slot in B.
        sizes: numbers of A and of B in a packed slot.
        places: where they begin, among the numbers A and B of all products; set by `AdapterSlots`.
    """

    places: tuple[int, int]

    def __init__(self, tokens: AdapterTokens, sources: Sequence[Source], columns: Shard):
        self._tokens, self._sources, self._columns = tokens, sources, columns
        self.modules = {s.name: ModuleShape(s.rows.total, columns.total) for s in sources}
        self.inputs = columns.size
        self._out = sum(source.rows.size for source in sources)
        self.width = len(self.modules) * tokens.max_rank
        self.sizes = self.width * columns.size, self._out * self.width
        self._down: torch.Tensor
        self._up: torch.Tensor
        self._addition: Addition | None = None

    def up_shape(self, slots: int) -> tuple[int, int]:
        """Returns the shape of the matrices B of so many slots, side by side."""
        return self._out, aligned(slots * self.width)

    def allocate(self, memory: torch.Tensor, up: torch.Tensor) -> None:
        """Takes its part of `memory` [slots, numbers], which has A of all products, and `up` for
        the matrices B of all slots, once the weight is loaded."""
        self._down, self._up = self._down_of(memory), up
        orders = self.row_order, self.input_order
        self._orders = [None if each is None else each.to(memory.device) for each in orders]

    def rows(self) -> ProductRows:
        """Returns where B is, for `kernels.adapter_slots`."""
        from aioinfer.kernels.adapter_slots import ProductRows

        return ProductRows(self.places[1], self.width, self._up, self._orders[0])

    @property
    def is_active(self) -> bool:
        """See `Extending.is_active`."""
        return self._tokens.is_active

    def pieces(
        self, downs: torch.Tensor, ups: torch.Tensor, weights: Mapping[str, AdapterWeights],
        rank: int,
    ) -> Iterator[Piece]:  # fmt: skip
        """Yields the pieces of an adapter's matrices for the numbers A and B of a slot of zeros on
        the host; `rank`: the largest of its modules."""
        down, up = self._down_of(downs[None])[0], self._up_of(ups)
        given = {
            name: (weights[name], number * rank)
            for number, name in enumerate(self.modules)
            if name in weights
        }
        return pieces_of_rows(down, up, self._sources, self._columns, given)

    def _down_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns A [slots, width, in] in memory of slots [slots, numbers]."""
        first, size = self.places[0], self._columns.size
        return memory[:, first : first + self.width * size].view(len(memory), self.width, size)

    def _up_of(self, ups: torch.Tensor) -> torch.Tensor:
        """Returns B [out, width] in the numbers B of a slot."""
        first = self.places[1]
        return ups[first : first + self._out * self.width].view(self._out, self.width)

    def enter(self, slot: int, ups: torch.Tensor) -> None:
        """Copies B to the columns of a slot, from its numbers B, in the order of the weight: what
        `kernels.adapter_slots` does for all products."""
        up, rows = self._up_of(ups), self._orders[0]
        columns = slice(slot * self.width, (slot + 1) * self.width)
        self._up[:, columns].copy_(up if rows is None else up.index_select(0, rows))

    def order_inputs(self, slot: int) -> None:
        """Has A of a slot in the order of the weight's inputs."""
        down, inputs = self._down[slot], self._orders[1]
        if inputs is not None:
            down.copy_(down.index_select(1, inputs))

    # ---------------------------------------------------------------- products

    def _matrices(self) -> Adapters:
        """Returns the matrices as kernels take them."""
        from aioinfer.kernels.adapters import Adapters

        return Adapters(self._down, self._up, self._tokens.ranks, len(self.modules))

    def may_fuse(self, x: torch.Tensor) -> bool:
        """See `ProductExtension.may_fuse`."""
        return x.ndim == 2 and self._tokens.may_fuse(len(x), self._up.shape[1], self.inputs)

    def operand(self, x: torch.Tensor) -> AdapterOperand | RowOperand:
        """See `ProductExtension.operand`: a kernel adds the product with B to the weight's."""
        from aioinfer.kernels.adapters import RowOperand, shrink

        tokens = self._tokens
        tiles = tokens.tiles_of(len(x))
        if len(x) == 1:
            return RowOperand.of(self._matrices(), tiles, tokens.next_launch())
        operand = shrink(x, self._matrices(), tiles, tokens.workspace, pdl=tokens.backend.pdl)
        assert operand is not None, "too many tokens"
        return operand

    def begin(self, x: torch.Tensor) -> None:
        """See `ProductExtension.begin`."""
        tokens = self._tokens
        if not tokens.backend.has_kernels or not len(x):
            return
        from aioinfer.kernels.adapters import shrink

        with tokens.beside():
            shrink(x, self._matrices(), tokens.tiles_of(len(x)), tokens.workspace)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `ProductExtension.add`."""
        tokens = self._tokens
        if not len(x):
            return
        if tokens.backend.has_kernels:
            if self._addition is None:
                self._addition = Addition(self._matrices(), tokens)
            tokens.join()
            self._addition.add(y)
            return
        for slot, own in tokens.tokens_of(len(x)):
            used = int(tokens.ranks[slot]) * len(self.modules)
            first = slot * self.width
            shrunk = x.index_select(0, own) @ self._down[slot, :used].t()
            y.index_add_(0, own, shrunk @ self._up[:, first : first + used].t())


class RowProduct(AdaptedProduct, RowExtension):
    """What the adapters add to a product of rows [N, in], given the adapter slot of each (int32
    [N], negative for none): x A^T in the columns of all slots, of which those of the row's adapter
    are kept, times B of all slots. In plain torch, which CUDA graphs may capture."""

    def allocate(self, memory: torch.Tensor, up: torch.Tensor) -> None:
        """See `AdaptedProduct.allocate`."""
        super().allocate(memory, up)
        slots = torch.arange(len(memory), dtype=torch.int32, device=self._up.device)
        self._slot_of = slots.repeat_interleave(self.width)

    def terms_of(self, step: Step) -> torch.Tensor | None:
        """See `RowExtension.terms_of`."""
        return self._tokens.terms_of(step)

    @property
    def _sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [columns, in] and B [out, columns] of all slots."""
        return self._down.flatten(0, 1), self._up[:, : len(self._slot_of)]

    def _keep_own(self, shrunk: torch.Tensor, terms: Terms) -> torch.Tensor:
        """Returns products with A of all slots [..., N, columns] with zeros in the columns of other
        adapters than each row's; they are written to."""
        return shrunk.masked_fill_(terms[:, None] != self._slot_of, 0)

    def add_rows(self, x: torch.Tensor, y: torch.Tensor, terms: Terms) -> None:
        """See `RowExtension.add_rows`."""
        down, up = self._sides
        y.addmm_(self._keep_own(x @ down.t(), terms), up.t())

    def add_from_outputs(
        self, x: torch.Tensor, y: torch.Tensor, terms: Terms, part: RowPart
    ) -> None:
        """See `RowExtension.add_from_outputs`: with W + B A in the place of W, W^T x becomes W^T x
        + A^T (B^T x)."""
        down, up = self._sides
        shrunk = self._keep_own(torch.bmm(x.transpose(0, 1), part(up)), terms)
        y.add_((shrunk @ down).transpose(0, 1))

    def add_by_heads(self, x: torch.Tensor, y: torch.Tensor, terms: Terms, part: RowPart) -> None:
        """See `RowExtension.add_by_heads`."""
        down, up = self._sides
        shrunk = self._keep_own((x @ down.t()).transpose(0, 1), terms)
        y.add_(torch.bmm(shrunk, part(up).transpose(1, 2)).transpose(0, 1))

    def add_looked_up(self, numbers: torch.Tensor, y: torch.Tensor, terms: Terms) -> None:
        """See `RowExtension.add_looked_up`."""
        if not self._columns.size:
            return
        local = numbers.long() - self._columns.start
        is_own = (local >= 0) & (local < self._columns.size)
        slots = torch.where(is_own, terms, -1)
        columns = self._down[slots.long().clamp(min=0), :, torch.where(is_own, local, 0)]
        y.addmm_(self._keep_own(columns.repeat(1, len(self._down)), slots), self._sides[1].t())
