"""Adapters (LoRA, Hu et al. 2021): to a linear layer's product y = x W^T, a token with an adapter
adds (x A^T) B^T, with matrices of low rank.

A rank has slots for adapters on its device, of one size each: a slot holds the matrices of all
adapted layers (`AdaptedProduct`). Modules that a product merges have their ranks one after the
other: A is [modules * rank, in], and B [out, modules * rank] with zeros where a row's module has
other ranks. The matrices B of all slots lie side by side, as one matrix that a kernel may multiply
with together with the layer's weight. Tensor-parallel ranks have the rows of B or the columns of A
that belong to their part of the weight, so no sum over the ranks is added.

`Weight.multiply` adds the products of a step's adapters while `AdapterSlots.is_active`; a step
without adapters computes what it would without slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.layers.adapter_parts import AdapterWeights, ModuleShape, SlotParts, SoftPrompts
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.adapter_tiles import AdapterTiles
    from aioinfer.kernels.adapters import AdapterOperand, Adapters, AdapterWorkspace

#: Of more rows than `kernels.adapter_tiles.MAX_FUSED_ROWS` a product has the adapters in its launch
#: only if it has so many times as many input features as columns of B.
_COLUMN_SHARE = 8
#: Matrices in a slot begin at multiples of so many numbers, and slots of B end at them.
_ALIGNMENT = 64


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
        self._places = slots.reserve(self.width * columns.size, self._out * self.width)
        self._down: torch.Tensor
        self._up: torch.Tensor

    @property
    def inputs(self) -> int:
        """Input features on this rank."""
        return self._columns.size

    def allocate(self) -> None:
        """Makes the matrices B of all slots, once those A are there."""
        memory = self._slots.memory
        columns = -(-self._slots.count * self.width // _ALIGNMENT) * _ALIGNMENT
        self._down, self._up = self._down_of(memory), memory.new_zeros(self._out, columns)

    @property
    def is_active(self) -> bool:
        """Whether a token of the step may have an adapter."""
        return self._slots.is_active

    def shape_of(self, module: str) -> tuple[int, int]:
        """Returns (out, in) of a checkpoint module."""
        rows = next(source.rows for source in self._sources if source.name == module)
        return rows.total, self._columns.total

    def put(self, packed: torch.Tensor, weights: Mapping[str, AdapterWeights], rank: int) -> None:
        """Writes an adapter's matrices into `packed`, a slot of zeros on the host; `rank`: the
        largest of its modules."""
        down, up = self._down_of(packed[None])[0], self._up_of(packed)
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
            down[ranks] = given if self.input_order is None else given[:, self.input_order]
            own = found.up[source.rows.start : source.rows.start + source.rows.size].float()
            up[rows, ranks] = (own * (found.scale * source.scale)).to(up.dtype)
        if self.row_order is not None:
            up.copy_(up[self.row_order])

    def _down_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns A [slots, width, in] in memory of slots [slots, numbers]."""
        first, size = self._places[0], self._columns.size
        return memory[:, first : first + self.width * size].view(len(memory), self.width, size)

    def _up_of(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns B [out, width] in a packed slot."""
        first = self._places[1] + self._slots.down_size
        return packed[first : first + self._out * self.width].view(self._out, self.width)

    def enter(self, slot: int, packed: torch.Tensor) -> None:
        """Copies B of a packed slot that is on the device to its columns."""
        columns = slice(slot * self.width, (slot + 1) * self.width)
        self._up[:, columns].copy_(self._up_of(packed))

    # ---------------------------------------------------------------- products

    def _matrices(self) -> Adapters:
        """Returns the matrices as kernels take them."""
        from aioinfer.kernels.adapters import Adapters

        return Adapters(self._down, self._up, self._slots.ranks, len(self.modules))

    def may_fuse(self, x: torch.Tensor) -> bool:
        """Whether a kernel may add the adapters to the product of x [T, in] in its own launch."""
        return x.ndim == 2 and self._slots.may_fuse(len(x), self._up.shape[1], self.inputs)

    def shrink(self, x: torch.Tensor, norm: Any = None) -> AdapterOperand:
        """Returns the adapters of the step's few tokens x [T, in], whose product with B a kernel
        adds to the weight's (`AdapterSlots.may_fuse`).

        Args:
            norm: the RMSNorm that x passes through first, or None; of one token alone.
        """
        from aioinfer.kernels.adapters import shrink

        slots = self._slots
        given: dict[str, Any] = {}
        if norm is not None:
            given = {"norm_weight": norm.weight, "eps": norm.eps}
        tiles = slots.tiles_of(len(x))
        operand = shrink(x, self._matrices(), tiles, slots.workspace, **given, pdl=slots.pdl)
        assert operand is not None, "too many tokens"
        return operand

    def begin(self, x: torch.Tensor) -> None:
        """Begins to compute what `add` adds for x [T, in], beside the weight's product with x."""
        slots = self._slots
        if not slots.uses_kernels or not len(x):
            return
        from aioinfer.kernels.adapters import shrink

        with slots.beside():
            shrink(x, self._matrices(), slots.tiles_of(len(x)), slots.workspace)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the products of the step's tokens x [T, in] with their adapters to y [T, out], after
        `begin`."""
        slots = self._slots
        if not len(x):
            return
        if slots.uses_kernels:
            from aioinfer.kernels.adapters import expand

            slots.join()
            expand(y, self._matrices(), slots.tiles_of(len(x)), slots.workspace)
            return
        for slot, tokens in slots.tokens_of(len(x)):
            used = int(slots.ranks[slot]) * len(self.modules)
            first = slot * self.width
            shrunk = x.index_select(0, tokens) @ self._down[slot, :used].t()
            y.index_add_(0, tokens, shrunk @ self._up[:, first : first + used].t())


class AdapterSlots:
    """The adapters on one rank's device.

    Args:
        count: how many there can be at a time.
        max_rank: of an adapter.
        dtype, device: of the rank.
        uses_kernels: whether Triton kernels compute the products.
        has_experts: whether adapters may change experts.
        max_prompt_tokens: maximum of a soft prompt; 0 for none.

    Attributes:
        is_active: whether a token of the step that is being computed may have an adapter.
        products: that adapters may change.
        prompts: the soft prompts, if there may be any.
        parts: what a slot holds beside their matrices.
        memory: [count, numbers], the matrices A of each slot; made by `allocate`.
        ranks: int32 [count], of the adapter in each slot; on a CPU on the host.
        workspace: of the kernels.
        pdl: whether kernels are launched as programmatic dependents.
    """

    memory: torch.Tensor
    workspace: AdapterWorkspace

    def __init__(
        self, count: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        *, uses_kernels: bool, pdl: bool = False, has_experts: bool = False,
        max_prompt_tokens: int = 0,
    ):  # fmt: skip
        self._max_prompt_tokens = max_prompt_tokens
        self.prompts: SoftPrompts | None = None
        self.has_experts = has_experts
        self.count, self.max_rank = count, max_rank
        self.uses_kernels, self.pdl = uses_kernels, pdl
        self.is_active = False
        self.products: list[AdaptedProduct] = []
        self.parts = SlotParts()
        self.ranks = torch.zeros(count, dtype=torch.int32, device=device)
        self._dtype, self._device = dtype, device
        #: numbers of a packed slot in A and in B
        self._sizes = [0, 0]
        self._entering: torch.Tensor
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tokens = 0
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

    def add_prompts(self, hidden_size: int) -> None:
        """Adds soft prompts to the slots of a model, before `allocate`, if there may be any."""
        if self._max_prompt_tokens:
            self.prompts = SoftPrompts(self._max_prompt_tokens, hidden_size)
            self.parts.add(self.prompts)

    def adapt(self, sources: Sequence[Source], columns: Shard) -> AdaptedProduct:
        """Returns what adapters add to the product of a weight, before `allocate`."""
        product = AdaptedProduct(self, sources, columns)
        self.products.append(product)
        return product

    def reserve(self, downs: int, ups: int) -> tuple[int, int]:
        """Returns where so many numbers of A begin among a slot's, and those of B."""
        places = []
        for which, numbers in enumerate((downs, ups)):
            places.append(self._sizes[which])
            self._sizes[which] += -(-numbers // _ALIGNMENT) * _ALIGNMENT
        return places[0], places[1]

    @property
    def down_size(self) -> int:
        """Numbers of a slot's matrices A, with which a packed slot begins."""
        return self._sizes[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return (sum(self._sizes) + self.parts.size) * self._dtype.itemsize

    def allocate(self, tokens: int) -> None:
        """Makes the memory of the slots, for steps of up to `tokens` tokens."""
        dtype, device = self._dtype, self._device
        self.memory = torch.zeros(self.count, self._sizes[0], dtype=dtype, device=device)
        for product in self.products:
            product.allocate()
        self.parts.allocate(self.count, dtype, device)
        if not self.uses_kernels:
            return
        from aioinfer.kernels.adapter_tiles import AdapterTiles, RankLayout
        from aioinfer.kernels.adapters import AdapterWorkspace

        merged = sorted({len(product.modules) for product in self.products})
        layout = RankLayout(self.count, self.max_rank, tuple(merged))
        inputs = max(product.inputs for product in self.products)
        self.workspace = AdapterWorkspace.empty(tokens, layout, inputs, dtype, device)
        self._tiles = AdapterTiles.empty(tokens, layout, dtype, device)
        self._sampled_tiles = AdapterTiles.empty(tokens, layout, dtype, device)
        self._entering = torch.empty(sum(self._sizes), dtype=dtype, device=device)

    def pack(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's part of an adapter in the form of a slot, on the host.

        Args:
            weights: by checkpoint module.
            pinned: in pinned memory.
        """
        packed = torch.zeros(sum(self._sizes), dtype=self._dtype, pin_memory=pinned)
        rank = rank_of(weights)
        for product in self.products:
            product.put(packed, weights, rank)
        return packed

    def pack_parts(self, weights: Mapping[str, AdapterWeights], *, pinned: bool) -> torch.Tensor:
        """Returns this rank's `parts` of an adapter on the host; arguments as of `pack`."""
        return self.parts.pack(weights, rank_of(weights), self._dtype, pinned=pinned)

    def enter(self, slot: int, packed: torch.Tensor, rank: int) -> None:
        """Puts an adapter into a slot, on the current stream."""
        if self.uses_kernels:
            packed = self._entering.copy_(packed, non_blocking=True)
        self.memory[slot].copy_(packed[: self.down_size])
        for product in self.products:
            product.enter(slot, packed)
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

    def beside(self) -> AbstractContextManager[Any]:
        """Context of launches beside those that follow on the current stream, until `join`; on a
        CPU of calls in their order."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """Lets the current stream wait for the launches of `beside`."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def plan(self, step: Step) -> None:
        """Finds the tokens of each adapter in a step, while `is_active`; before its products. On a
        GPU this may be captured in a CUDA graph."""
        adapters, sampled = step.inputs.adapters, step.sampled
        if not self.is_active or adapters is None:
            return
        self._tokens = len(adapters)
        self._by_slot = {}
        self._sort(adapters, is_sampled=False)
        if sampled is not None:
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
        from aioinfer.kernels.adapter_tiles import sort_by_adapter

        tiles = self._sampled_tiles if is_sampled else self._tiles
        sort_by_adapter(adapters, tiles, self.ranks)

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
        return tiles.views(rows)

    def may_fuse(self, rows: int, columns: int, inputs: int) -> bool:
        """Whether a kernel may add the adapters to a product of so many rows in its own launch: few
        rows read the matrices B that they need anyway, while many would take arithmetic for each
        column of B beside the input features."""
        if not self.uses_kernels or not 0 < rows <= len(self._tiles.shrunk):
            return False
        from aioinfer.kernels.adapter_tiles import MAX_FUSED_ROWS

        return rows <= MAX_FUSED_ROWS or _COLUMN_SHARE * columns <= inputs

    def tokens_of(self, rows: int) -> list[tuple[int, torch.Tensor]]:
        """Returns (slot, int64 tokens) of the adapters in a product of so many rows, in plain
        torch."""
        return self._by_slot[rows]


def rank_of(weights: Mapping[str, AdapterWeights]) -> int:
    """Returns the largest rank of an adapter's modules."""
    return max(-(-each.down.shape[-2] // each.merged) for each in weights.values())
