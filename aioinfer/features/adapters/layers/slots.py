"""The adapters on one rank's device (LoRA, Hu et al. 2021), in slots of one size each: a slot holds
the matrices of all adapted layers.

The products of a step's adapters are added while `AdapterSlots.is_active`; a step without adapters
computes what it would without slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from aioinfer.config_sections import LoraConfig
from aioinfer.features.adapters.layers.experts import ExpertAdapters, adapt_experts
from aioinfer.features.adapters.layers.parts import (
    AdapterPart,
    AdapterWeights,
    ModuleShape,
    Piece,
    SoftPrompts,
    aligned,
    rank_of,
)
from aioinfer.features.adapters.layers.products import AdaptedProduct, RowProduct
from aioinfer.features.adapters.layers.tokens import AdapterTokens
from aioinfer.layers.shards import Shard, Source

if TYPE_CHECKING:
    from aioinfer.kernels.adapter_slots import SlotRows
    from aioinfer.layers.backend import Backend
    from aioinfer.layers.embedding import Embedding, LMHead
    from aioinfer.layers.mixture import PlacedExperts

P = TypeVar("P", bound=AdaptedProduct)


class AdapterSlots(AdapterTokens):
    """The adapters on one rank's device.

    Args:
        config: of adapters.
        backend: of the rank's layers.

    Attributes:
        products: that adapters may change, of a step's tokens.
        row_products: the others.
        prompts: the soft prompts, if there may be any.
        parts: what a slot holds beside their matrices.
        memory: [count, numbers], the matrices A of each slot; made by `allocate`.
    """

    shortage = "the adapters", "lower lora.max_adapters or lora.max_rank"
    memory: torch.Tensor

    def __init__(self, config: LoraConfig, backend: Backend):
        super().__init__(config.num_slots, config.max_rank, backend)
        self._config = config
        self.prompts: SoftPrompts | None = None
        self.products: list[AdaptedProduct] = []
        self.row_products: list[RowProduct] = []
        self.parts: list[AdapterPart] = []
        #: numbers of a packed slot in A and in B
        self._sizes = [0, 0]
        self._entering: torch.Tensor
        self._rows: SlotRows

    @property
    def modules(self) -> dict[str, ModuleShape]:
        """The checkpoint's modules that adapters may change."""
        found = dict[str, ModuleShape]()
        for product in self._all_products:
            found |= product.modules
        for part in self.parts:
            found |= part.modules
        return found

    @property
    def _all_products(self) -> Iterator[AdaptedProduct]:
        return chain(self.products, self.row_products)

    @property
    def is_used(self) -> bool:
        """See `Extension.is_used`."""
        return bool(self.products)

    # ---------------------------------------------------------------- while a model is made

    def extend_ends(
        self, hidden_size: int, embedding: Embedding | None, head: LMHead | None
    ) -> None:
        """See `Extension.extend_ends`."""
        if self._config.max_prompt_tokens:
            self.prompts = SoftPrompts(self._config.max_prompt_tokens, hidden_size)
            self.parts.append(self.prompts)
        for end in (embedding, head) if "embeddings" in self._config.targets else ():
            if end is not None:
                end.extend(self)

    def extend_experts(
        self, stacks: tuple[str, str], here: Sequence[Sequence[Source]], placed: PlacedExperts,
        **options: Any,
    ) -> ExpertAdapters | None:  # fmt: skip
        """See `Extension.extend_experts`."""
        if "experts" not in self._config.targets:
            return None
        found = adapt_experts(self, stacks, here, placed, **options)
        self.parts += found.products
        return found

    def extend(self, sources: Sequence[Source], columns: Shard) -> AdaptedProduct:
        """See `Extension.extend`."""
        self.products.append(self._place(AdaptedProduct(self, sources, columns)))
        return self.products[-1]

    def extend_rows(self, sources: Sequence[Source], columns: Shard) -> RowProduct:
        """See `Extension.extend_rows`."""
        self.row_products.append(self._place(RowProduct(self, sources, columns)))
        return self.row_products[-1]

    def _place(self, product: P) -> P:
        """Gives a product its places in a packed slot."""
        product.places = down, up = self._sizes[0], self._sizes[1]
        self._sizes = [down + aligned(product.sizes[0]), up + aligned(product.sizes[1])]
        return product

    @property
    def _part_sizes(self) -> list[int]:
        """Numbers of all tensors of `parts` in a packed slot."""
        return [size for part in self.parts for size in part.sizes]

    @property
    def slot_numbers(self) -> int:
        """Numbers of a slot."""
        return sum(self._sizes) + sum(self._part_sizes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.slot_numbers * self.backend.dtype.itemsize

    def allocate(self, tokens: int, requests: int) -> None:
        """See `Extension.allocate`."""
        dtype, device = self.backend.dtype, self.backend.device
        self.of_slots = torch.zeros(requests, dtype=torch.int32, device=device)
        self.memory = torch.zeros(self.count, self._sizes[0], dtype=dtype, device=device)
        products = [*self._all_products]
        shapes = [product.up_shape(self.count) for product in products]
        ups = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        numbers = ups.split([math.prod(shape) for shape in shapes])
        for product, shape, up in zip(products, shapes, numbers, strict=True):
            product.allocate(self.memory, up.view(shape))
        for part in self.parts:
            part.tensors = [
                torch.zeros(self.count, *shape, dtype=dtype, device=device) for shape in part.shapes
            ]
        if self.backend.has_kernels:
            from aioinfer.kernels.adapter_slots import SlotRows

            merged = sorted({len(product.modules) for product in self.products})
            inputs = max(product.inputs for product in self.products)
            self.allocate_tokens(tokens, tuple(merged), inputs)
            self._entering = torch.empty(sum(self._sizes), dtype=dtype, device=device)
            self._rows = SlotRows.of([product.rows() for product in products], ups)

    def warm_up(self) -> None:
        """See `Extension.warm_up`."""
        self._enter_ups(0, self._entering[self._sizes[0] :])

    def pieces(
        self, weights: Mapping[str, AdapterWeights], packed: torch.Tensor
    ) -> Iterator[Piece]:
        """Yields the pieces of this rank's part of an adapter, given by checkpoint module, for the
        form of a slot: zeros [slot_numbers], memory of the host."""
        rank, (downs, ups) = rank_of(weights), packed[: sum(self._sizes)].split(self._sizes)
        for product in self._all_products:
            yield from product.pieces(downs, ups, weights, rank)
        for part, tensors in self._views(packed):
            yield from part.pieces(tensors, weights, rank)

    def _views(self, packed: torch.Tensor) -> Iterator[tuple[AdapterPart, list[torch.Tensor]]]:
        """Yields the parts, each with its tensors in a packed slot."""
        flat = iter(packed.split([*self._sizes, *self._part_sizes])[2:])
        for part in self.parts:
            yield part, [next(flat)[: math.prod(shape)].view(shape) for shape in part.shapes]

    def enter(
        self, slot: int, packed: torch.Tensor, rank: int, after: torch.cuda.Stream | None = None
    ) -> None:
        """Puts an adapter into a slot, on the current stream, which all calls have in common; what
        is on the stream `after` may use the slot."""
        products = packed[: sum(self._sizes)]
        if self.backend.has_kernels:
            products = self._entering.copy_(products, non_blocking=True)
        if after is not None:
            torch.cuda.current_stream().wait_stream(after)
        downs, ups = products.split(self._sizes)
        self.memory[slot].copy_(downs)
        self._enter_ups(slot, ups)
        for product in self._all_products:
            product.order_inputs(slot)
        self.ranks[slot].fill_(rank)
        for part, tensors in self._views(packed):
            part.enter(slot, tensors)

    def _enter_ups(self, slot: int, ups: torch.Tensor) -> None:
        """Copies the matrices B of all products to a slot."""
        if self.backend.has_kernels:
            from aioinfer.kernels.adapter_slots import enter_slot

            enter_slot(ups, self._rows, slot)
            return
        for product in self._all_products:
            product.enter(slot, ups)
