"""Adapters (LoRA, Hu et al. 2021): to a linear layer's product y = x W^T, a token with an adapter
adds (x A^T) B^T, with matrices of low rank.

A rank has slots for adapters on its device, of one size each: a slot holds the matrices of all
adapted layers (`AdaptedProduct`), so that an adapter enters it by one copy. Modules that a product
merges have their ranks one after the other: A is [modules * rank, in], and B [out, modules * rank]
with zeros where a row's module has other ranks. Tensor-parallel ranks have the rows of B or the
columns of A that belong to their part of the weight, so no sum over the ranks is added.

`Weight.multiply` adds the products of a step's adapters while `AdapterSlots.is_active`; a step
without adapters computes what it would without slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from aioinfer.layers.adapter_parts import ModuleShape, SlotParts
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.adapters import AdapterRoom, AdapterTiles

#: Slots begin at multiples of so many numbers, as do the matrices in them.
_ALIGNMENT = 64


class AdapterWeights(NamedTuple):
    """The matrices of an adapter for one module of the checkpoint.

    Attributes:
        down: A [rank, in], or of a stack of experts [experts, rank, in].
        up: B [out, rank] or [experts, out, rank].
        scale: of the product.
        merged: how many modules it merges (`ModuleShape.merged`).
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    merged: int = 1


class AdaptedProduct:
    """What the adapters add to one product on one rank.

    Args:
        slots: that hold the matrices.
        sources, columns: of the product's weight.

    Attributes:
        modules: the checkpoint modules that it merges.
        row_order: int64 [out], the row in checkpoint order at each place; None for the same order.
        input_order: int64 [in], the input at each place; None for the same order.
    """

    def __init__(self, slots: AdapterSlots, sources: Sequence[Source], columns: Shard):
        self._slots, self._sources, self._columns = slots, sources, columns
        self.modules = list(dict.fromkeys(source.name for source in sources))
        self.row_order: torch.Tensor | None = None
        self.input_order: torch.Tensor | None = None
        self._out = sum(source.rows.size for source in sources)
        self.width = len(self.modules) * slots.max_rank
        self._down, self._up = self._slots.reserve(self, columns.size, self._out)

    @property
    def is_active(self) -> bool:
        """Whether a token of the step may have an adapter."""
        return self._slots.is_active

    def shape_of(self, module: str) -> tuple[int, int]:
        """Returns (out, in) of a checkpoint module."""
        rows = next(source.rows for source in self._sources if source.name == module)
        return rows.total, self._columns.total

    def put(self, packed: torch.Tensor, weights: Mapping[str, AdapterWeights], rank: int) -> None:
        """Writes an adapter's matrices into `packed`, a slot of zeros; `rank`: the largest of its
        modules."""
        down, up = self._views(packed[None])
        columns = slice(self._columns.start, self._columns.start + self._columns.size)
        first_row = 0
        for source in self._sources:
            rows = slice(first_row, first_row := first_row + source.rows.size)
            found = weights.get(source.name)
            if found is None:
                continue
            number = self.modules.index(source.name) * rank
            ranks = slice(number, number + len(found.down))
            given = found.down[:, columns]
            down[0, ranks] = given if self.input_order is None else given[:, self.input_order]
            own = found.up[source.rows.start : source.rows.start + source.rows.size].float()
            up[0, rows, ranks] = (own * (found.scale * source.scale)).to(up.dtype)
        if self.row_order is not None:
            up[0] = up[0][self.row_order]

    def _views(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A [slots, width, in] and B [slots, out, width] in memory of slots."""
        size, width, count = self._columns.size, self.width, len(memory)
        down = memory[:, self._down : self._down + width * size].view(count, width, size)
        up = memory[:, self._up : self._up + self._out * width].view(count, self._out, width)
        return down, up

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the products of the step's tokens x [T, in] with their adapters to y [T, out]."""
        slots = self._slots
        if not len(x):
            return
        down, up = self._views(slots.memory)
        if slots.uses_kernels:
            from aioinfer.kernels.adapters import add_adapters

            tiles = slots.tiles_of(len(x))
            add_adapters(
                x, down, up, y, tiles, slots.ranks, len(self.modules), slots.room, pdl=slots.pdl
            )
            return
        for slot, tokens in slots.tokens_of(len(x)):
            used = int(slots.ranks[slot]) * len(self.modules)
            shrunk = x.index_select(0, tokens) @ down[slot, :used].t()
            y.index_add_(0, tokens, shrunk @ up[slot, :, :used].t())


class AdapterSlots:
    """The adapters on one rank's device.

    Args:
        count: how many there can be at a time.
        max_rank: of an adapter.
        dtype, device: of the rank.
        uses_kernels: whether Triton kernels compute the products.
        has_experts: whether adapters may change experts.

    Attributes:
        is_active: whether a token of the step that is being computed may have an adapter.
        products: that adapters may change.
        parts: what a slot holds beside their matrices.
        memory: [count, numbers of a slot]; made by `allocate`.
        ranks: int32 [count], of the adapter in each slot; on a CPU on the host.
        room: the kernels' memory between the two matrices.
        pdl: whether kernels are launched as programmatic dependents.
    """

    memory: torch.Tensor
    room: AdapterRoom

    def __init__(
        self, count: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        *, uses_kernels: bool, pdl: bool = False, has_experts: bool = False,
    ):  # fmt: skip
        self.has_experts = has_experts
        self.count, self.max_rank = count, max_rank
        self.uses_kernels, self.pdl = uses_kernels, pdl
        self.is_active = False
        self.products: list[AdaptedProduct] = []
        self.parts = SlotParts()
        self.ranks = torch.zeros(count, dtype=torch.int32, device=device)
        self._dtype, self._device = dtype, device
        self._size = 0
        self._tokens = self._sampled = 0
        #: on a CPU: by the number of tokens, the tokens of each slot
        self._by_slot: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._tiles: AdapterTiles
        self._sampled_tiles: AdapterTiles

    @property
    def modules(self) -> dict[str, ModuleShape]:
        """The checkpoint's modules that adapters may change."""
        found = {
            module: ModuleShape(*product.shape_of(module))
            for product in self.products
            for module in product.modules
        }
        for part in self.parts:
            found |= part.modules
        return found

    def __enter__(self) -> None:
        """Begins a block in which tokens may have adapters."""
        self.is_active = True

    def __exit__(self, *error: object) -> None:
        self.is_active = False

    # ---------------------------------------------------------------- matrices

    def adapt(self, sources: Sequence[Source], columns: Shard) -> AdaptedProduct:
        """Returns what adapters add to the product of a weight, before `allocate`."""
        product = AdaptedProduct(self, sources, columns)
        self.products.append(product)
        return product

    def reserve(self, product: AdaptedProduct, inputs: int, outputs: int) -> tuple[int, int]:
        """Returns where the matrices of a product begin in a slot."""
        places = []
        for numbers in (inputs, outputs):
            places.append(self._size)
            self._size += -(-numbers * product.width // _ALIGNMENT) * _ALIGNMENT
        return places[0], places[1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return (self._size + self.parts.size) * self._dtype.itemsize

    def allocate(self, tokens: int) -> None:
        """Makes the memory of the slots, for steps of up to `tokens` tokens."""
        shape = self.count, self._size
        self.memory = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.parts.allocate(self.count, self._dtype, self._device)
        if not self.uses_kernels:
            return
        from aioinfer.kernels.adapters import AdapterRoom, AdapterTiles

        widths = {product.width for product in self.products}
        self.room = max(
            (AdapterRoom.empty(tokens, self.count, n, self._dtype, self._device) for n in widths),
            key=lambda room: room.shrunk.numel(),
        )
        self._tiles = AdapterTiles.empty(tokens, self.count, self._device)
        self._sampled_tiles = AdapterTiles.empty(tokens, self.count, self._device)

    def pack(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's part of an adapter in the form of a slot, on the host.

        Args:
            weights: by checkpoint module.
            pinned: in pinned memory.
        """
        packed = torch.zeros(self._size, dtype=self._dtype, pin_memory=pinned)
        rank = rank_of(weights)
        for product in self.products:
            product.put(packed, weights, rank)
        return packed

    def pack_parts(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's `parts` of an adapter on the host; arguments as of `pack`."""
        return self.parts.pack(weights, rank_of(weights), self._dtype, pinned=pinned)

    def enter(self, slot: int, packed: torch.Tensor, rank: int) -> None:
        """Puts an adapter into a slot, on the current stream."""
        self.memory[slot].copy_(packed, non_blocking=True)
        self.ranks[slot] = rank

    # ---------------------------------------------------------------- a step

    def adapters_of(self, step: Step, rows: int) -> torch.Tensor | None:
        """Returns the adapter slot (int32 [rows], negative for none) of each row of a layer, which
        has all tokens of a step or the sampled ones; None where no token may have an adapter."""
        given, sampled = step.inputs.adapters, step.sampled
        if not self.is_active or given is None or rows == len(given):
            return given if self.is_active else None
        assert sampled is not None, "neither all tokens nor the sampled ones"
        return given.index_select(0, sampled.last)

    def plan(self, step: Step) -> None:
        """Finds the tokens of each adapter in a step, while `is_active`; before its products. On a
        GPU this may be captured in a CUDA graph."""
        adapters, sampled = step.inputs.adapters, step.sampled
        if not self.is_active or adapters is None:
            return
        self._tokens = self._sampled = len(adapters)
        self._by_slot = {}
        self._sort(adapters, is_sampled=False)
        if sampled is not None:
            self._sampled = len(sampled.last)
            self._sort(adapters.index_select(0, sampled.last), is_sampled=True)

    def _sort(self, adapters: torch.Tensor, *, is_sampled: bool) -> None:
        if not self.uses_kernels:
            self._by_slot[len(adapters)] = [
                (slot, torch.nonzero(adapters == slot)[:, 0])
                for slot in adapters.unique().tolist()
                if slot >= 0
            ]
            return
        if not len(adapters):
            return
        from aioinfer.kernels.adapters import sort_by_adapter

        tiles = self._sampled_tiles if is_sampled else self._tiles
        sort_by_adapter(adapters, tiles, self.count)

    @contextmanager
    def expecting(self, tokens: int) -> Iterator[None]:
        """Context in which products read the tiles of all tokens of a step of up to so many, which
        `plan` finds before they are computed: for a CUDA graph of layers alone."""
        planned, self._tokens = self._tokens, tokens
        yield
        self._tokens = planned

    def tiles_of(self, rows: int) -> AdapterTiles:
        """Returns the tiles of a product of so many rows: all tokens of the step, or the sampled
        ones."""
        tiles = self._tiles if rows == self._tokens else self._sampled_tiles
        return tiles.views(rows, self.count)

    def tokens_of(self, rows: int) -> list[tuple[int, torch.Tensor]]:
        """Returns (slot, int64 tokens) of the adapters in a product of so many rows, in plain
        torch."""
        return self._by_slot[rows]


def rank_of(weights: Mapping[str, AdapterWeights]) -> int:
    """Returns the largest rank of an adapter's modules."""
    return max(-(-each.down.shape[-2] // each.merged) for each in weights.values())
