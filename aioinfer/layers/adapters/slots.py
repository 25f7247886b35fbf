"""The adapters on one rank's device (LoRA, Hu et al. 2021), in slots of one size each: a slot holds
the matrices of all adapted layers.

The products of a step's adapters are added while `AdapterSlots.is_active`; a step without adapters
computes what it would without slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from aioinfer.config_sections import LoraConfig
from aioinfer.layers.adapters.experts import ExpertAdapters, adapt_experts
from aioinfer.layers.adapters.parts import (
    AdapterWeights,
    ModuleShape,
    SlotParts,
    SoftPrompts,
    aligned,
    rank_of,
)
from aioinfer.layers.adapters.products import AdaptedProduct, RowProduct
from aioinfer.layers.adapters.tokens import AdapterTokens
from aioinfer.layers.extension import Extension, Terms
from aioinfer.layers.kernel_choices import KernelChoices
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.backend import Backend
    from aioinfer.layers.embedding import Embedding, LMHead
    from aioinfer.layers.mixture import PlacedExperts


class AdapterSlots(Extension):
    """The adapters on one rank's device.

    Args:
        count: how many there can be at a time.
        max_rank: of an adapter.
        dtype, device: of the rank.
        uses_kernels, pdl, choices: as in `AdapterTokens`.
        has_experts, has_embeddings: whether adapters may change experts, and the embedding and the
            head.
        max_prompt_tokens: maximum of a soft prompt; 0 for none.

    Attributes:
        dtype: of the matrices.
        tokens: of a step by adapter.
        products: that adapters may change, of a step's tokens.
        row_products: the others.
        prompts: the soft prompts, if there may be any.
        parts: what a slot holds beside their matrices.
        memory: [count, numbers], the matrices A of each slot; made by `allocate`.
    """

    shortage = "the adapters", "lower lora.max_adapters or lora.max_rank"
    memory: torch.Tensor

    def __init__(
        self, count: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        *, uses_kernels: bool, pdl: bool = False, choices: KernelChoices | None = None,
        has_experts: bool = False,
        has_embeddings: bool = False, max_prompt_tokens: int = 0,
    ):  # fmt: skip
        self._max_prompt_tokens = max_prompt_tokens
        self.prompts: SoftPrompts | None = None
        self._has_experts, self._has_embeddings = has_experts, has_embeddings
        self.tokens = AdapterTokens(
            count, max_rank, device, uses_kernels=uses_kernels, pdl=pdl,
            choices=choices or KernelChoices(),
        )  # fmt: skip
        self.count = count
        self.products: list[AdaptedProduct] = []
        self.row_products: list[RowProduct] = []
        self.parts = SlotParts()
        self.dtype, self._device = dtype, device
        #: numbers of a packed slot in A and in B
        self._sizes = [0, 0]
        self._entering: torch.Tensor

    @classmethod
    def of(cls, config: LoraConfig, backend: Backend, dtype: torch.dtype) -> AdapterSlots:
        """Returns the slots of a configuration, for layers of a backend."""
        return cls(
            config.num_slots, config.max_rank, dtype, backend.device,
            uses_kernels=backend.has_kernels, pdl=backend.pdl, choices=backend.choices,
            has_experts="experts" in config.targets, has_embeddings="embeddings" in config.targets,
            max_prompt_tokens=config.max_prompt_tokens,
        )  # fmt: skip

    @property
    def modules(self) -> dict[str, ModuleShape]:
        """The checkpoint's modules that adapters may change."""
        found = {
            module: ModuleShape(*product.shape_of(module))
            for product in self._all_products
            for module in product.modules
        }
        for part in self.parts:
            found |= part.modules
        return found

    @property
    def _all_products(self) -> Iterator[AdaptedProduct]:
        return chain(self.products, self.row_products)

    @property
    def is_active(self) -> bool:
        """See `Extending.is_active`."""
        return self.tokens.is_active

    @property
    def is_used(self) -> bool:
        """See `Extension.is_used`."""
        return bool(self.products)

    def __enter__(self) -> None:
        self.tokens.is_active = True

    def __exit__(self, *error: object) -> None:
        self.tokens.is_active = False

    def plan(self, step: Step) -> None:
        """See `Extension.plan`."""
        self.tokens.plan(step)

    def terms_of(self, step: Step) -> Terms | None:
        """See `Extension.terms_of`."""
        return self.tokens.of_tokens(step)

    def terms_at(self, tokens: torch.Tensor | None) -> Terms | None:
        """See `Extension.terms_at`."""
        return self.tokens.at(tokens)

    def expecting(self, tokens: int) -> AbstractContextManager[None]:
        """See `Extension.expecting`."""
        return self.tokens.expecting(tokens)

    # ---------------------------------------------------------------- while a model is made

    def extend_ends(
        self, hidden_size: int, embedding: Embedding | None, head: LMHead | None
    ) -> None:
        """See `Extension.extend_ends`."""
        if self._max_prompt_tokens:
            self.prompts = SoftPrompts(self._max_prompt_tokens, hidden_size)
            self.parts.add(self.prompts)
        for end in (embedding, head) if self._has_embeddings else ():
            if end is not None:
                end.extend(self)

    def extend_experts(
        self, backend: Backend, stacks: tuple[str, str], here: Sequence[Sequence[Source]],
        placed: PlacedExperts, *, takes_stacked: bool, in_turns: bool = False,
        channels: Shard | None = None,
    ) -> ExpertAdapters | None:  # fmt: skip
        """See `Extension.extend_experts`."""
        if not self._has_experts:
            return None
        return adapt_experts(
            self, backend, stacks, here, placed, takes_stacked=takes_stacked, in_turns=in_turns,
            channels=channels,
        )  # fmt: skip

    def extend(self, sources: Sequence[Source], columns: Shard) -> AdaptedProduct:
        """See `Extension.extend`."""
        product = AdaptedProduct(self.tokens, sources, columns)
        product.places = self._reserve(product)
        self.products.append(product)
        return product

    def extend_rows(self, sources: Sequence[Source], columns: Shard) -> RowProduct:
        """See `Extension.extend_rows`."""
        product = RowProduct(self.tokens, sources, columns)
        product.places = self._reserve(product)
        self.row_products.append(product)
        return product

    def _reserve(self, product: AdaptedProduct) -> tuple[int, int]:
        """Returns where the product's A begins among a slot's, and its B."""
        places = self._sizes[0], self._sizes[1]
        self._sizes = [
            place + aligned(numbers) for place, numbers in zip(places, product.sizes, strict=True)
        ]
        return places

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return (sum(self._sizes) + self.parts.size) * self.dtype.itemsize

    def allocate(self, tokens: int, requests: int) -> None:
        """See `Extension.allocate`."""
        dtype, device = self.dtype, self._device
        self.tokens.of_slots = torch.zeros(requests, dtype=torch.int32, device=device)
        self.memory = torch.zeros(self.count, self._sizes[0], dtype=dtype, device=device)
        for product in self._all_products:
            product.allocate(self.memory)
        self.parts.allocate(self.count, dtype, device)
        if self.tokens.uses_kernels:
            merged = sorted({len(product.modules) for product in self.products})
            inputs = max(product.inputs for product in self.products)
            self.tokens.allocate(tokens, tuple(merged), inputs, dtype)
            self._entering = torch.empty(sum(self._sizes), dtype=dtype, device=device)

    def pack(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's part of an adapter in the form of a slot, on the host.

        Args:
            weights: by checkpoint module.
            pinned: in pinned memory.
        """
        packed = torch.zeros(sum(self._sizes), dtype=self.dtype, pin_memory=pinned)
        rank, (downs, ups) = rank_of(weights), packed.split(self._sizes)
        for product in self._all_products:
            product.put(downs, ups, weights, rank)
        return packed

    def pack_parts(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's `parts` of an adapter on the host; arguments as of `pack`."""
        return self.parts.pack(weights, rank_of(weights), self.dtype, pinned=pinned)

    def enter(self, slot: int, packed: torch.Tensor, rank: int) -> None:
        """Puts an adapter into a slot, on the current stream."""
        if self.tokens.uses_kernels:
            packed = self._entering.copy_(packed, non_blocking=True)
        downs, ups = packed.split(self._sizes)
        self.memory[slot].copy_(downs)
        for product in self._all_products:
            product.enter(slot, ups)
        self.tokens.ranks[slot] = rank
